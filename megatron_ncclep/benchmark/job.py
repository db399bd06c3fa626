"""One benchmark as plain data: made from the command line, the same on every rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron_ncclep.benchmark import shapes
from megatron_ncclep.benchmark.catalogue import default_names, split_name
from megatron_ncclep.benchmark.shapes import Shape
from megatron_ncclep.errors import InputError

# Rounds, unless the file or the command line says so.
WARMUP = {"cuda": 5, "cpu": 1}
SAMPLES = {"cuda": 30, "cpu": 3}


@dataclass(frozen=True)
class Job:
    """Everything that `ncclep bench` was asked to do.

    Attributes:
        config: name or path of the file with the shapes.
        shapes: what it holds.
        ranks: processes that are measured.
        device: "cpu" or "cuda".
        subjects: names, in the order in which they are shown.
        required: those that were asked for on the command line: it is an error if one cannot run.
        warmup, samples: untimed and timed rounds.
        timeout_s: seconds that a rank waits for the others.
        out: folder for the results.
    """

    config: str
    shapes: tuple[Shape, ...]
    ranks: int
    device: str
    subjects: tuple[str, ...]
    required: tuple[str, ...]
    warmup: int
    samples: int
    timeout_s: float
    out: str

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
    ) -> Job:
        """Lay what the command line named over the file's values, and check the whole.

        Args:
            subjects, warmup, samples: None: what the file says, else the defaults.

        Raises:
            InputError: something is wrong or would be ignored.
        """
        file = shapes.load(config)
        names = tuple(subjects or file.subjects or default_names())
        for name in names:
            split_name(name)
        if len(set(names)) != len(names):
            raise InputError(f"a subject is named twice: {', '.join(names)}")
        for shape in file.shapes:
            shape.check_ranks(ranks)
        # Made anew, so that what the command line says is checked as what the file says.
        measured = dataclasses.replace(
            file,
            warmup=_first(warmup, file.warmup, WARMUP[device]),
            samples=_first(samples, file.samples, SAMPLES[device]),
        )
        return cls(
            config=config,
            shapes=file.shapes,
            ranks=ranks,
            device=device,
            subjects=names,
            required=tuple(subjects or ()),
            warmup=measured.warmup or 0,
            samples=measured.samples or 0,
            timeout_s=file.timeout_s,
            out=out,
        )


def _first(*values: int | None) -> int:
    """The first value that is given."""
    return next(value for value in values if value is not None)
