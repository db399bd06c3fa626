"""What the routers of a model that trains decide: balanced routing, and the load of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

UNPICKED = -100.0  # logit of experts that a token does not use; others are at least log(0.5)
STEP = 0.1  # between the logits of a token's experts: their weights differ


class _Given(torch.autograd.Function):
    """See `with_values`."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given.to(own.dtype).view_as(own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def with_values(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """The values of `given`, and their gradient for `own`, which has no other use."""
    result: torch.Tensor = _Given.apply(own, given)
    return result


def _routers(gpt: Any) -> list[Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in gpt.modules() if isinstance(module, TopKRouter)]


def balance(gpt: Any, num_tokens: int, rank: int) -> None:
    """Let every micro-batch of `num_tokens` be routed evenly over a layer's experts.

    Routers do all of their work, forward and backward; only their logits have given values, the
    same in every run and for every dispatcher, and also in CUDA graphs.
    """
    for layer, router in enumerate(_routers(gpt)):
        config, own = router.config, router.gating
        experts = even_experts(
            num_tokens, config.num_moe_experts, config.moe_router_topk,
            config.moe_router_num_groups or 1, config.moe_router_group_topk or 1,
            seed=layer * dist.get_world_size() + rank,
        )  # fmt: skip
        logits = torch.full((num_tokens, config.num_moe_experts), UNPICKED)
        logits.scatter_(1, experts, -STEP * torch.arange(experts.shape[1]).expand_as(experts))
        given = logits.to(router.weight.device)
        router.gating = lambda hidden, own=own, given=given: with_values(own(hidden), given)


def even_experts(
    num_tokens: int, num_experts: int, top_k: int, groups: int, groups_of_token: int, seed: int
) -> torch.Tensor:
    """Draw experts as a router would, but each equally often in every `num_experts` tokens.

    Args:
        groups, groups_of_token: the experts are divided into `groups`, and a token's are in so many
            of them, which must divide `top_k`.

    Returns:
        int64 [num_tokens, top_k], distinct in each row.
    """
    generator, size = torch.Generator().manual_seed(seed), num_experts // groups
    token = torch.arange(num_experts)

    def draw(which: torch.Tensor, among: int, number: int) -> torch.Tensor:
        # Of a random order, each token takes those at fixed distances from its own place.
        order = torch.randperm(among, generator=generator)
        places = torch.randperm(among, generator=generator)[:number]
        return order[(which[:, None] + places) % among]

    blocks = []
    for _ in range(-(-num_tokens // num_experts)):
        group = draw(token % groups, groups, groups_of_token)
        inside = draw(token // groups, size, top_k // groups_of_token)
        blocks.append((group[:, :, None] * size + inside[:, None]).flatten(1))
    return torch.cat(blocks)[:num_tokens]


@contextmanager
def watched(gpt: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the tokens of each expert, [num_experts], of every call of a router."""
    counts: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda module, args, out: counts.append(out[1].sum(0)))
        for router in _routers(gpt)
    ]
    yield counts
    for hook in hooks:
        hook.remove()


def load_of_busiest(counts: list[torch.Tensor]) -> float:
    """Rows of the rank with most, in multiples of the mean, averaged over calls.  Collective."""
    total = torch.stack(counts).float()
    dist.all_reduce(total)
    of_ranks = total.view(len(counts), dist.get_world_size(), -1).sum(2)
    return float((of_ranks.amax(1) / of_ranks.mean(1)).mean())
