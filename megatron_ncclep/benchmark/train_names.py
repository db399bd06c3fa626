"""Training steps by name: `train:` and a variant of a dispatcher (variants.py)."""

from __future__ import annotations

import importlib.util

from megatron_ncclep.benchmark.dispatchers import dispatcher_names
from megatron_ncclep.benchmark.train_shapes import TrainingShape
from megatron_ncclep.benchmark.variants import (
    FULL_ITERATION,
    NO_GRAPHS_ON_CPU,
    PARTIAL_GRAPHS,
    Grammar,
    Variant,
)

TRAIN = "train:"
# Sizes its buffers by a factor of a routing that must be known beforehand.
NOT_TRAINED = ("flex_ncclep",)
GRAMMAR = Grammar(
    TRAIN,
    tuple(name for name in dispatcher_names() if name not in NOT_TRAINED),
    (FULL_ITERATION, PARTIAL_GRAPHS),
    steps=True,
)
# Whose losses the others are compared with.
CONTROL = "train:alltoall"


def parse_train(name: str) -> Variant:
    """Read the name of a subject that trains.

    Raises:
        InputError: unknown words, or variants that do not go together.
    """
    return GRAMMAR.parse(name)


def train_obstacle(choice: Variant, device: str, shape: TrainingShape) -> str | None:
    """Say why `choice` cannot train on `device`, as far as one process can tell; None if it can."""
    if importlib.util.find_spec("megatron") is None:
        return "Megatron-Core is not installed: pip install 'megatron-ncclep[train]'"
    if choice.captured and device != "cuda":
        return NO_GRAPHS_ON_CPU.format(choice.captured)
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
