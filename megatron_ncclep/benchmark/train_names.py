"""Training steps by name, `train:DISPATCHER[:grouped][:static][:GRAPHS]`, and what cannot be.

DISPATCHER      as for whole layers: alltoall_fused, ncclep:native, ...
grouped         this package's experts in place of Megatron-Core's (ncclep only)
static          a fixed number of received rows (ncclep only), which graphs need and imply
GRAPHS          full_iteration   forward and backward as one CUDA graph (ncclep with grouped)
                partial_graphs   Megatron-Core's graphs of attention, router and preprocessing
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass

from megatron_ncclep.benchmark.dispatchers import (
    OUR_DISPATCHER,
    dispatcher_choice,
    dispatcher_names,
)
from megatron_ncclep.benchmark.megatron_setup import DispatcherChoice
from megatron_ncclep.benchmark.train_shapes import TrainingShape
from megatron_ncclep.errors import InputError

TRAIN = "train:"
GROUPED, STATIC = "grouped", "static"
FULL_ITERATION, PARTIAL_GRAPHS = "full_iteration", "partial_graphs"
GRAPHS = (FULL_ITERATION, PARTIAL_GRAPHS)
GRAMMAR = "train:DISPATCHER[:grouped][:static][:full_iteration or :partial_graphs]"
# Sizes its buffers by a factor of a routing that must be known beforehand.
NOT_TRAINED = ("flex_ncclep",)
# Whose losses the others are compared with.
CONTROL = "train:alltoall"


@dataclass(frozen=True)
class TrainChoice:
    """How one subject trains.

    Attributes:
        name: as on the command line.
        dispatcher: of its MoE layers.
        grouped: this package's experts, not Megatron-Core's.
        static: received tensors have a fixed number of rows.
        graphs: one of `GRAPHS`; None: no CUDA graphs.
    """

    name: str
    dispatcher: DispatcherChoice
    grouped: bool = False
    static: bool = False
    graphs: str | None = None

    @property
    def ours(self) -> bool:
        """Whether the dispatcher is this package's."""
        return self.dispatcher.engine is not None

    def without_graphs(self) -> TrainChoice:
        """The same, launched kernel by kernel."""
        return dataclasses.replace(self, name=f"{self.name} without graphs", graphs=None)


def train_names() -> list[str]:
    """The names of all subjects without variants."""
    return [TRAIN + name for name in dispatcher_names() if name not in NOT_TRAINED]


def parse_train(name: str) -> TrainChoice:
    """Read the name of a subject that trains.

    Raises:
        InputError: unknown words, or variants that do not go together.
    """
    base = next(
        (known for known in train_names() if name == known or name.startswith(f"{known}:")), None
    )
    if base is None or "@" in name:
        raise InputError(
            f"unknown subject {name!r}: write {GRAMMAR}, such as {CONTROL} or "
            f"train:ncclep:native:grouped:full_iteration; without variants there are "
            f"{', '.join(train_names())}"
        )
    words = name[len(base) :].split(":")[1:]
    ordered = [word for word in (GROUPED, STATIC, *GRAPHS) if word in words]
    graphs = [word for word in words if word in GRAPHS]
    if words != ordered or len(graphs) > 1:
        raise InputError(f"subject {name!r}: write {GRAMMAR}, in this order")
    choice = TrainChoice(
        name,
        dispatcher_choice(base.removeprefix(TRAIN)),
        grouped=GROUPED in words,
        static=STATIC in words or (bool(graphs) and base.startswith(TRAIN + OUR_DISPATCHER)),
        graphs=graphs[0] if graphs else None,
    )
    if problem := _contradiction(choice, words):
        raise InputError(f"subject {name!r}: {problem}")
    return choice


def _contradiction(choice: TrainChoice, words: list[str]) -> str | None:
    """Say which variants do not go together, if any."""
    for word in (GROUPED, STATIC):
        if word in words and not choice.ours:
            return f"{word} is of this package's dispatcher: write train:ncclep:ENGINE:{word}"
    if choice.graphs == FULL_ITERATION and not choice.ours:
        return (
            "this dispatcher's host waits for the numbers of rows, which one graph of an iteration "
            f"cannot have: write {PARTIAL_GRAPHS}"
        )
    if choice.graphs == FULL_ITERATION and not choice.grouped:
        return (
            "Megatron-Core's experts take the numbers of rows on the host, which one graph of an "
            f"iteration cannot have: write {GROUPED}:{FULL_ITERATION}"
        )
    if choice.graphs and STATIC in words:
        return f"{choice.graphs} implies {STATIC}: leave it out"
    return None


def train_obstacle(choice: TrainChoice, device: str, shape: TrainingShape) -> str | None:
    """Say why `choice` cannot train on `device`, as far as one process can tell; None if it can."""
    if importlib.util.find_spec("megatron") is None:
        return "Megatron-Core is not installed: pip install 'megatron-ncclep[train]'"
    if choice.graphs and device != "cuda":
        return f"a CPU has no CUDA graphs: leave {choice.graphs} out"
    if not shape.needs_engine:
        return None
    if device != "cuda":
        return (
            f"{shape.name} is a model of TransformerEngine's modules, which need a GPU: use "
            "--config smoke, or a file with transformer-impl: local"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        return (
            f"{shape.name} needs TransformerEngine, which is not installed: "
            "pip install 'megatron-ncclep[te]'"
        )
    return None


def is_train(name: str) -> bool:
    """Whether a subject's name is that of one that trains."""
    return name.startswith(TRAIN)
