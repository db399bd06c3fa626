"""Dispatchers by name: Megatron-Core's own, and this package's with each of its engines."""

from __future__ import annotations

from typing import Any

from megatron_ncclep.benchmark.megatron_setup import DispatcherChoice
from megatron_ncclep.engines import ENGINES

# Yardsticks of Megatron-Core: our name -> dispatcher type and further TransformerConfig fields.
MEGATRON: dict[str, tuple[str, dict[str, Any]]] = {
    "alltoall": ("alltoall", {}),
    "alltoall_fused": ("alltoall", {"moe_permute_fusion": True}),
    "allgather": ("allgather", {}),
    "flex_deepep": ("flex", {"moe_flex_dispatcher_backend": "deepep"}),
    "flex_hybridep": ("flex", {"moe_flex_dispatcher_backend": "hybridep"}),
    "flex_ncclep": ("flex", {"moe_flex_dispatcher_backend": "ncclep"}),
}
OUR_DISPATCHER = "ncclep:"


def dispatcher_names() -> list[str]:
    """All names, in the order of the table."""
    return [*(OUR_DISPATCHER + engine for engine in ENGINES), *MEGATRON]


def dispatcher_choice(name: str) -> DispatcherChoice:
    """What one of `dispatcher_names` means."""
    if name.startswith(OUR_DISPATCHER):
        return DispatcherChoice("ncclep", {}, name.removeprefix(OUR_DISPATCHER))
    return DispatcherChoice(*MEGATRON[name])
