"""Replaces the obstacles to a CPU in Megatron itself: megatron.core and megatron.training.

Each function below replaces one thing and says which releases and modules need it.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch

from megatron_ncclep.cpu.torch_calls import no_op, replace
from megatron_ncclep.errors import UnsupportedError


def replace_in_core() -> None:
    """Replace the obstacles in `megatron.core`; imports it."""
    _redirect_rng_tracker()
    _define_missing_gemm()
    _convert_split_sizes()
    _allow_sequence_parallel_norm()
    _recognise_no_inference_linear()


def replace_in_training() -> None:
    """Replace the obstacles in `megatron.training`; imports it."""
    _pretend_one_device()
    _allow_no_cuda()
    _skip_fused_kernels()


# ---- megatron.core


def _redirect_rng_tracker() -> None:
    """Let the tracker of random states fork the CPU's generator.

    Every version, tensor_parallel.random: its own setter queues the work until CUDA starts.  It
    asks for a state that a CUDA graph can hold when the options ask for such graphs.
    """

    def get_rng_state(
        device: Any = "cuda", clone: bool = False, graph_safe: bool = False
    ) -> torch.Tensor:
        if graph_safe:
            raise UnsupportedError(
                "the options ask for CUDA graphs (such as --cuda-graph-impl), and a CPU has none: "
                "leave them out to train with --cpu"
            )
        return torch.get_rng_state()

    replace(
        importlib.import_module("megatron.core.tensor_parallel.random"),
        _get_cuda_rng_state=get_rng_state,
        _set_cuda_rng_state=lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(
            new_state
        ),
    )


def _define_missing_gemm() -> None:
    """Define a name that the router's GEMM tests for None without having imported it.

    0.16.1 only, transformer.moe.moe_utils without TransformerEngine: NameError.
    """
    moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010


def _convert_split_sizes() -> None:
    """Turn the `alltoall` dispatcher's split sizes into numpy arrays on the CPU too.

    Every version, transformer.moe.token_dispatcher: the conversion is part of the copy to the CPU,
    which skips tensors that are already there, and `all_to_all_single` does not accept tensors.
    """
    token_dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    original = token_dispatcher.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        moved = original(tensor, as_numpy, *args, **kwargs)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    replace(token_dispatcher, maybe_move_tensor_to_cpu=maybe_move_tensor_to_cpu)


def _allow_sequence_parallel_norm() -> None:
    """Let torch's norms be used with sequence parallelism, their gradients marked for reduction.

    Every version, tensor parallelism > 1 only: transformer.torch_norm refuses it; the norms that
    allow it come from TransformerEngine and Apex.
    """
    norm = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    original = norm.__new__

    @functools.wraps(original)
    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        sequence_parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            module = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in module.parameters():
            # finalize_model_grads sums these gradients over the tensor-parallel ranks.
            setattr(parameter, "sequence_parallel", sequence_parallel)  # noqa: B010
        return module

    replace(norm, __new__=new)


def _recognise_no_inference_linear() -> None:
    """Say of every linear layer that it is none of those for inference.

    From 0.20 on, transformer.multi_token_prediction without TransformerEngine: their classes are
    mocks, and `isinstance` with a mock is a TypeError.
    """
    prediction = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    if hasattr(prediction, "is_inference_column_parallel_linear"):
        replace(prediction, is_inference_column_parallel_linear=lambda module: False)


# ---- megatron.training


def _pretend_one_device() -> None:
    """Count one CUDA device, of an architecture that needs no environment variables.

    All versions that have megatron.training: initialize skips model parallelism without a device;
    with tensor or context parallelism arguments.validate_args asks for the architecture, and
    requires CUDA_DEVICE_MAX_CONNECTIONS=1 for those before the tenth.
    """
    properties = SimpleNamespace(name="CPU", major=10, minor=0)
    replace(
        torch.cuda,
        device_count=lambda: 1,
        get_device_properties=lambda device=None: properties,
        get_device_capability=lambda device=None: (properties.major, properties.minor),
    )


def _allow_no_cuda() -> None:
    """Start with the switch that megatron.training has for CPU runs but never sets.

    All versions that have megatron.training: `pretrain` calls `initialize_megatron` without it.
    """
    initialize = importlib.import_module("megatron.training.initialize").initialize_megatron
    replace(
        importlib.import_module("megatron.training.training"),
        initialize_megatron=functools.partial(initialize, allow_no_cuda=True),
    )


def _skip_fused_kernels() -> None:
    """Do not compile the fused kernels of the models before Megatron-Core.

    A checkout of 0.16 only (its wheel has no megatron.training): megatron.training.initialize asks
    nvcc for its version before it checks whether any of them is needed.
    """
    initialize = importlib.import_module("megatron.training.initialize")
    if hasattr(initialize, "fused_kernels"):
        replace(initialize.fused_kernels, load=no_op())
