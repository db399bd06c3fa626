"""Adapters (LoRA) that libraries put around the linear layers of experts.

They replace a linear by a wrapper, which adds rows @ a^T @ b^T * scale to the linear's result.  A
wrapper and its parts are known here by the names of their classes and by their attributes, all of
them, because one that is not known may be an option that changes the result.  The libraries are
never imported.  Known are LoRA of Megatron-Bridge 0.6.2, and that of mcore-bridge 1.6.5, with which
ms-swift uses peft (0.21.2; peft's own class for Megatron's linears fails in its forward).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron_ncclep.integration.experts.grouped_gemm import unavailable_reason

# Name of a class -> its attributes, modules and parameters.
_WRAPPERS = {
    "megatron.bridge.peft.lora_layers.LoRALinear": "_adapter_enabled to_wrap adapter",
    "mcore_bridge.tuners.lora.LoraParallelLinear": """base_layer lora_A lora_B lora_dropout
        lora_embedding_A lora_embedding_B lora_magnitude_vector r lora_alpha scaling lora_variant
        _active_adapter _disable_adapters merged_adapters use_dora use_rslora lora_bias _caches
        ephemeral_gpu_offload cast_input_dtype_enabled kwargs in_features out_features config
        is_parallel_a is_grouped fan_in_fan_out is_expert sequence_parallel tp_size
        is_target_conv_1d_layer""",
}
_OF_ALL = """linear_in linear_out dropout activation dim alpha dropout_position base_linear_name
    base_linear_is_parallel is_expert config"""
_ADAPTERS = {
    # Of one expert, or shared by all experts of a rank.
    "megatron.bridge.peft.utils.ParallelLinearAdapter": f"""{_OF_ALL} input_is_parallel use_a2a
        sequence_parallel_input_regather _sequence_parallel_input_regather_fallback_logged
        use_legacy_shared_expert_adapter_checkpoint pg_collection tp_group ep_group expert_dp_group
        disable_sequence_parallel_comm""",
    # One pair of factors for each expert.
    "megatron.bridge.peft.utils.GroupedExpertLinearAdapter": f"""{_OF_ALL} input_is_parallel
        num_local_experts _te_grouped_linear_helpers pg_collection expert_tp_group ep_group
        expert_dp_group _linear_in_tp_axis _linear_out_tp_axis""",
    # One factor for each expert, the other one shared.
    "megatron.bridge.peft.utils.SharedOuterGroupedExpertAdapter": f"""{_OF_ALL} num_local_experts
        _is_fc1""",
}
# Modules that hold a factor, whose weights say all about them.
_FACTORS = {
    "megatron.bridge.peft.utils._GroupedExpertAdapterWeight",
    "megatron.bridge.peft.utils.PackedPerExpertLinear",
    *(f"megatron.core.tensor_parallel.layers.{kind}ParallelLinear" for kind in ("Column", "Row")),
    *(
        f"megatron.core.extensions.transformer_engine.TE{kind}Linear"
        for kind in ("", "ColumnParallel", "RowParallel", "Grouped", "ColumnParallelGrouped",
                     "RowParallelGrouped")
    ),
}  # fmt: skip
_OF_A_MODULE = vars(nn.Module()).keys()


@dataclass(frozen=True)
class Adapter:
    """A low-rank product that is added to the result of a linear layer of all experts.

    Attributes:
        a, b: the modules with the factors [rank, in_features] and [out_features, rank]: one for
            each expert, in the experts' order, or one for all.
        scale: of the product.
        dropout: probability that an element becomes zero; 0 unless the modules train.
        drops_last: elements of the product, not of the rows.
    """

    a: Sequence[nn.Module]
    b: Sequence[nn.Module]
    scale: float
    dropout: float
    drops_last: bool


def weights_in(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The weights of linears, in the experts' order."""
    return [
        weight
        for module in modules
        for name, weight in module._parameters.items()
        if weight is not None and name.startswith("weight")
    ]


def unread(wrapper: nn.Module | None, linear: nn.Module) -> str | None:
    """Say why `what_is_in` cannot read what is in place of `linear`; None if it can."""
    if wrapper is None or not _is_one_of(wrapper, _WRAPPERS):
        return "not a known one, with known attributes"
    own, parts = vars(wrapper), dict[str, Any](wrapper._modules)
    triples: list[tuple[Any, ...]]
    if "adapter" in parts:
        inner = parts["adapter"]
        if not _is_one_of(inner, _ADAPTERS) or type(inner.activation) is not nn.Identity:
            return "not a known adapter, with known attributes and without an activation"
        base, triples = parts["to_wrap"], [(inner.linear_in, inner.linear_out, inner.dropout)]
    else:
        if own["lora_variant"] or any((*own["use_dora"].values(), *own["lora_bias"].values())):
            return "another variant of LoRA, or with a bias"
        held = [parts[name]._modules for name in ("lora_A", "lora_B", "lora_dropout")]
        if any(part.keys() != held[0].keys() for part in held):
            return "with parts of an adapter"
        base, triples = (
            parts["base_layer"],
            [tuple(part[name] for part in held) for name in held[0]],
        )
    if base is not linear:
        return "around another module"
    weights = weights_in([linear])
    return next(filter(None, (_unfit(triple, weights) for triple in triples)), None)


# Modules with the two factors, and the other fields of an Adapter.
Pair = tuple[Any, Any, tuple[float, float, bool]]


def what_is_in(wrapper: Any) -> list[Pair] | None:
    """Read what a wrapper adds at present; every pass asks.

    Returns:
        nothing if its adapters are switched off or merged into the weights; None if its next
        forward would take them out of the weights.
    """
    if "adapter" not in wrapper._modules:
        return _in_swift(wrapper)
    if not wrapper._adapter_enabled:
        return []
    inner = wrapper._modules["adapter"]
    parts = inner._modules
    dropout, drops_last = _dropout(parts["dropout"]), inner.dropout_position == "post"
    settings = (float(inner.alpha / inner.dim), dropout, drops_last)
    return [(parts["linear_in"], parts["linear_out"], settings)]


def together(of_each: Sequence[list[Pair] | None]) -> list[Adapter] | None:
    """The adapters of one layer, from what its wrappers add: one for all experts or one for each.

    Returns:
        None if `what_is_in` said so, or if experts differ in more than weights.
    """
    first, *others = of_each
    if first is None or any(other is None or len(other) != len(first) for other in others):
        return None
    found = []
    for same in zip(*of_each, strict=True):
        a, b, settings = zip(*same, strict=True)
        if others and (len({*settings}) > 1 or len({each.weight.shape for each in a}) > 1):
            return None
        found.append(Adapter(a, b, *settings[0]))
    return found


def _in_swift(wrapper: Any) -> list[Pair] | None:
    if wrapper.merged_adapters:
        return None if wrapper._disable_adapters else []
    if wrapper._disable_adapters:
        return []
    names, parts = wrapper._active_adapter, wrapper._modules
    a, b, dropout = (parts[name]._modules for name in ("lora_A", "lora_B", "lora_dropout"))
    return [
        (a[name], b[name], (float(wrapper.scaling[name]), _dropout(dropout[name]), False))
        for name in ([names] if isinstance(names, str) else names)
        if name in a
    ]


def _dropout(module: Any) -> float:
    return module.p if type(module) is nn.Dropout and module.training else 0.0


def _unfit(parts: tuple[Any, ...], weights: Sequence[Any]) -> str | None:
    """Say why two factors and dropout cannot be used beside these weights, if they cannot."""
    *factors, dropout = parts
    kinds = [_name(factor) for factor in factors]
    if not _FACTORS.issuperset(kinds) or type(dropout) not in (nn.Dropout, nn.Identity):
        return f"with factors of {' and '.join(kinds)} and {_name(dropout)}"
    shapes, dtypes = [], set()
    for factor in factors:
        held = weights_in([factor])
        if len(held) != sum(parameter is not None for parameter in factor._parameters.values()):
            return "with factors that have other parameters than weights"
        # One weight [out, in], or one for each expert, in a list or in one tensor.
        number = len(held) if held[0].dim() == 2 else len(held[0])
        is_of_each = held[0].dim() == 3 or number > 1
        if is_of_each and number != len(weights):
            return f"with factors of {number} experts"
        shapes.append(held[0].shape[-2:])
        dtypes |= {weight.dtype for weight in held}
    (rank, into), (out, also_rank) = shapes
    if rank != also_rank or (out, into) != weights[0].shape:
        found = " and ".join(str(list(shape)) for shape in shapes)
        return f"with factors {found} of weights {list(weights[0].shape)}, or of slices of them"
    if len(dtypes) > 1:
        return f"with factors in {' and '.join(sorted(map(str, dtypes)))}"
    reason = unavailable_reason(held[0].device, dtype := dtypes.pop())
    return reason and f"with factors in {dtype}: {reason}"


def _is_one_of(module: nn.Module | None, known: dict[str, str]) -> bool:
    """Whether the module is of a known class, with exactly its attributes and its own forward.

    None of them holds parameters itself, such as a scale that is trained.
    """
    if module is None or (attributes := known.get(_name(module))) is None:
        return False
    found = vars(module).keys() - _OF_A_MODULE | module._modules.keys()
    forward = type(module).forward
    # functools.wraps gives a patch the name of what it calls.
    if hasattr(forward, "__wrapped__") or module._parameters:
        return False
    own = f"{type(module).__name__}.forward"
    return found == set(attributes.split()) and forward.__qualname__ == own


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
