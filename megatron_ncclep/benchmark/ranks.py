"""The common steps of a measurement's ranks: agree on outcomes, time, copy over their links.

Every wait has a deadline.  An engine's own is `timeout_s`; ranks that compare outcomes wait twice
as long, so that the engine's message comes first; a step that takes three times as long, for
example in a kernel that never ends, ends the process with the stack of every thread.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.benchmark import Setting, UnavailableError
from megatron_ncclep.errors import LibraryError, PeerError
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.launch import RankContext

Times = dict[str, list[float]]  # pass -> microseconds of each time that it ran, in one round
Clock = Callable[[], Times]  # times a round of one subject on this rank; collective

# From the best to the worst; the ranks agree on the worst.
OUTCOMES = ("ok", "unavailable", "wrong", "failed")
# Device-side delay before a sample.  During the delay the host queues the kernels of the call, so
# the time to launch them is not measured.  `_sleep` counts cycles, at about 2 GHz: a millisecond,
# because a host that has done something else in between needs several hundred us.
DELAY_CYCLES = 2_000_000
# SMs of the copies over the links; bytes that each rank moves in a sample, enough to amortize the
# launch; and rounds.
COPY_SMS = (16, 24, 32, 132)
COPY_BYTES = 256 * 2**20
COPY_WARMUP, COPY_SAMPLES = 3, 10


class Ranks:
    """One rank's side of a measurement.  Made and closed by all ranks together.

    `context` has all ranks of the process's world; `what` names the shape that is measured.  With
    `shows`, rank 0 reports each step on stderr: stdout has only the table.

    Attributes:
        rank, num_ranks, on_gpu: of this process.
        setting: where subjects run.
        group: the measured ranks.
        timer: over the same ranks.
    """

    def __init__(
        self, context: RankContext, timeout_s: float, what: str, shows: bool = False
    ) -> None:
        self._timeout_s, self._what, self._shows = timeout_s, what, shows and context.rank == 0
        self._began = time.monotonic()
        self.rank, self.num_ranks = context.rank, context.num_ranks
        self.on_gpu = context.device == "cuda"
        backend = "nccl" if self.on_gpu else "gloo"
        self._made: list[dist.ProcessGroup] = []
        # Separate from the measured group: ranks compare outcomes even when the device is stuck.
        self._control = self._new_group("gloo", 2)
        self.setting = Setting(
            self.rank, self.num_ranks, context.device, timeout_s, lambda: self._new_group(backend)
        )
        self.group = self.setting.new_group()
        self.timer = Timer(self.group, context.device)

    def agree(self, status: str, reason: str | None) -> tuple[str, str | None]:
        """Give every rank the worst outcome of any of them and all reasons for it.  Collective."""
        self.deadline()  # the previous step may have taken an engine's whole deadline
        try:
            every = self.gather((OUTCOMES.index(status), reason))
        except RuntimeError as error:
            late = f"rank {self.rank}: no answer from the other ranks in {2 * self._timeout_s:g} s"
            raise PeerError(f"{late}; here: {reason or status}. {error}") from error
        worst = max(outcome for outcome, _ in every)
        reasons = dict.fromkeys(text for outcome, text in every if outcome == worst and text)
        return OUTCOMES[worst], "; ".join(reasons) or None

    def attempt(self, call: Callable[[], str | None]) -> tuple[str, str | None]:
        """Run `call`, which returns a problem or None; give the worst outcome.  Collective."""
        try:
            reason = call()
            status = "wrong" if reason else "ok"
        except UnavailableError as error:
            status, reason = "unavailable", str(error)
        except Exception as error:
            status, reason = "failed", f"{type(error).__name__}: {error}"
        return self.agree(status, reason)

    def gather(self, mine: Any) -> list[Any]:
        """Give every rank the values of all, in the order of ranks.  Collective."""
        every: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(every, mine, group=self._control)
        return every

    def largest(self, mine: dict[str, int] | None) -> dict[str, int] | None:
        """The largest value of any rank, key by key.  Collective."""
        every = self.gather(mine)
        return None if mine is None else {key: max(m[key] for m in every) for key in mine}

    def step(self, what: str) -> None:
        """Report the next step, and the seconds so far, and start its deadline."""
        if self._shows:
            passed = time.monotonic() - self._began
            print(f"{self._what}, {passed:.0f} s: {what}", file=sys.stderr, flush=True)
        self.deadline()

    def deadline(self) -> None:
        """Restart the time after which the process is killed."""
        faulthandler.dump_traceback_later(3 * self._timeout_s, exit=True)

    def close(self) -> None:
        """Release the groups, and cancel the deadline.  Collective."""
        self.stop()
        for group in reversed(self._made):
            EpGroup.of(group).close()
            dist.destroy_process_group(group)

    def stop(self) -> None:
        """Cancel the deadline."""
        faulthandler.cancel_dump_traceback_later()

    def _new_group(self, backend: str, patience: float = 1) -> dist.ProcessGroup:
        """A new process group of all ranks: one subject's failure does not affect another."""
        timeout = timedelta(seconds=patience * self._timeout_s)
        group = dist.new_group(backend=backend, timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        self._made.append(group)
        return group


class DeviceMemory:
    """Device memory that a subject takes from the time this object is made."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._allocated, self._outside = torch.cuda.memory_allocated(), self._outside_torch()

    def growth(self, shared_bytes: int = 0) -> dict[str, int] | None:
        """Bytes at the peak of torch's allocator, and bytes held outside of it; None on a CPU.

        `shared_bytes` of torch's memory existed before, and the subject needs them too.
        """
        if not self._on_gpu:
            return None
        return {
            "torch_bytes": torch.cuda.max_memory_allocated() - self._allocated + shared_bytes,
            "other_bytes": self._outside_torch() - self._outside,
        }

    @staticmethod
    def _outside_torch() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()


class Timer:
    """Times calls on one rank of `group`, with device events, or a CPU's clock.  Collective."""

    def __init__(self, group: dist.ProcessGroup, device: str) -> None:
        self._group, self._on_gpu = group, device == "cuda"
        self._tiny = torch.zeros(1, device=device)

    def sample(self, call: Callable[[], Any], include_host: bool) -> float:
        """Call `call` once and return the microseconds that it took on this rank.

        The ranks are aligned by an all-reduce of one number on the device before it.  With
        `include_host` the device is idle when the call starts, so that the time to launch its work
        counts.  Otherwise the device is kept busy meanwhile (GPU only).
        """
        if not self._on_gpu:
            return self.consecutive(call, 1)[0]
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for event in (before, after):
            event.record()  # torch makes an event when it is first recorded
        if not include_host:
            # Before the all-reduce, because the clocks of two GPUs differ: a delay after it pulls
            # the ranks apart again, by tens of microseconds in a millisecond.
            torch.cuda._sleep(DELAY_CYCLES)
        dist.all_reduce(self._tiny, group=self._group)
        if include_host:
            torch.cuda.synchronize()
        before.record()
        call()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) * 1e3

    def consecutive(self, call: Callable[[], Any], count: int) -> list[float]:
        """Call `call` `count` times, one right after the other; microseconds of each on this rank.

        The ranks start together.  On a GPU a call ends when its last kernel does, and the host goes
        on to the next one without waiting, as in training.
        """
        dist.all_reduce(self._tiny, group=self._group)
        if not self._on_gpu:
            times = [time.perf_counter()]
            for _ in range(count):
                call()
                times.append(time.perf_counter())
            return [(after - before) * 1e6 for before, after in pairwise(times)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        events[-1].synchronize()
        return [before.elapsed_time(after) * 1e3 for before, after in pairwise(events)]

    def clock(self, passes: dict[str, Callable[[], Any]], include_host: bool) -> Clock:
        """Make a clock that runs every pass once, in order."""
        return lambda: {name: [self.sample(call, include_host)] for name, call in passes.items()}


def quantiles(samples: Sequence[float], *parts: float) -> list[float]:
    """The quantiles `parts` of `samples`, which are not empty; 0.5 is the median."""
    values, wanted = (torch.tensor(each, dtype=torch.float64) for each in (samples, parts))
    return list(values.quantile(wanted).tolist())


def measure(clocks: dict[str, Clock], warmup: int, samples: int) -> Iterator[dict[str, Times]]:
    """Time every subject once a round; yield each timed round, by subject.  Collective.

    The subjects are interleaved round by round, so that a changing clock rate or other load on the
    machine affects all of them.
    """
    for round_number in range(warmup + samples):
        times = {name: clock() for name, clock in clocks.items()}
        if round_number >= warmup:
            yield times


def slowest(rounds: list[list[dict[str, Times]]]) -> dict[str, Times]:
    """Take the slowest rank's time of everything: subject -> pass -> microseconds of all rounds.

    `rounds` has the rounds that `measure` yielded on each rank.
    """
    return {
        subject: {
            name: [
                max(times)
                for of_ranks in zip(*rounds, strict=True)
                for times in zip(*(found[subject][name] for found in of_ranks), strict=True)
            ]
            for name in passes
        }
        for subject, passes in (rounds[0][0] if rounds[0] else {}).items()
    }


def random_rows(rank: int, num_ranks: int, rows_per_peer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the rows of the peers' windows that `rank` copies, `rows_per_peer` of each.

    Every rank has its own part in each window, so pushes never collide.  Returns the rank of each
    row and its number in that rank's window, int32 [n], in a random order of peers.

    Example: 3 ranks, rows_per_peer 2.  A window has 3 parts of 2 rows; rank 1 copies rows 2 and 3
    of the windows of ranks 0 and 2, in any order.
    """
    peers = torch.tensor([r for r in range(num_ranks) if r != rank], dtype=torch.int32)
    peer = peers.repeat_interleave(rows_per_peer)
    row = torch.arange(rows_per_peer, dtype=torch.int32).repeat(len(peers)) + rank * rows_per_peer
    order = torch.randperm(len(peer), generator=torch.Generator().manual_seed(rank))
    return peer[order], row[order]


def no_ceiling_reason(group: EpGroup, row_bytes: int) -> str | None:
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
) -> dict[str, dict[str, Any]]:
    """Measure the upper bound of dispatch and combine: the links' bandwidth.  Collective.

    It tries both directions with several numbers of SMs.

    Returns:
        "push" and "pull" -> the best rate of the slowest rank, {"gb_per_s", "num_sms"}.

    Raises:
        LibraryError: rows did not arrive unchanged.
    """
    native = extension.load()
    rows_per_peer = max(1, COPY_BYTES // row_bytes // (group.size - 1))
    communicator = communicator_of(group, timeout_s)
    window = native.Window(communicator, rows_per_peer * group.size * row_bytes)
    sms = torch.cuda.get_device_properties(group.device).multi_processor_count
    counts = sorted({min(count, sms) for count in COPY_SMS})
    best: dict[str, dict[str, Any]] = {}
    try:
        copies = _Copies(native, window, group, row_bytes, rows_per_peer)
        copies.verify(timeout_s)
        for direction in ("push", "pull"):
            rates = [(copies.rate(direction, n, timer, timeout_s), n) for n in counts]
            best[direction] = dict(zip(("gb_per_s", "num_sms"), max(rates), strict=True))
    finally:
        torch.cuda.synchronize(group.device)
        window.close()
    return best


class _Copies:
    """The copies of one rank between its own memory and the peers' windows."""

    def __init__(
        self, native: Any, window: Any, group: EpGroup, row_bytes: int, rows_per_peer: int
    ) -> None:
        self._native, self._window, self._group = native, window, group
        self._row_bytes, self._rows_per_peer = row_bytes, rows_per_peer
        peer, row = random_rows(group.rank, group.size, rows_per_peer)
        self._peer, self._row = peer.to(group.device), row.to(group.device)
        self._local = torch.zeros(len(peer), row_bytes // 4, dtype=torch.int32, device=group.device)

    def copy(self, direction: str, num_sms: int) -> None:
        """Queue one copy on the current stream."""
        self._native.copy_rows(
            direction, self._local.data_ptr(), self._window.peers, self._peer, self._row,
            len(self._row), self._row_bytes, num_sms, extension.current_stream(),
        )  # fmt: skip

    def rate(self, direction: str, num_sms: int, timer: Timer, timeout_s: float) -> float:
        """The rate of this rank and its peers in 1e9 bytes per second, by the slowest median."""
        times = [
            timer.sample(lambda: self.copy(direction, num_sms), include_host=False)
            for _ in range(COPY_WARMUP + COPY_SAMPLES)
        ]
        mine = torch.tensor(times[COPY_WARMUP:], dtype=torch.float64)
        theirs = self._group.hosts.gather(mine, "ceiling, gathering times", timeout_s)
        (median,) = quantiles(theirs.max(dim=0).values.tolist(), 0.5)
        return self._local.nbytes / median * 1e-3  # bytes / us -> GB / s

    def verify(self, timeout_s: float) -> None:
        """Push rows that identify their place, pull them back, and compare both ends."""
        group, length = self._group, self._rows_per_peer * self._group.size
        sent = (self._peer * length + self._row)[:, None].expand_as(self._local)
        self._local.copy_(sent)
        self.copy("push", COPY_SMS[0])
        self._wait("ceiling, after the push", timeout_s)
        self._local.zero_()
        self.copy("pull", COPY_SMS[0])
        self._wait("ceiling, after the pull", timeout_s)
        pulled = torch.equal(self._local, sent)
        # This rank's own window has the rows that the peers put into their parts of it.
        held = torch.empty(length, self._row_bytes // 4, dtype=torch.int32)
        self._native.copy_memory(held.data_ptr(), self._window.address, held.nbytes)
        row_index = torch.arange(length, dtype=torch.int32)
        theirs = row_index // self._rows_per_peer != group.rank
        named = (group.rank * length + row_index)[:, None].expand_as(held)
        pushed = torch.equal(held[theirs], named[theirs])
        if not (pushed and pulled):
            raise LibraryError(
                f"ceiling: rank {group.rank} {'pulled' if pushed else 'pushed'} rows that did not "
                "arrive as they were sent: the memory shared over NVLink cannot be trusted here"
            )
        self._wait("ceiling, after the comparison", timeout_s)

    def _wait(self, what: str, timeout_s: float) -> None:
        """Let no rank continue before all copies are done."""
        torch.cuda.synchronize(self._group.device)
        self._group.hosts.gather(torch.zeros(1), what, timeout_s)
