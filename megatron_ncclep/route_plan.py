"""Step 1, plan: routing map and probabilities -> what `Engine.plan` and `dispatch` take."""

from __future__ import annotations

import torch

from megatron_ncclep.engines import extension
from megatron_ncclep.engines.engine import NOT_ROUTED, TOO_MANY_EXPERTS
from megatron_ncclep.errors import InputError


def topk_from_routing_map(routing_map: torch.Tensor, top_k: int) -> torch.Tensor:
    """List each token's experts, in ascending order.  Not collective, does not wait for the device.

    The map is the truth: probabilities say nothing about where a token goes (a router may give an
    expert that is not chosen a positive one, or a chosen one zero).

    Example, top_k 2, four experts: `[[F, T, F, T], [F, F, T, F]]` -> `[[1, 3], [2, -1]]`.

    Args:
        routing_map: [num_tokens, num_experts] bool; at most `top_k` True in a row.
        top_k: K, columns of the result.

    Returns:
        [num_tokens, top_k] int64; `NOT_ROUTED` fills a row up, and a row with more than `top_k`
        experts is `TOO_MANY_EXPERTS` throughout, which the engine's plan refuses on every rank.

    Raises:
        InputError: `routing_map` is not a two-dimensional bool tensor.
    """
    if routing_map.dim() != 2 or routing_map.dtype != torch.bool:
        raise InputError(
            f"routing_map is {routing_map.dtype} {list(routing_map.shape)}: it must be bool "
            "[num_tokens, num_experts]"
        )
    if routing_map.is_cuda and extension.obstacle() is None:
        return _topk_in_one_kernel(routing_map, top_k)
    num_tokens, num_experts = routing_map.shape
    place = routing_map.cumsum(dim=1) - 1  # of an expert among its token's
    # Column top_k takes what is not routed; it is cut off.
    column = torch.where(routing_map, place, top_k).clamp(max=top_k)
    experts = torch.arange(num_experts, device=routing_map.device).expand(num_tokens, -1)
    topk_idx = experts.new_full((num_tokens, top_k + 1), NOT_ROUTED)
    topk_idx = topk_idx.scatter(1, column, experts)[:, :top_k]
    too_many = routing_map.sum(dim=1, keepdim=True) > top_k
    return topk_idx.masked_fill(too_many, TOO_MANY_EXPERTS)


def _topk_in_one_kernel(routing_map: torch.Tensor, top_k: int) -> torch.Tensor:
    """Do what `topk_from_routing_map` does, on a GPU: the same bits, without a dozen launches."""
    routing_map = routing_map.contiguous()
    topk_idx = torch.empty(len(routing_map), top_k, dtype=torch.int64, device=routing_map.device)
    extension.load().topk_from_map(
        routing_map.view(torch.uint8),
        NOT_ROUTED,
        TOO_MANY_EXPERTS,
        topk_idx,
        torch.cuda.current_stream().cuda_stream,
    )
    return topk_idx


def weights_from_probs(probs: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """Pick each token's probabilities for its experts; differentiable in `probs`.

    Args:
        probs: [num_tokens, num_experts] of any floating dtype.  NaN is passed through to the
            experts it belongs to, and to nobody else.
        topk_idx: [num_tokens, top_k] as from `topk_from_routing_map`.

    Returns:
        [num_tokens, top_k] of the dtype of `probs`; zero where a pick goes nowhere.
    """
    picked = probs.gather(1, topk_idx.clamp(min=0))
    return torch.where(
        topk_idx >= 0, picked, torch.zeros((), dtype=probs.dtype, device=probs.device)
    )
