"""Whole MoELayers by name: `layer:` and a variant of a dispatcher (variants.py)."""

from __future__ import annotations

from megatron_ncclep.benchmark.dispatchers import dispatcher_names
from megatron_ncclep.benchmark.variants import (
    FULL_ITERATION,
    NO_GRAPHS_ON_CPU,
    Grammar,
    Variant,
)

LAYER = "layer:"
GRAMMAR = Grammar(LAYER, tuple(dispatcher_names()), (FULL_ITERATION,))


def parse_layer(name: str) -> Variant:
    """Read the name of a subject that is a whole layer.

    Raises:
        InputError: unknown words, or variants that do not go together.
    """
    return GRAMMAR.parse(name)


def layer_obstacle(variant: Variant, device: str) -> str | None:
    """Say why `variant` cannot run on `device`, as far as its name tells; None if it can."""
    if variant.graphs and device != "cuda":
        return NO_GRAPHS_ON_CPU.format(variant.graphs)
    return None


def is_layer(name: str) -> bool:
    """Whether a subject's name is that of a whole layer."""
    return name.startswith(LAYER)
