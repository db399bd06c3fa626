"""Low-rank products of all experts, added to the results of their linears.

`add_adapter` does that for any adapter, with products of its own.  Where the experts are one node
of autograd (fused_swiglu.py), that node takes the factors, as `low_rank` returns them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ncclep.integration.experts.adapters import Adapter, weights_in
from megatron_ncclep.integration.experts.grouped_gemm import ADDRESS_BYTES
from megatron_ncclep.integration.experts.grouped_linear import grouped_linear


class LowRank(NamedTuple):
    """An adapter's factors for all experts, and what its product is multiplied by.

    Attributes:
        a: [num_experts, rank, in_features], in the blocks' order.
        b: [num_experts, out_features, rank].
        scale: of the product.
    """

    a: Tensor
    b: Tensor
    scale: float


def low_rank(
    adapters: Sequence[Adapter], num_experts: int, reverse_local_experts: bool, dtype: torch.dtype
) -> LowRank | None:
    """Return a linear's adapter as contiguous factors, whose gradients go through autograd.

    Args:
        adapters: of the linear, one at least.
        num_experts, reverse_local_experts: of the blocks.
        dtype: of the rows.

    Returns:
        None where `add_adapter` has to do it: for several adapters, dropout, another dtype.
    """
    adapter = adapters[0]
    if len(adapters) > 1 or adapter.dropout:
        return None
    a, b = _factors(adapter, num_experts, reverse_local_experts)
    return LowRank(a.contiguous(), b.contiguous(), adapter.scale) if a.dtype is dtype else None


def add_adapter(
    result: Tensor,
    rows: Tensor,
    offsets: Tensor,
    adapter: Adapter,
    reverse_local_experts: bool,
    make_rows_again: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Add an adapter's product to the result of a linear, in place.

    Gradients of the factors always go through autograd, because libraries have hooks there:
    Megatron-Bridge sums those of shared factors over the ranks.

    Args:
        result: of the linear, [num_rows, out_features].
        rows: [num_rows, in_features]; they are computed in the factors' dtype.
        offsets: ends of the blocks, int32 [num_experts].
        adapter: of this linear.
        reverse_local_experts: the order of the blocks.
        make_rows_again: if given, called in backward instead of keeping `rows`, unless elements of
            these are dropped.

    Returns:
        result.
    """
    a, b = _factors(adapter, len(offsets), reverse_local_experts)
    rows = rows.to(a.dtype)
    if adapter.dropout and not adapter.drops_last:
        rows, make_rows_again = F.dropout(rows, adapter.dropout), None
    # Scaled here, where it is smallest.
    low = grouped_linear(rows, offsets, [a], None, make_rows_again) * adapter.scale
    product = grouped_linear(low, offsets, [b], None)
    if adapter.dropout and adapter.drops_last:
        product = F.dropout(product, adapter.dropout)
    return result.add_(product)


def _factors(
    adapter: Adapter, num_experts: int, reverse_local_experts: bool
) -> tuple[Tensor, Tensor]:
    """The adapter's factors of all experts, as in `LowRank`."""
    a, b = (_stack(factor, num_experts, reverse_local_experts) for factor in (adapter.a, adapter.b))
    # Rows of the small product begin at addresses that grouped GEMMs accept.
    lacking = -a.shape[1] % (ADDRESS_BYTES // a.element_size())
    return (F.pad(a, (0, 0, 0, lacking)), F.pad(b, (0, lacking))) if lacking else (a, b)


def _stack(factor: Sequence[nn.Module], num_experts: int, reverse_local_experts: bool) -> Tensor:
    """A factor of all experts in the blocks' order, [num_experts, ...]; autograd sees the weights.

    One that experts share is repeated without a copy, and autograd adds up its gradients.
    """
    weights: list[Tensor] = list(weights_in(factor))
    if len(weights) > 1:
        return torch.stack(weights[::-1] if reverse_local_experts else weights)
    (weight,) = weights
    if weight.dim() == 2:
        return weight.expand(num_experts, *weight.shape)
    reverse: Callable[[Tensor], Tensor] = _Reverse.apply
    return reverse(weight) if reverse_local_experts else weight


class _Reverse(torch.autograd.Function):
    """weight.flip(0), which takes one element at a time, eight bytes at a time."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        words = weight.contiguous().view(len(weight), -1)
        # A view of a larger tensor may begin anywhere.
        if math.gcd(words.shape[1], words.storage_offset()) * words.element_size() % 8 == 0:
            words = words.view(torch.int64)
        return words.flip(0).view(weight.dtype).view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result: Tensor = _Reverse.apply(grad)
        return result
