"""Low-latency mode: dispatch and combine of a few tokens, without a plan.

For decoding, where a rank has from one to a few hundred tokens, and launches and waits dominate.
Top-k indices go straight in, and a token's row is sent to a rank once, however many of its experts
are there. docs/contract.md ("Low-latency mode") states it in full.

Example: two ranks, four experts, top-2, max_tokens 3; rank 1 holds experts 2 and 3.  Rank 0's
tokens 0, 1, 2 name experts (0, 1), (3, 0), (2, 3).  From rank 0, rank 1 gets counts[0] = 2 and

    rows[0]     = x[1], x[2], undefined
    topk_idx[0] = (1, -1), (0, 1), (-1, -1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from megatron_ncclep.engines import checks
from megatron_ncclep.engines.engine import Engine, EngineCaps
from megatron_ncclep.engines.low_latency_types import LowLatencyRows, LowLatencySizes, Tokens
from megatron_ncclep.errors import EngineUnavailableError, GroupClosedError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource
from megatron_ncclep.ranks.uncopied import Uncopied

if TYPE_CHECKING:
    from megatron_ncclep.engines.native.low_latency import NativeLowLatency
    from megatron_ncclep.engines.reference.low_latency import ReferenceLowLatency


class LowLatency(Uncopied, Resource):
    """Alternating dispatch and combine, one micro-batch at a time; made by `create_low_latency`.

    All calls are collective, and every rank makes the same ones in the same order.  A rank may have
    any number of tokens up to `max_tokens`, including none.  Results may be used on the stream on
    which the call was made.  Two micro-batches at a time need two objects.
    """

    def __init__(
        self,
        group: EpGroup,
        caps: EngineCaps,
        sizes: LowLatencySizes,
        calls: NativeLowLatency | ReferenceLowLatency,
        release: Callable[[], None],
    ) -> None:
        """Not collective.

        `calls`, whose arguments this object checks, belong to an engine with these `caps`;
        `release` closes them.
        """
        self.group, self.sizes = group, sizes
        self._caps, self._calls, self._release = caps, calls, release
        self._last = "combine"  # the last call
        self._closed = False

    # --- calls ------------------------------------------------------------------------------------

    @torch.compiler.disable
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
            scales: [num_tokens, num_scales] fp32, if the object was made with num_scales.

        Raises:
            InputError: something is wrong on some rank; docs/contract.md says when the other ranks
                raise.
            PeerError: a rank did not come.
            GroupClosedError: the object or its group was closed.
        """
        return self._dispatch(Tokens(x, topk_idx, weights, scales), completes=True)

    @torch.compiler.disable
    def send_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None = None,
    ) -> None:
        """Do the first half of `dispatch`, which does not wait.

        The arguments must stay as they are until `complete_dispatch` is over on the device.
        """
        self._dispatch(Tokens(x, topk_idx, weights, scales), completes=False)

    @torch.compiler.disable
    def complete_dispatch(self) -> LowLatencyRows:
        """Do the second half of `dispatch`."""
        self._calls.begin("dispatch", self._problem("complete_dispatch", "send_dispatch"), False)
        rows = self._calls.complete_dispatch()
        self._last = "dispatch"
        return rows

    @torch.compiler.disable
    def combine(self, y: torch.Tensor, rows_of: torch.Tensor | None = None) -> torch.Tensor:
        """Return the experts' outputs for the last dispatch's rows, and add them up.

        Args:
            y: [num_ranks, max_tokens, hidden] of the object's dtype, a row for each place; rows
                beyond `counts` are not read.  With `rows_of`, rows in any order, [..., hidden].
            rows_of: int32 [num_ranks, max_tokens, top_k]: which rows of y are added up for each
                place, in this order; -1: none.  `LowLatencyRows.by_expert` makes one.

        Returns:
            out [num_tokens, hidden], zero for a token without experts.

        Raises:
            as `dispatch`.
        """
        return self._combine(y, rows_of, completes=True)

    @torch.compiler.disable
    def send_combine(self, y: torch.Tensor, rows_of: torch.Tensor | None = None) -> None:
        """Do the first half of `combine`, which does not wait.

        The arguments must stay as they are until `complete_combine` is over on the device.
        """
        self._combine(y, rows_of, completes=False)

    @torch.compiler.disable
    def complete_combine(self) -> torch.Tensor:
        """Do the second half of `combine`."""
        self._calls.begin("combine", self._problem("complete_combine", "send_combine"), False)
        out = self._calls.complete_combine()
        self._last = "combine"
        return out

    def close(self) -> None:
        """Release the object's resources.  Collective; idempotent."""
        if not self._closed:
            self._closed = True
            self._release()

    def _dispatch(self, tokens: Tokens, completes: bool) -> LowLatencyRows:
        problem = self._problem("dispatch", "combine") or self._dispatch_problem(tokens)
        self._calls.begin("dispatch", problem, True)
        rows = self._calls.dispatch(tokens, completes)
        self._last = "dispatch" if completes else "send_dispatch"
        return rows

    def _combine(
        self, y: torch.Tensor, rows_of: torch.Tensor | None, completes: bool
    ) -> torch.Tensor:
        problem = self._problem("combine", "dispatch") or self._combine_problem(y, rows_of)
        self._calls.begin("combine", problem, True)
        if rows_of is not None:
            y = y.reshape(-1, self.sizes.hidden)
        out = self._calls.combine(y, rows_of, completes)
        self._last = "combine" if completes else "send_combine"
        return out

    def _problem(self, call: str, after: str) -> str | None:
        """Say that the last call was not `after`, if so; raise GroupClosedError when closed."""
        self.group.torch.require_open()
        if self._closed:
            raise GroupClosedError("the low-latency object was closed: make another one")
        if self._last == after:
            return None
        return (
            f"{call} of a low-latency object must come after {after}, and the last call was "
            f"{self._last}: dispatch and combine take turns; two micro-batches at a time need two "
            "objects"
        )

    def _dispatch_problem(self, tokens: Tokens) -> str | None:
        sizes, device, scales = self.sizes, self.group.device, tokens.scales
        if problem := checks.topk_shape_problem(tokens.topk_idx, device, self._caps):
            return problem
        num_tokens, top_k = tokens.topk_idx.shape
        if num_tokens > sizes.max_tokens:
            return f"{num_tokens} tokens: the low-latency object was made for {sizes.max_tokens}"
        if top_k != sizes.top_k:
            return f"topk_idx has top_k {top_k}: the low-latency object was made for {sizes.top_k}"
        expected = [
            ("x", tokens.x, sizes.payload, (num_tokens, sizes.hidden)),
            ("weights", tokens.weights, torch.float32, (num_tokens, top_k)),
        ]
        if (scales is None) != (sizes.num_scales == 0):
            return (
                f"scales {'missing' if scales is None else 'given'}: the low-latency object was "
                f"made for num_scales {sizes.num_scales}"
            )
        if scales is not None:
            expected.append(("scales", scales, torch.float32, (num_tokens, sizes.num_scales)))
        return _first_problem(expected, device) or self._calls.topk_problem(tokens.topk_idx)

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
    expected: Sequence[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]],
    device: torch.device,
) -> str | None:
    for name, tensor, dtype, shape in expected:
        if tuple(tensor.shape) != shape:
            return f"{name} has shape {list(tensor.shape)}: it must be {list(shape)}"
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}: the low-latency object takes {dtype}"
        if problem := checks.device_problem(name, tensor, device):
            return problem
    return None


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
        payload: dtype of dispatched rows; default: `dtype`.

    Raises:
        EngineUnavailableError: the engine has no low-latency mode.
        InputError: on every rank, when sizes are wrong or differ.
        LibraryError: on every rank, when one has no memory for it.
        PeerError: a rank did not come in time.
    """
    if not engine.caps.low_latency_tokens:
        raise EngineUnavailableError(
            f"engine {engine.caps.name!r} has no low-latency mode: use 'native', with at most 32 "
            "ranks in an NVLink domain, or 'reference' on a CPU"
        )
    sizes = LowLatencySizes(max_tokens, hidden, top_k, dtype, payload or dtype, num_scales)
    problem = sizes.problem(engine.caps)
    if problem is None and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        problem = "a low-latency object cannot be made while a CUDA graph is captured"
    values = {} if problem else sizes.values()
    group, config, maker = engine.group, engine.config, cast(Any, engine)
    number = group.hosts.agree("open", values, problem, group.deadline_s(config)).call
    name = f"low-latency {number}"  # shared by the group, so that it is closed with the group
    calls = group.resources.share(name, lambda: maker.make_low_latency(sizes, number))

    def release() -> None:
        group.resources.release(name, group.deadline_s(config))

    return LowLatency(group, engine.caps, sizes, calls, release)
