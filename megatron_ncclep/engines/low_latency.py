"""Low-latency mode: dispatch and combine of a few tokens, without a plan.

For decoding, where a rank has 1 to some hundred tokens and launches and waits are everything.
Top-k indices go straight in, and a token's row crosses to a rank once, however many of its experts
are there.  docs/contract.md ("Low-latency mode") states it in full.

Example: two ranks, four experts, top-2, max_tokens 3; rank 1 holds experts 2 and 3.  Rank 0's
tokens 0, 1, 2 name experts (0, 1), (3, 0), (2, 3).  From rank 0, rank 1 gets counts[0] = 2 and

    rows[0]     = x[1], x[2], undefined
    topk_idx[0] = (1, -1), (0, 1), (-1, -1)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from megatron_ncclep.engines import checks
from megatron_ncclep.engines.engine import NOT_ROUTED, Engine, EngineCaps
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.errors import EngineUnavailableError, GroupClosedError

# What is combined, and rows that only travel, a byte for each number.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)


@dataclass(frozen=True)
class LowLatencySizes:
    """What an object is made for; the same on all ranks.

    Attributes:
        max_tokens: of any rank.
        hidden: numbers of a row.
        top_k: picks of a token.
        dtype: of what is combined: bf16, fp16 or fp32.
        payload: dtype of what is dispatched: the same, or one of `ONE_BYTE`.
        num_scales: fp32 numbers that travel with each dispatched row.
    """

    max_tokens: int
    hidden: int
    top_k: int
    dtype: torch.dtype
    payload: torch.dtype
    num_scales: int = 0

    def problem(self, caps: EngineCaps) -> str | None:
        """Say what is wrong with them for an engine, if anything is."""
        limits = {
            "max_tokens": (self.max_tokens, caps.low_latency_tokens),
            "top_k": (self.top_k, caps.max_top_k or 2**31 - 1),
            "hidden": (self.hidden, 2**20),
        }
        for name, (value, most) in limits.items():
            if not isinstance(value, int) or not 1 <= value <= most:
                return f"{name} {value}: low-latency mode of {caps.name!r} takes 1 to {most}"
        if self.dtype not in DTYPES:
            return f"dtype {self.dtype}: low-latency mode combines {', '.join(map(str, DTYPES))}"
        if self.payload not in (self.dtype, *ONE_BYTE):
            return (
                f"payload {self.payload}: rows are {self.dtype}, as what is combined, or one of "
                f"{', '.join(map(str, ONE_BYTE))}"
            )
        if not isinstance(self.num_scales, int) or self.num_scales < 0:
            return f"num_scales {self.num_scales}: must be 0 or more"
        for name, num_bytes in (
            ("a row", self.hidden * self.payload.itemsize),
            ("a row's result", self.hidden * self.dtype.itemsize),
            ("a row's scales", self.num_scales * 4),
        ):
            if num_bytes % caps.row_bytes_multiple:
                return (
                    f"{name} has {num_bytes} bytes: engine {caps.name!r} needs a multiple of "
                    f"{caps.row_bytes_multiple}"
                )
        return None

    def values(self) -> dict[str, int | None]:
        """What the ranks compare."""
        return {
            "max_tokens": self.max_tokens,
            "hidden size": self.hidden,
            "top_k": self.top_k,
            "dtype": DTYPES.index(self.dtype),
            "payload dtype": (*DTYPES, *ONE_BYTE).index(self.payload),
            "num_scales": self.num_scales,
        }


@dataclass(frozen=True)
class ExpertRows:
    """Dispatched rows by expert; see `LowLatencyRows.by_expert`.

    Attributes:
        rows: [num_local_experts, num_ranks * max_tokens, hidden]; those behind an expert's count
            are undefined.
        counts: int32 [num_local_experts]: rows of each expert.
        rows_of: int32 [num_ranks, max_tokens, top_k]: what `combine` takes with rows like these:
            where the rows for a place are, as if the first two dimensions of `rows` were one.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    rows_of: torch.Tensor


@dataclass(frozen=True)
class LowLatencyRows:
    """What a dispatch brings, by source rank; on this rank's device.

    It is valid until the object's next dispatch, or until it is closed: an engine may return the
    memory that the other ranks write to.

    Attributes:
        rows: [num_ranks, max_tokens, hidden]; a source's rows in the order of its tokens, one for
            each token that has an expert here.  Those from `counts` on are undefined.
        topk_idx: int32 [num_ranks, max_tokens, top_k]: the picks of each row as this rank's expert
            numbers, 0 to num_local_experts - 1, in the token's own order; -1 for experts of other
            ranks, for picks that go nowhere, and where there is no row.
        weights: fp32 [num_ranks, max_tokens, top_k]: of these picks; 0 where a row has no pick,
            undefined where there is no row.
        counts: int32 [num_ranks]: rows from each rank.
        num_local_experts: of this rank.
        scales: fp32 [num_ranks, max_tokens, num_scales], or None.
    """

    rows: torch.Tensor
    topk_idx: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    num_local_experts: int
    scales: torch.Tensor | None = None

    def by_expert(self) -> ExpertRows:
        """Copy the rows to blocks of experts, in the order of source rank and token in each.

        Waits for nothing; a CUDA graph can hold it.
        """
        num_places, top_k = self.counts.numel() * self.topk_idx.shape[1], self.topk_idx.shape[2]
        num_local = self.num_local_experts
        expert = torch.arange(num_local, device=self.topk_idx.device)
        picks = self.topk_idx.view(num_places, top_k, 1)
        is_there = (picks == expert).any(dim=1)  # [places, experts]
        nowhere = num_local * num_places
        row = expert * num_places + is_there.cumsum(0) - 1
        row = torch.where(is_there, row, nowhere)
        # A place's rows in ascending order of experts, which is the order of additions.
        rows_of = row.sort(dim=1).values[:, :top_k]
        rows_of = torch.where(rows_of == nowhere, NOT_ROUTED, rows_of).int()
        if top_k > num_local:
            rows_of = torch.nn.functional.pad(rows_of, (0, top_k - num_local), value=NOT_ROUTED)
        order = (~is_there).int().argsort(dim=0, stable=True).T  # [experts, places]
        flat = self.rows.view(num_places, -1)
        return ExpertRows(
            flat.view(torch.uint8)[order].view(flat.dtype),
            is_there.sum(0).int(),
            rows_of.view(*self.topk_idx.shape),
        )


class _Last(enum.Enum):
    """What the last call was."""

    COMBINED = "combine"
    DISPATCH_SENT = "send_dispatch"
    DISPATCHED = "dispatch"
    COMBINE_SENT = "send_combine"


class LowLatency:
    """Dispatch and combine in turns, for one micro-batch at a time; made by `create_low_latency`.

    All calls are collective, and every rank makes the same ones in the same order.  A rank may have
    any number of tokens up to `max_tokens`, also none.  Results may be used on the stream on which
    the call was made.  Two micro-batches at a time need two objects.

    Attributes:
        sizes: what it was made for.
    """

    def __init__(
        self, group: EpGroup, num_experts: int, caps: EngineCaps, sizes: LowLatencySizes
    ) -> None:
        self.group = group
        self.num_experts = num_experts
        self.num_local_experts = num_experts // group.size
        self.caps = caps
        self.sizes = sizes
        self._last = _Last.COMBINED
        self._num_tokens = 0
        self._closed = False

    # --- calls ------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> LowLatencyRows:
        """Copy every token's row to each rank that has experts for it.

        Args:
            x: [num_tokens, hidden] of the payload's dtype.
            topk_idx: [num_tokens, top_k] int32 or int64: distinct experts of all ranks; -1: none.
            weights: [num_tokens, top_k] fp32.
            scales: [num_tokens, num_scales] fp32, if the object was made for any.

        Raises:
            InputError: something is wrong on some rank; docs/contract.md says when the other ranks
                raise.
            PeerError: a rank did not come.
            GroupClosedError: the object or its group was closed.
        """
        self._start_dispatch(x, topk_idx, weights, scales, completes=True)
        self._last = _Last.DISPATCHED
        return self._rows()

    def send_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Do the first half of `dispatch`, which waits for nobody.

        The arguments must stay as they are until `complete_dispatch` is over on the device.
        """
        self._start_dispatch(x, topk_idx, weights, scales, completes=False)
        self._last = _Last.DISPATCH_SENT

    def complete_dispatch(self) -> LowLatencyRows:
        """Do the second half of `dispatch`."""
        self._begin("dispatch", self._turn_problem("complete_dispatch", _Last.DISPATCH_SENT), False)
        self._complete_dispatch()
        self._last = _Last.DISPATCHED
        return self._rows()

    def combine(self, y: torch.Tensor, rows_of: torch.Tensor | None = None) -> torch.Tensor:
        """Bring home what the experts made of the last dispatch's rows, and add it up.

        Args:
            y: [num_ranks, max_tokens, hidden] of the object's dtype, a row for each place; what is
                behind `counts` is not read.  With `rows_of`, rows in any order, [..., hidden].
            rows_of: int32 [num_ranks, max_tokens, top_k]: which rows of y are added up for each
                place, in this order; -1: none.  `LowLatencyRows.by_expert` makes one.

        Returns:
            out [num_tokens, hidden], zero for a token without experts.

        Raises:
            as `dispatch`.
        """
        out = self._start_combine(y, rows_of, completes=True)
        self._last = _Last.COMBINED
        return out

    def send_combine(self, y: torch.Tensor, rows_of: torch.Tensor | None = None) -> None:
        """Do the first half of `combine`, which waits for nobody.

        The arguments must stay as they are until `complete_combine` is over on the device.
        """
        self._start_combine(y, rows_of, completes=False)
        self._last = _Last.COMBINE_SENT

    def complete_combine(self) -> torch.Tensor:
        """Do the second half of `combine`."""
        self._begin("combine", self._turn_problem("complete_combine", _Last.COMBINE_SENT), False)
        out = self._complete_combine()
        self._last = _Last.COMBINED
        return out

    def close(self) -> None:
        """Release what the object holds.  Collective; idempotent."""
        if not self._closed:
            self._closed = True
            self._close()

    # --- what an engine does ----------------------------------------------------------------------

    def _begin(self, phase: str, problem: str | None, sends: bool) -> None:
        """Raise what there is to raise, `problem` on all ranks; comes first in each call."""
        raise NotImplementedError

    def _dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        completes: bool,
    ) -> None:
        raise NotImplementedError

    def _complete_dispatch(self) -> None:
        raise NotImplementedError

    def _rows(self) -> LowLatencyRows:
        raise NotImplementedError

    def _combine(
        self, y: torch.Tensor, rows_of: torch.Tensor | None, completes: bool
    ) -> torch.Tensor:
        raise NotImplementedError

    def _complete_combine(self) -> torch.Tensor:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    # --- what all engines check -------------------------------------------------------------------

    def _start_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        completes: bool,
    ) -> None:
        problem = self._turn_problem("dispatch", _Last.COMBINED) or self._dispatch_problem(
            x, topk_idx, weights, scales
        )
        self._begin("dispatch", problem, True)
        self._num_tokens = x.shape[0]
        self._dispatch(x, topk_idx, weights, scales, completes)

    def _start_combine(
        self, y: torch.Tensor, rows_of: torch.Tensor | None, completes: bool
    ) -> torch.Tensor:
        problem = self._turn_problem("combine", _Last.DISPATCHED) or self._combine_problem(
            y, rows_of
        )
        self._begin("combine", problem, True)
        if rows_of is not None:
            y = y.reshape(-1, self.sizes.hidden)
        return self._combine(y, rows_of, completes)

    def _require_open(self) -> None:
        if self._closed:
            raise GroupClosedError("the low-latency object was closed: make another one")

    def _turn_problem(self, call: str, needed: _Last) -> str | None:
        if self._last is needed:
            return None
        return (
            f"{call} of a low-latency object must come after {needed.value}, and the last call was "
            f"{self._last.value}: dispatch and combine take turns; two micro-batches at a time "
            "need two objects"
        )

    def _dispatch_problem(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> str | None:
        sizes, device = self.sizes, self.group.device
        if problem := checks.topk_shape_problem(topk_idx, device, self.caps):
            return problem
        num_tokens, top_k = topk_idx.shape
        if num_tokens > sizes.max_tokens:
            return f"{num_tokens} tokens: the low-latency object was made for {sizes.max_tokens}"
        if top_k != sizes.top_k:
            return f"topk_idx has top_k {top_k}: the low-latency object was made for {sizes.top_k}"
        wanted = [
            ("x", x, sizes.payload, (num_tokens, sizes.hidden)),
            ("weights", weights, torch.float32, (num_tokens, top_k)),
        ]
        if (scales is None) != (sizes.num_scales == 0):
            return (
                f"scales {'missing' if scales is None else 'given'}: the low-latency object was "
                f"made for num_scales {sizes.num_scales}"
            )
        if scales is not None:
            wanted.append(("scales", scales, torch.float32, (num_tokens, sizes.num_scales)))
        return _first_problem(wanted, device)

    def _combine_problem(self, y: torch.Tensor, rows_of: torch.Tensor | None) -> str | None:
        sizes, device = self.sizes, self.group.device
        places = (self.group.size, sizes.max_tokens)
        if rows_of is None:
            return _first_problem([("y", y, sizes.dtype, (*places, sizes.hidden))], device)
        shape = (*y.shape[:-1], sizes.hidden) if y.dim() > 1 else (-1, sizes.hidden)
        if y.numel() // sizes.hidden > 2**31 - 1:
            return f"y has {y.numel() // sizes.hidden} rows: at most 2^31 - 1"
        return _first_problem(
            [
                ("y", y, sizes.dtype, shape),
                ("rows_of", rows_of, torch.int32, (*places, sizes.top_k)),
            ],
            device,
        )


def _first_problem(
    wanted: Sequence[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]],
    device: torch.device,
) -> str | None:
    for name, tensor, dtype, shape in wanted:
        if tuple(tensor.shape) != shape:
            return f"{name} has shape {list(tensor.shape)}: it must be {list(shape)}"
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}: the low-latency object takes {dtype}"
        if problem := checks.device_problem(name, tensor, device):
            return problem
    return None


class _HasLowLatency(Protocol):
    group: EpGroup
    make_low_latency: Callable[[LowLatencySizes, int], LowLatency]


def create_low_latency(
    engine: Engine,
    *,
    max_tokens: int,
    hidden: int,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    payload: torch.dtype | None = None,
    num_scales: int = 0,
) -> LowLatency:
    """Make an object for low-latency calls of an engine's group.  Collective.

    Args:
        engine: made by `create_engine`; stays open as long as the object.
        max_tokens, hidden, top_k, dtype, num_scales: see `LowLatencySizes`; the same on all ranks.
        payload: dtype of what is dispatched; default: `dtype`.

    Raises:
        EngineUnavailableError: the engine has no low-latency mode.
        InputError: on every rank, when sizes are wrong or differ.
        LibraryError: on every rank, when one has no memory for it.
        PeerError: a rank did not come in time.
    """
    if not engine.caps.low_latency_tokens:
        raise EngineUnavailableError(
            f"engine {engine.caps.name!r} has no low-latency mode: use the engine native, or "
            "reference on a CPU"
        )
    sizes = LowLatencySizes(max_tokens, hidden, top_k, dtype, payload or dtype, num_scales)
    maker = cast(_HasLowLatency, engine)
    problem = sizes.problem(engine.caps)
    if problem is None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        problem = "a low-latency object cannot be made while a CUDA graph is captured"
    values = {} if problem else sizes.values()
    agreed = maker.group.agree("open", values, problem, engine.config.timeout_s)
    return maker.make_low_latency(sizes, agreed.call)
