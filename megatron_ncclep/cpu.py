"""Let Megatron-Core train on a CPU with gloo: `enable()`, and `enable_training_scripts()` on top.

Megatron-Core 0.16.1 to 0.19.2 takes for granted that there is a GPU, although nearly nothing in its
local (not TransformerEngine) modules needs one.  Each function below replaces one thing that stands
in the way and says which module needs it.  Nothing here is used on a machine that has a GPU, and
importing this file changes nothing.

What a CPU run cannot show: streams and events are stand-ins here, so a missing synchronisation is
only seen on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.errors import IntegrationError, UnsupportedError

CPU = torch.device("cpu")


def enable() -> None:
    """Make `megatron.core` build and train models on this process's CPU.

    Not collective; once per process, before models are built (megatron may be imported already).
    Further calls do nothing.  Only the calling thread's `device="cuda"` is redirected.

    Raises:
        UnsupportedError: this machine has a GPU.
        IntegrationError: something that must be replaced is not where it is expected.
    """
    if torch.cuda.is_available():
        raise UnsupportedError(
            f"running on the CPU was asked for, but this process sees {torch.cuda.device_count()} "
            "GPU(s): leave out --cpu to train on them, or hide them with CUDA_VISIBLE_DEVICES=''"
        )
    if enabled():
        return
    _run_compiled_functions_eagerly()
    _replace_streams_and_events()
    _replace_device_queries()
    _replace_random_state()
    _replace_profiling()
    _allow_uneven_collectives()
    _send_copies()
    _redirect_rng_tracker()
    _define_missing_gemm()
    _convert_split_sizes()
    _allow_sequence_parallel_norm()
    CpuMode().__enter__()


def enabled() -> bool:
    """Whether `enable()` was called in this process."""
    return torch.cuda.Stream is CpuStream


def enable_training_scripts() -> None:
    """Call `enable()`, then make `megatron.training` (`pretrain_gpt.py` and its like) run too.

    The script still has to be told `--distributed-backend gloo --use-cpu-initialization
    --transformer-impl local` and to leave the fused CUDA kernels alone.

    Raises:
        UnsupportedError, IntegrationError: as `enable()`.
    """
    enable()
    _pretend_one_device()
    _allow_no_cuda()
    _skip_fused_kernels()


# ---- torch.compile


def _run_compiled_functions_eagerly() -> None:
    """Run what is decorated with `torch.compile` as it stands.

    Every version: megatron.core.jit decorates small functions with it, and on a CPU that needs a
    C++ compiler and minutes.  The variable is read when a function is decorated, and inherited by
    child processes; the option counts when an already decorated function is called.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:
        setattr(sys.modules["torch._dynamo"].config, "disable", True)  # noqa: B010


# ---- torch.cuda


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: a CPU runs in program order, so there is nothing to record or to wait for."""


def _no_op() -> Callable[..., None]:
    """Make a function that does nothing, a new one each time.

    Importing torch._dynamo builds tables of torch's functions; none may stand there twice.
    """
    return lambda *args, **kwargs: None


class CpuEvent:
    """Stands in for torch.cuda.Event: everything before it has always happened already."""

    record = wait = synchronize = __init__ = _nothing

    def query(self) -> bool:
        """Return True: the work before the event is done."""
        return True

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Return 0.0 milliseconds."""
        return 0.0


class CpuStream:
    """Stands in for torch.cuda.Stream; all streams are the one program order, hence equal."""

    cuda_stream = 0
    device = CPU
    wait_stream = wait_event = synchronize = __init__ = _nothing

    def record_event(self, event: Any = None) -> Any:
        """Return `event`, or a new one."""
        return CpuEvent() if event is None else event

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuStream)

    def __hash__(self) -> int:
        return hash(CpuStream)


def _replace_streams_and_events() -> None:
    """Give torch.cuda streams and events that do nothing.

    Every version: transformer.moe.token_dispatcher and shared_experts, distributed's gradient
    buckets, pipeline_parallel's schedules (the 1F1B overlap most of all), timers.  `record_stream`
    is replaced on the class: it looks at the stream before a `TorchFunctionMode` sees the call.
    """
    stream = CpuStream()
    _replace(
        torch.cuda,
        Stream=CpuStream,
        Event=CpuEvent,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        set_stream=_no_op(),
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=_no_op(),
    )
    _replace(torch.Tensor, record_stream=_no_op())


def _replace_device_queries() -> None:
    """Answer `torch.cuda.current_device()` with the CPU: it is used as `device=` everywhere.

    Every version: tensor_parallel.layers, distributed.param_and_grad_buffer, transformer.moe.
    """
    _replace(torch.cuda, current_device=lambda: CPU, set_device=_no_op())


def _replace_random_state() -> None:
    """Let the one generator of the CPU stand for that of the GPU.

    Every version: tensor_parallel.random (seeds per parallel rank, recompute).
    """

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    for module in (torch.cuda, torch.cuda.random):
        _replace(module, get_rng_state=get_rng_state, set_rng_state=set_rng_state)
    _replace(torch.cuda, manual_seed=torch.manual_seed)


def _replace_profiling() -> None:
    """Report no GPU memory and no NVTX ranges.

    Every version: utils (nvtx_range_push), pipeline_parallel, training.report_memory.
    """

    _replace(torch.cuda.nvtx, range_push=_no_op(), range_pop=_no_op())
    _replace(torch.cuda, empty_cache=_no_op(), reset_peak_memory_stats=_no_op())
    _replace(torch.cuda, memory_stats=lambda device=None: {})
    for name in ("memory_allocated", "memory_reserved"):
        _replace(torch.cuda, **{name: lambda device=None: 0, f"max_{name}": lambda device=None: 0})


class CpuMode(torch.overrides.TorchFunctionMode):
    """While entered, torch calls of this thread that name a CUDA device use the CPU.

    Every version: literal `device="cuda"` in optimizer, clip_grads, schedules, MoE metrics;
    `.cuda()` on models; asserts that `Tensor.type()` is one of `torch.cuda.*Tensor` in
    optimizer.optimizer.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call `func` with its CUDA devices replaced."""
        kwargs = dict(kwargs or {})
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):  # called without a new type
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _names_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


# ---- gloo


def _allow_uneven_collectives() -> None:
    """Let `all_gather` and `reduce_scatter` take tensors of different lengths, as NCCL does.

    Every version, expert tensor parallelism > 1 only: the `alltoall` dispatcher gathers as many
    rows as each rank happens to have (tensor_parallel.mappings), and gloo refuses that.
    """
    all_gather_even, reduce_scatter_even = dist.all_gather, dist.reduce_scatter

    @functools.wraps(all_gather_even)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({part.shape for part in tensor_list}) <= 1:
            return all_gather_even(tensor_list, tensor, group=group, async_op=async_op)
        _refuse_async("all_gather", async_op)
        longest = max(len(part) for part in tensor_list)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        all_gather_even(gathered, padded, group=group)
        for part, source in zip(tensor_list, gathered, strict=True):
            part.copy_(source[: len(part)])

    @functools.wraps(reduce_scatter_even)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({part.shape for part in input_list}) <= 1:
            return reduce_scatter_even(output, input_list, op=op, group=group, async_op=async_op)
        _refuse_async("reduce_scatter", async_op)
        everything = torch.cat(list(input_list))
        dist.all_reduce(everything, op=op, group=group)
        output.copy_(everything.split([len(part) for part in input_list])[dist.get_rank(group)])

    for module in (dist, dist.distributed_c10d):
        _replace(module, all_gather=all_gather, reduce_scatter=reduce_scatter)


def _send_copies() -> None:
    """Let `isend` send a copy: Megatron frees what it has sent before it has left.

    0.16 and 0.17, pipeline_parallel.schedules with virtual stages (deallocate_pipeline_outputs and
    overlap_p2p_comm): on a GPU the stream keeps the order, but gloo sends from another thread.
    """
    isend = dist.isend

    @functools.wraps(isend)
    def isend_copy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return isend(tensor.clone(), *args, **kwargs)  # the work that it returns holds the copy

    for module in (dist, dist.distributed_c10d):
        _replace(module, isend=isend_copy)


def _refuse_async(collective: str, async_op: bool) -> None:
    if async_op:
        raise UnsupportedError(
            f"{collective} of tensors with different lengths and async_op=True: gloo cannot, and "
            "its stand-in here is synchronous"
        )


# ---- megatron.core


def _redirect_rng_tracker() -> None:
    """Let the tracker of random states fork the CPU's generator.

    Every version, tensor_parallel.random: its own setter queues the work until CUDA starts.  A
    state that a CUDA graph can hold is asked for when the options want such graphs.
    """

    def get_rng_state(
        device: Any = "cuda", clone: bool = False, graph_safe: bool = False
    ) -> torch.Tensor:
        if graph_safe:
            raise UnsupportedError(
                "CUDA graphs were asked for (--cuda-graph-impl, say), and a CPU has none: leave "
                "that out to train with --cpu"
            )
        return torch.get_rng_state()

    _replace(
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
    which leaves tensors alone that are there already, and `all_to_all_single` takes no tensors.
    """
    token_dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    original = token_dispatcher.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        moved = original(tensor, as_numpy=as_numpy, record_stream=record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    _replace(token_dispatcher, maybe_move_tensor_to_cpu=maybe_move_tensor_to_cpu)


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

    _replace(norm, __new__=new)


# ---- megatron.training


def _pretend_one_device() -> None:
    """Count one CUDA device, of an architecture that needs nothing of its surroundings.

    All versions that have megatron.training: initialize skips model parallelism without a device;
    with tensor or context parallelism arguments.validate_args asks for the architecture, and wants
    CUDA_DEVICE_MAX_CONNECTIONS=1 of those before the tenth.
    """
    properties = SimpleNamespace(name="CPU", major=10, minor=0)
    _replace(
        torch.cuda,
        device_count=lambda: 1,
        get_device_properties=lambda device=None: properties,
        get_device_capability=lambda device=None: (properties.major, properties.minor),
    )


def _allow_no_cuda() -> None:
    """Start with the switch that megatron.training has for CPU runs but passes on from nowhere.

    All versions that have megatron.training: `pretrain` calls `initialize_megatron` without it.
    """
    initialize = importlib.import_module("megatron.training.initialize").initialize_megatron
    _replace(
        importlib.import_module("megatron.training.training"),
        initialize_megatron=functools.partial(initialize, allow_no_cuda=True),
    )


def _skip_fused_kernels() -> None:
    """Do not compile the fused kernels of the models before Megatron-Core.

    A checkout of 0.16 only (its wheel has no megatron.training): megatron.training.initialize asks
    nvcc for its version before it looks at whether any of them is wanted.
    """
    initialize = importlib.import_module("megatron.training.initialize")
    if hasattr(initialize, "fused_kernels"):
        _replace(initialize.fused_kernels, load=_no_op())


def _replace(owner: Any, **stand_ins: Any) -> None:
    """Set attributes of `owner` that must exist already.

    Raises:
        IntegrationError: one does not, so that the release is not one this file was written for.
    """
    for name, stand_in in stand_ins.items():
        if not hasattr(owner, name):
            raise IntegrationError(
                f"{getattr(owner, '__name__', owner)}.{name} does not exist, so this file cannot "
                "put a stand-in for the CPU there: use a tested release of Megatron-Core and torch"
            )
        setattr(owner, name, stand_in)
