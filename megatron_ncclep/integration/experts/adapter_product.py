"""Low-rank products of all experts, added to the results of their linears."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ncclep.integration.experts.adapters import Adapter, weights_in
from megatron_ncclep.integration.experts.grouped_gemm import ADDRESS_BYTES
from megatron_ncclep.integration.experts.grouped_linear import grouped_product


def add_adapter(
    result: Tensor,
    rows: Tensor,
    offsets: Tensor,
    adapter: Adapter,
    last_expert_first: bool,
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
        last_expert_first: the order of the blocks.
        make_rows_again: if given, called in backward instead of keeping `rows`, unless elements of
            these are dropped.

    Returns:
        result.
    """
    a, b = (_stack(factor, len(offsets), last_expert_first) for factor in (adapter.a, adapter.b))
    rows = rows.to(a.dtype)
    if adapter.dropout and not adapter.drops_last:
        rows, make_rows_again = F.dropout(rows, adapter.dropout), None
    # Rows of the small product begin at addresses that grouped GEMMs accept.
    lacking = -a.shape[1] % (ADDRESS_BYTES // a.element_size())
    if lacking:
        a, b = F.pad(a, (0, 0, 0, lacking)), F.pad(b, (0, lacking))
    # Scaled here, where it is smallest.
    low = grouped_product(rows, offsets, a, make_rows_again) * adapter.scale
    product = grouped_product(low, offsets, b)
    if adapter.dropout and adapter.drops_last:
        product = F.dropout(product, adapter.dropout)
    return result.add_(product)


def _stack(factor: Sequence[nn.Module], num_experts: int, last_expert_first: bool) -> Tensor:
    """A factor of all experts in the blocks' order, [num_experts, ...]; autograd sees the weights.

    One that experts share is repeated without a copy, and autograd adds up its gradients.
    """
    weights: list[Tensor] = list(weights_in(factor))
    if len(weights) > 1:
        return torch.stack(weights[::-1] if last_expert_first else weights)
    (weight,) = weights
    if weight.dim() == 2:
        return weight.expand(num_experts, *weight.shape)
    return weight.flip(0) if last_expert_first else weight
