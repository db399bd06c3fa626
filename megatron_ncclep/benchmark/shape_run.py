"""One shape on one rank: subjects are prepared, checked, timed in turns, and checked again."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_ncclep.benchmark import LOW_LATENCY
from megatron_ncclep.benchmark import ranks as links
from megatron_ncclep.benchmark.ranks import Clock, DeviceMemory, Ranks
from megatron_ncclep.benchmark.result import ShapeResult, SubjectResult
from megatron_ncclep.benchmark.shapes import Shape, Workload, wire_rows
from megatron_ncclep.ranks.group import EpGroup

if TYPE_CHECKING:
    from megatron_ncclep.benchmark.job import Job


@dataclass
class _Entry:
    """A subject that is being measured, and its results so far."""

    result: SubjectResult
    subject: Any = None
    clock: Clock = dict


class ShapeRun:
    """Prepares every subject for one shape, checks it, and times all of them interleaved."""

    def __init__(self, ranks: Ranks, job: Job, shape: Shape) -> None:
        self._ranks, self._job, self._shape = ranks, job, shape
        self._low_latency = job.mode == LOW_LATENCY

    def run(self) -> ShapeResult:
        """Measure them.  Collective."""
        # Graphs can be captured on this stream, unlike the default one.
        with torch.cuda.stream(torch.cuda.Stream()) if self._ranks.on_gpu else nullcontext():
            return self._run()

    def _run(self) -> ShapeResult:
        ranks, shape = self._ranks, self._shape
        ranks.step("routing and payload")
        case = shape.case(ranks.num_ranks, ranks.setting.device)
        workload = Workload(case, ranks.rank, shape.ffn_hidden_size)
        result: ShapeResult = ShapeResult.of(shape)
        result.row_bytes, result.on_gpu = shape.row_bytes, ranks.on_gpu
        routes = (workload.tables, list(case.tokens))
        result.wire_bytes = wire_rows(*routes) * shape.row_bytes
        result.logical_bytes = wire_rows(*routes, with_own=True) * shape.row_bytes
        if not self._low_latency:
            result.set_products(workload)
            self._measure_ceiling(result)
        entries = [self._prepare(name, workload) for name in self._job.measured]
        result.subjects = [entry.result for entry in entries]
        for entry in entries:
            if (nodes := getattr(entry.subject, "nodes", None)) and nodes.count > 1:
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
        """Measure the links' bandwidth; if that is impossible, say why."""
        ranks, row_bytes = self._ranks, self._shape.row_bytes
        ranks.step("ceiling of the links")
        group, found = EpGroup.of(ranks.group), {}

        def copies() -> None:
            found.update(links.measure_ceiling(group, ranks.timer, row_bytes, self._job.timeout_s))

        status, reason = ranks.attempt(lambda: links.no_ceiling_reason(group, row_bytes))
        if status == "ok":
            status, reason = ranks.attempt(copies)
        result.set_ceiling(found if status == "ok" else {}, reason)

    def _prepare(self, name: str, workload: Workload) -> _Entry:
        """Prepare a subject, run every pass once and check the results."""
        ranks, job = self._ranks, self._job
        entry = _Entry(result := SubjectResult(name, kind=job.kind_of(name)))
        ranks.step(name)
        gc.collect()
        memory = DeviceMemory(ranks.on_gpu)

        def prepare() -> None:
            subject = job.make_subject(name, ranks.setting, workload)
            entry.subject = subject
            for call in subject.passes.values():
                ranks.deadline()
                call()
            if ranks.on_gpu:
                torch.cuda.synchronize()
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
        if result.status != "ok":
            ranks.step(f"{name} is left out: {result.status}: {result.reason}")
        return entry

    def _check(self, entry: _Entry, when: str) -> None:
        status, reason = self._ranks.attempt(entry.subject.problem)
        if status != "ok":
            entry.result.fail(status, f"{when}: {reason}")

    def _time(self, entries: list[_Entry]) -> None:
        ranks, total = self._ranks, self._job.samples
        ranks.step(f"timing {len(entries)} subjects, {total} samples")
        clocks = {entry.result.name: entry.clock for entry in entries}
        rounds = []
        for times in links.measure(clocks, self._job.warmup, total):
            rounds.append(times)
            ranks.deadline()
        samples = links.slowest(ranks.gather(rounds))
        for entry in entries:
            entry.result.set_samples(samples[entry.result.name], self._low_latency)
