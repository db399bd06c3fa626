"""Low-latency mode of the native engine: `csrc/native/low_latency/protocol.h`.

No call waits for a device or for another host, so a CUDA graph can hold any number of them and be
replayed as long as dispatch and combine alternate.  A dispatch returns the window itself, into
which the other ranks write: nothing is copied, and its addresses never change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.low_latency_types import LowLatencyRows, LowLatencySizes, Tokens
from megatron_ncclep.engines.native.availability import most_sms
from megatron_ncclep.engines.native.buffers import aligned, try_allocate
from megatron_ncclep.engines.native.group import ROW_BYTES, NativeGroup, Refusing
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import groups_with_low_latency
from megatron_ncclep.ranks.resources import Resource

if TYPE_CHECKING:
    from megatron_ncclep import _C

_Arguments = dict[str, Any]  # tensors, or None

# A kernel has as many CTAs as leave several warps of each with a 1 KiB piece of a row.
DEFAULT_MOST_CTAS = 120
LEAST_CTAS, PIECE_BYTES, PIECES_PER_CTA = 8, 1024, 4
# A combine has CTAs for at least max_tokens / LEAST_SHARE tokens.
LEAST_SHARE = 8


class NativeLowLatency(Resource):
    """See `ReferenceLowLatency`, whose calls these are too.

    A multi-rank group is unusable after an error, as after one of the engine's own calls.
    """

    def __init__(
        self,
        shared: NativeGroup,
        streams: extension.StreamKeeper,
        config: EpConfig,
        sizes: LowLatencySizes,
    ) -> None:
        """Collective; the ranks have agreed on `sizes`.  Makes windows for a group without any.

        Raises:
            LibraryError: on every rank, when one has no memory for its window or NCCL cannot make
            it.
        """
        self._group, self._sizes = shared.group, sizes
        self._shared, self._streams, self._config = shared, streams, config
        self._num_tokens = 0  # of the last dispatch
        self._is_dispatched = False  # rows are here, or come, and have not been combined
        group = shared.group
        timeout_s = group.deadline_s(config)
        shared.begin(timeout_s)
        communicator_of(group, timeout_s)  # held for as long as the window
        self._counts = torch.zeros(group.size, dtype=torch.int32, device=group.device)
        try:
            self._open()
        except Exception:
            group.resources.release("communicator", timeout_s)
            raise
        # Every CTA of a combine waits for all ranks, and a rank's word comes after all of its CTAs
        # have sent: all must get an SM.  As long as NCCL's SMs are left free, an ordinary launch
        # ensures that: the group's own kernels run one after the other, and others end by
        # themselves, except for those of other groups, with which this one shares the SMs.  One
        # order for all groups would not do instead: two GPUs may queue them in different orders.
        most = most_sms(_num_sms(group.device), group.ranks_per_gpu(timeout_s))
        self._most_ctas = config.num_sms or min(DEFAULT_MOST_CTAS, most)
        # Tensors that kernels in flight, or second halves still to come, read.
        self._arguments: _Arguments = {}
        group.num_low_latency += 1

    def _open(self) -> None:
        """Make the window.  Collective; raises on all ranks."""
        sizes, group = self._sizes, self._group
        native: _C.LowLatencyHandle = self._shared.module.LowLatencyHandle(
            self._shared.native,
            max_tokens=sizes.max_tokens,
            hidden=sizes.hidden,
            top_k=sizes.top_k,
            payload=str(_carried(sizes.payload)),
            dtype=str(sizes.dtype),
            num_scales=sizes.num_scales,
            all_gather=group.hosts.exchange,
        )
        self._native, self._is_open = native, True
        places = (group.size, sizes.max_tokens)
        scales = None
        if sizes.num_scales:
            scales = self._view(native.scales, torch.float32, *places, sizes.num_scales)
        self._received = LowLatencyRows(
            rows=self._view(native.rows, sizes.payload, *places, sizes.hidden),
            topk_idx=self._view(native.experts, torch.int32, *places, sizes.top_k),
            weights=self._view(native.weights, torch.float32, *places, sizes.top_k),
            counts=self._counts,
            num_local_experts=self._shared.num_experts // group.size,
            scales=scales,
        )

    def begin(self, phase: str, problem: str | None, sends: bool) -> None:
        """See `ReferenceLowLatency.begin`."""
        self._shared.begin(self._group.deadline_s(self._config))
        # Reported once where the group remains usable: a multi-rank group does not.
        problem = problem or self._shared.bad_routings(forget=self._group.size == 1)
        if problem is None and not self._is_open and torch.cuda.is_current_stream_capturing():
            problem = "its memory was released: run the model once before a CUDA graph is captured"
        if problem is not None:
            self._shared.refuse(f"low-latency {phase}", problem)
        if not self._is_open:
            self._shared.reserve(1, self._sizes.top_k, ROW_BYTES)
            self._open()
        if sends:
            self._group.hosts.enter()

    def topk_problem(self, topk_idx: torch.Tensor) -> str | None:
        """None: the device checks the values."""
        return None

    def dispatch(self, tokens: Tokens, completes: bool) -> LowLatencyRows:
        """See `ReferenceLowLatency.dispatch`."""
        self._num_tokens, self._is_dispatched = tokens.x.shape[0], True
        x, scales = tokens.x, tokens.scales
        stream = self._streams.keep(x, tokens.topk_idx, tokens.weights, scales)

        def allocate() -> _Arguments:
            return {
                "x": aligned(x.view(_carried(x.dtype))),
                "scales": None if scales is None else aligned(scales),
                "topk_idx": tokens.topk_idx.contiguous(),
                "weights": tokens.weights.contiguous(),
            }

        arguments = self._allocated("dispatch", allocate)
        # Over domains also for the tokens of rail peers.
        is_whole = self._shared.domains.count == 1
        num_tokens = self._num_tokens if is_whole else self._tokens_of_combine()
        num_ctas = self._num_ctas(num_tokens, x.element_size())
        with Refusing(self._shared, "low-latency dispatch"):
            self._native.dispatch(
                **arguments,
                counts=self._counts,
                completes=completes,
                num_ctas=num_ctas,
                stream=stream,
            )
        self._arguments = {} if completes else arguments
        return self._received

    def complete_dispatch(self) -> LowLatencyRows:
        """See `ReferenceLowLatency.complete_dispatch`."""
        stream = self._streams.keep(*self._arguments.values())
        with Refusing(self._shared, "low-latency dispatch"):
            self._native.complete_dispatch(counts=self._counts, stream=stream)
        self._arguments = {}
        return self._received

    def combine(
        self, y: torch.Tensor, rows_of: torch.Tensor | None, completes: bool
    ) -> torch.Tensor:
        """See `ReferenceLowLatency.combine`."""
        stream = self._streams.keep(y, rows_of)

        def allocate() -> _Arguments:
            return {
                "y": aligned(y).view(-1, self._sizes.hidden),
                "rows_of": None if rows_of is None else rows_of.contiguous(),
                "out": y.new_empty(self._num_tokens, self._sizes.hidden),
            }

        arguments = self._allocated("combine", allocate)
        return self._combine(arguments, self._tokens_of_combine(), stream, True, completes)

    def complete_combine(self) -> torch.Tensor:
        """See `ReferenceLowLatency.complete_combine`."""
        stream = self._streams.keep(*self._arguments.values())
        return self._combine(self._arguments, self._num_tokens, stream, False, True)

    def _combine(
        self, arguments: _Arguments, num_tokens: int, stream: int, sends: bool, completes: bool
    ) -> torch.Tensor:
        """Queue a half of a combine, or both; the CTAs are as many as `num_tokens` need."""
        out: torch.Tensor = arguments["out"]
        with Refusing(self._shared, "low-latency combine"):
            self._native.combine(
                **arguments,
                sends=sends,
                completes=completes,
                num_ctas=self._num_ctas(num_tokens, out.element_size()),
                stream=stream,
            )
        self._arguments = {} if completes else arguments
        self._is_dispatched = not completes
        return out

    def memory_problem(self, graphs_are_dropped: bool) -> str | None:
        """See `Resource.memory_problem`; what graphs hold, the group knows."""
        if not self._is_dispatched:
            return None
        return "a low-latency dispatch has no combine yet: call that first"

    def release_memory(self) -> None:
        """Close the window, which the next dispatch makes again.  Collective."""
        if self._is_open:
            self._native.close()
            self._is_open = self._is_dispatched = False

    def close(self) -> None:
        """See `ReferenceLowLatency.close`."""
        self.release_memory()
        self._group.num_low_latency -= 1
        self._group.resources.release("communicator", self._group.deadline_s(self._config))

    def abort(self) -> None:
        """Free the windows without the other ranks.  Not collective."""
        self._shared.leave()
        self.close()

    def _allocated(self, phase: str, allocate: Callable[[], _Arguments]) -> _Arguments:
        """The result of `allocate`; if memory runs out, the call is refused for all ranks."""
        memory = try_allocate(f"a low-latency {phase}", allocate)
        if isinstance(memory, str):
            self._shared.refuse(f"low-latency {phase}", memory)
        return memory

    def _tokens_of_combine(self) -> int:
        """The number of tokens to size CTAs for: only the device knows how many rows were received.

        On a rank with one token and 128 received rows, CTAs for one token would take 34 us; CTAs
        for 16 tokens, an eighth of 128, take 13 us, no longer than more CTAs; with nothing to send
        they cost half a us.
        """
        return max(self._num_tokens, -(-self._sizes.max_tokens // LEAST_SHARE))

    def _num_ctas(self, num_tokens: int, itemsize: int) -> int:
        """CTAs for `num_tokens` tokens.

        All of them fit on the GPU at once, as combine needs, beside those of all other groups.
        """
        pieces = num_tokens * -(-self._sizes.hidden * itemsize // PIECE_BYTES)
        most = self._most_ctas // groups_with_low_latency()
        return min(most, max(LEAST_CTAS, -(-pieces // PIECES_PER_CTA)))

    def _view(self, address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The window's memory as a tensor, without a copy."""
        num_bytes = dtype.itemsize * math.prod(shape)
        flat = torch.as_tensor(_Memory(address, num_bytes), device=self._group.device)
        return flat.view(dtype).view(shape)


class _Memory:
    """Device memory in the form that torch accepts."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _carried(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the extension takes rows: one-byte dtypes as uint8."""
    return torch.uint8 if dtype.itemsize == 1 else dtype


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
