"""What ranks import, all at once and before they are forked: it takes each of them seconds."""

from __future__ import annotations

import importlib

# Variables where what is imported looks for GPUs: the process that forks ranks must not use them.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
MEGATRON = ("megatron.core.models.gpt.gpt_model", "megatron.core.optimizer")


def import_dynamo() -> None:
    """Import what torch imports when it is first told not to compile something."""
    importlib.import_module("torch._dynamo")


def import_megatron() -> None:
    """Import Megatron-Core as it comes."""
    for name in MEGATRON:
        importlib.import_module(name)


def import_megatron_on_cpu() -> None:
    """Import Megatron-Core after what makes it run on a CPU."""
    from megatron_ncclep import cpu

    cpu.enable()
    import_megatron()
