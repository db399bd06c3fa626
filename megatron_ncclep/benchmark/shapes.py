"""Shapes: the sizes to measure, read from configs/benchmark/."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ncclep import config_files
from megatron_ncclep.benchmark.train_shapes import TrainingShape
from megatron_ncclep.config import ALIGNMENTS
from megatron_ncclep.errors import InputError
from megatron_ncclep.testing.cases import Case

# fp64 is for gradient checks, not for training: not measured.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# What a field of Shape may be, by its annotation.
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "int | None": (int, type(None)),
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One problem size, the same on every rank.

    Attributes:
        name: readable identity, unique in its file.
        tokens: T of each rank.
        hidden: H.
        experts: E of the whole group.
        top_k: K.
        dtype: of the payload, a key of `DTYPES`.
        skew: 0 spreads tokens evenly over experts; 1 sends everything to as few as possible.
        alignment: rows that an expert's block is padded to a multiple of.
        ffn_hidden_size: of one expert; only layers need it.
    """

    name: str
    tokens: int
    hidden: int
    experts: int
    top_k: int
    dtype: str = "bfloat16"
    skew: float = 0.0
    alignment: int = 1
    ffn_hidden_size: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, _TYPES[str(field.type)]) or isinstance(value, bool):
                raise InputError(f"shape {self.name}: {field.name} {value!r}: must be {field.type}")
        for name in ("tokens", "hidden", "experts", "top_k", "ffn_hidden_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"shape {self.name}: {name} {value}: must be >= 1")
        if self.dtype not in DTYPES:
            raise InputError(f"shape {self.name}: dtype {self.dtype!r}: one of {', '.join(DTYPES)}")
        if self.top_k > self.experts:
            raise InputError(
                f"shape {self.name}: top_k {self.top_k}: a token picks distinct experts, and there "
                f"are {self.experts}"
            )
        if self.skew < 0:
            raise InputError(f"shape {self.name}: skew {self.skew}: must be >= 0")
        if self.alignment not in ALIGNMENTS:
            raise InputError(f"shape {self.name}: alignment {self.alignment}: one of {ALIGNMENTS}")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the payload."""
        return self.hidden * DTYPES[self.dtype].itemsize

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a number of ranks over which the experts cannot be divided.

        Raises:
            InputError: names both numbers.
        """
        if self.experts % num_ranks:
            raise InputError(
                f"shape {self.name}: {self.experts} experts cannot be divided over {num_ranks} "
                f"ranks: give --ranks a divisor of {self.experts}"
            )

    def case(self, num_ranks: int, device: str) -> Case:
        """The shape as a routing problem of `num_ranks` ranks."""
        return Case(
            name=self.name,
            tokens=(self.tokens,) * num_ranks,
            num_experts=self.experts,
            top_k=self.top_k,
            hidden=self.hidden,
            dtype=DTYPES[self.dtype],
            alignment=self.alignment,
            skew=self.skew,
            device=device,
        )


@dataclass(frozen=True)
class Measurement:
    """A file of configs/benchmark/: shapes, and how they are measured unless the command says so.

    Attributes:
        shapes: of one MoE layer.
        trainings: of subjects that train.  With the shapes at least one, all with different names.
        subjects: names to measure; empty: all but layers and training.
        warmup, samples: untimed and timed rounds.
        timeout_s: seconds that a rank waits for the others.
    """

    shapes: tuple[Shape, ...] = ()
    trainings: tuple[TrainingShape, ...] = ()
    subjects: tuple[str, ...] = ()
    warmup: int | None = None
    samples: int | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        names = [shape.name for shape in self.shapes] + [t.name for t in self.trainings]
        if not names or len(names) != len(set(names)):
            raise InputError(
                f"give at least one shape or training, each with a name of its own: {names}"
            )
        for name, least in (("warmup", 0), ("samples", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise InputError(f"{name} {value!r}: must be a whole number of at least {least}")
        if type(self.timeout_s) not in (int, float) or not self.timeout_s > 0:
            raise InputError(f"timeout_s {self.timeout_s!r}: must be a positive number of seconds")


def load(name_or_path: str) -> Measurement:
    """Read a file of configs/benchmark/, by its name or its path.

    Raises:
        InputError: no such file, an unknown or missing key, or a value of the wrong form.
    """
    content = config_files.load(config_files.BENCHMARK, name_or_path)
    where = f"benchmark configuration {name_or_path}"
    _check_keys(where, content, Measurement)
    kinds: dict[str, Any] = {"shapes": Shape, "trainings": TrainingShape}
    lists: dict[str, Any] = {key: content.get(key, []) for key in kinds}
    for key, listed in lists.items():
        if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
            raise InputError(f"{where}: {key} must be a list of mappings")
        for number, item in enumerate(listed):
            _check_keys(f"{where}: {key[:-1]} {item.get('name', number)}", item, kinds[key])
    subjects = content.get("subjects", [])
    if not isinstance(subjects, list) or not all(isinstance(name, str) for name in subjects):
        raise InputError(f"{where}: subjects must be a list of names")
    values: dict[str, Any] = {**content, "subjects": tuple(subjects)}
    try:
        for key, listed in lists.items():
            values[key] = tuple(kinds[key](**item) for item in listed)
        return Measurement(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _check_keys(where: str, mapping: dict[str, Any], kind: type) -> None:
    """Refuse keys that `kind`, a dataclass, does not have, and the lack of those that it needs."""
    fields = dataclasses.fields(kind)
    unknown = [name for name in mapping if name not in {f.name for f in fields}]
    needed = [f for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    missing = [f.name for f in needed if f.name not in mapping]
    if unknown or missing:
        known = ", ".join(f.name for f in fields)
        wrong = f"unknown key {unknown[0]!r}" if unknown else f"no {missing[0]}"
        raise InputError(f"{where}: {wrong}: the keys are {known}")
