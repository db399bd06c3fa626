"""One shape on one rank: prepare every subject, check it, time all of them interleaved."""

from __future__ import annotations

import faulthandler
import gc
from dataclasses import dataclass
from typing import Any

from megatron_ncclep.benchmark import ceiling
from megatron_ncclep.benchmark.catalogue import make_subject
from megatron_ncclep.benchmark.job import Job
from megatron_ncclep.benchmark.progress import Show
from megatron_ncclep.benchmark.ranks import DeviceMemory, Ranks
from megatron_ncclep.benchmark.result import ShapeResult, SubjectResult
from megatron_ncclep.benchmark.routes import wire_rows
from megatron_ncclep.benchmark.shapes import Shape
from megatron_ncclep.benchmark.subjects import (
    LAUNCHED,
    Prepared,
    Subject,
    UnavailableError,
    Workload,
    make_workload,
)
from megatron_ncclep.benchmark.timing import Clocked, measure, slowest
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.testing.launcher import RankContext
from megatron_ncclep.training.quiet import remarks_hidden


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
        self._job, self._shape = job, shape
        self._ranks = Ranks(context, job.timeout_s, shape.name, notes, show)

    def run(self) -> ShapeResult | None:
        """See `run_shape`."""
        try:
            # Remarks of Megatron-Core about packages that are missing, and the like.
            with remarks_hidden(), self._ranks.own_stream():
                return self._run()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> ShapeResult | None:
        self._ranks.step("routing and payload")
        case = self._shape.case(self._ranks.num_ranks, self._ranks.setting.device)
        workload = make_workload(case, self._ranks.rank, self._shape.ffn_hidden_size)
        result = ShapeResult.of(
            self._shape,
            num_rows=[workload.routes.num_rows(rank) for rank in range(self._ranks.num_ranks)],
            wire_bytes=wire_rows(workload.routes) * self._shape.row_bytes,
        )
        self._measure_ceiling(result)
        entries = [
            self._prepare(make_subject(name, self._job.max_recv_rows), workload)
            for name in self._job.measured
        ]
        result.subjects = [entry.result for entry in entries]
        running = [entry for entry in entries if entry.result.status == "ok"]
        self._time(running)
        for entry in running:
            self._ranks.step("checking again", entry.subject.name)
            self._check(entry, "after timing")
        for entry in running:
            self._ranks.step("closing", entry.subject.name)
            entry.prepared.close()
        self._ranks.close()
        result.judge(self._job.required)
        return result if self._ranks.rank == 0 else None

    def _measure_ceiling(self, result: ShapeResult) -> None:
        self._ranks.step("ceiling of the links")
        group = EpGroup.of(self._ranks.group)
        reason = ceiling.obstacle(group, self._shape.row_bytes)
        found: dict[str, ceiling.Ceiling] = {}
        status, reason = self._ranks.agree("unavailable" if reason else "ok", reason)
        if status == "ok":
            try:
                found = ceiling.measure_ceiling(
                    group, self._ranks.timer, self._shape.row_bytes, self._job.timeout_s
                )
            except Exception as error:
                status, reason = "failed", f"{type(error).__name__}: {error}"
            status, reason = self._ranks.agree(status, reason)
        result.set_ceiling(found if status == "ok" else {}, reason)

    def _prepare(self, subject: Subject, workload: Workload) -> _Entry:
        """Make a subject ready, run every pass once and check the results."""
        result = SubjectResult(name=subject.name, kind=subject.kind, checked=subject.checked)
        prepared: Any = None
        self._ranks.step(subject.name, "prepare")
        gc.collect()
        memory = DeviceMemory(self._ranks.on_gpu)
        try:
            prepared = subject.prepare(self._ranks.setting, workload)
            for name, call in prepared.passes.items():
                self._ranks.step(subject.name, f"first {name}")
                call()
            self._ranks.wait_for_device()
            result.memory = memory.growth(prepared.shared_bytes)
            result.sms = prepared.sms
            status, reason = "ok", None
        except UnavailableError as error:
            status, reason = "unavailable", str(error)
        except Exception as error:
            status, reason = "failed", f"{type(error).__name__}: {error}"
        result.status, result.reason = self._ranks.agree(status, reason)
        entry = _Entry(subject, prepared, result)
        if result.status == "ok":
            result.memory = self._ranks.largest(result.memory)
            self._ranks.step(subject.name, "check")
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
        status, reason = self._ranks.agree(status, reason)
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
        self._ranks.step(f"timing {len(entries)} subjects, {total} samples")
        for times in measure(self._ranks.timer, clocked, self._job.warmup, total):
            rounds.append(times)
            self._ranks.deadline()
        samples = slowest(self._ranks.gather(rounds))
        for entry in entries:
            entry.result.set_samples(samples[entry.subject.name])
