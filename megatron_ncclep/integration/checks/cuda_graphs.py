"""Which of Megatron-Core's CUDA graphs can hold the dispatcher, and why the others cannot.

This depends on how much of an MoE layer a graph holds (`Captured`).  Up to `dispatch_preprocess`
everything runs on the device in every mode (in exact mode, except for capacity padding).  From the
dispatch on, the host must not need the routing: that takes static mode, an engine whose calls can
be captured, and experts that read their numbers of rows on the device.

Releases name the options differently.  This file reads them after Megatron's own validation
(`check_graph_options` reads them before it):

    0.16, 0.17    cuda_graph_impl local | transformer_engine, with cuda_graph_scope, where
                  full_iteration is one of local's scopes
    0.18 on       cuda_graph_impl local | transformer_engine, with cuda_graph_modules, and
                  full_iteration; the older names are translated
"""

from __future__ import annotations

import enum
from typing import Any

from megatron_ncclep.engines.engine import EngineCaps
from megatron_ncclep.errors import UnsupportedError

# The parts of an MoE layer that may be captured in every mode.
OUTSIDE_DISPATCH = "attn, moe_router and moe_preprocess"


class Captured(enum.IntEnum):
    """How much of an MoE layer CUDA graphs hold; each value includes the previous ones."""

    NOTHING = 0
    ROUTER = 1
    PREPROCESS = 2  # with dispatch_preprocess
    DISPATCH = 3  # with dispatch, experts and combine


def check_graph_options(config: Any) -> None:
    """Refuse options that Megatron's validation would refuse for reasons that do not apply here.

    Args:
        config: TransformerConfig before its validation: it may hold strings, and the old names.

    Raises:
        UnsupportedError: names the option, its value, the reason and the remedy.
    """
    old_names = ("enable_cuda_graph", "external_cuda_graph")
    if _impl(config) == "none" and not any(getattr(config, name, False) for name in old_names):
        return
    names = _modules(config)
    if "moe" in names and not config.moe_pad_expert_input_to_capacity:
        raise _refused(
            config,
            "Megatron-Core captures the module 'moe' only for experts that are padded to a "
            "capacity",
            f"leave {_modules_field(config)} empty (whole layers), or capture {OUTSIDE_DISPATCH}",
        )
    factor = config.moe_expert_capacity_factor
    drops = factor is not None and factor >= 0 and not config.moe_pad_expert_input_to_capacity
    if "moe_preprocess" in names and drops:
        raise _refused(
            config,
            "Megatron-Core does not capture moe_preprocess when its router drops tokens "
            f"(moe_expert_capacity_factor={factor})",
            "leave the factor out, or capture attn and moe_router only",
        )
    scope = getattr(config, "inference_cuda_graph_scope", None)
    if getattr(config, "transformer_impl", None) == "inference_optimized":
        return  # a layer uses another dispatcher while text is generated
    if "full_iteration_inference" in names or getattr(scope, "name", scope) == "block":
        raise _refused(
            config,
            "graphs of the whole model are for inference, and this dispatcher is for training",
            "leave inference_cuda_graph_scope and full_iteration_inference out",
        )


def captured_by(config: Any) -> Captured:
    """How much of an MoE layer the whole model's graphs, or TransformerEngine's of a layer, hold.

    For Megatron's own graphs of a layer (`local`) that depends on the layer: see `captured_in`.
    """
    impl, names = _impl(config), _modules(config)
    if holds_iteration(config):
        return Captured.DISPATCH
    if impl != "transformer_engine":
        return Captured.NOTHING
    if not names or "moe" in names:
        return Captured.DISPATCH
    if "moe_preprocess" in names:
        return Captured.PREPROCESS
    return Captured.ROUTER if "moe_router" in names else Captured.NOTHING


def may_hold_experts(config: Any) -> bool:
    """Whether graphs will hold the experts, as far as a validated TransformerConfig shows."""
    return captured_by(config) == Captured.DISPATCH or _impl(config) == "local"


def captured_in(transformer_layer: Any) -> Captured:
    """How much of its MoE layer Megatron's own graphs (`local`) of a layer will hold.

    A TransformerLayer is captured as a whole, including with the module attn; a MoETransformerLayer
    of hybrid models may be captured up to the dispatch and again after it.
    """
    if hasattr(transformer_layer, "cudagraph_manager_router"):
        return Captured.PREPROCESS
    return (
        Captured.DISPATCH if hasattr(transformer_layer, "cudagraph_manager") else Captured.NOTHING
    )


def check_captured(
    config: Any,
    captured: Captured,
    caps: EngineCaps,
    is_static: bool,
    host_experts: str | None,
    follows_load: bool = False,
) -> None:
    """Refuse a graph that would hold work that needs the host.

    Args:
        config: TransformerConfig, validated.
        captured: how much of the MoE layer its graphs hold.
        caps: the engine's.
        is_static: the option max_recv_rows is set.
        host_experts: the class of the experts, if they read their numbers of rows on the host.
        follows_load: max_recv_rows is "auto".

    Raises:
        UnsupportedError: names the option, its value, the reason and the remedy.
    """
    pads = config.moe_pad_expert_input_to_capacity
    if captured == Captured.PREPROCESS and pads and not is_static:
        raise _refused(
            config,
            "with moe_pad_expert_input_to_capacity the ranks' hosts agree on how many experts a "
            "token has, unless max_recv_rows is set",
            "set it (--ncclep-max-recv-rows), or capture attn and moe_router only",
        )
    if captured < Captured.DISPATCH:
        return
    otherwise = f"or capture {OUTSIDE_DISPATCH} only (cuda_graph_impl='transformer_engine')"
    if not is_static:
        raise _refused(
            config,
            "the graph holds the dispatch, and without max_recv_rows the host must know how many "
            "rows come",
            f"set max_recv_rows (--ncclep-max-recv-rows), {otherwise}",
        )
    if follows_load and not holds_iteration(config):
        raise _refused(
            config,
            "a graph of the layer would keep the limit that it was captured with, and with "
            "max_recv_rows='auto' the limit follows the load",
            "capture whole iterations (cuda_graph_impl='full_iteration'), set a factor, "
            f"{otherwise}",
        )
    if host_experts is not None:
        raise _refused(
            config,
            f"the graph holds the experts, and {host_experts} reads on the host how many rows each "
            "of them has",
            "use experts that do not need the host (--ncclep-experts grouped; in FP8 only "
            "with fp8 'e4m3' and fp8_recipe 'blockwise'), "
            f"{otherwise}",
        )
    if not caps.captures_static:
        raise _refused(
            config,
            f"the graph holds the dispatch, and calls of engine {caps.name!r} cannot be captured",
            f"choose engine 'native' (--ncclep-engine native), {otherwise}",
        )


def flags_tell_of_the_step(config: Any) -> bool:
    """Whether `grad_added_to_main_grad` tells which micro-batch of a step is the first.

    DDP resets it together with the gradients, but not with TransformerEngine's graphs, and
    Megatron's own graphs of layers set it in every micro-batch.
    """
    return _impl(config) == "none" or holds_iteration(config)


def holds_iteration(config: Any) -> bool:
    """Whether one graph holds forward and backward of the whole model."""
    impl = _impl(config)
    return impl == "full_iteration" or (impl == "local" and "full_iteration" in _modules(config))


def _impl(config: Any) -> str:
    return getattr(config, "cuda_graph_impl", None) or "none"


def _modules_field(config: Any) -> str:
    return "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"


def _modules(config: Any) -> frozenset[str]:
    """Names of the modules to capture; none: whole layers."""
    names: set[str] = set()
    for field in ("cuda_graph_modules", "cuda_graph_scope"):
        value = getattr(config, field, None) or []
        if isinstance(value, str):
            value = value.split(",")
        elif not isinstance(value, list):
            value = [value]
        names.update(getattr(name, "name", name) for name in value)
    return frozenset(names - {"full"})


def _refused(config: Any, reason: str, remedy: str) -> UnsupportedError:
    names = sorted(_modules(config))
    modules = f"{_modules_field(config)}={names}{'' if names else ' (all of it)'}"
    return UnsupportedError(
        f"moe_token_dispatcher_type='ncclep' does not support cuda_graph_impl={_impl(config)!r} "
        f"with {modules}: {reason}; {remedy}"
    )
