"""The engine interface: moving tokens, without autograd and without Megatron.

docs/contract.md states the contract in full; the engine `reference` is its meaning in code.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.uncopied import Uncopied

# An entry of topk_idx that routes nowhere.
NOT_ROUTED = -1
# Fills a row of topk_idx when the routing map named more than top_k experts for its token.
TOO_MANY_EXPERTS = -(2**31)

# The dtype of rows that dispatch copies but combine cannot add up: FP8 rows with their scales, for
# example (ops/packed_rows.py).
BYTES = torch.uint8

# How combine rounds.  All add a rank's rows in local-expert order and the ranks' parts in rank
# order, in fp32, and round what crosses the wire; the first two differ in the source rank's own
# part.
SOURCE_PART_UNROUNDED = "source rank's part unrounded"  # the contract's
EVERY_PART_ROUNDED = "every part rounded"  # for an engine that treats all ranks alike
# For a grid of nodes: on each node the rank with the source rank's local index adds up the
# parts of its node, its own unrounded, and rounds; the source rank adds the nodes' sums, all
# of them rounded.
NODE_SUMS_ROUNDED = "node sums rounded"
REDUCTIONS = (SOURCE_PART_UNROUNDED, EVERY_PART_ROUNDED, NODE_SUMS_ROUNDED)

# The order of an expert's rows in their block, in which they are also kept if not all fit: by token
# within a source rank, and the source ranks as follows.
BY_RANK = "by rank"  # the contract's: in ascending order
BY_RAIL = "by rail"  # by local index and then by node: ranks 0 2 1 3 of two nodes of two
SLOT_ORDERS = (BY_RANK, BY_RAIL)
# Options of EpConfig that all engines honour.
COMMON_OPTIONS = frozenset(
    {
        "alignment",
        "check_calls",
        "first_timeout_s",
        "max_recv_rows",
        "max_tokens_per_rank",
        "on_overflow",
        "timeout_s",
    }
)


@dataclass(frozen=True)
class EngineCaps:
    """What an engine can do; checked before every call, so exceeding a limit is a clear error.

    Attributes:
        name: of the engine.
        reduction: how combine adds up, one of REDUCTIONS; engines with the same one, and the same
            slot order, agree to the bit.
        payload_dtypes: dtypes of rows that combine can add up.
        row_bytes_multiple: the bytes of one row must be a multiple of this.
        options: options of EpConfig, other than `engine`, that the engine honours; others are
        refused.
        moves_bytes: dispatch moves rows of bytes (uint8) too, whatever they encode.
        slot_order: the order of rows in a block, one of SLOT_ORDERS.
        max_tokens: most tokens on one rank; None: no limit, as with the next two.
        max_top_k: most assignments of one token.
        max_local_experts: most experts on one rank.
        low_latency_tokens: most tokens of a rank in low-latency mode; 0: the engine has none.
        min_ranks: ranks of the smallest group that it serves.
        captures_static: in static mode no call waits for the device: a CUDA graph can capture all.
    """

    name: str
    reduction: str
    payload_dtypes: tuple[torch.dtype, ...]
    row_bytes_multiple: int
    options: frozenset[str]
    moves_bytes: bool = False
    slot_order: str = BY_RANK
    max_tokens: int | None = None
    max_top_k: int | None = None
    max_local_experts: int | None = None
    low_latency_tokens: int = 0
    min_ranks: int = 1
    captures_static: bool = False


@dataclass(eq=False)
class RoutePlan(Uncopied):
    """Where every row goes: made once per micro-batch and layer, kept until backward.

    An engine subclasses it with whatever it needs to find the rows again; the fields here are what
    every engine provides.  A plan is complete, and never changed again, when `Engine.plan` returns
    it; any number of plans may be alive at once.

    Attributes:
        plan_id: the same number on every rank of the group for the same plan.
        num_tokens: T, tokens of this rank.
        top_k: K, assignments per token.
        made_by: the engine that made it.
        num_rows: N, rows of the dispatched tensor on this rank (padding included).
        counts: int64 [2 * num_local_experts + 1], on the plan's device: `tokens_per_expert`,
            `routed_per_expert` and `num_dropped`, one after the other.
    """

    plan_id: int
    num_tokens: int
    top_k: int
    made_by: Engine
    num_rows: int
    counts: torch.Tensor

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """int64 [num_local_experts]: rows of each local expert's block, padded to the alignment.

        Their sum is `num_rows`, except in static mode, where rows may follow the last block.
        """
        return self.counts[: len(self.counts) // 2]

    @property
    def routed_per_expert(self) -> torch.Tensor:
        """int64 [num_local_experts]: the rows of each block that hold a token."""
        return self.counts[len(self.counts) // 2 : -1]

    @property
    def num_dropped(self) -> torch.Tensor:
        """int64 scalar: assignments for this rank's experts that did not fit; 0 in exact mode."""
        return self.counts[-1]

    def tensors(self) -> list[torch.Tensor]:
        """The plan's own tensors, without those of an inner plan."""
        values = (getattr(self, f.name) for f in fields(self))
        return [v for v in values if isinstance(v, torch.Tensor)]

    def tokens_per_expert_on_host(self) -> torch.Tensor:
        """Return `tokens_per_expert` as a CPU tensor; waits for the plan, not for other work."""
        return self.tokens_per_expert.cpu()


class Engine(Protocol):
    """Plan, dispatch and combine over one expert-parallel group.

    `dispatch` and `combine` move rows without autograd: for gradients, use the functions
    `megatron_ncclep.dispatch` and `megatron_ncclep.combine`.

    Making an engine and every method is collective: all ranks of the group call the same methods in
    the same order.  A wrong argument on any rank raises the same InputError on every rank.
    """

    caps: EngineCaps
    config: EpConfig
    # As passed to `create_engine`.
    ranks_per_expert: int
    # The ranks, and the number of experts of each.
    group: EpGroup
    num_local_experts: int

    def plan(self, topk_idx: torch.Tensor, zero_unused: bool = True) -> RoutePlan:
        """Agree on the routes of one micro-batch.

        Args:
            topk_idx: [num_tokens, top_k] int32 or int64; global expert indices, distinct within a
                row, `NOT_ROUTED` where an assignment goes nowhere.
            zero_unused: in static mode, rows after the last block are zero in every dispatch of the
                plan.  False: they may hold anything, for experts that do not read them; their
                weights are zero.  The ranks may differ in it.

        Raises:
            InputError: on every rank, when a rank's indices are wrong or ranks differ in top-k; in
                static mode perhaps later, see "Errors" in docs/contract.md.
            PeerError: a rank died, did not come in time, or is in a different call.
            GroupClosedError: the engine, its group or the process group was closed.
        """
        ...

    def dispatch(
        self, plan: RoutePlan, x: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copy every token's row to a slot of each of its experts.

        Args:
            plan: made by this engine.
            x: [num_tokens, hidden] payload, or rows of bytes, [num_tokens, row_bytes] uint8.
            w: [num_tokens, top_k] weights of the assignments, or None.

        Returns:
            rows [num_rows, hidden] in slot order, and their weights [num_rows] (None without `w`).
            Padding rows and their weights are zero; for those after the last block, see `plan`.

        Raises:
            InputError: on every rank, when an argument is wrong on any or ranks differ in hidden
                size, dtype or plan; where devices compare them a RefusedError, on the other ranks
                at their next call or `megatron_ncclep.check()`.
            PeerError: a rank died, did not come in time, or is in a different call.
            GroupClosedError: the engine, its group or the process group was closed.
        """
        ...

    def combine(
        self, plan: RoutePlan, y: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add up every token's rows at its source rank: the unweighted adjoint of `dispatch`.

        Args:
            plan: made by this engine.
            y: [num_rows, hidden] payload; padding rows are not read.
            w: [num_rows] values to bring back to the assignments, or None.

        Returns:
            out [num_tokens, hidden], zero for a token without experts, and the values at their
            assignments [num_tokens, top_k] (None without `w`; zero where an assignment goes
            nowhere).

        Raises:
            as `dispatch`.
        """
        ...

    def close(self) -> None:
        """Release what the engine holds.  Idempotent; every later call raises GroupClosedError.

        All ranks close an engine, in the order in which they close others of the group; one that
        is never closed keeps its memory until `megatron_ncclep.close()`.
        """
        ...
