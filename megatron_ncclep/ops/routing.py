"""Step 1, plan: routing map and probabilities -> the arguments of `Engine.plan` and `dispatch`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ncclep.engines.engine import NOT_ROUTED, TOO_MANY_EXPERTS
from megatron_ncclep.engines.plain_torch import plain_torch
from megatron_ncclep.errors import InputError
from megatron_ncclep.libraries import extension


@dataclass(frozen=True)
class Routes:
    """Each token's experts, and how they were read from the routing map.

    Attributes:
        topk_idx: [num_tokens, top_k] int64, in ascending order; `NOT_ROUTED` fills the rest of a
            row; the row of a token with more than `top_k` experts is all `TOO_MANY_EXPERTS`, which
            the engine's plan refuses on every rank.
        num_experts: columns of the map.
        experts_per_block: experts are numbered backwards in blocks of this many.
    """

    topk_idx: torch.Tensor
    num_experts: int
    experts_per_block: int

    def probs_gradient(self, grad_weights: torch.Tensor) -> torch.Tensor:
        """Scatter each weight's gradient to its probability; the others get zero.

        Args:
            grad_weights: [num_tokens, top_k], gradients of the weights of `routes_and_weights`.

        Returns:
            [num_tokens, num_experts] of the same dtype.
        """
        num_tokens = len(self.topk_idx)
        if (kernels := extension.kernels_on(grad_weights.device)) is not None:
            grad_probs = grad_weights.new_empty(num_tokens, self.num_experts)
            stream = extension.current_stream()
            grad_weights = grad_weights.contiguous()
            kernels.probs_gradient(
                self.topk_idx, grad_weights, grad_probs, self.experts_per_block, stream
            )
            return grad_probs
        # Column num_experts collects assignments that are not routed; it is cut off.
        grad_probs = grad_weights.new_zeros(num_tokens, self.num_experts + 1)
        column = torch.where(self.topk_idx >= 0, self.topk_idx, self.num_experts)
        grad_probs = grad_probs.scatter(1, column, grad_weights)[:, :-1]
        return _backwards_in_blocks(grad_probs, self.experts_per_block)


@plain_torch
def routes_and_weights(
    routing_map: torch.Tensor, probs: torch.Tensor, top_k: int, experts_per_block: int = 1
) -> tuple[Routes, torch.Tensor]:
    """List each token's experts, in ascending order, and its probabilities for them.

    Not collective, does not wait for the device.  Autograd does not record this: `dispatch` takes
    the routes together with the probabilities, and its backward computes their gradient
    (`Routes.probs_gradient`).

    Only the map decides where a token goes, not the probabilities: a router may give a positive
    probability to an expert that is not chosen, or zero to a chosen one.

    Example, top_k 2, four experts, map `[[F, T, F, T], [F, F, T, F]]` and probabilities
    `[[.1, .2, .3, .4], [.5, .6, .7, .8]]`: experts `[[1, 3], [2, -1]]`, weights
    `[[.2, .4], [.7, 0]]`.

    Args:
        routing_map: [num_tokens, num_experts] bool; at most `top_k` True in a row.
        probs: [num_tokens, num_experts] of any floating dtype, on the map's device.  NaN is passed
            through to its own experts only.
        top_k: K, columns of the results, the most experts that a token may have.
        experts_per_block: experts are numbered backwards in blocks of this many, a divisor of their
            number: with 4 experts and blocks of 2, the experts of the map's columns are 1, 0, 3, 2.

    Returns:
        the routes; and weights [num_tokens, top_k] of the dtype of `probs`: zero where there is no
        expert.

    Raises:
        InputError: `routing_map` is not a two-dimensional bool tensor with experts, or `probs` has
            a different shape or device.
    """
    if routing_map.dim() != 2 or routing_map.dtype != torch.bool or routing_map.shape[1] == 0:
        raise InputError(
            f"routing_map is {routing_map.dtype} {list(routing_map.shape)}: it must be bool "
            "[num_tokens, num_experts]"
        )
    if probs.shape != routing_map.shape or probs.device != routing_map.device:
        raise InputError(
            f"probs is {list(probs.shape)} on {probs.device}: it must match routing_map, "
            f"{list(routing_map.shape)} on {routing_map.device}"
        )
    num_tokens, num_experts = routing_map.shape
    if (kernels := extension.kernels_on(routing_map.device)) is not None:
        topk_idx = routing_map.new_empty(num_tokens, top_k, dtype=torch.int64)
        weights = probs.new_empty(num_tokens, top_k)
        kernels.routes_and_weights(
            routing_map.contiguous(),
            probs.contiguous(),
            NOT_ROUTED,
            TOO_MANY_EXPERTS,
            topk_idx,
            weights,
            experts_per_block,
            extension.current_stream(),
        )
        return Routes(topk_idx, num_experts, experts_per_block), weights
    probs = _backwards_in_blocks(probs, experts_per_block)
    routing_map = _backwards_in_blocks(routing_map, experts_per_block)
    slot = routing_map.cumsum(dim=1) - 1  # of an expert among its token's
    # Column top_k collects experts that are not chosen; it is cut off.
    column = torch.where(routing_map, slot, top_k).clamp(max=top_k)
    experts = torch.arange(num_experts, device=routing_map.device).expand(num_tokens, -1)
    topk_idx = experts.new_full((num_tokens, top_k + 1), NOT_ROUTED)
    topk_idx = topk_idx.scatter(1, column, experts)[:, :top_k]
    topk_idx = topk_idx.masked_fill(slot[:, -1:] >= top_k, TOO_MANY_EXPERTS)
    chosen = probs.gather(1, topk_idx.clamp(min=0))
    weights = torch.where(topk_idx >= 0, chosen, chosen.new_zeros(()))
    return Routes(topk_idx, num_experts, experts_per_block), weights


def _backwards_in_blocks(per_expert: torch.Tensor, experts_per_block: int) -> torch.Tensor:
    """Reverse the columns of [num_tokens, num_experts], block by block."""
    if experts_per_block == 1:
        return per_expert
    return per_expert.unflatten(1, (-1, experts_per_block)).flip(2).flatten(1)
