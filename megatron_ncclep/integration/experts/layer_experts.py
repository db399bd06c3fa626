"""Select a layer's experts, find out how they read their row counts, and whether they still do."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.checks.cuda_graphs import may_hold_experts
from megatron_ncclep.integration.checks.fp8 import is_quantized

if TYPE_CHECKING:
    from megatron_ncclep.integration.experts.fp8_crossing import Fp8Crossing
    from megatron_ncclep.integration.experts.selection import Choice

# Attributes that are true of this package's experts, which never read the counts on the host; of
# TEGroupedMLP with TransformerEngine's op fuser (from 0.18 on); with moe_use_grouped_tensor (0.20).
_OURS, _OP_FUSED = "takes_counts_on_device", "_with_fused_impl"
_WITH_GROUPED_TENSORS = "_use_grouped_tensor"


def check_experts(config: Any, options: EpConfig, num_ranks: int, num_slices: int) -> None:
    """Refuse unsupported grouped experts before Megatron builds any experts.

    Raises:
        UnsupportedError: names the option, its value and the remedy.
    """
    if options.experts == "grouped":
        from megatron_ncclep.integration.experts.refusals import config_problem, unsupported

        num_local_experts = config.num_moe_experts // num_ranks
        if problem := config_problem(config, num_local_experts, num_slices):
            raise unsupported(problem)


def select_experts(
    layer: Any, options: EpConfig, num_slices: int
) -> tuple[EpConfig, Choice | None, GroupedInLayer | None]:
    """Give the layer the experts that the options select.  Not collective.

    Returns:
        the options, in which "auto" is resolved; the choice made for "auto", or for "grouped" how
        these experts compute, or None for "megatron"; and what the dispatcher of grouped experts
        needs.
    """
    if options.experts == "megatron":
        return options, None, None
    from megatron_ncclep.integration.experts import selection

    config, in_graph = layer.config, may_hold_experts(layer.config)
    is_asked_for = options.experts == "grouped"
    choice = selection.choose(
        config, options, layer.experts, layer.num_local_experts, num_slices, in_graph
    )
    options = dataclasses.replace(options, experts=choice.experts)
    if options.experts != "grouped":
        return options, choice, None
    from megatron_ncclep.integration.experts.grouped import group_experts

    group_experts(layer.experts, reverse_local_experts=True)
    return options, choice, GroupedInLayer(layer, is_asked_for)


class GroupedInLayer:
    """Whether a layer's grouped experts may compute the next pass: its dispatcher asks each time.

    Attributes:
        experts: as the layer was built with them.
    """

    def __init__(self, layer: Any, is_asked_for: bool) -> None:
        """`is_asked_for`: the options ask for grouped experts, so Megatron's must not compute."""
        self.experts = layer.experts
        self._is_asked_for = is_asked_for
        # Not the layer: it holds its dispatcher, and this.
        self._modules = layer._modules

    def change(self) -> str | None:
        """Say what has been put on the experts since they were built; then Megatron's compute.

        Raises:
            UnsupportedError: the same, if the options ask for grouped experts.
        """
        now = self._modules["experts"]
        if now is not self.experts and "as_built" in vars(now):
            self.experts = now  # another layer's, or a copy: they need the same order
        built = self.experts.as_built
        if self._is_asked_for:
            built.found = None  # it may have been removed
        found: str | None = built.change()
        if now is not self.experts:
            found = f"the layer's experts are now a {type(now).__name__}"
            for module in now.modules():  # grouped ones inside get their rows in Megatron's order
                if (of_module := vars(module).get("as_built")) is not None:
                    of_module.found = found
        if found is not None and self._is_asked_for:
            from megatron_ncclep.integration.experts.refusals import unsupported

            raise unsupported(
                f"what was put on their modules after the layer was built, because they do not "
                f"call them: {found}; remove it, or let Megatron's experts compute this layer, "
                "with experts='auto'"
            )
        return found

    def rows_cross(self, tokens: Tensor) -> Fp8Crossing | None:
        """How the next pass's rows reach the experts that compute it: see `GroupedExperts`."""
        if not is_quantized(self.experts.config):
            return None
        computes = self.change() is None  # on this rank
        crossing: Fp8Crossing | None = self.experts.rows_cross(tokens, computes)
        return crossing


def refused_change(found: str) -> UnsupportedError:
    """The error where experts change when their rows have crossed in FP8."""
    return UnsupportedError(
        f"rows have crossed in FP8 for grouped experts, and Megatron's experts would compute them: "
        f"{found}; change the experts before the layer's forward pass"
    )


def refused_graph(found: str) -> UnsupportedError:
    """The error where a CUDA graph would hold experts that Megatron's forward computes."""
    return UnsupportedError(
        f"a CUDA graph holds the experts, and Megatron's compute this layer, which read on "
        f"the host how many rows each expert has: {found}; remove it, or leave the experts out "
        "of the graph (cuda_graph_impl, cuda_graph_modules)"
    )


def reversed_blocks(rows: Tensor, sizes: list[int]) -> Tensor:
    """Put blocks of rows into the opposite order, and zeros after the last block.

    Rows there may hold anything, and so may their gradients, which do not pass.

    Args:
        rows: [num_rows, ...].
        sizes: rows of each block, in the present order.

    Returns:
        [num_rows, ...], differentiable.
    """
    *blocks, others = rows.split([*sizes, len(rows) - sum(sizes)])
    return torch.cat([*blocks[::-1], torch.zeros_like(others)])


def counts_wanted(experts: Any) -> dict[str, bool]:
    """The dispatcher's keyword arguments that match how the experts read their row counts."""
    if _is(experts, _OURS):
        return {"counts_on_device": True}
    # The op fuser passes the counts on.  Where TransformerEngine has no kernel that reads them, it
    # splits the rows by these counts, so they must add up to the number of rows.
    if _is(experts, _OP_FUSED, _WITH_GROUPED_TENSORS):
        return {"counts_on_device": True, "counts_cover_all_rows": True}
    return {}


def need_no_host(experts: Any, config: Any) -> bool:
    """Whether the experts read their row counts only on the device."""
    if _is(experts, _OURS):
        return True
    if is_quantized(config):  # not tested, and up to 0.17 Megatron pads the rows by the counts
        return False
    # Whether TransformerEngine has such kernels depends on its release, the GPU and cuBLAS; without
    # them it splits the rows on the host.
    if _is(experts, _OP_FUSED):
        place, question = "ops.basic", "is_op_fuser_grouped_tensor_path_supported"
    elif _is(experts, _WITH_GROUPED_TENSORS):
        # Separate biases are added expert by expert, to rows that the host has split.
        if config.add_bias_linear and not config.moe_single_grouped_bias:
            return False
        place, question = "module", "is_module_grouped_tensor_path_supported"
    else:
        return False
    modules = importlib.import_module(f"transformer_engine.pytorch.{place}.grouped_linear")
    has_kernels = getattr(modules, question, None)
    return has_kernels is not None and bool(has_kernels(None, config.params_dtype))


def _is(experts: Any, *attributes: str) -> bool:
    return any(getattr(experts, name, False) for name in attributes)
