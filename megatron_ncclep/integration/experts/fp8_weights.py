"""The experts' weights in FP8, quantised once a step where it is known when a step begins.

Megatron sets `is_first_microbatch` on TransformerEngine's linears when a step begins, and they
clear it in their forward pass.  Grouped experts do not call them, and do the same.  Weights are
quantised in every pass where this does not tell of all changes:

    evaluation               Megatron sets the flag in the first one only
    linears without the flag
    disable_parameter_transpose_cache
    a CUDA graph of a layer  it is captured once, and replayed for all micro-batches

A graph of whole iterations holds the quantisation of its first micro-batch.  A change in place, as
by `load_state_dict`, counts too; the distributed optimizer's leaves no trace in the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ncclep.integration.checks.cuda_graphs import holds_iteration

if TYPE_CHECKING:
    from megatron_ncclep.integration.experts.fp8_products import Fp8Products, Fp8Weights

Pair = tuple["Fp8Weights", "Fp8Weights"]


@dataclass(frozen=True)
class _Made:
    """Weights in FP8, and from what they were made."""

    pair: Pair
    products: Fp8Products
    versions: tuple[list[int], list[int]]  # the parameters' addresses, and counts of changes
    in_graph: bool


class StepWeights:
    """The weights of one layer's experts in FP8, of fc1 and of fc2, as of this step."""

    def __init__(self) -> None:
        self._made: _Made | None = None

    def __reduce__(self) -> tuple[type[StepWeights], tuple[()]]:
        """A copy of a model, and a pickled one, quantise their own."""
        return StepWeights, ()

    def of(
        self,
        fc1: Sequence[Tensor],
        fc2: Sequence[Tensor],
        linears: Iterable[Any],
        products: Fp8Products,
        config: Any,
        is_training: bool,
    ) -> Pair:
        """Return the weights in FP8; quantise them unless this step has, and clear the flags.

        Args:
            fc1, fc2: a parameter for each expert.
            linears: Megatron's modules that hold them.
            products: quantises them.
            config: TransformerConfig.
            is_training: the experts are in training mode.
        """
        linears, weights = list(linears), (*fc1, *fc2)
        in_graph = fc1[0].is_cuda and torch.cuda.is_current_stream_capturing()
        may_keep = (
            is_training
            and not config.disable_parameter_transpose_cache
            and all(hasattr(linear, "is_first_microbatch") for linear in linears)
            and not any(map(Tensor.is_inference, weights))
            and (not in_graph or (holds_iteration(config) and torch.is_grad_enabled()))
        )
        if not may_keep:
            self._made = None
            return products.quantize_weights(fc1), products.quantize_weights(fc2)
        # Every pass asks, so these are hardly loops of Python's.
        versions = list(map(Tensor.data_ptr, weights)), [weight._version for weight in weights]
        now, made = (products, versions, in_graph), self._made
        is_first = any(linear.is_first_microbatch for linear in linears)
        if is_first or made is None or (made.products, made.versions, made.in_graph) != now:
            self._made = None  # its memory serves again
            pair = products.quantize_weights(fc1), products.quantize_weights(fc2)
            self._made = made = _Made(pair, *now)
        for linear in linears:
            linear.is_first_microbatch = False
        return made.pair
