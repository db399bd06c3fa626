"""A job with everything that can be measured, and what makes its subjects."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import deepep, shapes
from benchmarks.adapted_layers import AdaptedLayerSubject
from benchmarks.catalogue import (
    LIBRARIES,
    LIBRARY,
    LIGER_CUTE,
    MAX_RECV_ROWS,
    check_name,
    default_names,
    is_train,
    kind_of,
    known_variant,
    unavailable_reason,
    variant_of,
)
from benchmarks.fp8_experts import Fp8ExpertsSubject
from benchmarks.layer_model import import_on_cpu
from benchmarks.layers import DispatcherSubject, ExpertsSubject, LayerSubject
from benchmarks.library import LibraryLowLatencySubject, LibrarySubject
from benchmarks.liger_cute import LigerCuteSubject
from benchmarks.result import TrainingResult
from benchmarks.shapes import TrainingShape
from benchmarks.training import TrainingRun
from megatron_ncclep import envs
from megatron_ncclep.benchmark import HIGH_THROUGHPUT, LOW_LATENCY, Setting, Subject, job
from megatron_ncclep.benchmark.engines import EngineSubject
from megatron_ncclep.benchmark.low_latency import LowLatencySubject
from megatron_ncclep.benchmark.ranks import Ranks
from megatron_ncclep.benchmark.result import Measured
from megatron_ncclep.benchmark.shapes import Shape, Workload
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import InputError

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
    if name == LIGER_CUTE:
        return LigerCuteSubject(name, setting, workload)
    if kind == "layer":
        made = AdaptedLayerSubject if known_variant(name).frozen else LayerSubject
        return made(name, setting, workload, max_recv_rows)
    if kind == "experts" and known_variant(name).fp8:
        return Fp8ExpertsSubject(name, setting, workload)
    return SUBJECTS[mode][kind](name, setting, workload)


@dataclass(frozen=True)
class Job(job.Job):
    """The whole task of `python -m benchmarks`; its methods are described in the base class."""

    trainings: tuple[TrainingShape, ...] = ()  # for subjects that train; empty if there are none
    max_recv_rows: int | str | None = None  # of layers and trainings that are static
    trace: bool = False  # a step of each training is traced

    @classmethod
    def load(cls, config: str) -> shapes.Measurement:
        """See the base class."""
        return shapes.load(config)

    @classmethod
    def usual_config(cls, args: argparse.Namespace) -> str:
        """See the base class."""
        trains = bool(args.subjects) and all(map(is_train, args.subjects))
        usual = super().usual_config(args)
        return "training" if trains and usual == "models" else usual

    @classmethod
    def default_names(cls, mode: str, device: str) -> tuple[str, ...]:
        """See the base class."""
        if mode != LOW_LATENCY:
            return tuple(default_names())
        return (*super().default_names(mode, device), *([LIBRARY] if device == "cuda" else []))

    @classmethod
    def check_name(cls, name: str) -> None:
        """See the base class."""
        check_name(name)

    @classmethod
    def low_latency_names(cls, device: str) -> list[str]:
        """See the base class."""
        libraries = [name for name, (_, modes) in LIBRARIES.items() if not modes]
        return [*super().low_latency_names(device), *libraries]

    @classmethod
    def more(cls, args: argparse.Namespace, file: Any, names: Sequence[str]) -> dict[str, Any]:
        """See the base class."""
        return {
            "shapes": _chosen(args, file, file.shapes) if not all(map(is_train, names)) else (),
            "trainings": _chosen(args, file, file.trainings) if any(map(is_train, names)) else (),
            "max_recv_rows": _max_recv_rows(args.max_recv_rows, names),
            "trace": args.trace,
        }

    def kind_of(self, name: str) -> str:
        """See the base class."""
        return kind_of(name)

    @property
    def measured(self) -> tuple[str, ...]:
        """The subjects that do not train."""
        return tuple(name for name in self.subjects if not is_train(name))

    @property
    def trained(self) -> tuple[str, ...]:
        """The subjects that train."""
        return tuple(filter(is_train, self.subjects))

    def check(self) -> None:
        """Refuse subjects for which the file has nothing, and ranks that do not fit the shapes."""
        if self.measured and not self.shapes:
            wrong = f"{self.measured[0]} does not train, and {self.config} has trainings only"
            raise InputError(f"{wrong}: give another --config")
        if self.trained and not self.trainings:
            wrong = f"{self.trained[0]} trains, and {self.config} has no trainings"
            raise InputError(f"{wrong}: give --config training")
        replaced = envs.get("NCCLEP_IN_PLACE_OF")
        if replaced and self._needs_megatron:
            raise InputError(f"NCCLEP_IN_PLACE_OF={replaced} changes what is measured: unset it")
        if self.trace and (not self.trained or self.device != "cuda"):
            raise InputError("--trace is for trainings on GPUs: leave it out, or name one")
        super().check()
        for training in self.trainings:
            training.settings(self.ranks)
        for name in self.required:
            variant = variant_of(name)
            for model in self.trainings if is_train(name) else (None,):
                reason = variant and unavailable_reason(variant, self.device, model)
                if reason:
                    raise InputError(f"{name}: {reason}")

    @property
    def _needs_megatron(self) -> bool:
        return not {"engine", "library", "deepep"}.issuperset(map(kind_of, self.subjects))

    def batches(self) -> list[list[Any]]:
        """See the base class: no earlier model stays in memory."""
        return [list(self.shapes), *([training] for training in self.trainings)]

    def prepare(self) -> None:
        """See the base class."""
        if self.device == "cpu" and self._needs_megatron:
            import_on_cpu()

    def make_subject(self, name: str, setting: Setting, workload: Workload) -> Subject:
        """See the base class."""
        return make_subject(name, setting, workload, self.mode, self.max_recv_rows)

    def result_of(self, shape: Shape | TrainingShape, error: str | None = None) -> Measured:
        """See the base class."""
        if isinstance(shape, Shape):
            return super().result_of(shape, error)
        found: Measured = TrainingResult.of(shape, error)
        return found

    def measure(self, ranks: Ranks, shape: Shape | TrainingShape) -> Measured:
        """See the base class."""
        if isinstance(shape, Shape):
            return super().measure(ranks, shape)
        return TrainingRun(ranks, self, shape).run()

    def lists(self) -> tuple[str, ...]:
        """See the base class."""
        return (*super().lists(), "trainings")

    def list_of(self, found: Measured) -> str:
        """See the base class."""
        return "trainings" if isinstance(found, TrainingResult) else super().list_of(found)


def _chosen(args: argparse.Namespace, file: Any, found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those of `found`, in `file`, that --shape names, if it is given."""
    if args.shape is None:
        return found
    known = [shape.name for shape in (*file.shapes, *file.trainings)]
    if unknown := set(args.shape) - set(known):
        raise InputError(f"--shape {min(unknown)}: the file has {'; '.join(known)}")
    return tuple(shape for shape in found if shape.name in args.shape)


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
