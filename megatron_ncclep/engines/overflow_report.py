"""Static mode: what did not fit, counted on the device and told before an optimizer steps.

No call of an engine waits for the host or the device to tell it.  What the device has counted is
read by `EpGroup.check`, which `megatron_ncclep.check()` calls: memory that stays where it is, so
that what a replayed CUDA graph adds is seen too.
"""

from __future__ import annotations

import logging
import weakref

import torch

from megatron_ncclep.config import RAISE, EpConfig
from megatron_ncclep.engines.rows_limit import can_drop
from megatron_ncclep.errors import RowsDroppedError
from megatron_ncclep.ranks.group import EpGroup

# A word of `Shortage.words`: rows that a rank lacked above, rows that it had below.
_HALF = 32


class Shortage:
    """Rows that ranks lacked, for `on_overflow="raise"`; every rank knows it of all.

    A dropped row changes what its token's source rank gets, and with that the gradients of all
    ranks: all must raise.  They need not tell each other: what a plan needs on each rank follows
    from the counts of assignments that every engine's plan brings to all ranks.  So an engine
    writes down the same on every rank, and it does not matter which of them asks how often.

    Attributes:
        words: int64 [num_ranks] on the group's device: for each rank, of the call in which it
            lacked most since it was last asked, the rows that it lacked << 32 | those that it had;
            0 if it lacked none.  One number, so that a kernel can take the larger of two at once.
    """

    def __init__(self, group: EpGroup, config: EpConfig) -> None:
        self._group = group
        self._option = config.max_recv_rows
        self.words = torch.zeros(group.size, dtype=torch.int64, device=group.device)

    @classmethod
    def name(cls, config: EpConfig) -> str:
        """What engines with this option share it as (`EpGroup.share`)."""
        return f"rows lacked of {config.max_recv_rows}"

    @classmethod
    def shared(cls, group: EpGroup, config: EpConfig) -> Shortage | None:
        """The group's, for an engine with these options; None where it has nothing to say."""
        if config.on_overflow != RAISE or not can_drop(config):
            return None
        return group.share(cls.name(config), lambda: cls(group, config))

    def record(self, needed: torch.Tensor, limit: int) -> None:
        """Write down what a plan needs.  Waits for nothing.

        Args:
            needed: int64 [num_ranks]: rows that each rank needs, padding of its blocks included.
            limit: rows that each has.
        """
        if self._group.is_warmup:
            return
        needed = needed.to(self.words.device)
        lacked = torch.where(needed > limit, (needed - limit << _HALF) + limit, 0)
        torch.maximum(self.words, lacked, out=self.words)

    def for_kernel(self) -> torch.Tensor | None:
        """`words`, for a kernel that does what `record` does; None if it should not."""
        return None if self._group.is_warmup else self.words

    def check(self) -> None:
        """Raise what was written down since the last time.  Waits for the current stream.

        Does nothing while that stream is captured in a CUDA graph.

        Raises:
            RowsDroppedError: a rank lacked rows; with the same text on all ranks.
        """
        if _is_capturing(self.words.device):
            return
        words = self.words.tolist()
        if not any(words):
            return
        self.words.zero_()
        had = {rank: word & (1 << _HALF) - 1 for rank, word in enumerate(words) if word}
        needs = {rank: rows + (words[rank] >> _HALF) for rank, rows in had.items()}
        each = ", ".join(f"rank {r} needed {needs[r]} rows and had {had[r]}" for r in had)
        raise RowsDroppedError(
            f"rows were dropped: with max_recv_rows={self._option}, {each} (of each rank the worst "
            "call since the last check). on_overflow is 'raise', so no optimizer steps with these "
            f"gradients: set max_recv_rows (--ncclep-max-recv-rows) to {max(needs.values())} or "
            "more, to a larger factor or to 'worst', with which nothing is dropped; or leave it "
            "out, or let rows be dropped with on_overflow='drop'"
        )

    def close(self) -> None:
        """Nothing to give back."""


class DropWarning:
    """Says once for a group and rank that rows were dropped: `on_overflow="drop"`.

    A dispatcher adds its counter, which may be captured in a CUDA graph.
    """

    def __init__(self, group: EpGroup) -> None:
        self._group = group
        self._watched: list[tuple[weakref.ref[torch.Tensor], int | str | None]] = []
        # What was watched when the counters were copied, and the copy on its way to the host.
        self._options: list[int | str | None] = []
        self._on_host: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._has_spoken = False

    @classmethod
    def of(cls, group: EpGroup) -> DropWarning:
        """The group's."""
        return group.share("warning of dropped rows", lambda: cls(group))

    def watch(self, counter: torch.Tensor, config: EpConfig) -> None:
        """Warn when `counter`, an int64 scalar on the group's device, is more than 0.

        It is not kept alive: it goes with its dispatcher.

        Args:
            counter: what was dropped in static mode.
            config: options of the dispatcher that counts.
        """
        self._watched = [(c, option) for c, option in self._watched if c() is not None]
        self._watched.append((weakref.ref(counter), config.max_recv_rows))

    def check(self) -> None:
        """Warn of what is known to have been dropped.  Waits for nothing; not collective.

        On a GPU the numbers are copied to the host at one call, and read at a later one.
        """
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
            f"{self._options[first]} and were dropped (this is said once; later ones are only "
            "counted): raise it, set it to 'worst' or leave it out and nothing is dropped",
        )

    def close(self) -> None:
        """Nothing to give back."""

    def _known_counts(self) -> torch.Tensor | None:
        """The counters as they were at this call or an earlier one, on the CPU; None: not yet."""
        if self._copied is None:
            watched = [(c(), option) for c, option in self._watched]
            counters = [counter for counter, _ in watched if counter is not None]
            self._options = [option for counter, option in watched if counter is not None]
            if not counters:
                return None
            counts = torch.stack(counters)
            if not counts.is_cuda:
                return counts
            self._on_host = torch.empty(len(counts), dtype=torch.int64, pin_memory=True)
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
