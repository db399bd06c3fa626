"""This project's own engine: kernels on NCCL's windows, for ranks in one NVLink domain.

The kernels are in `csrc/native/`.  This module is the host's part: it checks arguments, allocates
the memory of plans, and queues the kernels.  The ranks' hosts agree when they must know a plan's
sizes and when windows grow; in all other calls the kernels compare the arguments that must be the
same on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import checks
from megatron_ncclep.engines.base import EngineBase
from megatron_ncclep.engines.engine import (
    COMMON_OPTIONS,
    SOURCE_PART_UNROUNDED,
    EngineCaps,
    RoutePlan,
)
from megatron_ncclep.engines.low_latency_types import LowLatencySizes
from megatron_ncclep.engines.native import windows
from megatron_ncclep.engines.native.availability import default_num_sms
from megatron_ncclep.engines.native.group import BAD_ROUTING, NativeGroup, aligned
from megatron_ncclep.engines.native.low_latency import NativeLowLatency
from megatron_ncclep.engines.native.plan import (
    HEADROOM,
    NativePlan,
    PlanCapacity,
    next_capacity_factor,
    plan_memory,
    try_allocate,
)
from megatron_ncclep.engines.overflow import can_drop
from megatron_ncclep.errors import InputError, PeerError, RefusedError
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.group import EpGroup

_Result = TypeVar("_Result")

CAPS = EngineCaps(
    name="native",
    reduction=SOURCE_PART_UNROUNDED,
    payload_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    row_bytes_multiple=16,
    options=COMMON_OPTIONS | {"num_sms"},
    moves_bytes=True,
    max_tokens=extension.limit("MAX_TOKENS"),
    max_top_k=extension.limit("MAX_TOP_K"),
    max_local_experts=extension.limit("MAX_EXPERTS"),
    captures_static=True,
    device_deadline=True,
    compares_on_device=True,
    low_latency_tokens=extension.limit("LOW_LATENCY_TOKENS") or 0,
)


class NativeEngine(EngineBase[NativePlan]):
    """See `Engine`.

    In static mode no call waits for the device or for another host, so that all of them can be
    captured in a CUDA graph.  A graph must not run concurrently with other work of the group on
    another stream.  During and after a capture a batch that is larger than all earlier ones, or has
    longer rows, is refused: windows are replaced when they grow, and the graph would use the old
    ones.

    A multi-rank group is unusable after an error in a call on which the hosts do not agree: all its
    later calls raise the same error on all ranks.

    Autograd records none of it, even if arguments require gradients: results are new tensors, which
    kernels write.
    """

    caps = CAPS
    plan_type = NativePlan

    def __init__(self, group: EpGroup, num_experts: int, config: EpConfig) -> None:
        """Collective; makes the group's communicator, if need be."""
        ranks_per_gpu = group.ranks_per_gpu(group.deadline_s(config))
        self.num_sms = config.num_sms or default_num_sms(group.device, ranks_per_gpu)
        if ranks_per_gpu > 1 and group.rank == 0:
            text = f"up to {ranks_per_gpu} ranks share a GPU: a test, whose timings mean nothing"
            group.log_once(logging.WARNING, text, text)
        self._is_static = config.max_recv_rows is not None
        self._may_drop = can_drop(config)
        self._name = f"native {num_experts}"
        self._shared = group.share(
            self._name, lambda: NativeGroup(group, num_experts, group.deadline_s(config))
        )
        self._native = self._shared.native
        self._row_bytes = 16  # of the longest row so far
        self._most_tokens = 0  # of any rank so far
        # Assignments that the next plan has room for, as a multiple of a balanced load.
        self._capacity_factor = HEADROOM
        self._described: set[tuple[int, int]] = set()
        super().__init__(group, num_experts, config)

    def plan(self, topk_idx: torch.Tensor) -> NativePlan:
        """See `Engine.plan`.

        The device checks the values of `topk_idx`.  In static mode the host waits neither for the
        device nor for other ranks' hosts, unless windows have to grow or the ranks have recently
        brought different numbers of tokens: an index that is no expert, or is named twice, counts
        as not routed, and a later `plan` or `megatron_ncclep.check()` raises InputError on all
        ranks.
        """
        call, capacity, memory = self._enter_plan(topk_idx)
        num_tokens, top_k = topk_idx.shape
        limit, native, num_sms = capacity.limit, self._native, self.num_sms
        stream = self.streams.keep(topk_idx)
        assignments = topk_idx.contiguous()
        counts, token_routes, kept, routes = memory
        lacked = None if self._shortage is None else self._shortage.for_kernel()
        handle = self._shared.module.NativePlan(
            counts, token_routes, capacity.most_tokens, top_k, call
        )
        # Everything is queued before the host knows how much arrives; that is seldom more than
        # expected.
        ticket = native.plan(
            *(handle, assignments, self.config.block_alignment, limit or 0, kept, lacked),
            *(capacity.max_pairs, capacity.max_assignments, routes, num_sms, stream),
        )
        # The plan object is made while the device works; it is complete once the sizes are filled
        # in.
        plan = NativePlan(
            plan_id=call,
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=self.num_experts,
            num_rows=0 if limit is None else limit,
            counts=counts,
            token_routes=token_routes,
            routes=routes,
            most_tokens=capacity.most_tokens,
            handle=handle,
            stream=stream,
            shared=self._shared,
            rows_on_host=(
                torch.empty(self.num_local_experts, dtype=torch.int64) if limit is None else None
            ),
        )
        if limit is None:
            sizes = native.wait_for_sizes(handle, ticket, plan.rows_on_host, stream)
            if sizes is None:
                self._shared.raise_failure()
            if sizes.bad_ranks:
                self._raise_bad_routing(topk_idx)
            plan.num_rows = sizes.num_rows
            if (
                sizes.num_pairs > capacity.max_pairs
                or sizes.num_assignments > capacity.max_assignments
            ):
                needed = (sizes.num_pairs, sizes.num_assignments)
                more: list[torch.Tensor] = []
                size = native.routes_size(*needed, capacity.most_tokens)
                problem = try_allocate("a plan's routes", more, lambda: (routes.new_empty(size),))
                if problem is not None:  # the other ranks have moved on
                    self._shared.refuse("plan", problem)
                (plan.routes,) = more
                native.plan_receive(handle, *needed, plan.routes, num_sms, stream)
            balanced = capacity.most_tokens * top_k
            self._capacity_factor = next_capacity_factor(
                self._capacity_factor, sizes.num_assignments, balanced
            )
        return plan

    def dispatch(
        self, plan: RoutePlan, x: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.dispatch`."""

        def allocate(plan: NativePlan) -> tuple[Any, ...]:
            rows = x.new_empty(plan.num_rows, x.shape[1])
            row_w = None if w is None else w.new_empty(plan.num_rows)
            return rows, row_w, aligned(x), None if w is None else w.contiguous()

        agreed, memory, stream = self._enter("dispatch", plan, x, w, allocate)
        rows, row_w, *inputs = memory
        self._native.dispatch(agreed.handle, *inputs, rows, row_w, self.num_sms, stream)
        return rows, row_w

    def combine(
        self, plan: RoutePlan, y: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.combine`."""

        def allocate(plan: NativePlan) -> tuple[Any, ...]:
            out = y.new_empty(plan.num_tokens, y.shape[1])
            topk_w = None if w is None else w.new_empty(plan.num_tokens, plan.top_k)
            num_sums = self._native.sums_size(plan.handle, self.num_sms, _row_bytes(y))
            sums = y.new_empty(num_sums, y.shape[1]) if num_sums else None
            return out, topk_w, aligned(y), None if w is None else w.contiguous(), sums

        agreed, memory, stream = self._enter("combine", plan, y, w, allocate)
        out, topk_w, *inputs = memory
        self._native.combine(agreed.handle, *inputs, out, topk_w, self.num_sms, stream)
        return out, topk_w

    def make_low_latency(self, sizes: LowLatencySizes, number: int) -> NativeLowLatency:
        """See `create_low_latency`."""
        self._begin()
        arguments = (self.num_experts, self.config, sizes, number)
        return NativeLowLatency(self._shared, self.streams, *arguments)

    def _release(self) -> None:
        """Release the windows, which the group's last engine frees."""
        self.group.release(self._name, self.timeout_s)

    def nbytes(self) -> int:
        """Bytes of symmetric memory that this rank holds; all engines of the group share it."""
        num_bytes: int = self._native.num_bytes
        return num_bytes

    def _begin(self) -> None:
        """Preamble of every call: raise pending errors, set the deadline."""
        self._require_open()
        self._shared.raise_failure()
        self._native.timeout_s = self.timeout_s  # the group's other engines have their own

    def _enter_plan(self, topk_idx: torch.Tensor) -> tuple[int, PlanCapacity, list[Any]]:
        """Check the arguments of plan; provide memory and windows for it.

        Returns:
            the number of the call, the capacity of the memory, and the result of `plan_memory`.
        """
        self._begin()
        memory: list[Any] = []

        def allocate(capacity: PlanCapacity) -> str | None:
            arguments = (self._native, capacity, topk_idx, self._may_drop)
            return try_allocate("a plan", memory, plan_memory, *arguments)

        problem = checks.topk_shape_problem(topk_idx, self.group.device, self.caps)
        is_known = (
            self._is_static
            and not self.config.check_calls
            # Where batch sizes vary, this one may be the first that is too large for the windows.
            and self._shared.plans_to_meet == 0
            and (problem is not None or self._native.fits(*topk_idx.shape, self._row_bytes))
        )
        if not is_known:
            agreed = self._together(
                "plan", lambda: self._agree_on_plan(topk_idx, problem, allocate, memory)
            )
            return *agreed, memory
        problem = problem or self._shared.bad_routings(forget=self.group.size == 1)
        if problem is None:
            capacity = self._capacity(self._native.max_tokens, topk_idx)
            problem = allocate(capacity)
        if problem is not None:
            self._shared.refuse("plan", problem)
        return self.group.enter(), capacity, memory

    def _agree_on_plan(
        self,
        topk_idx: torch.Tensor,
        problem: str | None,
        allocate: Callable[[PlanCapacity], str | None],
        memory: list[Any],
    ) -> tuple[int, PlanCapacity]:
        """Agree on a plan with all ranks' hosts, and exchange the numbers of tokens.

        Windows that are too small grow, and `allocate` puts what the plan needs into `memory`.
        Returns the number of the call, and the capacity of the memory.
        """
        timeout_s = self.timeout_s
        # Allocated before the ranks agree, so that one without memory can still tell the others.
        problem = problem or self._plan_problem()
        if problem is None:
            expected = max(self._most_tokens, topk_idx.shape[0])
            capacity = self._capacity(expected, topk_idx)
            problem = allocate(capacity)
        try:
            agreement = self.agree_on_routes(topk_idx, problem)
            most_tokens = max(agreement.gathered)
            if self._is_static:  # for exact plans hosts agree anyway
                self._shared.note_batches(agreement.gathered)
            self._reserve(most_tokens, topk_idx.shape[1], self._row_bytes)
            if self._is_static:
                most_tokens = self._native.max_tokens
            if most_tokens != expected:
                capacity = self._capacity(most_tokens, topk_idx)
            if most_tokens > self._most_tokens:  # some rank may have expected less, and all know it
                problem = allocate(capacity) if most_tokens > expected else None
                if problems := self.group.gather_problems(problem, "plan", timeout_s):
                    raise InputError(f"plan: {problems}")
        except RefusedError:
            raise
        except InputError as error:
            self._shared.raise_bad_routings(error, timeout_s)
            raise
        if most_tokens < expected:
            # Shrink the plan's memory if there is memory for both copies; all ranks move on now, so
            # a failure here must be ignored.
            allocate(capacity)
        self._most_tokens = max(self._most_tokens, most_tokens)
        return agreement.call, capacity

    def _capacity(self, most_tokens: int, topk_idx: torch.Tensor) -> PlanCapacity:
        """The capacity of a plan; in static mode for everything that can arrive."""
        (num_tokens, top_k), num_local = topk_idx.shape, self.num_local_experts
        # In static mode the kernels compare it between ranks.
        limit = self.rows_limit(num_tokens, top_k)
        most_pairs = self.group.size * most_tokens
        most_assignments = most_pairs * min(top_k, num_local)
        expected = int(self._capacity_factor * most_tokens * top_k) if limit is None else limit
        max_assignments = min(most_assignments, expected)
        max_pairs = min(most_pairs, max_assignments)
        return PlanCapacity(num_local, most_tokens, max_pairs, max_assignments, limit)

    def _enter(
        self,
        phase: str,
        plan: RoutePlan,
        rows: torch.Tensor,
        w: torch.Tensor | None,
        allocate: Callable[[NativePlan], tuple[Any, ...]],
    ) -> tuple[NativePlan, list[Any], int]:
        """Check the arguments of dispatch or combine; provide memory and windows for it.

        The device compares them with those of the other ranks.  With `check_calls` the hosts do,
        and nothing is queued unless they agree.

        Returns:
            the plan, typed; the tensors that `allocate` returned; and the handle of the current
            stream.
        """
        self._begin()
        memory: list[Any] = []

        problem = self.rows_problem(phase, plan, rows, w)
        if problem is None:
            assert isinstance(plan, NativePlan)  # or it would be a problem
            problem = try_allocate(f"the results of {phase}", memory, allocate, plan)
        is_known = not self.config.check_calls
        if is_known:
            if problem is not None:
                self._shared.refuse(phase, problem)
            assert isinstance(plan, NativePlan)
            is_known = self._native.fits(plan.most_tokens, plan.top_k, _row_bytes(rows))
        if is_known:
            self.group.enter()
        else:
            self._together(phase, lambda: self.agree_on_rows(phase, plan, rows, w, problem))
        assert isinstance(plan, NativePlan)
        row_bytes = _row_bytes(rows)
        self._row_bytes = max(self._row_bytes, row_bytes)
        if not is_known:
            self._reserve(plan.most_tokens, plan.top_k, row_bytes)
        self._describe(row_bytes, plan.top_k)
        stream = self.streams.keep(rows, w)
        if stream != plan.stream:
            self.streams.keep(*plan.tensors())
        return plan, memory, stream

    def _together(self, phase: str, agree: Callable[[], _Result]) -> _Result:
        """Agree; only ranks whose windows must grow call this, unless all ranks always do.

        Raises:
            RefusedError: only some ranks' windows must grow; all ranks raise it.
        """
        try:
            return agree()
        except PeerError:
            rank = self.group.rank_ahead()
            always = self.config.check_calls or (phase == "plan" and not self._is_static)
            if rank is None or always:  # it is in a different call, or gone
                raise
            self._shared.refuse(
                phase,
                "this batch has more tokens, a larger top-k or longer rows than all before, so "
                f"that this rank's windows must grow, but those of rank {rank} need not: in calls "
                "on which the hosts do not agree, windows can only grow on all ranks at once. Run "
                "the largest batch first, or set check_calls",
            )

    def _reserve(self, num_tokens: int, top_k: int, row_bytes: int) -> None:
        """Make sure that all ranks' windows are large enough.  Collective when they grow."""
        needed = (num_tokens, top_k, row_bytes)
        windows.reserve(self.group, self._native, *needed, self.timeout_s)

    def _describe(self, row_bytes: int, top_k: int) -> None:
        """Log at level DEBUG how the kernels are set up for such rows, once per kind of row."""
        if self.group.rank != 0 or (row_bytes, top_k) in self._described:
            return
        self._described.add((row_bytes, top_k))
        text = configuration(self.num_sms, self.group.size, row_bytes, top_k)
        self.group.log_once(logging.DEBUG, text, text)

    def _plan_problem(self) -> str | None:
        """Say what else is wrong with a plan on which the hosts agree, if anything."""
        if self._native.bad_ranks(forget=False):
            return BAD_ROUTING
        if self.config.max_recv_rows is None and torch.cuda.is_current_stream_capturing():
            return (
                "a CUDA graph cannot capture a plan whose number of rows the host must know: set "
                "max_recv_rows (--ncclep-max-recv-rows), or leave the plan out of the graph"
            )
        return None

    def _raise_bad_routing(self, topk_idx: torch.Tensor) -> None:
        """Raise the same InputError on all ranks, which know that a routing is bad.  Collective."""
        problem = checks.topk_value_problem(topk_idx, self.num_experts)
        raise InputError(f"plan: {self.group.gather_problems(problem, 'plan', self.timeout_s)}")


def configuration(num_sms: int, num_ranks: int, row_bytes: int, top_k: int) -> str:
    """Say how dispatch and combine share their CTAs; see `csrc/native/rows/cta_roles.h`."""
    native = extension.load()
    staging, pulling = native.split_dispatch(num_sms)
    adding, sending, summing = native.split_combine(num_sms, num_ranks, top_k, row_bytes)
    return (
        f"native: rows of {row_bytes} bytes, top-{top_k}, {num_ranks} ranks, {num_sms} SMs: "
        f"CTAs of dispatch: {staging} staging, {pulling} pulling; of combine: {adding} adding, "
        f"{sending} sending, {summing} summing"
    )


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()
