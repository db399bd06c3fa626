"""Options that grouped experts refuse when the model is built, and what to do instead."""

from __future__ import annotations

from typing import Any

from torch import nn

from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.checks.unsupported import Refusals, is_on, other_than
from megatron_ncclep.integration.experts.activation import is_fused
from megatron_ncclep.integration.experts.fused_swiglu import other_activation
from megatron_ncclep.integration.experts.grouped_gemm import ADDRESS_BYTES, MAX_EXPERTS

# In numbers of bf16, so that every row and every weight begins at a multiple of ADDRESS_BYTES.
WIDTH = ADDRESS_BYTES // 2
# In FP8 both sides of a weight are columns of some product's result, which has whole tiles.
FP8_WIDTH = 256
FP8_FORMAT, FP8_RECIPE = "e4m3", "blockwise"
_OFFLOADED = {"expert_fc1", "moe_act", "fused_group_mlp"}


def _has_parameters(function: Any) -> bool:
    """Whether an activation is a module with parameters, or a method of one."""
    module = getattr(function, "__self__", function)
    return isinstance(module, nn.Module) and any(True for _ in module.parameters())


_TOGETHER = "leave it out: they compute weight gradients together with those of the rows"
REFUSALS: Refusals = {
    "add_bias_linear": (
        is_on,
        "leave the biases out (add_bias_linear=False, --disable-bias-linear)",
    ),
    "use_transformer_engine_op_fuser": (
        is_on,
        "leave it out: with it TransformerEngine computes the experts in another way",
    ),
    "moe_use_grouped_tensor": (
        is_on,
        "leave it out: it has TransformerEngine compute the experts, from its own grouped tensors",
    ),
    "moe_single_grouped_weight": (
        is_on,
        "leave it out: they keep one parameter for each expert, without copying them",
    ),
    "use_te_activation_func": (is_on, "leave it out: Megatron's own activations are used"),
    "activation_func": (
        _has_parameters,
        "use one without parameters: rows of no expert, which may hold anything, would add to "
        "their gradients",
    ),
    "activation_func_fp8_input_store": (is_on, "leave it out: activations are kept as they are"),
    "moe_mlp_glu_interleave_size": (
        other_than(),
        "leave it out: gates and values stay in two halves",
    ),
    "fp4": (
        is_on,
        f"leave it out, or set fp8={FP8_FORMAT!r} and fp8_recipe={FP8_RECIPE!r}, all that they "
        "compute beside bf16",
    ),
    "quant_recipe": (other_than(), "leave it out: quantised experts are not supported yet"),
    "delay_wgrad_compute": (is_on, _TOGETHER),
    "overlap_dispatch_backward_with_experts_wgrad": (is_on, _TOGETHER),
    "cpu_offloading": (is_on, "leave it out: offloading is not supported"),
    "offload_modules": (
        lambda value: bool(_OFFLOADED & set(value or ())),
        "leave out expert_fc1, moe_act and fused_group_mlp: offloading the experts' activations is "
        "not supported; recompute_modules with moe_act saves memory too",
    ),
    "expert_gtp_weight_remat_size": (
        lambda value: (value or 1) > 1,
        "leave it out: weights that are gathered for each use are not supported",
    ),
}


def config_problem(config: Any, num_local_experts: int, num_slices: int) -> str | None:
    """Say which option of a TransformerConfig grouped experts would get wrong or ignore, if any.

    Args:
        config: a field that this Megatron-Core does not have counts as not set.
        num_local_experts: experts of this rank.
        num_slices: ranks that each expert's own hidden size is divided among.

    Returns:
        the option, its value and the remedy.
    """
    for option, (is_set, remedy) in REFUSALS.items():
        value = getattr(config, option, None)
        if is_set(value):
            return f"{option}={value!r}: {remedy}"
    in_fp8 = bool(getattr(config, "fp8", None))
    if in_fp8 and (problem := _fp8_problem(config)):
        return problem
    width_of_input = (
        "moe_latent_size" if getattr(config, "moe_latent_size", None) else "hidden_size"
    )
    width, said = (FP8_WIDTH, " in FP8") if in_fp8 else (WIDTH, "")
    for option, parts in ((width_of_input, 1), ("moe_ffn_hidden_size", num_slices)):
        value = getattr(config, option)
        if value % (parts * width):
            why = "" if parts == 1 else f", {width} for each of its {parts} slices"
            return f"{option}={value!r}{said}: it must be a multiple of {parts * width}{why}"
    if num_local_experts > MAX_EXPERTS:
        return (
            f"{num_local_experts} experts on one rank: at most {MAX_EXPERTS}, so use more "
            "expert-parallel ranks"
        )
    if recomputes_activation(config) and not is_fused(config):
        return (
            f"recompute_modules={config.recompute_modules!r} with an activation that is not fused "
            "with the probabilities: set bias_activation_fusion (SwiGLU, quick GEGLU) or "
            "use_fused_weighted_squared_relu, or leave out moe_act"
        )
    return None


def _fp8_problem(config: Any) -> str | None:
    """Say what of a TransformerConfig in FP8 they do not compute, apart from sizes."""
    recipe = getattr(config.fp8_recipe, "value", config.fp8_recipe)
    if (config.fp8, recipe) != (FP8_FORMAT, FP8_RECIPE):
        return (
            f"fp8={config.fp8!r}, fp8_recipe={recipe!r}: set fp8={FP8_FORMAT!r} and "
            f"fp8_recipe={FP8_RECIPE!r} (--fp8-format {FP8_FORMAT} --fp8-recipe {FP8_RECIPE})"
        )
    if config.fp8_param:
        return "fp8_param=True: leave it (--fp8-param-gather) out, so that parameters stay in bf16"
    if other := other_activation(config):
        return f"fp8={config.fp8!r}: {other}, and in FP8 they compute plain SwiGLU only"
    return None


def recomputes_activation(config: Any) -> bool:
    """Whether Megatron's config asks to recompute the experts' activation."""
    modules = getattr(config, "recompute_modules", None) or ()
    return config.recompute_granularity == "selective" and "moe_act" in modules


def unsupported(what: str) -> UnsupportedError:
    """The error of grouped experts that do not support `what`, which names the remedy."""
    return UnsupportedError(
        f"experts='grouped' (--ncclep-experts grouped) does not support {what}; or use Megatron's "
        "experts, with experts='megatron'"
    )
