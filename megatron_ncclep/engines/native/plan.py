"""The native engine's plan, and the capacity of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron_ncclep.engines.engine import RoutePlan
from megatron_ncclep.engines.native.group import NativeGroup

if TYPE_CHECKING:
    from megatron_ncclep import _C

# An exact plan has room for this many times the assignments that are expected to arrive.
HEADROOM = 1.25
# The fraction of unneeded room that a plan gives up for the plans after it.
TAKEN_BACK = 1 / 8


@dataclass(eq=False)
class NativePlan(RoutePlan):
    """Routes as the kernels keep them.

    Attributes:
        token_routes: int32 [native.num_token_routes, num_tokens]: the source rank's routes of each
            token.
        routes: int32: the pairs and assignments that this rank receives, with room for more; in
            static mode for as many as can arrive.
        most_tokens: the most tokens that any rank has.
        handle: the `_C.PlanHandle` over `counts`, `token_routes` and `routes`.
        stream: handle of the stream that they belong to.
        shared: the group; its failures make the plan invalid.
        rows_on_host: `tokens_per_expert` on the CPU; None in static mode, where no host waits.
    """

    token_routes: torch.Tensor
    routes: torch.Tensor
    most_tokens: int
    handle: _C.PlanHandle
    stream: int
    shared: NativeGroup
    rows_on_host: torch.Tensor | None

    def tokens_per_expert_on_host(self) -> torch.Tensor:
        """See `RoutePlan.tokens_per_expert_on_host`; in static mode it waits for the stream.

        Raises:
            PeerError: in static mode, when a wait on the device failed meanwhile.
        """
        if self.rows_on_host is not None:
            return self.rows_on_host
        rows = self.tokens_per_expert.cpu()
        self.shared.raise_failure()
        return rows


class PlanCapacity(NamedTuple):
    """The capacity of a plan's memory.

    Attributes:
        num_local_experts: of each rank.
        most_tokens: the most tokens of any rank; in static mode, as many as the windows are for.
        max_pairs, max_assignments: the most that this rank can receive with it.
        limit: rows of the dispatched tensor in static mode; otherwise None.
    """

    num_local_experts: int
    most_tokens: int
    max_pairs: int
    max_assignments: int
    limit: int | None


def next_capacity_factor(factor: float, num_assignments: int, balanced: int) -> float:
    """The capacity of a layer's next plan, as a multiple of a balanced load.

    `HEADROOM` times the last load, which counts as at least balanced.  It rises at once and falls
    step by step, because batches alternate.  Example: after a plan with five times a
    balanced load, 6.25; then, with balanced plans, 5.625, 5.078 and so on down to 1.25.

    Args:
        factor: the capacity of the last plan.
        num_assignments: assignments that it received.
        balanced: assignments that each rank receives in a balanced plan.
    """
    needed = HEADROOM * max(1.0, num_assignments / max(balanced, 1))
    return max(needed, factor - TAKEN_BACK * (factor - needed))
