"""Shapes: what to measure, read from configs/benchmark/: sizes of a layer, models that train."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_ncclep.cli import config_files
from megatron_ncclep.config import ALIGNMENTS, MIN_TIMEOUT_S
from megatron_ncclep.errors import InputError
from megatron_ncclep.testing.cases import Case
from megatron_ncclep.training.settings import Settings

# fp64 is for gradient checks, not for training: not measured.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Fields of Shape that `model: NAME` fills in -> arguments in configs/model/NAME.yaml.
OF_A_MODEL = {
    "hidden": "hidden-size", "ffn_hidden_size": "moe-ffn-hidden-size", "experts": "num-experts",
    "top_k": "moe-router-topk",
}  # fmt: skip
# Set from the number of ranks.
BATCH = "global-batch-size"
# What a field may be, by its annotation.
TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "dict[str, Any]": (dict,),
    "None": (type(None),),
}  # fmt: skip


class Checked:
    """A dataclass that checks its fields: types, and metadata `least` and `choices`.

    Raises:
        InputError: names the field and its value.
    """

    def __post_init__(self) -> None:
        for known in dataclasses.fields(self):  # type: ignore[arg-type]
            value, must = getattr(self, known.name), known.metadata
            kinds = str(known.type).split(" | ")
            if not set(kinds) <= set(TYPES):
                continue
            where = f"{known.name} {value!r}"
            allowed = tuple(kind for name in kinds for kind in TYPES[name])
            if not isinstance(value, allowed) or isinstance(value, bool):
                raise InputError(f"{where}: must be {known.type}")
            # Not `<`: a NaN is no less than anything.
            if value is not None and "least" in must and not value >= must["least"]:
                raise InputError(f"{where}: must be >= {must['least']}")
            if value not in must.get("choices", (value,)):
                raise InputError(f"{where}: one of {', '.join(map(str, must['choices']))}")


def at_least(least: float, **default: Any) -> Any:
    """A field of a `Checked`, a number that is no less."""
    return field(metadata={"least": least}, **default)


def _one_of(choices: Iterable[Any], default: Any) -> Any:
    return field(metadata={"choices": tuple(choices)}, default=default)


@dataclass(frozen=True)
class Shape(Checked):
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
        ffn_hidden_size: of one expert; only layers and experts need it.
    """

    name: str
    tokens: int = at_least(1)
    hidden: int = at_least(1)
    experts: int = at_least(1)
    top_k: int = at_least(1)
    dtype: str = _one_of(DTYPES, "bfloat16")
    skew: float = at_least(0, default=0.0)
    alignment: int = _one_of(ALIGNMENTS, 1)
    ffn_hidden_size: int | None = at_least(1, default=None)

    def __str__(self) -> str:
        return f"shape {self.name}"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.experts:
            raise InputError(
                f"top_k {self.top_k}: a token picks distinct experts, and there are {self.experts}"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the payload."""
        return self.hidden * DTYPES[self.dtype].itemsize

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse, with an InputError, ranks over which the experts cannot be divided."""
        _check_experts(self, self.experts, num_ranks)

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
class TrainingShape(Checked):
    """A model and a batch, the same for every subject.

    Attributes:
        name: readable identity, unique in its file.
        model: name or path of a model file, as for `ncclep train --model`.
        changes: arguments laid over it.
        microbatches: of one rank in one step.
    """

    name: str
    model: str
    changes: dict[str, Any] = field(default_factory=dict)
    microbatches: int = at_least(1, default=1)

    def __str__(self) -> str:
        return f"training {self.name}"

    def __post_init__(self) -> None:
        super().__post_init__()
        config_files.check_arguments("changes", self.changes)
        if BATCH in self.changes:
            raise InputError(f"{BATCH} follows from microbatches and ranks: leave it out")

    def settings(self, num_ranks: int) -> Settings:
        """The checked settings of the model on `num_ranks` ranks, the experts divided over all.

        Raises:
            InputError: no such model, something in it or in the changes is wrong, or the experts
                cannot be divided over the ranks.
        """
        try:
            per_rank = Settings.load(self.model, self.changes)["micro-batch-size"]
            batch = {BATCH: per_rank * self.microbatches * num_ranks}
            settings = Settings.load(self.model, self.changes | batch)
        except InputError as error:
            raise InputError(f"{self}: {error}") from error
        _check_experts(self, settings["num-experts"], num_ranks)
        return settings


@dataclass(frozen=True)
class Measurement(Checked):
    """A file of configs/benchmark/: shapes, and how they are measured unless the command says so.

    Attributes:
        shapes: of one MoE layer.
        trainings: of subjects that train.  With the shapes at least one, all with different names.
        subjects: names to measure; empty: all but layers, experts and training.
        warmup, samples: untimed and timed rounds.
        timeout_s: seconds that a rank waits for the others.
    """

    shapes: tuple[Shape, ...] = ()
    trainings: tuple[TrainingShape, ...] = ()
    subjects: tuple[str, ...] = ()
    warmup: int | None = at_least(0, default=None)
    samples: int | None = at_least(1, default=None)
    timeout_s: float = at_least(MIN_TIMEOUT_S, default=60.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [shape.name for shape in self.shapes] + [t.name for t in self.trainings]
        if not names or len(names) != len(set(names)):
            raise InputError(
                f"give at least one shape or training, each with a name of its own: {names}"
            )


def load(name_or_path: str) -> Measurement:
    """Read a file of configs/benchmark/, by its name or its path.

    A shape may have `model: NAME` instead of the numbers of `OF_A_MODEL`.

    Raises:
        InputError: no such file, an unknown or missing key, or a value of the wrong form.
    """
    content: dict[str, Any] = dict(config_files.load(config_files.BENCHMARK, name_or_path))
    try:
        for key, kind in (("shapes", Shape), ("trainings", TrainingShape)):
            items = _listed(content, key, dict, "mappings")
            content[key] = tuple(_make(kind, key.removesuffix("s"), item) for item in items)
        content["subjects"] = tuple(_listed(content, "subjects", str, "names"))
        measurement: Measurement = _make(Measurement, None, content)
    except InputError as error:
        raise InputError(f"benchmark configuration {name_or_path}: {error}") from error
    return measurement


def _listed(content: dict[str, Any], key: str, kind: type, called: str) -> list[Any]:
    listed = content.get(key, [])
    if not isinstance(listed, list) or not all(isinstance(item, kind) for item in listed):
        raise InputError(f"{key} must be a list of {called}")
    return listed


def _make(kind: Any, called: str | None, mapping: dict[str, Any]) -> Any:
    """Make a dataclass of `mapping`, which errors call `called` and its name, if anything."""
    fields = dataclasses.fields(kind)
    try:
        if kind is Shape:
            mapping = _with_model(mapping)
        unknown = [name for name in mapping if name not in {f.name for f in fields}]
        needed = [f for f in fields if f.default is f.default_factory is dataclasses.MISSING]
        missing = [f.name for f in needed if f.name not in mapping]
        if unknown or missing:
            known = ", ".join(f.name for f in fields)
            wrong = f"unknown key {unknown[0]!r}" if unknown else f"no {missing[0]}"
            raise InputError(f"{wrong}: the keys are {known}")
        return kind(**mapping)
    except InputError as error:
        if called is None:
            raise
        raise InputError(f"{called} {mapping.get('name')}: {error}") from error


def _with_model(shape: dict[str, Any]) -> dict[str, Any]:
    """Fill in what `model: NAME` of a shape stands for; what the shape says itself wins."""
    if "model" not in shape:
        return shape
    own = {key: value for key, value in shape.items() if key != "model"}
    model = config_files.load("model", str(shape["model"]))
    if lacking := [name for name in OF_A_MODEL.values() if name not in model]:
        raise InputError(f"its model has no {lacking[0]}")
    return {field: model[name] for field, name in OF_A_MODEL.items()} | own


def _check_experts(shape: Shape | TrainingShape, num_experts: int, num_ranks: int) -> None:
    if num_experts % num_ranks:
        raise InputError(
            f"{shape}: {num_experts} experts cannot be divided over {num_ranks} ranks: give "
            f"--ranks a divisor of {num_experts}"
        )
