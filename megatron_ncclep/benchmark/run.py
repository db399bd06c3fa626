"""One shape on one rank: prepare every subject, check it, time all of them interleaved.

The passes of one MoE layer's routing, or with a job for low-latency mode its operations; training
steps, of which only one model fits at a time, are in train_run.py.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from megatron_ncclep.benchmark import ceiling
from megatron_ncclep.benchmark.engine_subject import EngineSubject
from megatron_ncclep.benchmark.experts import ExpertsSubject
from megatron_ncclep.benchmark.job import LOW_LATENCY, Job
from megatron_ncclep.benchmark.layer import LayerSubject
from megatron_ncclep.benchmark.library_subject import LibrarySubject
from megatron_ncclep.benchmark.low_latency import LowLatencySubject
from megatron_ncclep.benchmark.low_latency_library import LibraryLowLatencySubject
from megatron_ncclep.benchmark.megatron_subject import MegatronSubject
from megatron_ncclep.benchmark.names import kind_of
from megatron_ncclep.benchmark.ranks import DeviceMemory, Ranks
from megatron_ncclep.benchmark.result import Measured, ShapeResult, SubjectResult
from megatron_ncclep.benchmark.shapes import Shape, TrainingShape
from megatron_ncclep.benchmark.subjects import Setting, Subject
from megatron_ncclep.benchmark.timing import Clock, measure, slowest
from megatron_ncclep.benchmark.train_run import TrainingRun
from megatron_ncclep.benchmark.workload import Workload, wire_rows
from megatron_ncclep.logs import remarks_hidden
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.pool import RankContext

SUBJECTS = {
    "engine": EngineSubject,
    "library": LibrarySubject,
    "megatron": MegatronSubject,
    "experts": ExpertsSubject,
}


def run(context: RankContext, job: Job, shape: Shape | TrainingShape) -> Measured | None:
    """Measure every subject of the job with one shape.  Collective; rank 0 gets the result.

    Args:
        context: the ranks; all of the process's world.
        job, shape: the same on every rank.
    """
    ranks = Ranks(context, job.timeout_s, shape.name, shows=True)
    try:
        # Remarks of Megatron-Core about packages that are missing, and the like.
        with remarks_hidden():
            if isinstance(shape, TrainingShape):
                result: Measured = TrainingRun(ranks, job, shape).run()
            else:
                with ranks.own_stream():
                    result = _ShapeRun(ranks, job, shape).run()
            ranks.close()
    finally:
        ranks.stop()
    result.judge(job.required)
    return result if ranks.rank == 0 else None


def make_subject(
    name: str,
    setting: Setting,
    workload: Workload,
    mode: str | None = None,
    max_recv_rows: Any = None,
) -> Subject:
    """Make the subject that `name` means, which does not train, ready.  Collective.

    Args:
        name, setting, workload: see `Subject`.
        mode: of the job.
        max_recv_rows: option of a layer with a fixed number of received rows.

    Raises:
        UnavailableError: it cannot be measured here; raised on every rank that knows.
    """
    if mode == LOW_LATENCY:
        ours = kind_of(name) == "engine"
        return (LowLatencySubject if ours else LibraryLowLatencySubject)(name, setting, workload)
    if (kind := kind_of(name)) == "layer":
        return LayerSubject(name, setting, workload, max_recv_rows)
    return SUBJECTS[kind](name, setting, workload)


@dataclass
class _Entry:
    """A subject that is being measured, and what is known of it."""

    result: SubjectResult
    subject: Any = None
    clock: Clock = dict


class _ShapeRun:
    """The state of `run` for a shape of one MoE layer."""

    def __init__(self, ranks: Ranks, job: Job, shape: Shape) -> None:
        self._ranks, self._job, self._shape = ranks, job, shape
        self._low_latency = job.mode == LOW_LATENCY

    def run(self) -> ShapeResult:
        """See `run`."""
        ranks, shape = self._ranks, self._shape
        ranks.step("routing and payload")
        case = shape.case(ranks.num_ranks, ranks.setting.device)
        workload = Workload(case, ranks.rank, shape.ffn_hidden_size)
        result: ShapeResult = ShapeResult.of(shape)
        result.row_bytes, result.on_gpu = shape.row_bytes, ranks.on_gpu
        result.wire_bytes = wire_rows(workload.tables, list(case.tokens)) * shape.row_bytes
        if not self._low_latency:
            result.set_products(workload)
            self._measure_ceiling(result)
        entries = [self._prepare(name, workload) for name in self._job.measured]
        result.subjects = [entry.result for entry in entries]
        for entry in entries:
            if (nodes := getattr(entry.subject, "nodes", None)) is not None:
                result.set_network(workload, nodes)
            result.max_tokens = getattr(entry.subject, "max_tokens", result.max_tokens)
        running = [entry for entry in entries if entry.result.status == "ok"]
        self._time(running)
        for entry in running:
            ranks.step(f"{entry.result.name}, checking again")
            self._check(entry, "after timing")
        for entry in running:
            ranks.step(f"{entry.result.name}, closing")
            entry.subject.close()
        return result

    def _measure_ceiling(self, result: ShapeResult) -> None:
        """Measure what the links give; where that cannot be, say why."""
        ranks, row_bytes = self._ranks, self._shape.row_bytes
        ranks.step("ceiling of the links")
        group = EpGroup.of(ranks.group)
        found: dict[str, ceiling.Ceiling] = {}
        timer, timeout_s = ranks.timer, self._job.timeout_s

        def links() -> None:
            found.update(ceiling.measure_ceiling(group, timer, row_bytes, timeout_s))

        status, reason = ranks.attempt(lambda: ceiling.unavailable_reason(group, row_bytes))
        if status == "ok":
            status, reason = ranks.attempt(links)
        result.set_ceiling(found if status == "ok" else {}, reason)

    def _prepare(self, name: str, workload: Workload) -> _Entry:
        """Make a subject ready, run every pass once and check the results."""
        ranks, job = self._ranks, self._job
        result = SubjectResult(name, kind=kind_of(name))
        entry = _Entry(result)
        ranks.step(name)
        gc.collect()
        memory = DeviceMemory(ranks.on_gpu)

        def prepare() -> None:
            subject = make_subject(name, ranks.setting, workload, job.mode, job.max_recv_rows)
            entry.subject = subject
            for call in subject.passes.values():
                ranks.deadline()
                call()
            ranks.wait_for_device()
            result.memory = memory.growth(subject.shared_bytes)
            result.sms, result.window_bytes = subject.sms, subject.window_bytes
            entry.clock = subject.clock(ranks.timer)

        result.status, result.reason = ranks.attempt(prepare)
        if result.status == "ok":
            result.memory = ranks.largest(result.memory)
            ranks.deadline()
            self._check(entry, "before timing")
            if result.status == "wrong":
                entry.subject.close()
        return entry

    def _check(self, entry: _Entry, when: str) -> None:
        """Compare the results of every pass with what they must be; what is wrong is not timed."""
        status, reason = self._ranks.attempt(entry.subject.problem)
        if status != "ok":
            entry.result.fail(status, f"{when}: {reason}")

    def _time(self, entries: list[_Entry]) -> None:
        """Time all passes of all subjects."""
        ranks, total = self._ranks, self._job.samples
        ranks.step(f"timing {len(entries)} subjects, {total} samples")
        clocks = {entry.result.name: entry.clock for entry in entries}
        rounds = []
        for times in measure(clocks, self._job.warmup, total):
            rounds.append(times)
            ranks.deadline()
        samples = slowest(ranks.gather(rounds))
        for entry in entries:
            entry.result.set_samples(samples[entry.result.name], self._low_latency)
