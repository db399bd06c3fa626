"""Base class of this package's engines: a group, options, and the start of every call.

Before an engine moves anything, all ranks must be in the same call with matching arguments.  The
collective functions here raise the same error on every rank when something is wrong on any.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import checks
from megatron_ncclep.engines.engine import EngineCaps, RoutePlan
from megatron_ncclep.engines.overflow import OverflowReport, rows_limit
from megatron_ncclep.errors import GroupClosedError
from megatron_ncclep.libraries.extension import StreamKeeper
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.hosts import Agreement
from megatron_ncclep.ranks.resources import Resource
from megatron_ncclep.ranks.uncopied import Uncopied

_Plan = TypeVar("_Plan", bound=RoutePlan)


class EngineBase(Uncopied, Resource, Generic[_Plan]):
    """The parts of `Engine` other than plan, dispatch and combine.

    A base class rather than a member of each engine, because nearly all of it is part of `Engine`:
    an engine would have to forward every attribute and method.  Users only see `Engine`.

    Attributes:
        caps, config, ranks_per_expert: see `Engine`.
        num_nodes: nodes of the grid.  The engine serves one of them, and each of its ranks brings
            as many tokens for each node as one rank of the grid has.
        num_experts, num_local_experts: of the whole group, and of each rank.
        streams: keeps tensors alive for kernels on streams other than their own.
    """

    plan_type: type[_Plan]
    caps: EngineCaps
    ranks_per_expert = 1
    num_nodes = 1

    def __init_subclass__(cls) -> None:
        """Let torch.compile break its graph at each call, and trace nothing inside."""
        for name in ("plan", "dispatch", "combine"):
            if name in vars(cls):
                setattr(cls, name, torch.compiler.disable(vars(cls)[name]))

    def __init__(self, group: EpGroup, num_experts: int, config: EpConfig) -> None:
        """Not collective; called after every step that may fail on one rank."""
        self.group = group
        self.num_experts = num_experts
        self.num_local_experts = num_experts // group.size
        self.config = config
        self.streams = StreamKeeper(group.device)
        group.timeout_s = config.timeout_s
        self._overflow_report = OverflowReport.shared(group, config)
        self._closed = False

    @property
    def timeout_s(self) -> float:
        """Seconds that a call waits for other ranks: see `EpGroup.deadline_s`."""
        return self.group.deadline_s(self.config)

    def close(self) -> None:
        """See `Engine.close`.  Collective only where there is something to release."""
        if self._closed:
            return
        self._closed = True
        self._release()
        if self._overflow_report is not None:
            self.group.resources.release(OverflowReport.name(self.config), self.timeout_s)

    def _release(self) -> None:
        """Release the engine's other resources.  Collective."""

    def require_open(self) -> None:
        """Raise GroupClosedError when the engine, its group or the process group was closed."""
        self.group.torch.require_open()
        if self._closed:
            raise GroupClosedError("the engine was closed: create a new one with create_engine()")

    def _agree(
        self, phase: str, plan: RoutePlan, rows: torch.Tensor, w: torch.Tensor | None
    ) -> _Plan:
        """Begin dispatch or combine where all ranks' hosts agree on it.  Collective.

        Returns:
            plan, with its own type.
        """
        self.require_open()
        problem = self.rows_problem(phase, plan, rows, w)
        agreed = self.agree_on_rows(phase, plan, rows, w, problem)
        self.streams.keep(*agreed.tensors(), rows, w)
        return agreed

    def rows_limit(self, num_tokens: int, top_k: int) -> int | None:
        """The number of rows of a dispatched tensor in static mode; None in exact mode.

        Inside a node, it is that of a rank of the whole grid.
        """
        ranks, tokens = self.group.size * self.num_nodes, num_tokens // self.num_nodes
        shape = (ranks, tokens, top_k, self.num_local_experts)
        return rows_limit(self.config, *shape, self.ranks_per_expert)

    @property
    def declared_tokens(self) -> int:
        """The most tokens of a rank here, if the options say it; otherwise 0."""
        return (self.config.max_tokens_per_rank or 0) * self.num_nodes

    def topk_shape_problem(self, topk_idx: torch.Tensor) -> str | None:
        """Say what is wrong with the argument of plan apart from its values.  Does not wait."""
        problem = checks.topk_shape_problem(topk_idx, self.group.device, self.caps)
        declared = self.declared_tokens
        if problem is None and declared and len(topk_idx) > declared:
            problem = (
                f"topk_idx has {len(topk_idx)} tokens, more than max_tokens_per_rank {declared}: "
                "set --ncclep-max-tokens-per-rank to the most tokens of any batch, or use smaller "
                "micro-batches"
            )
        return problem

    def topk_problem(self, topk_idx: torch.Tensor) -> str | None:
        """Say what is wrong with the argument of plan on this rank.  Waits for the device."""
        problem = self.topk_shape_problem(topk_idx)
        return problem or checks.topk_value_problem(topk_idx, self.num_experts)

    def rows_problem(
        self, phase: str, plan: RoutePlan, rows: torch.Tensor, w: torch.Tensor | None
    ) -> str | None:
        """Say what is wrong with the arguments of dispatch or combine on this rank."""
        problem = checks.plan_problem(plan, self.plan_type, self)
        return problem or checks.rows_problem(  # otherwise it may not even be a plan
            phase == "dispatch", plan, rows, w, self.caps, self.group.device
        )

    def agree_on_routes(self, topk_idx: torch.Tensor, problem: str | None) -> Agreement:
        """Check the argument of plan on all ranks; every rank learns every rank's number of tokens.

        Collective.  `problem`: what is wrong on this rank, if anything is.
        """
        config = self.config
        shape = checks.routing_shape(topk_idx)
        num_tokens = shape[0]
        values: dict[str, int | str | None] = {
            "top_k": shape[-1],
            "num_experts": self.num_experts,
            "alignment": config.block_alignment,
            "max_recv_rows": config.max_recv_rows,
            "num_sms": config.num_sms,
        }
        if isinstance(rows := config.max_recv_rows, str) and not self.declared_tokens:
            name = (
                f"number of tokens (max_recv_rows={rows!r} depends on it, unless "
                "max_tokens_per_rank says how many there are at most)"
            )
            values[name] = num_tokens
        return self.group.hosts.agree("plan", values, problem, self.timeout_s, payload=num_tokens)

    def agree_on_rows(
        self,
        phase: str,
        plan: RoutePlan,
        rows: torch.Tensor,
        w: torch.Tensor | None,
        problem: str | None,
    ) -> _Plan:
        """Check the arguments of dispatch or combine on all ranks.  Collective.

        `phase`: "dispatch" or "combine"; `problem`: what is wrong on this rank, `rows_problem`
        included, if anything is.  Returns the plan.
        """
        values: dict[str, int | str | None] = {}
        if problem is None:
            values = {
                "plan": plan.plan_id,
                "dtype": str(rows.dtype).removeprefix("torch."),  # first: rows of bytes are longer
                "hidden size": rows.shape[-1],
                "presence of weights": str(w is not None),
            }
        self.group.hosts.agree(phase, values, problem, self.timeout_s)
        assert isinstance(plan, self.plan_type)  # agreed on
        return plan
