"""Shapes of trainings, and files that may hold them: benchmarks/configs/, configs/benchmark/."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from megatron_ncclep.benchmark import shapes
from megatron_ncclep.benchmark.shapes import Shape, check_experts
from megatron_ncclep.cli import config_files
from megatron_ncclep.cli.config_files import Checked, at_least, one_of
from megatron_ncclep.errors import InputError
from megatron_ncclep.training.settings import Settings

CONFIGS = Path(__file__).parent / "configs"
BATCH = "global-batch-size"  # set from the number of ranks
BALANCED = "balanced"


@dataclass(frozen=True)
class TrainingShape(Checked):
    """A model and a batch, the same for every subject."""

    name: str  # readable, unique in its file
    model: str  # name or path of a model file, as for `ncclep train --model`
    changes: dict[str, Any] = field(default_factory=dict)  # arguments that override it
    # Number of ranks -> further ones.
    on_ranks: dict[int, dict[str, Any]] = field(default_factory=dict)
    microbatches: int = at_least(1, default=1)  # of one rank in one step
    vocab_size: int | None = at_least(1, default=None)  # of the model; None: the text's
    routing: str = one_of(("natural", BALANCED), "natural")  # see routers.py
    # Steps of the control, 5 at least, whose weights subjects begin with; 0: the initial ones.
    trained_steps: int = at_least(0, default=0)
    published: str = ""  # a rate that others have published, with what differs and the source

    def __str__(self) -> str:
        return f"training {self.name}"

    def __post_init__(self) -> None:
        super().__post_init__()
        on_ranks: Any = self.on_ranks  # as the file has it
        listed = on_ranks.values() if isinstance(on_ranks, dict) else [None]
        for changes in (self.changes, *listed):
            if not isinstance(changes, dict):
                raise InputError(f"on_ranks {on_ranks}: must be numbers of ranks -> arguments")
            config_files.check_arguments("changes", changes)
            if BATCH in changes:
                raise InputError(f"{BATCH} follows from microbatches and ranks: leave it out")

    def settings(self, num_ranks: int) -> Settings:
        """The checked settings of the model on `num_ranks` ranks, the experts divided over all.

        Raises:
            InputError: no such model, a wrong argument, experts that cannot be divided, or no such
                number of ranks.
        """
        try:
            if self.on_ranks and num_ranks not in self.on_ranks:
                there = ", ".join(map(str, self.on_ranks))
                raise InputError(f"{num_ranks} ranks: its sizes are for {there}: give --ranks")
            changes = self.changes | self.on_ranks.get(num_ranks, {})
            per_rank = Settings.load(self.model, changes)["micro-batch-size"]
            batch = {BATCH: per_rank * self.microbatches * num_ranks}
            settings = Settings.load(self.model, changes | batch)
        except InputError as error:
            raise InputError(f"{self}: {error}") from error
        check_experts(self, settings["num-experts"], num_ranks)
        return settings


@dataclass(frozen=True)
class Measurement(shapes.Measurement):
    """A file with shapes, trainings, or both."""

    trainings: tuple[TrainingShape, ...] = ()  # for subjects that train

    ITEMS: ClassVar[dict[str, type]] = {"shapes": Shape, "trainings": TrainingShape}


def names() -> list[str]:
    """The names of the files that `load` finds."""
    own = {path.stem for path in CONFIGS.glob("*.yaml")}
    return sorted(own | set(config_files.names(config_files.BENCHMARK)))


def load(name_or_path: str) -> Measurement:
    """Read a file of benchmarks/configs/ or configs/benchmark/, or one at a path.

    Raises:
        InputError: see `shapes.load`.
    """
    own = str(CONFIGS / f"{name_or_path}.yaml")  # perhaps too long for pathlib
    found: Measurement = shapes.load(own if os.path.isfile(own) else name_or_path, Measurement)
    return found
