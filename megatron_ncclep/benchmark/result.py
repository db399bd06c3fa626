"""Results: the contents of bench.json, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ncclep.benchmark import WITH_EXPERTS
from megatron_ncclep.benchmark.ranks import quantiles
from megatron_ncclep.benchmark.shapes import Workload, network_rows
from megatron_ncclep.ranks.nodes import Nodes

FORMAT = 1
# Passes that move every row over the wire once; a forward or backward of Megatron has two of them.
# Those of WITH_EXPERTS also do other work, so no rate is computed for them.
CROSSINGS = {
    "dispatch": 1, "combine": 1, "bwd_dispatch": 1, "bwd_combine": 1, "forward": 2, "backward": 2,
}  # fmt: skip
# The rate of a GEMM of two 8192 x 8192 matrices in bf16, measured on H100 and H200.
PEAK_TFLOPS = 790


@dataclass
class Outcome:
    """The outcome of one subject with one shape.

    "unavailable": it cannot run here; "wrong": its results are wrong; "failed": it raised an error.
    All but "ok" have a reason and no times.
    """

    name: str
    status: str = "ok"
    reason: str | None = None

    def fail(self, status: str, reason: str | None) -> None:
        """Set the outcome, and remove the times from the result."""
        nothing = type(self)(self.name, status, reason)
        for name in ("status", "reason", "passes", "step", "turns_us", "tokens_per_s", "kinds_us"):
            if hasattr(self, name):
                setattr(self, name, getattr(nothing, name))


@dataclass
class SubjectResult(Outcome):
    """One subject with one MoE layer's routing.

    A pass has {"median_us", "p10_us", "p90_us"} of the slowest rank, where rows cross the wire
    "gb_per_s" and "logical_gb_per_s", and "percent_of_ceiling" if the ceiling is known; one of
    low-latency mode has {"p50_us", "p99_us", "min_us", "count"} over all operations.
    """

    kind: str = ""  # see job.kind_of
    sms: str = "-"  # SMs that its kernels use, as text
    passes: dict[str, dict[str, float]] = field(default_factory=dict)
    sum_us: float | None = None  # of the medians
    memory: dict[str, int] | None = None  # {"torch_bytes", "other_bytes"}, the most of any rank
    window_bytes: int | None = None  # that the other ranks write to, on each rank, if known

    def set_samples(self, samples: Mapping[str, Sequence[float]], low_latency: bool) -> None:
        """Summarise the slowest rank's microseconds of every pass."""
        summary = _operations if low_latency else spread
        self.passes = {name: summary(values) for name, values in samples.items()}


@dataclass
class Measured:
    """The measurements of one shape."""

    shape: dict[str, Any]  # the fields of what was measured, such as a Shape
    subjects: list[Any] = field(default_factory=list)  # an Outcome of each, in order
    error: str | None = None  # why nothing was measured, if so
    failures: list[str] = field(default_factory=list)  # the reasons why the command fails

    @classmethod
    def of(cls, shape: Any, error: str | None = None) -> Any:
        """Start the result of a shape."""
        return cls(dataclasses.asdict(shape), error=error)

    def judge(self, required: Sequence[str]) -> None:
        """Collect the failures; `required`: names of subjects that must have run."""
        where = self.shape["name"]
        if self.error is not None:
            self.failures.append(f"{where}: nothing was measured: {self.error}")
        for subject in self.subjects:
            what = {"wrong": "wrong", "failed": "failed"}
            if subject.name in required:
                what["unavailable"] = "was requested and cannot run"
            if said := what.get(subject.status):
                self.failures.append(f"{where}: {subject.name} {said}: {subject.reason}")


@dataclass
class ShapeResult(Measured):
    """Passes of one MoE layer's routing."""

    row_bytes: int = 0  # of one row
    # Of the busiest rank in one pass: each row once for each other rank that needs it.
    wire_bytes: int = 0
    # The same with rows for its own experts: DeepEP's logical bytes.  None: an older result.
    logical_bytes: int | None = None
    # The same between nodes, {"machines", "ranks_on_each", "hierarchical_bytes", "flat_bytes"}:
    # rows once for each node, or for each assignment; None: no subject works with nodes.
    network: dict[str, int] | None = None
    ceiling: dict[str, dict[str, Any]] = field(default_factory=dict)  # see measure_ceiling
    ceiling_reason: str | None = None  # why it was not measured
    limit_us: float | None = None  # the least that a pass can take: wire_bytes at the better rate
    expert_rows: int | None = None  # of the rank with most, without padding
    # "forward" and "backward" -> time of these rows' products with the experts' weights at
    # PEAK_TFLOPS; None without a GPU, and in fp32.
    products_us: dict[str, float] | None = None
    on_gpu: bool = False
    max_tokens: int | None = None  # of low-latency mode's objects; None: not this mode

    def set_network(self, work: Workload, nodes: Nodes) -> None:
        """Compute the traffic between `nodes`."""
        once, flat = network_rows(work.tables, list(work.case.tokens), nodes.ranks_on_each)
        self.network = {
            "machines": nodes.count, "ranks_on_each": nodes.ranks_on_each,
            "hierarchical_bytes": once * self.row_bytes, "flat_bytes": flat * self.row_bytes,
        }  # fmt: skip

    def set_products(self, work: Workload) -> None:
        """Compute the experts' minimum work; with `on_gpu` set, also how long it takes."""
        if work.ffn_hidden_size is None:
            return
        self.expert_rows = max(int(table.routed.sum()) for table in work.tables)
        if self.on_gpu and work.case.dtype.itemsize == 2:
            # Gates, values and outputs; backward has two products for each of forward.
            operations = 3 * 2 * self.expert_rows * work.case.hidden * work.ffn_hidden_size
            forward = operations / PEAK_TFLOPS * 1e-6
            self.products_us = {"forward": forward, "backward": 2 * forward}

    def set_ceiling(self, found: dict[str, dict[str, Any]], reason: str | None) -> None:
        """Set the result of `measure_ceiling`; if it is empty, `reason` says why."""
        self.ceiling, self.ceiling_reason = found, reason
        if found:
            best = max(rate["gb_per_s"] for rate in found.values())
            self.limit_us = self.wire_bytes / best * 1e-3  # bytes / (GB/s) -> us

    def judge(self, required: Sequence[str]) -> None:
        """Also compute rates and sums, except for low-latency mode."""
        for subject in self.subjects if self.max_tokens is None else ():
            if subject.passes:
                subject.sum_us = sum(times["median_us"] for times in subject.passes.values())
            for name, times in subject.passes.items():
                if name in CROSSINGS and subject.kind not in WITH_EXPERTS:
                    crossed = CROSSINGS[name] * self.wire_bytes
                    times["gb_per_s"] = crossed / times["median_us"] * 1e-3
                    if self.logical_bytes is not None:
                        logical = CROSSINGS[name] * self.logical_bytes
                        times["logical_gb_per_s"] = logical / times["median_us"] * 1e-3
                    if self.limit_us is not None:
                        limit = CROSSINGS[name] * self.limit_us
                        times["percent_of_ceiling"] = 100 * limit / times["median_us"]
        super().judge(required)


def spread(samples: Sequence[float]) -> dict[str, float]:
    """The quantiles of microseconds that are shown."""
    median, p10, p90 = quantiles(samples, 0.5, 0.1, 0.9)
    return {"median_us": median, "p10_us": p10, "p90_us": p90}


def _operations(samples: Sequence[float]) -> dict[str, float]:
    p50, p99 = quantiles(samples, 0.5, 0.99)
    return {"p50_us": p50, "p99_us": p99, "min_us": min(samples), "count": len(samples)}
