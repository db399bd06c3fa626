"""One benchmark as plain data: made from the command line, the same on every rank."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from megatron_ncclep.benchmark import low_latency, shapes
from megatron_ncclep.benchmark.names import (
    default_names,
    is_train,
    kind_of,
    split_name,
    unavailable_reason,
    variant_of,
)
from megatron_ncclep.benchmark.shapes import Checked, Shape, TrainingShape, at_least
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import InputError

# What is measured: the steps of training, or low-latency mode.
HIGH_THROUGHPUT, LOW_LATENCY = "ht", "ll"
MODES = (HIGH_THROUGHPUT, LOW_LATENCY)
# Rounds, unless the file or the command line says so.
WARMUP = {"cuda": 5, "cpu": 1}
SAMPLES = {"cuda": 30, "cpu": 3}
# Half as many again as a balanced routing brings: an untrained router is far from balanced.
MAX_RECV_ROWS = "1.5x"


@dataclass(frozen=True)
class Job(Checked):
    """Everything that `ncclep bench` was asked to do: what its file says, and what it was told.

    Attributes:
        config: name or path of the file with the shapes.
        shapes: what it holds for subjects that do not train; none if there are no such subjects.
        trainings: likewise for those that do.
        ranks: processes that are measured.
        device: "cpu" or "cuda".
        subjects: names, in the order in which they are shown.
        required: those that were asked for on the command line: it is an error if one cannot run.
        warmup, samples: untimed and timed rounds.
        timeout_s: seconds that a rank waits for the others.
        out: folder for the results.
        max_recv_rows: option of layers and training with a fixed number of received rows.
        mode: one of MODES.
    """

    config: str
    shapes: tuple[Shape, ...]
    trainings: tuple[TrainingShape, ...]
    ranks: int
    device: str
    subjects: tuple[str, ...]
    required: tuple[str, ...]
    warmup: int = at_least(0)
    samples: int = at_least(1)
    timeout_s: float = 60.0
    out: str = ""
    max_recv_rows: int | str | None = None
    mode: str = HIGH_THROUGHPUT

    @property
    def everything(self) -> list[Shape | TrainingShape]:
        """What is measured one after the other."""
        return [*self.shapes, *self.trainings]

    @property
    def measured(self) -> tuple[str, ...]:
        """The subjects that do not train."""
        return tuple(name for name in self.subjects if not is_train(name))

    @property
    def trained(self) -> tuple[str, ...]:
        """The subjects that train."""
        return tuple(filter(is_train, self.subjects))

    @property
    def needs_megatron(self) -> bool:
        """Whether some subjects are Megatron-Core's, or have models of it."""
        return not {"engine", "library"}.issuperset(map(kind_of, self.subjects))

    @classmethod
    def make(cls, args: argparse.Namespace, ranks: int, device: str) -> Job:
        """Lay what the command line named over the file's values, and check the whole.

        Args:
            args: of `ncclep bench`, parsed; None: what the file says, else the defaults.
            ranks, device: as in a Job.

        Raises:
            InputError: something is wrong or would be ignored.
        """
        subjects = None if args.subjects is None else args.subjects.split(",")
        if args.mode == LOW_LATENCY:
            config = args.config or ("low_latency_smoke" if args.smoke else "low_latency")
            file = shapes.load(config)
            # The file's subjects are those of the other mode.
            names = tuple(subjects or low_latency.default_names(device))
            _check_low_latency(names, device, file.shapes)
        else:
            trains = subjects is not None and all(map(is_train, subjects))
            usual = "smoke" if args.smoke else "training" if trains else "models"
            config = args.config or usual
            file = shapes.load(config)
            names = tuple(subjects or file.subjects or default_names())
        for name in names:
            split_name(name)
        if len(set(names)) != len(names):
            raise InputError(f"a subject is named twice: {', '.join(names)}")
        job = cls(
            shapes=file.shapes if not all(map(is_train, names)) else (),
            trainings=file.trainings if any(map(is_train, names)) else (),
            subjects=names,
            warmup=_first(args.warmup, file.warmup, WARMUP[device]),
            samples=_first(args.samples, file.samples, SAMPLES[device]),
            timeout_s=file.timeout_s,
            config=config,
            ranks=ranks,
            device=device,
            required=tuple(subjects or ()),
            out=args.out,
            max_recv_rows=_max_recv_rows(args.max_recv_rows, names),
            mode=args.mode,
        )
        job._check()
        return job

    def _check(self) -> None:
        """Refuse subjects for which the file has nothing, and ranks that do not fit the shapes."""
        if self.measured and not self.shapes:
            raise InputError(
                f"{self.measured[0]} does not train, and {self.config} has trainings only: give "
                "another --config"
            )
        if self.trained and not self.trainings:
            raise InputError(
                f"{self.trained[0]} trains, and {self.config} has no trainings: give --config "
                "training"
            )
        for shape in self.shapes:
            shape.check_ranks(self.ranks)
        for training in self.trainings:
            training.settings(self.ranks)
        for name in self.required:
            variant = variant_of(name)
            models = self.trainings if is_train(name) else (None,)
            reasons = [
                unavailable_reason(variant, self.device, model) for model in models if variant
            ]
            if found := next(filter(None, reasons), None):
                raise InputError(f"{name}: {found}")


def _check_low_latency(names: tuple[str, ...], device: str, found: tuple[Shape, ...]) -> None:
    """Refuse what has no low-latency mode, and what the mode would ignore."""
    known = low_latency.known_names(device)
    for name in names:
        if name.partition("@")[0] not in known:
            raise InputError(
                f"subject {name!r}: --mode {LOW_LATENCY} measures what has the mode, on GPUs what "
                f"CUDA graphs can hold: {', '.join(known)}"
            )
    for shape in found:
        if shape.alignment != 1:
            raise InputError(
                f"{shape}: alignment {shape.alignment}: low-latency mode has no blocks of experts "
                "that could be padded: leave it out"
            )


def _max_recv_rows(given: int | str | None, names: tuple[str, ...]) -> int | str | None:
    """What static subjects get; None where there is none of them."""
    variants = map(variant_of, names)
    if not any(variant is not None and variant.static for variant in variants):
        if given is not None:
            raise InputError(
                f"--max-recv-rows {given}: no subject has a fixed number of received rows, such as "
                "train:ncclep:native:grouped:static"
            )
        return None
    options: dict[str, Any] = {"max_recv_rows": MAX_RECV_ROWS if given is None else given}
    EpConfig(**options)
    return options["max_recv_rows"]


def _first(*values: int | None) -> int:
    """The first value that is given."""
    return next(value for value in values if value is not None)
