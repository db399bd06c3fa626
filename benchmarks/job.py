"""One benchmark as plain data, the same on every rank: subjects, shapes, and how to time."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from benchmarks import HIGH_THROUGHPUT, LOW_LATENCY, Setting, Subject, deepep, shapes
from benchmarks.catalogue import (
    LIBRARIES,
    LIBRARY,
    MAX_RECV_ROWS,
    check_name,
    default_names,
    is_train,
    kind_of,
    unavailable_reason,
    variant_of,
)
from benchmarks.checked import Checked, at_least
from benchmarks.engines import EngineSubject
from benchmarks.layer_model import import_on_cpu
from benchmarks.layers import DispatcherSubject, ExpertsSubject, LayerSubject
from benchmarks.library import LibraryLowLatencySubject, LibrarySubject
from benchmarks.low_latency import LowLatencySubject
from benchmarks.ranks import Ranks
from benchmarks.result import Measured, ShapeResult, TrainingResult
from benchmarks.shape_run import ShapeRun
from benchmarks.shapes import Shape, TrainingShape, Workload
from benchmarks.training import TrainingRun
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES
from megatron_ncclep.errors import InputError

# Rounds, unless the file or the command line says so.
WARMUP = {"cuda": 5, "cpu": 1}
SAMPLES = {"cuda": 30, "cpu": 3}
LOW_LATENCY_CONFIGS = {False: "low_latency", True: "low_latency_smoke"}  # by --smoke
# Mode -> kind of a subject -> what makes it; layers also have an option.
SUBJECTS: dict[str, dict[str, Callable[[str, Setting, Workload], Subject]]] = {
    HIGH_THROUGHPUT: {
        "engine": EngineSubject, "library": LibrarySubject, "deepep": deepep.make,
        "megatron": DispatcherSubject, "experts": ExpertsSubject,
    },
    LOW_LATENCY: {"engine": LowLatencySubject, "library": LibraryLowLatencySubject},
}  # fmt: skip


def make_subject(
    name: str, setting: Setting, workload: Workload, mode: str = HIGH_THROUGHPUT,
    max_recv_rows: Any = None,
) -> Subject:  # fmt: skip
    """Prepare the subject called `name`, which does not train.  Collective.

    Raises:
        UnavailableError: it cannot be measured here; raised on every rank that knows the reason.
    """
    kind = kind_of(name)
    if kind == "layer":
        return LayerSubject(name, setting, workload, max_recv_rows)
    return SUBJECTS[mode][kind](name, setting, workload)


@dataclass(frozen=True)
class Job(Checked):
    """The whole task of `python -m benchmarks`: its file, overridden by the command line."""

    config: str  # name or path of the file with the shapes
    shapes: tuple[Shape, ...]
    ranks: int
    device: str  # "cpu" or "cuda"
    subjects: tuple[str, ...]  # in the order in which they are shown
    required: tuple[str, ...]  # named on the command line: it is an error if one cannot run
    warmup: int = at_least(0)  # untimed rounds
    samples: int = at_least(1)  # timed rounds
    timeout_s: float = 60.0  # that a rank waits for the others
    out: str = ""  # folder for the results
    mode: str = HIGH_THROUGHPUT  # or LOW_LATENCY
    trainings: tuple[TrainingShape, ...] = ()  # for subjects that train; empty if there are none
    max_recv_rows: int | str | None = None  # of layers and trainings that are static

    @classmethod
    def make(cls, args: argparse.Namespace, ranks: int, device: str) -> Job:
        """Override the file's values with those of the command line, and check the result.

        Raises:
            InputError: something is wrong or would be ignored.
        """
        named = tuple(args.subjects or ())
        file = shapes.load(config := args.config or _usual_config(args))
        names = named or (args.mode != LOW_LATENCY and file.subjects)
        names = names or _default_names(args.mode, device)
        for name in names:
            check_name(name)
        if args.mode == LOW_LATENCY:
            _check_low_latency(names, device, file.shapes)
        if len(set(names)) != len(names):
            raise InputError(f"a subject is named twice: {', '.join(names)}")
        rounds: dict[str, Any] = {"warmup": WARMUP[device], "samples": SAMPLES[device]}
        for source, name in product((file, args), ("warmup", "samples")):
            if (value := getattr(source, name)) is not None:
                rounds[name] = value
        job = cls(
            config=config, ranks=ranks, device=device, subjects=names, required=named,
            out=args.out, timeout_s=file.timeout_s, mode=args.mode, **rounds,
            shapes=() if all(map(is_train, names)) else file.shapes,
            trainings=file.trainings if any(map(is_train, names)) else (),
            max_recv_rows=_max_recv_rows(args.max_recv_rows, names),
        )  # fmt: skip
        job._check()
        return job

    @property
    def measured(self) -> tuple[str, ...]:
        """The subjects that are measured with each shape: those that do not train."""
        return tuple(name for name in self.subjects if not is_train(name))

    @property
    def trained(self) -> tuple[str, ...]:
        """The subjects that train."""
        return tuple(filter(is_train, self.subjects))

    def _check(self) -> None:
        """Refuse subjects for which the file has nothing, ranks that do not fit the shapes, and
        what subjects would ignore.
        """
        if self.measured and not self.shapes:
            wrong = f"{self.measured[0]} does not train, and {self.config} has trainings only"
            raise InputError(f"{wrong}: give another --config")
        if self.trained and not self.trainings:
            wrong = f"{self.trained[0]} trains, and {self.config} has no trainings"
            raise InputError(f"{wrong}: give --config training")
        for shape in self.shapes:
            shape.check_ranks(self.ranks)
            others = [name for name in self.measured if kind_of(name) != "engine"]
            if shape.max_recv_rows is not None and (others or self.mode == LOW_LATENCY):
                what = f"--mode {LOW_LATENCY}" if self.mode == LOW_LATENCY else others[0]
                given = f"{self.config}: {shape}: max_recv_rows {shape.max_recv_rows}"
                raise InputError(f"{given}: {what} would ignore it: leave it out")
        for training in self.trainings:
            training.settings(self.ranks)
        for name in self.required:
            variant = variant_of(name)
            for model in self.trainings if is_train(name) else (None,):
                reason = variant and unavailable_reason(variant, self.device, model)
                if reason:
                    raise InputError(f"{name}: {reason}")

    def batches(self) -> list[list[Any]]:
        """What is measured in order; the items of a batch share their processes.

        Each training has its own: no earlier model stays in memory.
        """
        return [list(self.shapes), *([training] for training in self.trainings)]

    def prepare(self) -> None:
        """Called once in each process, before it makes a process group."""
        needs_megatron = not {"engine", "library", "deepep"}.issuperset(map(kind_of, self.subjects))
        if self.device == "cpu" and needs_megatron:
            import_on_cpu()

    def make_subject(self, name: str, setting: Setting, workload: Workload) -> Subject:
        """Prepare the subject called `name`; see the function.  Collective."""
        return make_subject(name, setting, workload, self.mode, self.max_recv_rows)

    def result_of(self, shape: Shape | TrainingShape, error: str | None = None) -> Measured:
        """A result without measurements, because of `error`."""
        kind = ShapeResult if isinstance(shape, Shape) else TrainingResult
        found: Measured = kind.of(shape, error)
        return found

    def measure(self, ranks: Ranks, shape: Shape | TrainingShape) -> Measured:
        """Measure one item of `batches`.  Collective."""
        if isinstance(shape, Shape):
            return ShapeRun(ranks, self, shape).run()
        return TrainingRun(ranks, self, shape).run()

    def list_of(self, found: Measured) -> str:
        """The list of bench.json that holds `found`."""
        if isinstance(found, TrainingResult):
            return "trainings"
        return "low_latency" if self.mode == LOW_LATENCY else "shapes"


def _usual_config(args: argparse.Namespace) -> str:
    """The name of the file that is read without --config."""
    if args.mode == LOW_LATENCY:
        return LOW_LATENCY_CONFIGS[args.smoke]
    if args.smoke:
        return "smoke"
    return "training" if args.subjects and all(map(is_train, args.subjects)) else "models"


def _low_latency_engines(device: str) -> list[str]:
    """The engines with low-latency mode; on "cuda" those that a CUDA graph can capture."""
    caps = {name: entry.caps for name, entry in ENGINES.items() if entry.caps.low_latency_tokens}
    return [name for name, c in caps.items() if device != "cuda" or c.captures_static]


def _default_names(mode: str, device: str) -> tuple[str, ...]:
    """The subjects that are measured by default, in the order of the table."""
    if mode != LOW_LATENCY:
        return tuple(default_names())
    return (*_low_latency_engines(device), *([LIBRARY] if device == "cuda" else []))


def _check_low_latency(names: Sequence[str], device: str, found: tuple[Shape, ...]) -> None:
    """Refuse subjects without low-latency mode, and settings that the mode would ignore."""
    libraries = [name for name, (_, modes) in LIBRARIES.items() if not modes]
    known = [*_low_latency_engines(device), *libraries]
    for name in names:
        if name.partition("@")[0] not in known:
            those = "subjects that have it, on GPUs those that CUDA graphs can hold"
            raise InputError(
                f"subject {name!r}: --mode {LOW_LATENCY} measures {those}: {', '.join(known)}"
            )
    for shape in found:
        if shape.alignment != 1:
            why = "low-latency mode has no expert blocks to pad: leave it out"
            raise InputError(f"{shape}: alignment {shape.alignment}: {why}")


def _max_recv_rows(given: int | str | None, names: Sequence[str]) -> int | str | None:
    """The option that static subjects get; None if there are none."""
    if any(variant and variant.static for variant in map(variant_of, names)):
        return EpConfig(max_recv_rows=MAX_RECV_ROWS if given is None else given).max_recv_rows
    if given is not None:
        lacking = (
            "no subject has a fixed number of received rows, such as layer:ncclep:native:static"
        )
        raise InputError(f"--max-recv-rows {given}: {lacking}")
    return None
