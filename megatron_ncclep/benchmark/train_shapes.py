"""Shapes of training steps: a model file with changes, read from configs/benchmark/."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_ncclep import config_files
from megatron_ncclep.errors import InputError
from megatron_ncclep.training.settings import Settings

# Set from the number of ranks.
BATCH = "global-batch-size"


@dataclass(frozen=True)
class TrainingShape:
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
    microbatches: int = 1

    def __post_init__(self) -> None:
        where = f"training {self.name}"
        for name in ("name", "model"):
            if not isinstance(getattr(self, name), str):
                raise InputError(f"{where}: {name} {getattr(self, name)!r}: must be a text")
        if type(self.microbatches) is not int or self.microbatches < 1:
            raise InputError(f"{where}: microbatches {self.microbatches!r}: must be at least 1")
        if not isinstance(self.changes, dict):
            raise InputError(f"{where}: changes must be a mapping of arguments to values")
        config_files.check_arguments(where, self.changes)
        if BATCH in self.changes:
            raise InputError(f"{where}: {BATCH} follows from microbatches and ranks: leave it out")

    @property
    def needs_engine(self) -> bool:
        """Whether the model is made of TransformerEngine's modules.

        Raises:
            InputError: see `settings`.
        """
        return bool(self._load({})["transformer-impl"] == "transformer_engine")

    def settings(self, num_ranks: int) -> Settings:
        """The checked settings of the model on `num_ranks` ranks, the experts divided over all.

        Raises:
            InputError: no such model, something in it or in the changes is wrong, or the experts
                cannot be divided over the ranks.
        """
        per_rank = self._load({})["micro-batch-size"] * self.microbatches
        settings = self._load({BATCH: per_rank * num_ranks})
        if settings["num-experts"] % num_ranks:
            raise InputError(
                f"training {self.name}: {settings['num-experts']} experts cannot be divided over "
                f"{num_ranks} ranks: give --ranks a divisor of {settings['num-experts']}"
            )
        return settings

    def _load(self, more: dict[str, Any]) -> Settings:
        try:
            return Settings.load(self.model, {**self.changes, **more})
        except InputError as error:
            raise InputError(f"training {self.name}: {error}") from error
