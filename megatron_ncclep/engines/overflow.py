"""Static mode: the number of rows, which assignments are dropped, and how drops are reported.

A rank's dispatched tensor always has `rows_limit` rows. The contract takes assignments in the order
(source rank, token, local expert) and counts the blocks of `alignment` rows that they open; the
first that does not fit and all after it are dropped.  Drops are counted on the device and reported
before an optimizer steps.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from megatron_ncclep.config import DROP, MAX_COUNT, RERUN, WORST, EpConfig, thousandths
from megatron_ncclep.engines.engine import NOT_ROUTED
from megatron_ncclep.errors import RowsDroppedError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource

# A word of `OverflowReport.words`: upper half the rows that a rank lacked, lower half those
# it had.
_HALF = 32


# --- capacity ------------------------------------------------------------------------------------


def rows_limit(
    config: EpConfig,
    num_ranks: int,
    num_tokens: int,
    top_k: int,
    num_local_experts: int,
    ranks_per_expert: int = 1,
) -> int | None:
    """The number of rows of every dispatched tensor; None in exact mode.  Not collective.

    It is the same on all ranks: T is `max_tokens_per_rank`, or without it the batch's number of
    tokens, on which they agree.  The number of assignments that always fit, however they are spread
    over the rank's experts, depends on `max_recv_rows`:

        4096      as many as fit into 4096 rows
        "worst"   R * T * min(K, L): every token of every rank sends as many as possible to one rank
        "1.25x"   1.25 * T * K, rounded up: a balanced load is T * K assignments for each rank

    N assignments need the most rows when each of min(L, N) experts has one assignment in its own
    alignment block before the others fill blocks: min(L, N) + (N - min(L, N)) // alignment blocks,
    at least one.

    With experts in S slices (ops/expert_slices.py), K counts the S copies of each assignment, and a
    rank gets one of them: a balanced load is still T * K assignments, and the worst case has
    min(K / S, L).

    Example: 4 ranks of 8 tokens, top-2, 3 experts each, alignment 16.  The worst case is
    4 * 8 * 2 = 64 assignments: 3 + 61 // 16 = 6 blocks, 96 rows.  "1.25x": 20 assignments,
    3 + 17 // 16 = 4 blocks, 64 rows.

    Args:
        num_ranks: R.
        num_tokens: T where the config has no `max_tokens_per_rank`.
        top_k: K, columns of topk_idx.
        num_local_experts: L.
        ranks_per_expert: S: copies of each assignment, each for a different rank.

    Returns:
        a multiple of the alignment, at most 2^31 - 1 rows, because row numbers are int32.
    """
    rows, alignment = config.max_recv_rows, config.block_alignment
    if not isinstance(rows, str):
        return rows
    num_tokens = config.max_tokens_per_rank or num_tokens
    num_assignments = num_ranks * num_tokens * min(top_k // ranks_per_expert, num_local_experts)
    if rows != WORST:
        factor = thousandths(rows)
        assert factor is not None, "EpConfig has checked it"
        num_assignments = min(num_assignments, -(-num_tokens * top_k * factor // 1000))
    opened = min(num_local_experts, num_assignments)
    num_blocks = max(1, opened + (num_assignments - opened) // alignment)
    return min(num_blocks, MAX_COUNT // alignment) * alignment


def can_drop(config: EpConfig) -> bool:
    """Whether rows may be dropped: not in exact mode, nor with room for any routing."""
    return config.max_recv_rows not in (None, WORST)


# --- dropping ------------------------------------------------------------------------------------


def drop_what_does_not_fit(
    topk_idx: torch.Tensor, counts: torch.Tensor, rank: int, alignment: int, max_recv_rows: int
) -> torch.Tensor:
    """Replace assignments that overflow their destination rank by `NOT_ROUTED`.  Not collective.

    For an engine that cannot drop in the contract's order: the source rank drops before the engine
    runs.  The number of blocks that lower source ranks open follows from their assignments for each
    expert, so every rank can tell which of its own assignments fit.

    Example: alignment 2, room for 4 rows, one rank with two experts.  Source 0 has 3 assignments
    for expert 0, which open 2 blocks: the room is full.  Source 1's assignment for expert 0 fills
    the second block, but it is kept only if no assignment before it had to open a third.

    Args:
        topk_idx: [num_tokens, top_k] int64 of this rank.
        counts: [num_ranks, num_experts] int64 on the CPU: assignments of every rank for every
            expert.
        rank: this rank.
        alignment: rows of an alignment block.
        max_recv_rows: rows that fit on each destination rank.

    Returns:
        [num_tokens, top_k] int64.
    """
    num_ranks, num_experts = counts.shape
    num_tokens, num_local = len(topk_idx), num_experts // num_ranks
    before = counts[:rank].sum(dim=0)
    blocks_before = ((before + alignment - 1) // alignment).view(num_ranks, -1).sum(dim=1)

    # An extra column takes assignments that are not routed.
    routed = topk_idx.new_zeros(num_tokens, num_experts + 1, dtype=torch.bool)
    column = torch.where(topk_idx == NOT_ROUTED, num_experts, topk_idx)
    routed = routed.scatter(1, column, True)[:, :num_experts]
    # The place of each assignment within its expert's rows.
    rank_in_expert = before.to(topk_idx.device) + routed.cumsum(dim=0) - 1
    opens = routed & (rank_in_expert % alignment == 0)
    # For each destination, in the order (token, local expert).
    opens = opens.view(num_tokens, num_ranks, num_local).transpose(0, 1)
    opened = opens.reshape(num_ranks, num_tokens * num_local).cumsum(dim=1)
    blocks = blocks_before.to(topk_idx.device)[:, None] + opened
    fits = blocks * alignment <= max_recv_rows
    fits = fits.view(num_ranks, num_tokens, num_local).transpose(0, 1)
    assignments_fit = fits.reshape(num_tokens, num_experts).gather(1, topk_idx.clamp(min=0))
    return torch.where(assignments_fit, topk_idx, NOT_ROUTED)


def assignments_of_experts(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Assignments for each expert, int64 [num_experts].  Does not wait; not collective.

    Args:
        topk_idx: integers [num_tokens, top_k], experts or `NOT_ROUTED`.
    """
    # An extra entry counts assignments that are not routed.
    expert = torch.where(topk_idx == NOT_ROUTED, num_experts, topk_idx).long().reshape(-1)
    counts = expert.new_zeros(num_experts + 1)
    return counts.scatter_add(0, expert, torch.ones_like(expert))[:num_experts]


def rows_needed(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Rows that every rank needs if nothing is dropped, padding included.  Not collective.

    Args:
        counts: [num_ranks, num_experts] int64: assignments of every rank for every expert.
        alignment: rows of an alignment block.

    Returns:
        int64 [num_ranks].
    """
    blocks = (counts.sum(dim=0) + alignment - 1) // alignment
    return blocks.view(len(counts), -1).sum(dim=1) * alignment


# --- reporting -----------------------------------------------------------------------------------


class OverflowReport(Resource):
    """Rows that ranks lacked, for `on_overflow` "raise" and "rerun"; every rank knows all ranks'.

    Recording does not wait.  `EpGroup.check`, which `megatron_ncclep.check()` calls, reads the
    device's counts at an address that never changes, so it also sees those of replayed CUDA graphs.

    A dropped row changes the result at its token's source rank, and with it the gradients of all
    ranks, so all must raise.  They need not tell each other: the rows that a plan needs on each
    rank follow from the counts of assignments that every engine's plan sends to all ranks.  So an
    engine records the same on every rank, and it does not matter how often each of them checks.

    Steps that are run again with "rerun", and evaluations with "raise", read what was recorded in
    them themselves (`set_aside`).  What `check` finds was recorded outside of those.

    Attributes:
        words: int64 [num_ranks] on the group's device: for each rank, from the call in which it
            lacked most since the last check, the rows that it lacked << 32 | those that it had; 0
            if it lacked none.  This is one number so that a kernel can take the maximum of two in
            one operation.
    """

    def __init__(self, group: EpGroup, config: EpConfig) -> None:
        self._group = group
        self._option, self._on_overflow = config.max_recv_rows, config.on_overflow
        self.words = torch.zeros(group.size, dtype=torch.int64, device=group.device)

    @classmethod
    def name(cls, config: EpConfig) -> str:
        """The name under which engines with this option share it (`Resources.share`)."""
        return f"rows lacked of {config.max_recv_rows}, {config.on_overflow}"

    @classmethod
    def shared(cls, group: EpGroup, config: EpConfig) -> OverflowReport | None:
        """The group's object for an engine with these options; None if it records nothing."""
        if config.on_overflow == DROP or not can_drop(config):
            return None
        return group.resources.share(cls.name(config), lambda: cls(group, config))

    def record(self, needed: torch.Tensor, limit: int) -> None:
        """Record the rows that a plan needs, padding included: int64 [num_ranks].  Does not wait.

        `limit`: rows that each rank has.
        """
        if self._group.is_warmup:
            return
        needed = needed.to(self.words.device)
        lacked = torch.where(needed > limit, (needed - limit << _HALF) + limit, 0)
        torch.maximum(self.words, lacked, out=self.words)

    def for_kernel(self) -> torch.Tensor | None:
        """`words`, for a kernel that does the work of `record`; None if it should not record."""
        return None if self._group.is_warmup else self.words

    def check(self) -> None:
        """Raise RowsDroppedError, with the same text on all ranks, if rows were lacking since the
        last check.  Waits for the current stream; does nothing while a CUDA graph captures it.
        """
        if _is_capturing(self.words.device):
            return
        words = self.words.tolist()
        if not any(words):
            return
        self.words.zero_()
        counts = {rank: needed_and_had(word) for rank, word in enumerate(words) if word}
        each = ", ".join(
            f"rank {r} needed {n} rows and had {had}" for r, (n, had) in counts.items()
        )
        reason = "no optimizer steps with these gradients"
        if self._on_overflow == RERUN:
            reason += (
                "; only steps of Megatron's schedules (get_forward_backward_func) can be run "
                "again, and a CUDA graph of the layer was replayed outside of one: train with a "
                "schedule"
            )
        most = max(needed for needed, _ in counts.values())
        who = f"{each} (each rank's worst call since the last check)"
        raise rows_dropped(self._option, self._on_overflow, who, reason, most)


@contextmanager
def set_aside(reports: Iterable[OverflowReport]) -> Iterator[None]:
    """Record only what comes inside; afterwards, what was recorded before.  Does not wait."""
    before = [(report.words, report.words.clone()) for report in reports]
    for words, _ in before:
        words.zero_()
    try:
        yield
    finally:
        for words, values in before:
            words.copy_(values)


def rows_dropped(
    option: int | str | None, on_overflow: str, who: str, reason: str, most: int
) -> RowsDroppedError:
    """The error that says which rows were dropped, and what would help."""
    return RowsDroppedError(
        f"rows were dropped: with max_recv_rows={option}, {who}. on_overflow is {on_overflow!r}, "
        f"so {reason}: set max_recv_rows (--ncclep-max-recv-rows) to {most} or more, to a larger "
        "factor or to 'worst', which drops nothing; or leave it out, or allow drops with "
        "on_overflow='drop'"
    )


def needed_and_had(word: int) -> tuple[int, int]:
    """The rows that a rank needed and those that it had, from a word of `OverflowReport.words`."""
    had = word & (1 << _HALF) - 1
    return had + (word >> _HALF), had


class DropWarning(Resource):
    """Warns once per group and rank about dropped rows: `on_overflow="drop"`.

    Dispatchers register their counters, which CUDA graphs may update.
    """

    def __init__(self, group: EpGroup) -> None:
        self._group = group
        self._watched: list[tuple[weakref.ref[torch.Tensor], int | str | None]] = []
        # The options of the counters that were copied, and the copy, which may still be in flight.
        self._options: list[int | str | None] = []
        self._on_host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._has_spoken = False

    @classmethod
    def of(cls, group: EpGroup) -> DropWarning:
        """The group's."""
        return group.resources.share("warning of dropped rows", lambda: cls(group))

    def watch(self, counter: torch.Tensor, config: EpConfig) -> None:
        """Warn when `counter`, an int64 scalar on the group's device, is more than 0.

        The counter is not kept alive: it goes away with its dispatcher.
        """
        self._watched = [(c, option) for c, option in self._watched if c() is not None]
        self._watched.append((weakref.ref(counter), config.max_recv_rows))

    def check(self) -> None:
        """Warn about the drops known so far; on a GPU, those of an earlier call.  Does not wait."""
        if self._has_spoken or _is_capturing(self._group.device):
            return
        counts = self._known_counts()
        if counts is None or not counts.any():
            return
        self._has_spoken = True
        first = int(counts.nonzero()[0])
        self._group.log_once(
            logging.WARNING,
            "overflow",
            f"rank {self._group.rank}: {int(counts.sum())} rows did not fit into max_recv_rows="
            f"{self._options[first]} and were dropped (reported once; later ones are only "
            "counted): to drop fewer rows, raise it; to drop none, set it to 'worst' or leave it "
            "out",
        )

    def _known_counts(self) -> torch.Tensor | None:
        """The counters as of this call or an earlier one, on the CPU; None: not copied yet."""
        if self._copied is None:
            watched = [(c(), option) for c, option in self._watched]
            counters = [counter for counter, _ in watched if counter is not None]
            self._options = [option for counter, option in watched if counter is not None]
            if not counters:
                return None
            counts = torch.stack(counters)
            if not counts.is_cuda:
                return counts
            self._on_host = torch.empty_like(counts, device="cpu", pin_memory=True)
            self._on_host.copy_(counts, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
            return None
        if not self._copied.query():
            return None
        self._copied = None
        return self._on_host


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
