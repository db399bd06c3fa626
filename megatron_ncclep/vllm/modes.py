"""How a pair moves rows: low-latency mode for few tokens, exact mode for many.

Both offer a dispatch and a combine in two halves, and deliver rows in vLLM's standard format, for
experts that drop what `expert_map` drops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from megatron_ncclep.engines.engine import NOT_ROUTED, Engine, RoutePlan
from megatron_ncclep.engines.low_latency import LowLatency
from megatron_ncclep.engines.low_latency_types import LowLatencyRows, Tokens
from megatron_ncclep.ops.packed_rows import pack_rows, unpack_rows


@dataclass(frozen=True)
class ExpertInputs:
    """What a rank's experts get.

    Attributes:
        rows: [num_rows, hidden].
        scales: [num_rows, num_scales] fp32, or None.
        counts: int32 [num_local_experts]: assignments of each expert.
        topk_ids: int32 [num_rows, k]: experts of all ranks; those of other ranks are to be dropped.
        topk_weights: fp32 [num_rows, k].
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


class Mode(Protocol):
    """One layer's call at a time: a dispatch, then its combine."""

    def dispatch(self, tokens: Tokens) -> Callable[[], ExpertInputs]:
        """Send this rank's tokens; returns a function that waits for the others'.  Collective."""
        ...

    def combine(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send back a row [num_rows, hidden] for each of the inputs.  Collective.

        Returns:
            a function that waits for the other ranks, and returns [num_tokens, hidden].
        """
        ...


class FewTokens:
    """A `LowLatency` object: no host waits, addresses stay, and so CUDA graphs can hold it.

    Rows are [num_ranks * max_tokens, hidden], one for each token that has an expert here.
    Assignments of other ranks, and all assignments of empty rows, name an expert of another rank:
    some of vLLM's experts accept -1 and some do not.
    """

    def __init__(self, calls: LowLatency, num_experts: int) -> None:
        """Not collective."""
        self._calls, self._num_experts = calls, num_experts

    def dispatch(self, tokens: Tokens) -> Callable[[], ExpertInputs]:
        """See `Mode.dispatch`."""
        self._calls.send_dispatch(tokens.x, tokens.topk_idx, tokens.weights, tokens.scales)
        return lambda: self._inputs(self._calls.complete_dispatch())

    def combine(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See `Mode.combine`."""
        sizes = self._calls.sizes
        self._calls.send_combine(rows.view(-1, sizes.max_tokens, sizes.hidden))
        return self._calls.complete_combine

    def _inputs(self, received: LowLatencyRows) -> ExpertInputs:
        sizes, num_local = self._calls.sizes, received.num_local_experts
        first = self._calls.group.rank * num_local
        elsewhere = self._num_experts - 1 if first == 0 else 0
        if self._calls.group.size == 1:
            elsewhere = NOT_ROUTED
        local = received.topk_idx.view(-1, sizes.top_k)
        is_here = local >= 0
        counts = torch.zeros(num_local + 1, dtype=torch.int32, device=local.device)
        counts.scatter_add_(
            0, torch.where(is_here, local, num_local).view(-1).long(), local.new_ones(local.numel())
        )
        return ExpertInputs(
            received.rows.view(-1, sizes.hidden),
            None if received.scales is None else received.scales.view(-1, sizes.num_scales),
            counts[:num_local],
            torch.where(is_here, local + first, elsewhere),
            received.weights.view(-1, sizes.top_k),
        )


class ManyTokens:
    """An engine in exact mode, for prompts: the host waits for the number of rows.

    Every row is an assignment of one expert here, in the order of experts; so the experts see rows
    of top-1.
    """

    def __init__(self, engine: Engine) -> None:
        """Not collective."""
        self._engine = engine
        self._plan: RoutePlan | None = None

    def dispatch(self, tokens: Tokens) -> Callable[[], ExpertInputs]:
        """See `Mode.dispatch`."""
        engine, x, scales = self._engine, tokens.x, tokens.scales
        plan = self._plan = engine.plan(tokens.topk_idx)
        sent = x if scales is None else pack_rows(x, scales)
        rows, weights = engine.dispatch(plan, sent, tokens.weights)
        assert weights is not None
        if scales is not None:
            rows, scales = unpack_rows(rows, x.shape[1], scales.shape[1], x.dtype)
            rows, scales = rows.contiguous(), scales.contiguous()
        num_local = engine.num_local_experts
        first = engine.group.rank * num_local
        experts = torch.arange(first, first + num_local, dtype=torch.int32, device=x.device)
        topk_ids = experts.repeat_interleave(plan.tokens_per_expert, output_size=plan.num_rows)
        inputs = ExpertInputs(
            rows, scales, plan.tokens_per_expert.int(), topk_ids.view(-1, 1), weights.view(-1, 1)
        )
        return lambda: inputs

    def combine(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """See `Mode.combine`."""
        assert self._plan is not None
        out, _ = self._engine.combine(self._plan, rows)
        self._plan = None
        return lambda: out
