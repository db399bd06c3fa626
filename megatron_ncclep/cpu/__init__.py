"""Let Megatron-Core train on a CPU with gloo: `enable()`, and `enable_training_scripts()` on top.

Megatron-Core 0.16.1 to 0.20.0 assumes that there is a GPU, although almost nothing in its local
(not TransformerEngine) modules needs one.  torch_calls.py and megatron_calls.py replace the
obstacles, one in each function.  Nothing here is used on a machine that has a GPU, and importing
this package changes nothing.

A CPU run cannot show everything: streams and events are stand-ins here, so a missing
synchronisation only shows on a GPU.
"""

from __future__ import annotations

import torch

from megatron_ncclep.cpu import megatron_calls, torch_calls
from megatron_ncclep.errors import UnsupportedError


def enable() -> None:
    """Make `megatron.core` build and train models on this process's CPU.

    Not collective; once per process, before models are built (megatron may be imported already).
    Further calls do nothing.  Only the calling thread's `device="cuda"` is redirected.

    Raises:
        UnsupportedError: this machine has a GPU.
        IntegrationError: a function that must be replaced is not where it is expected.
    """
    if torch.cuda.is_available():
        raise UnsupportedError(
            f"--cpu was given, but this process sees {torch.cuda.device_count()} "
            "GPU(s): leave out --cpu to train on them, or hide them with CUDA_VISIBLE_DEVICES=''"
        )
    if enabled():
        return
    torch_calls.replace_all()
    megatron_calls.replace_in_core()
    torch_calls.CpuMode().__enter__()


def enabled() -> bool:
    """Whether `enable()` was called in this process."""
    return torch.cuda.Stream is torch_calls.CpuStream


def enable_training_scripts() -> None:
    """Call `enable()`, then make `megatron.training` (`pretrain_gpt.py` and others) run too.

    The script still needs `--distributed-backend gloo --use-cpu-initialization
    --transformer-impl local` and the options that turn off fused CUDA kernels.

    Raises:
        UnsupportedError, IntegrationError: as `enable()`.
    """
    enable()
    megatron_calls.replace_in_training()
