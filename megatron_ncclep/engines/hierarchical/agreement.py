"""The start of every call of the engine `hierarchical`: argument checks and the hosts' agreement.

Where no call may wait, that is, in static mode over an engine that does not wait either, hosts
agree only on new shapes: the sizes of all messages follow from them.  After that each rank checks
only its own arguments.  If it then refuses a call, the others learn of it through shared memory if
they have some, and otherwise when their deadline passes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NoReturn

import torch

from megatron_ncclep.engines import checks
from megatron_ncclep.engines.base import EngineBase
from megatron_ncclep.engines.engine import RoutePlan
from megatron_ncclep.engines.hierarchical.internode_routes import HierarchicalPlan
from megatron_ncclep.errors import InputError, RefusedError

# The number of agreed shapes to remember; each batch size is a separate shape.
MOST_AGREED = 1024


class Calls:
    """The calls of one engine.

    Attributes:
        go_on: hosts agree only on new shapes.
    """

    def __init__(self, engine: EngineBase[HierarchicalPlan]) -> None:
        self._engine, self._group = engine, engine.group
        config = engine.config
        is_static = config.max_recv_rows is not None
        self.go_on = is_static and engine.caps.captures_static and not config.check_calls
        self._declared = config.max_tokens_per_rank or 0
        # All ranks must bring equally many tokens to each plan where the row limit depends on them.
        self._is_even = isinstance(config.max_recv_rows, str) and not self._declared
        self._is_free = is_static and not self._is_even
        self._agreed: dict[Hashable, None] = {}  # the oldest first
        self._most_tokens = self._declared  # or of any rank in a plan on which hosts agreed
        self._refusal: str | None = None

    def enter_plan(self, topk_idx: torch.Tensor) -> tuple[int, int]:
        """Check the arguments of plan.  Collective.

        Returns:
            the number of the call, and the most tokens of any rank or, in static mode where they
            may differ, of any plan so far or as declared: ranks may then bring fewer.
        """
        self.raise_refusal()
        shape = checks.routing_shape(topk_idx)
        num_tokens = shape[0]
        key = ("plan", shape[-1:], num_tokens if self._is_even else None)
        fits = self._is_even or self._declared > 0 or num_tokens <= self._most_tokens
        if self.go_on and key in self._agreed and fits:
            if problem := self._engine.topk_shape_problem(topk_idx):
                self.refuse("plan", problem)
            return self._group.hosts.enter(), num_tokens if self._is_even else self._most_tokens
        agreement = self._engine.agree_on_routes(topk_idx, self._plan_problem(topk_idx))
        self._remember(key)
        self._most_tokens = max(self._most_tokens, *agreement.gathered)
        return agreement.call, self._most_tokens if self._is_free else max(agreement.gathered)

    def enter(
        self, phase: str, plan: RoutePlan, rows: torch.Tensor, w: torch.Tensor | None
    ) -> HierarchicalPlan:
        """Check the arguments of dispatch or combine; return the plan, typed.  Collective."""
        self.raise_refusal()
        shape, dtype = getattr(rows, "shape", ()), getattr(rows, "dtype", None)
        key = (phase, shape[1:], dtype, w is None)
        problem = self._engine.rows_problem(phase, plan, rows, w)
        if self.go_on and key in self._agreed:
            if problem is not None:
                self.refuse(phase, problem)
            self._group.hosts.enter()
            assert isinstance(plan, HierarchicalPlan)
            return plan
        agreed = self._engine.agree_on_rows(phase, plan, rows, w, problem)
        self._remember(key)
        return agreed

    def refuse(self, phase: str, problem: str) -> NoReturn:
        """Raise a problem of this rank, in a call on which hosts do not agree.

        Not collective: the others are notified (`Hosts.refuse`), and the engine is unusable.  A
        single-rank group continues as if the call had not been made.

        Raises:
            InputError: always; where there are other ranks, a RefusedError.
        """
        refusal = f"{phase}: rank {self._group.rank}: {problem}"
        if self._group.size == 1:
            raise InputError(refusal)
        self._refusal = refusal
        self._group.hosts.refuse(refusal)
        raise RefusedError(refusal)

    def raise_refusal(self) -> None:
        """Raise this rank's earlier refusal again, if there is one."""
        if self._refusal is not None:
            raise RefusedError(self._refusal)

    def close(self) -> None:
        """Withdraw the refusal, so that a new engine can start.  Not collective."""
        if self._refusal is not None:
            self._group.hosts.forget_refusal()

    def _remember(self, key: Hashable) -> None:
        """Skip agreement on such calls from now on, unless many others come in between.

        All ranks agree on the same calls in the same order, and so they forget the same ones.
        """
        self._agreed[key] = None
        if len(self._agreed) > MOST_AGREED:
            del self._agreed[next(iter(self._agreed))]

    def _plan_problem(self, topk_idx: torch.Tensor) -> str | None:
        """Say what is wrong with the arguments of a plan on which the hosts agree."""
        if self.go_on:
            return self._engine.topk_shape_problem(topk_idx)
        if self._group.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return (
                "a CUDA graph cannot hold a plan whose sizes the hosts must know: set "
                "max_recv_rows (--ncclep-max-recv-rows), have engine 'native' inside the nodes, "
                "and leave check_calls off; or leave the plan out of the graph"
            )
        return self._engine.topk_problem(topk_idx)
