"""One benchmark as plain data: made from the command line, the same on every rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_ncclep.benchmark import shapes
from megatron_ncclep.benchmark.catalogue import default_names, split_name
from megatron_ncclep.benchmark.layer_names import is_layer, layer_obstacle, parse_layer
from megatron_ncclep.benchmark.shapes import Shape
from megatron_ncclep.benchmark.train_names import is_train, parse_train, train_obstacle
from megatron_ncclep.benchmark.train_shapes import TrainingShape
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import InputError

# Rounds, unless the file or the command line says so.
WARMUP = {"cuda": 5, "cpu": 1}
SAMPLES = {"cuda": 30, "cpu": 3}
# Half as many again as a balanced routing brings: an untrained router is far from balanced.
MAX_RECV_ROWS = "1.5x"


@dataclass(frozen=True)
class Job:
    """Everything that `ncclep bench` was asked to do.

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
    """

    config: str
    shapes: tuple[Shape, ...]
    trainings: tuple[TrainingShape, ...]
    ranks: int
    device: str
    subjects: tuple[str, ...]
    required: tuple[str, ...]
    warmup: int
    samples: int
    timeout_s: float
    out: str
    max_recv_rows: int | str | None = None

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

    @classmethod
    def make(
        cls,
        config: str,
        ranks: int,
        device: str,
        subjects: list[str] | None,
        warmup: int | None,
        samples: int | None,
        out: str,
        max_recv_rows: int | str | None = None,
    ) -> Job:
        """Lay what the command line named over the file's values, and check the whole.

        Args:
            subjects, warmup, samples: None: what the file says, else the defaults.
            max_recv_rows: None: the default, if a subject needs it.

        Raises:
            InputError: something is wrong or would be ignored.
        """
        file = shapes.load(config)
        names = tuple(subjects or file.subjects or default_names())
        for name in names:
            split_name(name)
        if len(set(names)) != len(names):
            raise InputError(f"a subject is named twice: {', '.join(names)}")
        trained = [name for name in names if is_train(name)]
        kept_shapes = file.shapes if len(trained) < len(names) else ()
        kept_trainings = file.trainings if trained else ()
        if len(trained) < len(names) and not file.shapes:
            other = next(name for name in names if not is_train(name))
            raise InputError(
                f"{other} does not train, and {config} has trainings only: give another --config"
            )
        if trained and not file.trainings:
            raise InputError(
                f"{trained[0]} trains, and {config} has no trainings: give --config training"
            )
        for shape in kept_shapes:
            shape.check_ranks(ranks)
        for name in filter(is_layer, subjects or ()):
            if reason := layer_obstacle(parse_layer(name), device):
                raise InputError(f"{name}: {reason}")
        for training in kept_trainings:
            training.settings(ranks)
            for name in filter(is_train, subjects or ()):
                if reason := train_obstacle(parse_train(name), device, training):
                    raise InputError(f"{name}: {reason}")
        # Made anew, so that what the command line says is checked as what the file says.
        measured = dataclasses.replace(
            file,
            warmup=_first(warmup, file.warmup, WARMUP[device]),
            samples=_first(samples, file.samples, SAMPLES[device]),
        )
        return cls(
            config=config,
            shapes=kept_shapes,
            trainings=kept_trainings,
            ranks=ranks,
            device=device,
            subjects=names,
            required=tuple(subjects or ()),
            warmup=measured.warmup or 0,
            samples=measured.samples or 0,
            timeout_s=file.timeout_s,
            out=out,
            max_recv_rows=_max_recv_rows(max_recv_rows, names),
        )


def _max_recv_rows(given: int | str | None, names: tuple[str, ...]) -> int | str | None:
    """What static subjects get; None where there is none of them.

    Raises:
        InputError: no value of the option, or nothing would use it.
    """
    variants = [
        *(parse_train(name) for name in names if is_train(name)),
        *(parse_layer(name) for name in names if is_layer(name)),
    ]
    if not any(variant.static for variant in variants):
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
