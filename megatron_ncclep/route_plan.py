"""Step 1, plan: routing map and probabilities -> what `Engine.plan` and `dispatch` take."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ncclep.engines import extension
from megatron_ncclep.engines.engine import NOT_ROUTED, TOO_MANY_EXPERTS
from megatron_ncclep.errors import InputError


def routes_and_weights(
    routing_map: torch.Tensor, probs: torch.Tensor, top_k: int, block: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """List each token's experts, in ascending order, and its probabilities for them.

    Differentiable in `probs`.  Not collective, does not wait for the device.

    The map is the truth: probabilities say nothing about where a token goes (a router may give an
    expert that is not chosen a positive one, or a chosen one zero).

    Example, top_k 2, four experts, map `[[F, T, F, T], [F, F, T, F]]` and probabilities
    `[[.1, .2, .3, .4], [.5, .6, .7, .8]]`: experts `[[1, 3], [2, -1]]`, weights
    `[[.2, .4], [.7, 0]]`.

    Args:
        routing_map: [num_tokens, num_experts] bool; at most `top_k` True in a row.
        probs: [num_tokens, num_experts] of any floating dtype, on the map's device.  NaN is passed
            through to the experts it belongs to, and to nobody else.
        top_k: K, columns of the results.
        block: experts are numbered backwards in blocks of this many, which divides their number:
            with 4 experts and blocks of 2, the experts of the map's columns are 1, 0, 3, 2.

    Returns:
        topk_idx [num_tokens, top_k] int64: `NOT_ROUTED` fills a row up, and a row with more than
        `top_k` experts is `TOO_MANY_EXPERTS` throughout, which the engine's plan refuses on every
        rank; and weights [num_tokens, top_k] of the dtype of `probs`: zero where no expert is.

    Raises:
        InputError: `routing_map` is not a two-dimensional bool tensor with experts, or `probs` has
            another shape or is elsewhere.
    """
    if routing_map.dim() != 2 or routing_map.dtype != torch.bool or routing_map.shape[1] == 0:
        raise InputError(
            f"routing_map is {routing_map.dtype} {list(routing_map.shape)}: it must be bool "
            "[num_tokens, num_experts]"
        )
    if probs.shape != routing_map.shape or probs.device != routing_map.device:
        raise InputError(
            f"probs is {list(probs.shape)} on {probs.device}: it must be like routing_map, "
            f"{list(routing_map.shape)} on {routing_map.device}"
        )
    if routing_map.is_cuda and (kernels := _kernels()) is not None:
        return InOneKernel.apply(routing_map, probs, top_k, block, kernels)
    num_tokens, num_experts = routing_map.shape
    if block > 1:
        routing_map, probs = (
            per_expert.unflatten(1, (-1, block)).flip(2).flatten(1)
            for per_expert in (routing_map, probs)
        )
    place = routing_map.cumsum(dim=1) - 1  # of an expert among its token's
    # Column top_k takes what is not routed; it is cut off.
    column = torch.where(routing_map, place, top_k).clamp(max=top_k)
    experts = torch.arange(num_experts, device=routing_map.device).expand(num_tokens, -1)
    topk_idx = experts.new_full((num_tokens, top_k + 1), NOT_ROUTED)
    topk_idx = topk_idx.scatter(1, column, experts)[:, :top_k]
    too_many = routing_map.sum(dim=1, keepdim=True) > top_k
    topk_idx = topk_idx.masked_fill(too_many, TOO_MANY_EXPERTS)
    picked = probs.gather(1, topk_idx.clamp(min=0))
    return topk_idx, torch.where(topk_idx >= 0, picked, picked.new_zeros(()))


class InOneKernel(torch.autograd.Function):
    """What `routes_and_weights` says, on a GPU: the same bits, in one launch each way."""

    @staticmethod
    def forward(
        ctx: Any,
        routing_map: torch.Tensor,
        probs: torch.Tensor,
        top_k: int,
        block: int,
        kernels: ModuleType,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the map and the probabilities, each once."""
        num_tokens, num_experts = routing_map.shape
        topk_idx = routing_map.new_empty(num_tokens, top_k, dtype=torch.int64)
        weights = probs.new_empty(num_tokens, top_k)
        kernels.routes_and_weights(
            routing_map.contiguous(),
            probs.contiguous(),
            NOT_ROUTED,
            TOO_MANY_EXPERTS,
            topk_idx,
            weights,
            block,
            extension.current_stream(),
        )
        ctx.save_for_backward(topk_idx)
        ctx.num_experts, ctx.block, ctx.kernels = num_experts, block, kernels
        ctx.mark_non_differentiable(topk_idx)
        ctx.set_materialize_grads(False)  # or autograd launches a kernel for zeros of topk_idx
        return topk_idx, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: None, grad_weights: torch.Tensor | None) -> tuple[Any, ...]:
        """Bring each weight's gradient to its probability; the others get zero."""
        if grad_weights is None:
            return None, None, None, None, None
        (topk_idx,) = ctx.saved_tensors
        grad_probs = grad_weights.new_empty(len(topk_idx), ctx.num_experts)
        ctx.kernels.probs_gradient(
            topk_idx,
            grad_weights.contiguous(),
            grad_probs,
            ctx.block,
            extension.current_stream(),
        )
        return None, grad_probs, None, None, None


@cache
def _kernels() -> ModuleType | None:
    """Return the extension if it can be used on this GPU; looked for once, not at every layer."""
    if extension.obstacle() is not None:
        return None
    if not extension.has_code_for(*torch.cuda.get_device_capability()):
        return None
    return extension.load()
