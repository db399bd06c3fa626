"""Ceiling: the bandwidth of copies of whole rows between the GPUs, both directions at once.

Dispatch and combine cannot move their rows faster than this; results are printed next to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_ncclep.benchmark.timing import Timer, quantiles
from megatron_ncclep.errors import LibraryError
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup

DIRECTIONS = ("push", "pull")
SM_COUNTS = (16, 24, 32, 132)
# Bytes that each rank moves in one sample: enough for the start not to count.
BYTES = 256 * 2**20
WARMUP, SAMPLES = 3, 10


@dataclass(frozen=True)
class Ceiling:
    """The best rate that one rank sees in one direction.

    Attributes:
        gb_per_s: 1e9 bytes a second.
        num_sms: SMs of the copy kernel that gave it.
    """

    gb_per_s: float
    num_sms: int


def random_rows(rank: int, num_ranks: int, rows_per_peer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the rows of the peers' windows that `rank` copies, `rows_per_peer` of each.

    Every rank has one part of each window, so that pushes do not meet.

    Returns:
        int32 [n] each, in a random order that mixes the peers: the rank of each row, and its number
        in that rank's window.

    Example: 3 ranks, rows_per_peer 2.  A window has 3 parts of 2 rows; rank 1 copies rows 2 and 3
    of the windows of ranks 0 and 2, in any order.
    """
    peers = torch.tensor([r for r in range(num_ranks) if r != rank], dtype=torch.int32)
    peer = peers.repeat_interleave(rows_per_peer)
    row = torch.arange(rows_per_peer, dtype=torch.int32).repeat(len(peers)) + rank * rows_per_peer
    order = torch.randperm(len(peer), generator=torch.Generator().manual_seed(rank))
    return peer[order], row[order]


def unavailable_reason(group: EpGroup, row_bytes: int) -> str | None:
    """Say why the ceiling cannot be measured; None if it can."""
    if group.device.type != "cuda":
        return "no GPUs"
    if group.size < 2:
        return "one rank has no links"
    if row_bytes % 16:
        return f"rows of {row_bytes} bytes: the copy kernel takes multiples of 16"
    return extension.unavailable_reason()


def measure_ceiling(
    group: EpGroup, timer: Timer, row_bytes: int, timeout_s: float
) -> dict[str, Ceiling]:
    """Measure both directions with several numbers of SMs; keep the best.  Collective.

    What was copied is compared with what should have been, so that a rate is one of real copies.

    Args:
        group: of at least two ranks with a GPU each (see `unavailable_reason`).
        timer: over the same ranks.
        row_bytes: of one row; a multiple of 16.
        timeout_s: for each wait.

    Returns:
        "push" and "pull" -> the best rate of the slowest rank.

    Raises:
        LibraryError: the memory cannot be shared, or a copy brought wrong bytes.
        PeerError: a rank did not come in time.
    """
    native = extension.load()
    rows_per_peer = max(1, BYTES // row_bytes // (group.size - 1))
    communicator = communicator_of(group, timeout_s)
    window = native.Window(communicator, rows_per_peer * group.size * row_bytes)
    try:
        copies = _Copies(native, window, group, row_bytes, rows_per_peer)
        copies.verify(timeout_s)
        sms = torch.cuda.get_device_properties(group.device).multi_processor_count
        counts = sorted({min(count, sms) for count in SM_COUNTS})
        rates = {
            direction: [
                Ceiling(copies.rate(direction, count, timer, timeout_s), count) for count in counts
            ]
            for direction in DIRECTIONS
        }
    finally:
        torch.cuda.synchronize(group.device)
        window.close()
    return {name: max(found, key=lambda c: c.gb_per_s) for name, found in rates.items()}


class _Copies:
    """The copies of one rank between memory of its own and the peers' windows."""

    def __init__(
        self, native: Any, window: Any, group: EpGroup, row_bytes: int, rows_per_peer: int
    ) -> None:
        self._native, self._window, self._group = native, window, group
        self._row_bytes, self._rows_per_peer = row_bytes, rows_per_peer
        peer, row = random_rows(group.rank, group.size, rows_per_peer)
        self._peer, self._row = peer.to(group.device), row.to(group.device)
        self._num_rows = len(peer)
        self._local = torch.zeros(
            self._num_rows, row_bytes // 4, dtype=torch.int32, device=group.device
        )

    def copy(self, direction: str, num_sms: int) -> None:
        """Queue one copy on the current stream."""
        self._native.copy_rows(
            direction,
            self._local.data_ptr(),
            self._window.peers,
            self._peer,
            self._row,
            self._num_rows,
            self._row_bytes,
            num_sms,
            extension.current_stream(),
        )

    def rate(self, direction: str, num_sms: int, timer: Timer, timeout_s: float) -> float:
        """1e9 bytes a second that this rank and its peers move, by the slowest rank's median."""
        times = [
            timer.sample(lambda: self.copy(direction, num_sms), include_host=False)
            for _ in range(WARMUP + SAMPLES)
        ][WARMUP:]
        theirs = self._group.gather(
            torch.tensor(times, dtype=torch.float64), "ceiling, gathering times", timeout_s
        )
        (median,) = quantiles(theirs.max(dim=0).values.tolist(), 0.5)
        return self._num_rows * self._row_bytes / median * 1e-3  # bytes / us -> GB / s

    def verify(self, timeout_s: float) -> None:
        """Push rows that name their place, pull them back, and compare both ends."""
        group, length = self._group, self._rows_per_peer * self._group.size
        sent = (self._peer * length + self._row)[:, None].expand_as(self._local)
        self._local.copy_(sent)
        self.copy("push", SM_COUNTS[0])
        self._wait("ceiling, after the push", timeout_s)
        self._local.zero_()
        self.copy("pull", SM_COUNTS[0])
        self._wait("ceiling, after the pull", timeout_s)
        pulled = torch.equal(self._local, sent)

        # And the own window, read here, holds what the peers put into their parts of it.
        held = torch.empty(length, self._row_bytes // 4, dtype=torch.int32)
        self._native.copy_memory(held.data_ptr(), self._window.address, held.nbytes)
        place = torch.arange(length, dtype=torch.int32)
        theirs = place // self._rows_per_peer != group.rank
        named = (group.rank * length + place)[:, None].expand_as(held)
        pushed = torch.equal(held[theirs], named[theirs])
        if not (pushed and pulled):
            raise LibraryError(
                f"ceiling: rank {group.rank} {'pushed' if not pushed else 'pulled'} rows that did "
                "not arrive as they were sent: the memory shared over NVLink cannot be trusted here"
            )
        self._wait("ceiling, after the comparison", timeout_s)

    def _wait(self, what: str, timeout_s: float) -> None:
        """Let no rank go on before all copies are done."""
        torch.cuda.synchronize(self._group.device)
        self._group.gather(torch.zeros(1), what, timeout_s)
