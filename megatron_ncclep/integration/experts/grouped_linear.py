"""A linear layer of all experts, with gradients where Megatron wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ncclep.integration.experts import grouped_gemm
from megatron_ncclep.integration.experts.expert_stack import stack_of, view_of


def grouped_linear(
    rows: Tensor,
    offsets: Tensor,
    weights: Sequence[Tensor],
    into_main_grad: bool,
    make_rows_again: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Return rows @ weights[g]^T for every block g.

    Nothing is read on the host.  Rows after the last offset may hold anything: they reach neither
    the other rows nor the weights' gradients, and their results and gradients are undefined.

    Args:
        rows: [num_rows, in_features].
        offsets: ends of the blocks, int32 [num_experts], on the rows' device.
        weights: one parameter [out_features, in_features] for each block, in the blocks' order.
        into_main_grad: add gradients to the parameters' `main_grad`, where they have one, instead
            of leaving that to who reads `.grad`.
        make_rows_again: called in backward, where it is given, instead of keeping `rows`.

    Returns:
        [num_rows, out_features].
    """
    result: Tensor = _GroupedLinear.apply(rows, offsets, into_main_grad, make_rows_again, *weights)
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        offsets: Tensor,
        into_main_grad: bool,
        make_rows_again: Callable[[], Tensor] | None,
        *weights: Tensor,
    ) -> Tensor:
        # The weights one by one, not their stack: where that is a copy, it is not kept.
        ctx.save_for_backward(None if make_rows_again else rows, offsets, *weights)
        ctx.into_main_grad, ctx.make_rows_again = into_main_grad, make_rows_again
        return grouped_gemm.multiply(rows, stack_of(weights), offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, offsets, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        rows_grad = None
        if ctx.needs_input_grad[0]:
            rows_grad = grouped_gemm.input_gradient(grad, stack_of(weights), offsets)
        weight_grads: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[4:]):  # autograd drops what comes for those that are frozen
            rows = rows if ctx.make_rows_again is None else ctx.make_rows_again()
            stack = grouped_gemm.weight_gradient(grad, rows, offsets)
            if ctx.into_main_grad and all(hasattr(weight, "main_grad") for weight in weights):
                weight_grads = _add_to_main_grads(weights, stack)
            else:
                weight_grads = list(stack.unbind())
        return (rows_grad, None, None, None, *weight_grads)


def _add_to_main_grads(weights: Sequence[Any], stack: Tensor) -> list[Tensor | None]:
    """Add the gradients to the weights' `main_grad` and return what autograd is to be given.

    Megatron's DDP has a hook behind every parameter that reduces gradients when all are there.  It
    runs after autograd has set `.grad`, and adds that up itself unless the parameter says
    `grad_added_to_main_grad`.  So autograd is given something: the gradients, which exist anyway,
    or zeros where Megatron asks for them.  Where nobody knows of the flag, nothing may come, or it
    would be taken for a gradient of its own.
    """
    main_grads = [weight.main_grad for weight in weights]
    whole = view_of(main_grads)
    if whole is not None:
        whole.add_(stack)
    else:
        for main_grad, gradient in zip(main_grads, stack.unbind(), strict=True):
            main_grad.add_(gradient)
    results: list[Tensor | None] = []
    for weight, gradient in zip(weights, stack.unbind(), strict=True):
        if not hasattr(weight, "grad_added_to_main_grad"):
            results.append(None)
            continue
        weight.grad_added_to_main_grad = True
        wants_zeros = getattr(weight, "zero_out_wgrad", False)
        results.append(torch.zeros_like(gradient) if wants_zeros else gradient)
    return results
