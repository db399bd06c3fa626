"""How the native engine's calls begin on the host: alone, or with the hosts of all ranks.

The hosts agree when they must know a plan's sizes, when windows grow, and with `check_calls`.  All
other calls are known: each rank makes them alone, and the devices compare the arguments that must
be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from megatron_ncclep.engines import checks
from megatron_ncclep.engines.base import EngineBase
from megatron_ncclep.engines.engine import RoutePlan
from megatron_ncclep.engines.native.buffers import (
    PlanBuffers,
    RowsCall,
    row_bytes_of,
    try_allocate,
)
from megatron_ncclep.engines.native.group import BAD_ROUTING, ROW_BYTES, NativeGroup
from megatron_ncclep.engines.native.plan import (
    HEADROOM,
    NativePlan,
    PlanCapacity,
    next_capacity_factor,
)
from megatron_ncclep.engines.overflow import can_drop
from megatron_ncclep.errors import InputError, PeerError, RefusedError

_Result = TypeVar("_Result")
# Number of the call, the same on all ranks; the capacity of a plan's memory, and the memory.
PlanCall = tuple[int, PlanCapacity, PlanBuffers]
# The sizes of a call with a problem: any windows are large enough for it.
NO_SHAPE = (0, 0, 0)


class HostProtocol:
    """What precedes each kernel of one engine, where hosts may meet."""

    def __init__(self, engine: EngineBase[NativePlan], shared: NativeGroup) -> None:
        """Not collective."""
        self._engine, self._config, self._hosts = engine, engine.config, engine.group.hosts
        self._shared, self._native = shared, shared.native
        self._is_static = engine.config.max_recv_rows is not None
        self._row_bytes = ROW_BYTES  # of the longest row so far
        self._most_tokens = 0  # of any rank so far
        # Assignments that the next plan has room for, as a multiple of a balanced load.
        self._capacity_factor = HEADROOM

    # --- plans -----------------------------------------------------------------------------------

    def begin_plan(self, topk_idx: torch.Tensor) -> PlanCall:
        """Check the arguments of plan; provide memory and windows for it."""
        self._engine.require_open()
        problem = self._engine.topk_shape_problem(topk_idx)
        shape = NO_SHAPE
        if problem is None:
            largest = max(self._engine.declared_tokens, len(topk_idx))
            shape = (largest, topk_idx.shape[1], self._row_bytes)
        fits = self._shared.begin(self._engine.timeout_s, *shape)
        is_known = (
            fits
            and self._is_static
            and not self._config.check_calls
            # Where batch sizes vary, this one may be the first that is too large for the windows;
            # while a graph is captured they cannot grow, and hosts need not meet.
            and (self._shared.plans_to_meet == 0 or torch.cuda.is_current_stream_capturing())
        )
        if is_known:
            return self._known_plan(topk_idx, problem)
        return self._together("plan", lambda: self._agreed_plan(topk_idx, problem, fits, shape[0]))

    def _known_plan(self, topk_idx: torch.Tensor, problem: str | None) -> PlanCall:
        """A static plan whose shape the other ranks need not know."""
        problem = problem or self._shared.bad_routings(forget=self._engine.group.size == 1)
        memory = problem or self._plan_memory(self._native.max_tokens, topk_idx)
        if isinstance(memory, str):
            self._shared.refuse("plan", memory)
        return self._hosts.enter(), *memory

    def _agreed_plan(
        self, topk_idx: torch.Tensor, problem: str | None, fits: bool, largest: int
    ) -> PlanCall:
        """Agree on a plan with all ranks' hosts, and exchange the numbers of tokens.

        Windows that are too small grow; `fits` says that they are large enough for `largest`
        tokens, those of this rank's batch or as declared.
        """
        # Allocated before the ranks agree, so a rank without memory can still tell the others.
        problem = problem or self._agreed_plan_problem()
        expected = max(self._most_tokens, largest)
        memory = problem or self._plan_memory(expected, topk_idx)
        try:
            agreement = self._engine.agree_on_routes(topk_idx, _problem_of(memory))
            most_tokens = max(largest, *agreement.gathered)
            # For exact plans hosts agree anyway, and what is declared does not grow.
            if self._is_static and not self._engine.declared_tokens:
                self._shared.record_batches(agreement.gathered)
            if not fits or most_tokens > largest:
                self._shared.reserve(most_tokens, topk_idx.shape[1], self._row_bytes)
            if self._is_static:
                most_tokens = self._native.max_tokens
            if most_tokens > self._most_tokens:  # a rank may have expected less, and all know it
                if most_tokens > expected:
                    memory = self._plan_memory(most_tokens, topk_idx)
                timeout_s = self._engine.timeout_s
                problem = _problem_of(memory)
                if problems := self._hosts.gather_problems(problem, "plan", timeout_s):
                    raise InputError(f"plan: {problems}")
        except InputError as error:
            if not isinstance(error, RefusedError):  # the ranks cannot meet after a refusal
                self._shared.raise_bad_routings(error, self._engine.timeout_s)
            raise
        assert not isinstance(memory, str)  # on any rank: all would have raised
        if most_tokens < expected:
            # Shrink the plan's memory if there is memory for both copies; all ranks move on now, so
            # a failure here must be ignored.
            smaller = self._plan_memory(most_tokens, topk_idx)
            if isinstance(smaller, str):
                smaller = self._capacity(most_tokens, topk_idx), memory[1]
            memory = smaller
        self._most_tokens = max(self._most_tokens, most_tokens)
        return agreement.call, *memory

    def _agreed_plan_problem(self) -> str | None:
        """Say what else is wrong with a plan on which the hosts agree, if anything."""
        if self._native.bad_ranks(forget=False):
            return BAD_ROUTING
        if not self._is_static and torch.cuda.is_current_stream_capturing():
            return (
                "a CUDA graph cannot capture a plan whose number of rows the host must know: set "
                "max_recv_rows (--ncclep-max-recv-rows), or leave the plan out of the graph"
            )
        return None

    def raise_bad_routing(self, topk_idx: torch.Tensor) -> NoReturn:
        """Raise the same InputError on all ranks, which know that a routing is bad.  Collective."""
        problem = checks.topk_value_problem(topk_idx, self._engine.num_experts)
        problems = self._hosts.gather_problems(problem, "plan", self._engine.timeout_s)
        raise InputError(f"plan: {problems}")

    def _plan_memory(
        self, most_tokens: int, topk_idx: torch.Tensor
    ) -> tuple[PlanCapacity, PlanBuffers] | str:
        capacity = self._capacity(most_tokens, topk_idx)
        arguments = (self._native, capacity, topk_idx, can_drop(self._config))
        buffers = try_allocate("a plan", PlanBuffers.allocate, *arguments)
        return buffers if isinstance(buffers, str) else (capacity, buffers)

    def _capacity(self, most_tokens: int, topk_idx: torch.Tensor) -> PlanCapacity:
        """The capacity of a plan; in static mode for any routing."""
        (num_tokens, top_k), num_local = topk_idx.shape, self._engine.num_local_experts
        # In static mode the kernels compare it between ranks.
        limit = self._engine.rows_limit(num_tokens, top_k)
        most_pairs = self._engine.group.size * most_tokens
        most_assignments = most_pairs * min(top_k, num_local)
        expected = int(self._capacity_factor * most_tokens * top_k) if limit is None else limit
        max_assignments = min(most_assignments, expected)
        max_pairs = min(most_pairs, max_assignments)
        return PlanCapacity(num_local, most_tokens, max_pairs, max_assignments, limit)

    def record_load(self, plan: NativePlan, num_assignments: int) -> None:
        """Size the next plan's memory by what this one has received."""
        balanced = plan.most_tokens * plan.top_k
        self._capacity_factor = next_capacity_factor(
            self._capacity_factor, num_assignments, balanced
        )

    # --- rows ------------------------------------------------------------------------------------

    def begin_rows(
        self,
        phase: str,
        plan: RoutePlan,
        rows: torch.Tensor,
        w: torch.Tensor | None,
        allocate: Callable[[NativePlan, torch.Tensor, torch.Tensor | None], RowsCall],
    ) -> RowsCall:
        """Check the arguments of dispatch or combine; provide memory and windows for it.

        The device compares them with those of the other ranks.  With `check_calls` the hosts do,
        and nothing is queued unless they agree.
        """
        self._engine.require_open()
        problem = self._engine.rows_problem(phase, plan, rows, w)
        known: Any = plan  # a NativePlan, unless there is a problem
        shape = NO_SHAPE if problem else (known.most_tokens, known.top_k, row_bytes_of(rows))
        fits = self._shared.begin(self._engine.timeout_s, *shape)
        call: RowsCall | str
        if problem is None:
            call = try_allocate(f"the results of {phase}", allocate, known, rows, w)
        else:
            call = problem
        if self._config.check_calls or not fits:
            problem = _problem_of(call)
            self._together(phase, lambda: self._engine.agree_on_rows(phase, plan, rows, w, problem))
            self._shared.reserve(*shape)
        elif isinstance(call, str):
            self._shared.refuse(phase, call)
        else:
            self._hosts.enter()
        assert not isinstance(call, str)  # agreed on
        self._row_bytes = max(self._row_bytes, shape[-1])
        call.stream = self._engine.streams.keep(rows, w)
        if call.stream != known.stream:
            self._engine.streams.keep(*known.tensors())
        return call

    # --- both ------------------------------------------------------------------------------------

    def _together(self, phase: str, agree: Callable[[], _Result]) -> _Result:
        """Agree; only ranks whose windows must grow call this, unless all ranks always do.

        Raises:
            RefusedError: only some ranks' windows must grow; all ranks raise it.
        """
        try:
            return agree()
        except PeerError:
            rank = self._hosts.link.rank_ahead()
            always = self._config.check_calls or (phase == "plan" and not self._is_static)
            if rank is None or always:  # it is in a different call, or gone
                raise
            self._shared.refuse(
                phase,
                "this batch has more tokens, a larger top-k or longer rows than all before, so "
                f"this rank's windows must grow, but those of rank {rank} need not: in calls "
                "on which the hosts do not agree, windows can only grow on all ranks at once. Run "
                "the largest batch first, or set max_tokens_per_rank or check_calls",
            )


def _problem_of(memory: object) -> str | None:
    """Why `try_allocate` has made no memory, if so."""
    return memory if isinstance(memory, str) else None
