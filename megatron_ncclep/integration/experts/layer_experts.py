"""The experts of a layer: which ones it gets, and how they read their numbers of rows."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

from megatron_ncclep.config import EpConfig
from megatron_ncclep.integration.checks.cuda_graphs import may_hold_experts
from megatron_ncclep.integration.checks.fp8 import is_quantized

if TYPE_CHECKING:
    from megatron_ncclep.integration.experts.selection import Choice


def check_experts(config: Any, options: EpConfig, num_ranks: int, num_slices: int) -> None:
    """Refuse unsupported grouped experts before Megatron builds any.

    Args:
        config: TransformerConfig.
        options: of the dispatcher.
        num_ranks: ranks of the expert-parallel group.
        num_slices: ranks that each expert's own hidden size is divided among.

    Raises:
        UnsupportedError, InputError: see `experts.refusals.check_config`.
    """
    if options.experts == "grouped":
        from megatron_ncclep.integration.experts.refusals import check_config

        check_config(config, config.num_moe_experts // num_ranks, num_slices)


def select_experts(
    layer: Any, options: EpConfig, num_slices: int
) -> tuple[EpConfig, Choice | None]:
    """Give the layer the experts that the options ask for.  Not collective.

    Args:
        layer: an MoELayer with the experts that Megatron has built.
        options: of the dispatcher.
        num_slices: ranks that each expert's own hidden size is divided among.

    Returns:
        the options, in which `experts` is no longer "auto"; and the choice, if there was one, or
        how grouped experts compute.
    """
    if options.experts == "megatron":
        return options, None
    from megatron_ncclep.integration.experts import selection

    config, in_graph = layer.config, may_hold_experts(layer.config)
    if options.experts == "auto":
        choice = selection.choose(
            *(config, options, layer.experts, layer.num_local_experts, num_slices), in_graph
        )
        options = dataclasses.replace(options, experts=choice.experts)
    else:
        choice = selection.asked_for(config)
    if options.experts == "grouped":
        from megatron_ncclep.integration.experts.grouped import group_experts

        group_experts(layer.experts, last_expert_first=True)
    return options, choice


def counts_wanted(experts: Any) -> dict[str, bool]:
    """How the experts read their numbers of rows: arguments of the dispatcher."""
    if _read_on_device(experts):
        return {"counts_on_device": True}
    # The op fuser passes the counts on; where TransformerEngine has no kernel that reads them, it
    # splits the rows by them, and then they must add up.
    if _is_op_fused(experts) or _have_grouped_tensors(experts):
        return {"counts_on_device": True, "counts_add_up": True}
    return {}


def need_no_host(experts: Any, config: Any) -> bool:
    """Whether experts read their numbers of rows only on the device."""
    if _read_on_device(experts):
        return True
    if is_quantized(config):  # not shown, and until 0.17 Megatron pads the rows by the counts
        return False
    # TransformerEngine has such kernels depending on release, GPU and cuBLAS; otherwise it splits
    # the rows on the host.
    if _is_op_fused(experts):
        place, question = "ops.basic", "is_op_fuser_grouped_tensor_path_supported"
    elif _have_grouped_tensors(experts):
        # A bias for each expert is added to rows that the host has split.
        if config.add_bias_linear and not config.moe_single_grouped_bias:
            return False
        place, question = "module", "is_module_grouped_tensor_path_supported"
    else:
        return False
    modules = importlib.import_module(f"transformer_engine.pytorch.{place}.grouped_linear")
    has_kernels = getattr(modules, question, None)
    return has_kernels is not None and bool(has_kernels(None, config.params_dtype))


def _read_on_device(experts: Any) -> bool:
    """Whether they are this package's, which never read the counts on the host."""
    return getattr(experts, "takes_counts_on_device", False)


def _is_op_fused(experts: Any) -> bool:
    """Whether they are Megatron's TEGroupedMLP over TransformerEngine's op fuser (from 0.18 on)."""
    return getattr(experts, "_with_fused_impl", False)


def _have_grouped_tensors(experts: Any) -> bool:
    """Whether they are TEGroupedMLP with moe_use_grouped_tensor (from 0.20 on)."""
    return getattr(experts, "_use_grouped_tensor", False)
