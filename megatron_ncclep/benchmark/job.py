"""One benchmark as plain data, the same on every rank: subjects by name, shapes, and how to time.

A subject is the name of an engine; `@N` behind it limits its kernels to N SMs.  In a checkout,
`benchmarks/job.py` has a job with more kinds of subjects.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from megatron_ncclep.benchmark import HIGH_THROUGHPUT, LOW_LATENCY, Setting, Subject, shapes
from megatron_ncclep.benchmark.engines import EngineSubject, split_name
from megatron_ncclep.benchmark.low_latency import LowLatencySubject
from megatron_ncclep.benchmark.ranks import Ranks
from megatron_ncclep.benchmark.result import Measured, ShapeResult
from megatron_ncclep.benchmark.shape_run import ShapeRun
from megatron_ncclep.benchmark.shapes import Shape, Workload
from megatron_ncclep.cli.config_files import Checked, at_least
from megatron_ncclep.engines import ENGINES
from megatron_ncclep.errors import InputError

# Rounds, unless the file or the command line says so.
WARMUP = {"cuda": 5, "cpu": 1}
SAMPLES = {"cuda": 30, "cpu": 3}
LOW_LATENCY_CONFIGS = {False: "low_latency", True: "low_latency_smoke"}  # by --smoke
CHECKOUT = (
    "other libraries, Megatron-Core's dispatchers, layers and trainings are measured by "
    "`python -m benchmarks` in a checkout of megatron_ncclep"
)


def low_latency_engines(device: str) -> list[str]:
    """The engines with low-latency mode; on "cuda" those that a CUDA graph can capture."""
    caps = {name: entry.caps for name, entry in ENGINES.items() if entry.caps.low_latency_tokens}
    return [name for name, c in caps.items() if device != "cuda" or c.captures_static]


@dataclass(frozen=True)
class Job(Checked):
    """The whole task of `ncclep bench`: its file, overridden by the command line."""

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

    @classmethod
    def make(cls, args: argparse.Namespace, ranks: int, device: str) -> Any:
        """Override the file's values with those of the command line, and check the result.

        Raises:
            InputError: something is wrong or would be ignored.
        """
        named = tuple(args.subjects or ())
        file = cls.load(config := args.config or cls.usual_config(args))
        names = named or (args.mode != LOW_LATENCY and file.subjects)
        names = names or cls.default_names(args.mode, device)
        for name in names:
            cls.check_name(name)
        if args.mode == LOW_LATENCY:
            cls.check_low_latency(names, device, file.shapes)
        if len(set(names)) != len(names):
            raise InputError(f"a subject is named twice: {', '.join(names)}")
        rounds: dict[str, Any] = {"warmup": WARMUP[device], "samples": SAMPLES[device]}
        for source, name in product((file, args), ("warmup", "samples")):
            if (value := getattr(source, name)) is not None:
                rounds[name] = value
        job = cls(
            config=config, ranks=ranks, device=device, subjects=names, required=named,
            out=args.out, timeout_s=file.timeout_s, mode=args.mode,
            **rounds, **cls.more(args, file, names),
        )  # fmt: skip
        job.check()
        return job

    # --- the kinds of subjects: benchmarks/job.py has others -------------------------------------

    @classmethod
    def load(cls, config: str) -> Any:
        """Read a file of shapes."""
        return shapes.load(config)

    @classmethod
    def usual_config(cls, args: argparse.Namespace) -> str:
        """The name of the file that is read without --config."""
        if args.mode == LOW_LATENCY:
            return LOW_LATENCY_CONFIGS[args.smoke]
        return "smoke" if args.smoke else "models"

    @classmethod
    def default_names(cls, mode: str, device: str) -> tuple[str, ...]:
        """The subjects that are measured by default, in the order of the table."""
        return tuple(low_latency_engines(device) if mode == LOW_LATENCY else ENGINES)

    @classmethod
    def check_name(cls, name: str) -> None:
        """Raise an InputError: no such subject, or a number of SMs that it would ignore."""
        base, num_sms = split_name(name)
        if base not in ENGINES:
            raise InputError(
                f"unknown subject {name!r}: there are {', '.join(ENGINES)}; {CHECKOUT}"
            )
        if num_sms is not None and "num_sms" not in ENGINES[base].caps.options:
            ignored = f"{base} would ignore a number of SMs: leave @{num_sms} out"
            raise InputError(f"subject {name!r}: {ignored}")

    @classmethod
    def low_latency_names(cls, device: str) -> list[str]:
        """All subjects that have low-latency mode, without their numbers of SMs."""
        return low_latency_engines(device)

    @classmethod
    def more(cls, args: argparse.Namespace, file: Any, names: Sequence[str]) -> dict[str, Any]:
        """Fields that depend on what is measured."""
        return {"shapes": file.shapes}

    @classmethod
    def check_low_latency(cls, names: Sequence[str], device: str, found: tuple[Shape, ...]) -> None:
        """Refuse subjects without low-latency mode, and settings that the mode would ignore."""
        known = cls.low_latency_names(device)
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

    def kind_of(self, name: str) -> str:
        """The kind of the subject called `name`."""
        return "engine"

    @property
    def measured(self) -> tuple[str, ...]:
        """The subjects that are measured with each shape."""
        return self.subjects

    def check(self) -> None:
        """Refuse ranks that do not fit the shapes, and what subjects would ignore."""
        for shape in self.shapes:
            shape.check_ranks(self.ranks)
            others = [name for name in self.measured if self.kind_of(name) != "engine"]
            if shape.max_recv_rows is not None and (others or self.mode == LOW_LATENCY):
                what = f"--mode {LOW_LATENCY}" if self.mode == LOW_LATENCY else others[0]
                given = f"{self.config}: {shape}: max_recv_rows {shape.max_recv_rows}"
                raise InputError(f"{given}: {what} would ignore it: leave it out")

    def batches(self) -> list[list[Any]]:
        """What is measured in order; the items of a batch share their processes."""
        return [list(self.shapes)]

    def prepare(self) -> None:
        """Called once in each process, before it makes a process group."""

    def make_subject(self, name: str, setting: Setting, workload: Workload) -> Subject:
        """Prepare the subject called `name`.  Collective.

        Raises:
            UnavailableError: it cannot be measured here; raised on every rank that knows the
                reason.
        """
        kind = LowLatencySubject if self.mode == LOW_LATENCY else EngineSubject
        return kind(name, setting, workload)

    def result_of(self, shape: Any, error: str | None = None) -> Measured:
        """A result without measurements, because of `error`."""
        found: Measured = ShapeResult.of(shape, error)
        return found

    def measure(self, ranks: Ranks, shape: Any) -> Measured:
        """Measure one item of `batches`.  Collective."""
        return ShapeRun(ranks, self, shape).run()

    def lists(self) -> tuple[str, ...]:
        """The names of the lists in bench.json."""
        return ("shapes", "low_latency")

    def list_of(self, found: Measured) -> str:
        """The one that holds `found`."""
        return "low_latency" if self.mode == LOW_LATENCY else "shapes"
