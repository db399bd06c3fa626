"""Results: what bench.json holds, as plain data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ncclep.benchmark.ceiling import Ceiling
from megatron_ncclep.benchmark.shapes import Shape
from megatron_ncclep.benchmark.timing import Spread
from megatron_ncclep.benchmark.train_result import TrainingResult, TrainResult, failures
from megatron_ncclep.errors import InputError

FORMAT = 1
# Passes that move every row over the wire once; a forward or backward of Megatron has two of them.
# A layer's do much else: no rate is worked out for them.
CROSSINGS = {
    "dispatch": 1, "combine": 1, "bwd_dispatch": 1, "bwd_combine": 1, "forward": 2, "backward": 2,
}  # fmt: skip


@dataclass
class SubjectResult:
    """What is known of one subject with one shape.

    Attributes:
        name, kind, checked: of the subject.
        status: "ok"; "unavailable": it cannot run here; "wrong": its results are; "failed": it
            raised an error.
        reason: why it is not ok.
        sms: SMs that its kernels use, in words.
        passes: pass -> {"median_us", "p10_us", "p90_us"} of the slowest rank, and where rows cross
            the wire "gb_per_s", and "percent_of_ceiling" if the ceiling is known.
        sum_us: sum of the medians.
        memory: bytes on the rank that takes most, {"torch_bytes", "other_bytes"}; None on a CPU.
    """

    name: str
    kind: str
    checked: str
    status: str = "ok"
    reason: str | None = None
    sms: str = "-"
    passes: dict[str, dict[str, float]] = field(default_factory=dict)
    sum_us: float | None = None
    memory: dict[str, int] | None = None

    def set_samples(self, samples: Mapping[str, Sequence[float]]) -> None:
        """Summarise the slowest rank's microseconds of every pass."""
        for name, values in samples.items():
            spread = Spread.of(values)
            self.passes[name] = {
                "median_us": spread.median, "p10_us": spread.p10, "p90_us": spread.p90,
            }  # fmt: skip


@dataclass
class ShapeResult:
    """What was measured with one shape.

    Attributes:
        shape: the fields of Shape.
        row_bytes: of one row.
        num_rows: rows of the dispatched tensor on each rank.
        wire_bytes: bytes that the busiest rank sends or receives in one pass, each row once for
            each other rank that needs it.
        ceiling: "push" and "pull" -> {"gb_per_s", "num_sms"}; empty if not measured.
        ceiling_reason: why it was not.
        limit_us: wire_bytes at the better of the two rates: the least that one pass can take.
        subjects: in the order in which they are shown.
        error: why nothing was measured, if so.
        failures: everything because of which the command fails, in words.
    """

    shape: dict[str, Any]
    row_bytes: int
    num_rows: list[int] = field(default_factory=list)
    wire_bytes: int = 0
    ceiling: dict[str, dict[str, Any]] = field(default_factory=dict)
    ceiling_reason: str | None = None
    limit_us: float | None = None
    subjects: list[SubjectResult] = field(default_factory=list)
    error: str | None = None
    failures: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        shape: Shape,
        num_rows: Sequence[int] = (),
        wire_bytes: int = 0,
        error: str | None = None,
    ) -> ShapeResult:
        """Start the result of a shape."""
        return cls(
            dataclasses.asdict(shape), shape.row_bytes, list(num_rows), wire_bytes, error=error
        )

    def set_ceiling(self, found: Mapping[str, Ceiling], reason: str | None) -> None:
        """Take what `measure_ceiling` found; nothing: `reason` says why."""
        self.ceiling = {name: dataclasses.asdict(best) for name, best in found.items()}
        self.ceiling_reason = reason
        if found:
            best = max(rate.gb_per_s for rate in found.values())
            self.limit_us = self.wire_bytes / best * 1e-3  # bytes / (GB/s) -> us

    def judge(self, required: Sequence[str]) -> None:
        """Work out rates and sums, and what is a failure.

        Args:
            required: names of subjects that must have run.
        """
        for subject in self.subjects:
            if subject.passes:
                subject.sum_us = sum(times["median_us"] for times in subject.passes.values())
            for name, times in subject.passes.items():
                if name in CROSSINGS and subject.kind != "layer":
                    crossed = CROSSINGS[name] * self.wire_bytes
                    times["gb_per_s"] = crossed / times["median_us"] * 1e-3
                    if self.limit_us is not None:
                        limit = CROSSINGS[name] * self.limit_us
                        times["percent_of_ceiling"] = 100 * limit / times["median_us"]
        where = self.shape["name"]
        if self.error is not None:
            self.failures.append(f"{where}: nothing was measured: {self.error}")
        self.failures += failures(where, self.subjects, required)


def save(result: dict[str, Any], path: Path) -> None:
    """Write a whole result as JSON."""
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def load(path: Path) -> dict[str, Any]:
    """Read what `save` wrote.

    Raises:
        InputError: there is no such file, or it is not a result of this version's format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: give the bench.json of a run") from error
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InputError(f"{path}: not a result of `ncclep bench` in format {FORMAT}")
    _require_fields(path, "shapes", content.get("shapes"), ShapeResult)
    for shape in content["shapes"]:
        _require_fields(path, "subjects", shape["subjects"], SubjectResult)
    trainings = content.setdefault("trainings", [])  # a result of before there were any
    _require_fields(path, "trainings", trainings, TrainingResult)
    for training in trainings:
        _require_fields(path, "subjects", training["subjects"], TrainResult)
    return content


def _require_fields(path: Path, name: str, listed: Any, kind: type) -> None:
    """Refuse what is no list of `kind`s as mappings."""
    fields = {field.name for field in dataclasses.fields(kind)}
    whole = isinstance(listed, list) and all(
        isinstance(item, dict) and fields <= set(item) for item in listed
    )
    if not whole:
        raise InputError(
            f"{path}: {name} is not what `ncclep bench` writes, a list of {sorted(fields)}: give "
            "the bench.json of a run, unchanged"
        )
