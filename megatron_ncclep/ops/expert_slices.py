"""Experts that several ranks hold in slices (Megatron's expert tensor parallelism, ETP).

Megatron cuts the two matrices of an expert along the expert's own hidden size: each of S ranks has
a slice, needs every row of the expert, and returns a part of its output; the parts are added up.
An engine treats each slice as an expert.  Its group has all ranks that hold experts, with the ranks
of one expert next to each other, and a token with K experts has K * S assignments.  So its row is
sent once to each rank that needs it, and combine adds up the slices' parts with everything else.

Example: 4 experts, 2 per rank, in 2 slices.  Ranks 0 and 1 have slices of experts 0 and 1, ranks 2
and 3 have slices of experts 2 and 3.

    rank               0       1       2       3
    expert, slice      0a 1a   0b 1b   2a 3a   2b 3b
    for the engine     0  1    2  3    4  5    6  7

For the engine, a token's assignments 1 and 2 are 1 and 3, 4 and 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ncclep.ops.routing import Routes


@dataclass(frozen=True)
class SlicedRoutes(Routes):
    """Routes to all slices of each token's experts.

    Attributes:
        whole: the routes to the experts.
        num_slices: S, slices of an expert.
    """

    whole: Routes
    num_slices: int

    def probs_gradient(self, grad_weights: torch.Tensor) -> torch.Tensor:
        """See `Routes.probs_gradient`.

        The gradients of an assignment's copies are added up, because each slice computes only its
        own part of the output.
        """
        copies = grad_weights.unflatten(1, (-1, self.num_slices))
        return self.whole.probs_gradient(copies.sum(dim=2))


def to_all_slices(
    routes: Routes, weights: torch.Tensor, num_local_experts: int, num_slices: int
) -> tuple[SlicedRoutes, torch.Tensor]:
    """Route every assignment, with its weight, to all ranks that hold slices of its expert.

    Not collective, does not wait for the device.

    Args:
        routes: to the experts.
        weights: [num_tokens, top_k].
        num_local_experts: the number of experts that each rank has slices of.
        num_slices: S, slices of an expert.

    Returns:
        the routes to the slices, with top_k * num_slices assignments, and their weights
        [num_tokens, top_k * num_slices]; the copies of an assignment are adjacent, and entries that
        are not routed stay unchanged.
    """
    topk_idx = routes.topk_idx
    # Expert e is on the S ranks from e // L * S on, each with L experts, at the same place on all.
    before = topk_idx.div(num_local_experts, rounding_mode="floor")
    first = topk_idx.add(before, alpha=num_local_experts * (num_slices - 1))
    steps = torch.arange(
        0, num_slices * num_local_experts, num_local_experts, device=topk_idx.device
    )
    copies = topk_idx[:, :, None].expand(-1, -1, num_slices)
    copies = torch.where(copies < 0, copies, first[:, :, None] + steps).flatten(1)
    num_experts = routes.num_experts * num_slices
    sliced = SlicedRoutes(
        copies, num_experts, routes.experts_per_block, whole=routes, num_slices=num_slices
    )
    return sliced, weights.repeat_interleave(num_slices, dim=1)
