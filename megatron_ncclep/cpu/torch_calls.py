"""The parts of torch that Megatron-Core needs on a GPU: stand-ins for torch.cuda, gaps of gloo.

Each function below replaces one thing and says which module of Megatron-Core needs it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.errors import IntegrationError, UnsupportedError

CPU = torch.device("cpu")


def replace_all() -> None:
    """Replace functions and classes; `CpuMode` handles devices in arguments."""
    _run_compiled_functions_eagerly()
    _replace_streams_and_events()
    _replace_device_queries()
    _replace_random_state()
    _replace_profiling()
    _allow_uneven_collectives()
    _send_copies()
    _share_gloo_device()


# ---- torch.compile


def _run_compiled_functions_eagerly() -> None:
    """Run functions that are decorated with `torch.compile` without compiling them.

    Every version: megatron.core.jit decorates small functions with it, and compiling them on a CPU
    needs a C++ compiler and takes minutes.  torch reads the variable when a function is decorated,
    and child processes inherit it; the option applies when an already decorated function is called.
    """
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:
        setattr(sys.modules["torch._dynamo"].config, "disable", True)  # noqa: B010


# ---- torch.cuda


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: a CPU runs in program order, so there is nothing to record or to wait for."""


def no_op() -> Callable[..., None]:
    """Make a function that does nothing, a new one each time.

    Importing torch._dynamo builds tables of torch's functions; none may occur there twice.
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
    replace(
        torch.cuda,
        Stream=CpuStream,
        Event=CpuEvent,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        set_stream=no_op(),
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=no_op(),
    )
    replace(torch.Tensor, record_stream=no_op())


def _replace_device_queries() -> None:
    """Answer `torch.cuda.current_device()` with the CPU: it is used as `device=` everywhere.

    Every version: tensor_parallel.layers, distributed.param_and_grad_buffer, transformer.moe.
    """
    replace(torch.cuda, current_device=lambda: CPU, set_device=no_op())


def _replace_random_state() -> None:
    """Let the CPU's generator stand in for the GPU's.

    Every version: tensor_parallel.random (seeds per parallel rank, recompute).
    """

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)

    for module in (torch.cuda, torch.cuda.random):
        replace(module, get_rng_state=get_rng_state, set_rng_state=set_rng_state)
    replace(torch.cuda, manual_seed=torch.manual_seed)


def _replace_profiling() -> None:
    """Make no NVTX ranges, and reset no peak of memory; torch reports 0 bytes itself.

    Every version: utils (nvtx_range_push), pipeline_parallel, training.report_memory.
    """
    replace(torch.cuda.nvtx, range_push=no_op(), range_pop=no_op())
    replace(torch.cuda, reset_peak_memory_stats=no_op())


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
    rows as each rank happens to have (tensor_parallel.mappings), and gloo refuses that.  In torch
    2.6 gloo has no reduce_scatter at all.
    """
    all_gather_even, reduce_scatter_even = dist.all_gather, dist.reduce_scatter

    @functools.wraps(all_gather_even)
    def all_gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
        **further: Any,
    ) -> Any:
        if len({part.shape for part in tensor_list}) <= 1:
            return all_gather_even(tensor_list, tensor, group, async_op, **further)
        _refuse_async("all_gather", async_op)
        longest = max(len(part) for part in tensor_list)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in tensor_list]
        all_gather_even(gathered, padded, group, **further)
        for part, source in zip(tensor_list, gathered, strict=True):
            part.copy_(source[: len(part)])

    @functools.wraps(reduce_scatter_even)
    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
        **further: Any,
    ) -> Any:
        if async_op and len({part.shape for part in input_list}) <= 1:
            return reduce_scatter_even(output, input_list, op, group, async_op, **further)
        _refuse_async("reduce_scatter", async_op)
        everything = torch.cat(list(input_list))
        dist.all_reduce(everything, op, group, **further)
        output.copy_(everything.split([len(part) for part in input_list])[dist.get_rank(group)])

    for module in (dist, dist.distributed_c10d):
        replace(module, all_gather=all_gather, reduce_scatter=reduce_scatter)


def _send_copies() -> None:
    """Let `isend` send a copy: Megatron frees a tensor before it has been sent.

    0.16 and 0.17, pipeline_parallel.schedules with virtual stages (deallocate_pipeline_outputs and
    overlap_p2p_comm): on a GPU the stream keeps the order, but gloo sends from another thread.
    """
    isend = dist.isend

    @functools.wraps(isend)
    def isend_copy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return isend(tensor.clone(), *args, **kwargs)  # the work that it returns holds the copy

    for module in (dist, dist.distributed_c10d):
        replace(module, isend=isend_copy)


def _share_gloo_device() -> None:
    """Let all gloo groups that are made from now on move their bytes with one thread.

    Every version: parallel_state makes dozens of groups on each rank, most of them of that rank
    alone.  Each would have its own gloo device, whose thread wakes up a hundred times a second for
    as long as the group lives; on two cores these threads would take half the time.
    """
    group_class: Any = dist.ProcessGroupGloo
    make = group_class.__init__
    made: list[Any] = []  # the options of the first group, which torch makes as usual

    @functools.wraps(make)
    def make_with_device(
        self: Any, store: Any, rank: int, size: int, *further: Any, **named: Any
    ) -> None:
        if options := _with_device_of(made[0], further, named) if made else None:
            make(self, store, rank, size, options)
            return
        make(self, store, rank, size, *further, **named)
        if not made:
            made.append(getattr(self, "options", None))  # the group itself would never end

    replace(group_class, __init__=make_with_device)


def _with_device_of(first: Any, further: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Options of a new gloo group that uses another group's device.

    Args:
        first: the options of the other group.
        further, named: what torch passes besides the store, the rank and the size.

    Returns:
        None if a torch passes what this file does not know, or options with devices that the caller
        has chosen: such a group is made as torch wants it, and training is only slower.
    """
    if len(further) > 1:
        return None
    try:
        options = type(first)()
        options._devices, options._threads = first._devices, first._threads
        for name, value in {**dict(zip(["timeout"], further, strict=False)), **named}.items():
            setattr(options, "_timeout" if name == "timeout" else name, value)
    except (AttributeError, TypeError):  # a name, or a kind of value, that options do not have
        return None
    return options


def _refuse_async(collective: str, async_op: bool) -> None:
    if async_op:
        raise UnsupportedError(
            f"{collective} of tensors with different lengths and async_op=True: gloo cannot, and "
            "its stand-in here is synchronous"
        )


def replace(owner: Any, **stand_ins: Any) -> None:
    """Set attributes of `owner` that must exist already.

    Raises:
        IntegrationError: one does not exist, so this file was not written for the release.
    """
    for name, stand_in in stand_ins.items():
        if not hasattr(owner, name):
            raise IntegrationError(
                f"{getattr(owner, '__name__', owner)}.{name} does not exist, so this file cannot "
                "put a stand-in for the CPU there: use a tested release of Megatron-Core and torch"
            )
        setattr(owner, name, stand_in)
