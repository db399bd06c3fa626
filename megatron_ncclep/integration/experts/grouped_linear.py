"""Products of all experts, with gradients where Megatron wants them or through autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ncclep.integration.experts import grouped_gemm
from megatron_ncclep.integration.experts.expert_stack import stack_of
from megatron_ncclep.integration.experts.main_grad import (
    GradientTarget,
    store_weight_gradients,
)

if TYPE_CHECKING:
    from megatron_ncclep.integration.experts.quack_products import QuackProducts


def grouped_linear(
    rows: Tensor,
    offsets: Tensor,
    weights: Sequence[Tensor],
    target: GradientTarget | None,
    make_rows_again: Callable[[], Tensor] | None = None,
    products: QuackProducts | None = None,
) -> Tensor:
    """Return rows @ weights[g]^T for every block g.

    The host reads nothing.  Rows after the last offset may hold anything: they affect neither the
    other rows nor the weights' gradients, and their results and gradients are undefined.

    Args:
        rows: [num_rows, in_features].
        offsets: ends of the blocks, int32 [num_experts], on the rows' device.
        weights: one parameter [out_features, in_features] for each block, in the blocks' order; or
            without a target one tensor of all, [num_experts, out_features, in_features].
        target: where the weights' gradients go; None: they are autograd's.
        make_rows_again: if given, called in backward instead of keeping `rows`.
        products: compute the weights' gradients, without rounding before they are added; None:
            torch does.

    Returns:
        [num_rows, out_features].
    """
    result: Tensor = _GroupedLinear.apply(
        rows, offsets, target, make_rows_again, products, *weights
    )
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        offsets: Tensor,
        target: GradientTarget | None,
        make_rows_again: Callable[[], Tensor] | None,
        products: QuackProducts | None,
        *weights: Tensor,
    ) -> Tensor:
        # The weights one by one, not their stack, which may be a copy that must not be kept.
        needs_rows = make_rows_again is None and any(ctx.needs_input_grad[5:])
        ctx.save_for_backward(rows if needs_rows else None, offsets, *weights)
        ctx.target, ctx.make_rows_again, ctx.products = target, make_rows_again, products
        return grouped_gemm.multiply(rows, _stack(weights), offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, offsets, *weights = ctx.saved_tensors
        products: QuackProducts | None = ctx.products
        grad = grad.contiguous()
        rows_grad = None
        if ctx.needs_input_grad[0]:
            rows_grad = grouped_gemm.multiply(grad, _stack(weights).mT, offsets)
        weight_grads: list[Tensor | None] = [None] * len(weights)
        is_trained = ctx.needs_input_grad[5:]
        if any(is_trained):
            if ctx.make_rows_again is not None:
                rows = ctx.make_rows_again().to(weights[0].dtype)
            if products is None:
                product = partial(grouped_gemm.weight_gradients, grad, rows, offsets)
            else:
                ends = F.pad(offsets, (1, 0))
                product = partial(products.weight_gradients, grad, rows, ends, False)
            if ctx.target is None:
                whole: Any = product()
                weight_grads = [whole]
            else:
                weight_grads = store_weight_gradients(weights, is_trained, product, ctx.target)
        return (rows_grad, None, None, None, None, *weight_grads)


def _stack(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if weights[0].dim() == 3 else stack_of(weights)
