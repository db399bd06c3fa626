"""How a server's layer moves rows: low-latency mode for few tokens, exact mode for many.

Both offer a dispatch and a combine in two halves, and deliver a list of rows with their experts,
for experts that drop those of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import NOT_ROUTED, Engine, RoutePlan
from megatron_ncclep.engines.low_latency import LowLatency, create_low_latency
from megatron_ncclep.engines.low_latency_types import LowLatencyRows, Tokens
from megatron_ncclep.errors import InputError
from megatron_ncclep.integration.releases import Program
from megatron_ncclep.ops.packed_rows import pack_rows, unpack_rows
from megatron_ncclep.ranks.group import EpGroup

# The numbers of tokens that low-latency objects are made for: experts get as many rows from each
# rank, so a small batch takes the smallest object in which it fits.
MOST_TOKENS = (8, 32, 128, 512)


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


class FewTokens:
    """A `LowLatency` object: no host waits, addresses stay, and so CUDA graphs can hold it.

    One layer's call at a time: a dispatch, then its combine.

    Rows are [num_ranks * max_tokens, hidden], one for each token that has an expert here.
    Assignments of other ranks, and all assignments of empty rows, name an expert of another rank:
    some of vLLM's experts accept -1 and some do not.
    """

    def __init__(self, calls: LowLatency, num_experts: int) -> None:
        """Not collective."""
        self._calls, self._num_experts = calls, num_experts

    def dispatch(self, tokens: Tokens) -> Callable[[], ExpertInputs]:
        """Send this rank's tokens; returns a function that waits for the others'.  Collective."""
        self._calls.send_dispatch(tokens.x, tokens.topk_idx, tokens.weights, tokens.scales)
        return lambda: self._inputs(self._calls.complete_dispatch())

    def combine(self, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send back a row [num_rows, hidden] for each of the inputs.  Collective.

        Returns:
            a function that waits for the other ranks, and returns [num_tokens, hidden].
        """
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
        is_local = local >= 0
        counts = torch.zeros(num_local + 1, dtype=torch.int32, device=local.device)
        counts.scatter_add_(
            0,
            torch.where(is_local, local, num_local).view(-1).long(),
            local.new_ones(local.numel()),
        )
        return ExpertInputs(
            received.rows.view(-1, sizes.hidden),
            None if received.scales is None else received.scales.view(-1, sizes.num_scales),
            counts[:num_local],
            torch.where(is_local, local + first, elsewhere),
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
        """See `FewTokens.dispatch`."""
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
        """See `FewTokens.combine`."""
        assert self._plan is not None
        out, _ = self._engine.combine(self._plan, rows)
        self._plan = None
        return lambda: out


Mode = FewTokens | ManyTokens


class Modes:
    """The objects of both modes for one layer.

    A batch is in low-latency mode if no rank has more than `MOST_TOKENS[-1]` tokens, otherwise in
    exact mode.  Servers' ranks know each other's numbers of tokens, so all choose the same.  No
    host waits in low-latency mode, so CUDA graphs can hold it; they cannot hold exact mode.

    Layers of the same sizes share their objects, because they take turns.
    """

    def __init__(
        self,
        group: EpGroup,
        program: Program,
        num_experts: int,
        num_local_experts: int,
        **sizes: Any,
    ) -> None:
        """Collective.

        Args:
            group: the layer's ranks.
            program: the server.
            num_experts: of the whole group.
            num_local_experts: of this rank.
            sizes: further ones of `create_low_latency`.

        Raises:
            InputError: the ranks have different numbers of experts; on all ranks, for sizes that
                low-latency mode does not support.
            EngineUnavailableError: for example, the GPUs are not in one NVLink domain.
        """
        if num_experts != num_local_experts * group.size:
            raise InputError(
                f"{num_experts} experts, {num_local_experts} on this rank of {group.size}: "
                "every rank must have equally many, in order"
            )
        self._program = program
        name = f"{program.name} {num_experts}"
        engine = group.resources.share(name, lambda: _make_engine(group, program, num_experts))
        self._few: dict[int, FewTokens] = {}
        for most in MOST_TOKENS:

            def make(most: int = most) -> LowLatency:
                return create_low_latency(engine, max_tokens=most, **sizes)

            calls = group.resources.share(f"{name} {most} {sizes}", make)
            self._few[most] = FewTokens(calls, num_experts)
        self._many = ManyTokens(engine)

    def of(self, num_tokens: int, option: str) -> Mode:
        """The mode of a batch in which no rank has more tokens; the same on all ranks.

        Raises:
            InputError: a CUDA graph is being captured, and cannot hold so many; `option` limits it.
        """
        for most, few in self._few.items():
            if num_tokens <= most:
                return few
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise InputError(
                f"a CUDA graph of {num_tokens} tokens: {self._program.feature} can be captured "
                f"up to {MOST_TOKENS[-1]}: set {option}"
            )
        return self._many


def _make_engine(group: EpGroup, program: Program, num_experts: int) -> Engine:
    name = "native" if group.device.type == "cuda" else "reference"
    config = EpConfig.resolve(engine=name)
    if config.max_recv_rows is not None:
        raise InputError(
            f"max_recv_rows {config.max_recv_rows!r} (NCCLEP_MAX_RECV_ROWS): {program.name} with "
            f"{program.feature} drops no rows; leave it out"
        )
    return create_engine(group.torch.process_group, num_experts, config)
