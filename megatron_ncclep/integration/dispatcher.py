"""Megatron's six dispatcher hooks in terms of plan, dispatch and combine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from megatron_ncclep.config import DROP, EpConfig
from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.engines.overflow import DropWarning, can_drop
from megatron_ncclep.errors import InputError, UnsupportedError
from megatron_ncclep.integration import shared_experts
from megatron_ncclep.integration.checks.assignments import (
    adds_assignments,
    require_columns_for_all_slices,
    require_order_of_ranks,
    require_usable_bound,
)
from megatron_ncclep.integration.experts.layer_experts import (
    GroupedInLayer,
    refused_change,
    refused_graph,
    reversed_blocks,
)
from megatron_ncclep.integration.layer_engines import LayerEngines
from megatron_ncclep.metrics import LayerCounts, count_layer
from megatron_ncclep.ops.combine import combine
from megatron_ncclep.ops.dispatch import dispatch
from megatron_ncclep.ops.expert_slices import to_all_slices
from megatron_ncclep.ops.nvtx import step_range
from megatron_ncclep.ops.routing import routes_and_weights
from megatron_ncclep.ranks.group import EpGroup

if TYPE_CHECKING:
    from megatron_ncclep.integration.experts.fp8_crossing import Fp8Crossing


class NcclEpTokenDispatcher(MoETokenDispatcher):
    """Token dispatcher over the ranks that hold one layer's experts.

    These are the expert-parallel group, or with expert tensor parallelism Megatron's group `tp_ep`:
    its ranks hold slices of the experts (ops/expert_slices.py).

    Megatron calls the hooks in the order in which they are defined here, once per micro-batch.  The
    dispatcher keeps what later hooks need (plan and shape), because Megatron's hooks have no other
    place for it.  What backward needs is in the autograd graph, so any number of micro-batches may
    be between forward and backward.

    A CUDA graph may end after `dispatch_preprocess`; then that hook does not run in Python on
    replay, and Megatron restores the tensor that `cudagraph_attrs` names.  So the hook stores
    nothing else.

    With moe_shared_expert_overlap the layer passes its shared experts to the dispatcher
    (`set_shared_experts`): the hooks that communicate run them on their own stream, the first half
    concurrently with dispatch and the second with combine (shared_experts.py).

    A layer that is recomputed is planned and dispatched again in backward, and so are its shared
    experts.  torch.compile must break the graph at the hooks that call the engine: it would trace
    tensors in the hosts' agreement, and recompile for other numbers of rows.

    With overlap_moe_expert_parallel_comm Megatron calls the hooks on two streams, which it orders:
    those that communicate on one, the rest on the other.  `_take_over` makes passing memory
    between them safe.

    With on_overflow="rerun" there are two engines (layer_engines.py).  One in static mode is for
    attempts at a step, which is run again if rows do not fit, and for captures; all other passes,
    those of a step that is run again among them, use one in exact mode.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any,
        counts_on_device: bool = False,
        counts_cover_all_rows: bool = False,
        grouped: GroupedInLayer | None = None,
        options: EpConfig | None = None,
    ) -> None:
        """Make the engine.  Collective over the ranks that hold the experts.

        Args:
            num_local_experts: experts of this rank, which may be slices.
            local_expert_indices: their global indices, consecutive.
            config: TransformerConfig; its attribute `ncclep` is the EpConfig, if it has one.
            pg_collection: Megatron's process groups; `ep`, `expt_tp` and `tp_ep` are used.
            counts_on_device: the experts take tokens_per_expert on the device; otherwise on the
                CPU, for which `dispatch_postprocess` waits.
            counts_cover_all_rows: even then, the experts need the counts to cover every row.
            grouped: the layer's grouped experts, which need their blocks in descending order.  The
                engine then treats the rank's last expert as its first; no rows are moved for that.
                When something was put on their modules, rows are moved into Megatron's order, for
                its own experts.
            options: replace those of the config.

        Raises:
            InputError, EngineUnavailableError: see `create_engine`.
            InputError: the engine supports fewer assignments of a token than its experts have
                slices, or this static mode does not work with capacity padding.
            UnsupportedError: the ranks of the groups are not in Megatron's order.
        """
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices
        self._num_slices: int = self.tp_group.size()
        self.group = self.ep_group if self._num_slices == 1 else self.tp_ep_group
        options = options or getattr(config, "ncclep", None)  # None: the environment's
        num_experts = config.num_moe_experts * self._num_slices
        self.engines = LayerEngines(self.group, num_experts, options, self._num_slices)
        self._ranks = EpGroup.of(self.group)
        self._counts_on_device = counts_on_device
        self._counts_cover_all_rows = counts_cover_all_rows or not counts_on_device
        self._is_static = self.engine.config.max_recv_rows is not None
        self._can_drop = can_drop(self.engine.config)
        self._grouped = grouped
        self._experts_per_block = 1 if grouped is None else num_local_experts
        # For `metrics_interval`.
        self._counts: LayerCounts | None = None
        try:
            if self._is_static and adds_assignments(config):
                require_usable_bound(config, self.engine, self._num_slices)
            if self._num_slices > 1:
                require_columns_for_all_slices(config, self.engine, self._num_slices)
                deadline_s = self._ranks.deadline_s(self.engine.config)
                require_order_of_ranks(self._ranks, self.ep_group, self.tp_group, deadline_s)
            if self.engine.config.metrics_interval:
                self._counts = count_layer(self.engine, self)
        except (InputError, UnsupportedError):  # of all ranks
            self.engines.close()
            raise
        self._has_two_streams = getattr(config, "overlap_moe_expert_parallel_comm", False)
        self._routing_map: torch.Tensor | None = None
        self._plan: RoutePlan | None = None
        self._hidden_shape: torch.Size | None = None
        # Hands the experts rows that cross in FP8.
        self._crossing: Fp8Crossing | None = None
        # Rows of each block in Megatron's order, if the rows were moved into it for this pass.
        self._moved: list[int] | None = None
        self.cudagraph_attrs = ["_routing_map"]
        # int64 scalar on the device: assignments dropped so far in static mode, in forward passes
        # only, each once.  It stays the same tensor, so that a replayed CUDA graph keeps counting.
        self.num_dropped: torch.Tensor | None = None
        if self._is_static:
            self.num_dropped = torch.zeros((), dtype=torch.int64, device=self._ranks.device)
            if self._can_drop and self.engine.config.on_overflow == DROP:
                DropWarning.of(self._ranks).watch(self.num_dropped, self.engine.config)

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the map, which `token_dispatch` reads.

        Args:
            hidden_states: [..., hidden]; all leading dimensions together are the tokens.
            routing_map: [num_tokens, num_experts] bool.
            probs: [num_tokens, num_experts].

        Returns:
            hidden_states and probs, unchanged.
        """
        self._routing_map = routing_map
        return hidden_states, probs

    @torch.compiler.disable
    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan the routes and dispatch rows and weights.  Collective.

        Args:
            hidden_states: [..., hidden].
            probs: [num_tokens, num_experts].

        Returns:
            rows [num_rows, hidden] in slot order, or what stands in for them if they cross in FP8,
            and their weights [num_rows].
        """
        assert self._routing_map is not None, "dispatch_preprocess comes first"
        routing_map, self._routing_map = self._routing_map, None
        self._take_over(hidden_states, probs, routing_map)
        self._crossing = None
        if self._grouped is not None and self.engine.caps.moves_bytes:
            self._crossing = self._grouped.rows_cross(hidden_states)
        self._hidden_shape, group, shared = hidden_states.shape, self._ranks, self.shared_experts
        shared_experts.prepare(shared, hidden_states)
        with shared_experts.finished_after_errors(shared, has_dispatched=False):
            chosen = routes_and_weights(
                routing_map, probs, self._top_k(routing_map), self._experts_per_block
            )
            if self._num_slices > 1:
                chosen = to_all_slices(*chosen, self.num_local_experts, self._num_slices)
            # Before it captures a layer, Megatron runs it with arbitrary data in its buffers.
            is_captured = hidden_states.is_cuda and torch.cuda.is_current_stream_capturing()
            group.is_warmup = is_graph_capturing() and not is_captured
            engine = self.engines.in_use()
            with step_range("plan", hidden_states):
                zero_unused = self._grouped is None or self._counts_cover_all_rows
                self._plan = engine.plan(chosen[0].topk_idx, zero_unused)
            if not group.is_warmup and not _is_recomputing():
                if self._can_drop and engine is self.engine:
                    assert self.num_dropped is not None  # static mode
                    self.num_dropped.add_(self._plan.num_dropped)
                if self._counts is not None:
                    self._counts.count(chosen[0].topk_idx, self._plan)
                self.engines.record_load(self._plan, hidden_states)
            shared_experts.let_start(shared)
            rows, row_probs = dispatch(
                engine, self._plan, hidden_states, probs, chosen, self._crossing
            )
        shared_experts.first_half(shared, rows)
        return rows, row_probs

    @torch.compiler.disable
    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the numbers of rows of each expert; the rows are already in the experts' order.

        Returns:
            rows, tokens_per_expert int64 [num_local_experts] in the blocks' order, and the rows'
            weights. tokens_per_expert is on the CPU, where Megatron's experts expect it, or on the
            device for experts that take it there, in which case the host does not wait.  It adds up
            to the number of rows, except in static mode for experts that take it on the device and
            do not need the full sum: there the rows after the last block belong to no expert,
            otherwise to the last one.  They are zero, or anything for grouped experts.
        """
        plan = self._plan
        assert plan is not None, "token_dispatch comes first"
        if self._grouped is not None and (change := self._grouped.change()):
            if self._crossing is not None and self._crossing.stands_in:
                raise refused_change(change)
            return self._in_megatrons_order(plan, hidden_states, probs, change)
        if self._counts_on_device:
            counts = plan.tokens_per_expert
        else:
            counts = plan.tokens_per_expert_on_host()
        if self._counts_cover_all_rows and self.engines.is_static():
            counts = counts.clone()
            counts[-1] = plan.num_rows - counts[:-1].sum()
        crossed = [] if self._crossing is None else self._crossing.waiting()
        self._take_over(hidden_states, probs, counts, *crossed)
        return hidden_states, counts, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Put moved rows back; otherwise combine reads the experts' rows where they are."""
        moved, self._moved = self._moved, None
        return hidden_states if moved is None else reversed_blocks(hidden_states, moved)

    @torch.compiler.disable
    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Add up each token's rows of [num_rows, hidden]; the hidden states' shape.  Collective."""
        assert self._plan is not None, "token_dispatch comes first"
        assert self._hidden_shape is not None
        plan, self._plan = self._plan, None
        crossing, self._crossing = self._crossing, None
        if crossing is not None:
            crossing.expect_gradient_of(hidden_states)
        shared_experts.let_start(self.shared_experts)
        with shared_experts.finished_after_errors(self.shared_experts, has_dispatched=True):
            out = combine(self.engines.in_use(), plan, hidden_states, self._hidden_shape, crossing)
        shared_experts.second_half(self.shared_experts, out)
        return out

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Wait for the shared experts, if this dispatcher has any, and add their output."""
        if self.shared_experts is None:
            return hidden_states
        return hidden_states + self.shared_experts.get_output()

    @property
    def engine(self) -> Engine:
        """The engine that the options ask for."""
        return self.engines.engine

    def counters(self) -> list[torch.Tensor]:
        """The counters of forward passes; they go back when a step is run again."""
        counters = [t for t in (self.num_dropped, self.engines.load) if t is not None]
        return counters if self._counts is None else [*counters, *self._counts.tensors()]

    def _in_megatrons_order(
        self, plan: RoutePlan, rows: torch.Tensor, probs: torch.Tensor, change: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `dispatch_postprocess` returns for Megatron's experts in place of grouped ones.

        The first expert comes first, and the counts are on the CPU and cover all rows, the unused
        ones too, which are zero then.

        Raises:
            UnsupportedError: a CUDA graph would hold this.
        """
        if is_graph_capturing() or (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise refused_graph(change)
        text = f"Megatron's experts compute in place of grouped ones from now on: {change}"
        self._ranks.log_once(logging.WARNING, text, f"rank {self._ranks.rank}: {text}")
        self._take_over(rows, probs)
        sizes: list[int] = plan.tokens_per_expert_on_host().tolist()
        rows, probs = reversed_blocks(rows, sizes), reversed_blocks(probs, sizes)
        self._moved = sizes[::-1]
        counts = torch.tensor(self._moved, device="cpu")
        counts[-1] += len(rows) - counts.sum()
        return rows, counts, probs

    def _take_over(self, *tensors: torch.Tensor) -> None:
        """Record the tensors on this stream so the allocator does not reuse them early.

        Megatron does this for the inputs that it frees and for gradients.
        """
        if self._has_two_streams:
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(torch.cuda.current_stream())

    def _top_k(self, routing_map: torch.Tensor) -> int:
        """The most experts of a token in this micro-batch; the same on every rank.

        Raises:
            InputError: on every rank, see `require_usable_bound`.
        """
        top_k: int = self.config.moe_router_topk
        if not adds_assignments(self.config):
            return top_k
        if self.engines.is_static():  # reading the map would have to wait for the device
            require_usable_bound(self.config, self.engine, self._num_slices)
            return int(self.config.num_moe_experts)
        mine = int(routing_map.sum(dim=1).max()) if len(routing_map) else 0
        all_ranks = self._ranks.hosts.gather(
            [mine],
            "plan, exchanging how many experts a token has with capacity padding",
            self._ranks.deadline_s(self.engine.config),
        )
        return max(top_k, int(all_ranks.max()))


def _is_recomputing() -> bool:
    """Whether this forward pass is a recomputation during backward, whoever requested it.

    Activation checkpointing of Megatron, TransformerEngine and torch runs inside autograd's engine.
    """
    return bool(torch._C._current_graph_task_id() != -1)
