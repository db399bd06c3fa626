"""One shape on one rank: prepare every subject, check it, time all of them interleaved.

Every wait has a deadline.  An engine's own is `timeout_s`; ranks that compare notes wait twice as
long, so that the engine's message comes first; a step that takes three times as long, in a kernel
that never ends say, ends the process with the stack of every thread.
"""

from __future__ import annotations

import faulthandler
import gc
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.benchmark import ceiling
from megatron_ncclep.benchmark.catalogue import make_subject
from megatron_ncclep.benchmark.job import Job
from megatron_ncclep.benchmark.progress import Show
from megatron_ncclep.benchmark.result import ShapeResult, SubjectResult
from megatron_ncclep.benchmark.routes import wire_rows
from megatron_ncclep.benchmark.shapes import Shape
from megatron_ncclep.benchmark.subjects import (
    LAUNCHED,
    Prepared,
    Setting,
    Subject,
    UnavailableError,
    Workload,
    make_workload,
)
from megatron_ncclep.benchmark.timing import Clocked, Timer, measure, slowest
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.errors import PeerError
from megatron_ncclep.testing.launcher import RankContext
from megatron_ncclep.training.quiet import remarks_hidden

# From the best to the worst; the ranks agree on the worst.
OUTCOMES = ("ok", "unavailable", "wrong", "failed")


def run_shape(
    context: RankContext, job: Job, shape: Shape, notes: str | None, show: Show
) -> ShapeResult | None:
    """Measure every subject of the job with one shape.  Collective; rank 0 gets the result.

    Args:
        context: the ranks; all of the process's world.
        job, shape: the same on every rank.
        notes: folder where each rank writes down what it is doing, for whoever finds it dead.
        show: called on rank 0 with what is done next, in words.
    """
    return _ShapeRun(context, job, shape, notes, show).run()


def note_path(notes: str, rank: int) -> Path:
    """Where `rank` writes down what it is doing."""
    return Path(notes) / f"rank{rank}.txt"


@dataclass
class _Entry:
    """A subject that is being measured, and what is known of it."""

    subject: Subject
    prepared: Prepared
    result: SubjectResult


class _ShapeRun:
    """The state of `run_shape`."""

    def __init__(
        self, context: RankContext, job: Job, shape: Shape, notes: str | None, show: Show
    ) -> None:
        self._job, self._shape, self._notes, self._show = job, shape, notes, show
        self._rank, self._num_ranks = context.rank, context.num_ranks
        self._on_gpu = context.device == "cuda"
        backend = "nccl" if self._on_gpu else "gloo"
        # Beside what is measured: ranks compare notes even when the device is stuck.
        self._made: list[dist.ProcessGroup] = []
        self._control = self._new_group("gloo", 2)
        self._setting = Setting(
            rank=context.rank,
            num_ranks=context.num_ranks,
            device=context.device,
            timeout_s=job.timeout_s,
            new_group=lambda: self._new_group(backend),
        )
        self._group = self._setting.new_group()
        self._timer = Timer(self._group, context.device)

    def run(self) -> ShapeResult | None:
        """See `run_shape`."""
        try:
            with remarks_hidden():  # of Megatron-Core about packages that are missing, and the like
                return self._run()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> ShapeResult | None:
        self._step("routing and payload")
        case = self._shape.case(self._num_ranks, self._setting.device)
        workload = make_workload(case, self._rank, self._shape.ffn_hidden_size)
        result = ShapeResult.of(
            self._shape,
            num_rows=[workload.routes.num_rows(rank) for rank in range(self._num_ranks)],
            wire_bytes=wire_rows(workload.routes) * self._shape.row_bytes,
        )
        self._measure_ceiling(result)
        entries = [self._prepare(make_subject(name), workload) for name in self._job.subjects]
        result.subjects = [entry.result for entry in entries]
        running = [entry for entry in entries if entry.result.status == "ok"]
        self._time(running)
        for entry in running:
            self._step("checking again", entry.subject.name)
            self._check(entry, "after timing")
        for entry in running:
            self._step("closing", entry.subject.name)
            entry.prepared.close()
        for group in reversed(self._made):
            EpGroup.of(group).close()
            dist.destroy_process_group(group)
        result.judge(self._job.required)
        return result if self._rank == 0 else None

    def _measure_ceiling(self, result: ShapeResult) -> None:
        self._step("ceiling of the links")
        group = EpGroup.of(self._group)
        reason = ceiling.obstacle(group, self._shape.row_bytes)
        found: dict[str, ceiling.Ceiling] = {}
        status, reason = self._agree("unavailable" if reason else "ok", reason)
        if status == "ok":
            try:
                found = ceiling.measure_ceiling(
                    group, self._timer, self._shape.row_bytes, self._job.timeout_s
                )
            except Exception as error:
                status, reason = "failed", f"{type(error).__name__}: {error}"
            status, reason = self._agree(status, reason)
        result.set_ceiling(found if status == "ok" else {}, reason)

    def _prepare(self, subject: Subject, workload: Workload) -> _Entry:
        """Make a subject ready, run every pass once and check the results."""
        result = SubjectResult(name=subject.name, kind=subject.kind, checked=subject.checked)
        prepared: Any = None
        self._step(subject.name, "prepare")
        gc.collect()
        memory = _Memory(self._on_gpu)
        try:
            prepared = subject.prepare(self._setting, workload)
            for name, call in prepared.passes.items():
                self._step(subject.name, f"first {name}")
                call()
            self._wait_for_device()
            result.memory = memory.growth(prepared.shared_bytes)
            result.sms = prepared.sms
            status, reason = "ok", None
        except UnavailableError as error:
            status, reason = "unavailable", str(error)
        except Exception as error:
            status, reason = "failed", f"{type(error).__name__}: {error}"
        result.status, result.reason = self._agree(status, reason)
        entry = _Entry(subject, prepared, result)
        if result.status == "ok":
            result.memory = self._largest_memory(result.memory)
            self._step(subject.name, "check")
            self._check(entry, "before timing")
            if entry.result.status == "wrong":
                prepared.close()
        return entry

    def _check(self, entry: _Entry, when: str) -> None:
        """Compare the results of every pass with what they must be; what is wrong is not timed."""
        reason: str | None
        try:
            reason = entry.prepared.problem()
            status = "wrong" if reason else "ok"
        except Exception as error:
            status, reason = "failed", f"{type(error).__name__}: {error}"
        status, reason = self._agree(status, reason)
        if status != "ok":
            entry.result.status, entry.result.reason = status, f"{when}: {reason}"
            entry.result.passes = {}

    def _time(self, entries: list[_Entry]) -> None:
        """Time all passes of all subjects."""
        clocked = [
            Clocked(e.subject.name, e.prepared.passes, e.subject.kind in LAUNCHED) for e in entries
        ]
        rounds = []
        total = self._job.samples
        self._step(f"timing {len(entries)} subjects, {total} samples")
        for times in measure(self._timer, clocked, self._job.warmup, total):
            rounds.append(times)
            self._deadline()
        every: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(every, rounds, group=self._control)
        samples = slowest(every)
        for entry in entries:
            entry.result.set_samples(samples[entry.subject.name])

    def _agree(self, status: str, reason: str | None) -> tuple[str, str | None]:
        """Give every rank the worst outcome of any of them and all reasons for it."""
        self._deadline()  # what came before may have taken an engine's whole deadline
        mine = (OUTCOMES.index(status), reason)
        every: list[Any] = [None] * self._num_ranks
        try:
            dist.all_gather_object(every, mine, group=self._control)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self._rank}: no answer from the other ranks within "
                f"{2 * self._job.timeout_s:g} s; here: {reason or status}. {error}"
            ) from error
        worst = max(outcome for outcome, _ in every)
        reasons = dict.fromkeys(text for outcome, text in every if outcome == worst and text)
        return OUTCOMES[worst], "; ".join(reasons) or None

    def _largest_memory(self, mine: dict[str, int] | None) -> dict[str, int] | None:
        every: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(every, mine, group=self._control)
        return None if mine is None else {key: max(m[key] for m in every) for key in mine}

    def _new_group(self, backend: str, patience: float = 1) -> dist.ProcessGroup:
        """All ranks as a process group of its own: one subject's failure is not another's."""
        timeout = timedelta(seconds=patience * self._job.timeout_s)
        group = dist.new_group(backend=backend, timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        self._made.append(group)
        return group

    def _step(self, what: str, part: str = "") -> None:
        """Say what is done next, and how long it may take at most."""
        what = f"{self._shape.name}: {what}"
        if self._notes is not None:
            note = f"{what}: {part}" if part else what
            note_path(self._notes, self._rank).write_text(note, encoding="utf-8")
        if self._rank == 0:
            self._show(what, part)
        self._deadline()

    def _deadline(self) -> None:
        """Start the time anew after which the process is ended."""
        faulthandler.dump_traceback_later(3 * self._job.timeout_s, exit=True)

    def _wait_for_device(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


class _Memory:
    """Device memory that a subject takes, from here on."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()
            self._outside = self._outside_torch()

    def growth(self, shared_bytes: int) -> dict[str, int] | None:
        """Bytes at the peak of torch's allocator, and bytes held outside of it; None on a CPU.

        Args:
            shared_bytes: of torch's that were there before and that the subject needs.
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
