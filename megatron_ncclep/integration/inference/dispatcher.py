"""Megatron's dispatcher hooks while text is generated (transformer_impl='inference_optimized').

Megatron's inference experts do not take rows ordered by expert.  They take rows in any order, with
each row's global expert numbers and probabilities, compute the rows that name one of their experts,
and return for every row the weighted sum over its experts here.  Low-latency mode delivers rows in
that form: one for each token that has an expert on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.moe.token_dispatcher_inference import (
    InferenceAllGatherDispatcherBase as ReadByExperts,
)

from megatron_ncclep.engines.engine import NOT_ROUTED, RoutePlan
from megatron_ncclep.engines.low_latency import LowLatency
from megatron_ncclep.integration.inference.session import DTYPE, InferenceSession


class NcclEpInferenceDispatcher(MoETokenDispatcher):
    """Token dispatcher of one layer for generating text; all layers of a group share its session.

    Megatron calls the hooks in the order in which they are defined here.  The dispatcher keeps what
    later hooks need, but nothing from one pass to the next: a CUDA graph may hold a pass, and is
    replayed with other tokens and other routings.

    Attributes:
        routing_map: passed by Megatron to the experts: int [num_rows, top_k], the experts of each
            row as global numbers; the experts skip those of other ranks.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: Any,
        pg_collection: Any,
        session: InferenceSession,
    ) -> None:
        """Not collective."""
        super().__init__(config=config, pg_collection=pg_collection)
        self.session = session
        self._num_local_experts, self._first_expert = num_local_experts, local_expert_indices[0]
        self.routing_map: torch.Tensor | None = None
        self._shape: torch.Size | None = None
        self._low_latency: LowLatency | None = None
        self._plan: RoutePlan | None = None
        self._num_valid: torch.Tensor | None = None
        self._others: tuple[Any, Any] | None = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the router's choice.

        Args:
            hidden_states: [..., hidden]; all leading dimensions together are the tokens.
            routing_map: [num_tokens, top_k] integers: global numbers of the experts.
            probs: fp32 [num_tokens, top_k].

        Returns:
            hidden_states [num_tokens, hidden], and probs unchanged.
        """
        if self.config.moe_router_topk == 1:  # Megatron's router leaves the dimension out
            routing_map, probs = (
                t.view(-1, 1) if t.dim() == 1 else t for t in (routing_map, probs)
            )
        self._shape, self.routing_map = hidden_states.shape, routing_map
        return hidden_states.reshape(-1, hidden_states.shape[-1]), probs

    @torch.compiler.disable
    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send rows and probabilities to the experts' ranks.  Collective.

        Returns:
            rows [num_rows, hidden], undefined where a row names no expert of this rank, and the
            probabilities of their experts, fp32 [num_rows, top_k].

        Raises:
            InputError: on every rank: the router's output, the dtype or the size of a batch is
                wrong.
        """
        assert self.routing_map is not None, "dispatch_preprocess comes first"
        problem = self._problem(hidden_states, self.routing_map, probs)
        self._low_latency = self.session.low_latency_for(len(hidden_states), problem)
        if self._low_latency is None:
            return self._dispatch_many(hidden_states, self.routing_map, probs)
        received = self._low_latency.dispatch(hidden_states, self.routing_map, probs)
        # Where no expert is named, -1 becomes the expert before this rank's first one, or stays -1:
        # in either case not an expert of this rank, so the experts skip it.
        self.routing_map = (received.topk_idx + self._first_expert).flatten(0, 1)
        self._num_valid = self.session.all_places
        return received.rows.flatten(0, 1), received.weights.flatten(0, 1)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None, torch.Tensor]:
        """Store the number of rows where Megatron's experts read it; `routing_map` is already set.

        These are two class attributes, which another model's dispatcher may use too: their old
        values are restored after the experts.

        Returns:
            rows, no tokens_per_expert, probabilities.
        """
        self._others = ReadByExperts._valid_tokens_tensor, ReadByExperts._host_valid_tokens_estimate
        ReadByExperts._valid_tokens_tensor = self._num_valid
        # Only determines how many threads a kernel gets: as in Megatron's dispatchers, it assumes
        # that all ranks have as many tokens as this one.
        assert self._shape is not None
        ReadByExperts._host_valid_tokens_estimate = max(
            1, self._shape[:-1].numel() * self.session.group.size
        )
        return hidden_states, None, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Restore the class attributes; combine reads the experts' rows where they are."""
        assert self._others is not None, "dispatch_postprocess comes first"
        ReadByExperts._valid_tokens_tensor, ReadByExperts._host_valid_tokens_estimate = self._others
        self._others = self.routing_map = self._num_valid = None
        return hidden_states

    @torch.compiler.disable
    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Add up the experts' rows [num_rows, hidden] by token: [num_tokens, hidden].  Collective.

        Some of Megatron's kernels return fp32: rows are rounded to bf16 before they are sent.
        """
        rows = hidden_states.to(DTYPE)
        low_latency, self._low_latency = self._low_latency, None
        if low_latency is not None:
            places = (self.session.group.size, low_latency.sizes.max_tokens)
            return low_latency.combine(rows.unflatten(0, places))
        assert self._plan is not None, "token_dispatch comes first"
        plan, self._plan = self._plan, None
        out, _ = self.session.engine.combine(plan, rows[: plan.num_rows])
        return out

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Restore the shape of the hidden states."""
        assert self._shape is not None, "dispatch_preprocess comes first"
        return hidden_states.view(self._shape)

    def _dispatch_many(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`token_dispatch` through the engine: one row per assignment."""
        engine = self.session.engine
        self._plan = plan = engine.plan(routing_map)
        rows, weights = engine.dispatch(plan, hidden_states, probs)
        assert weights is not None  # because probs were given
        num_rows = plan.num_rows
        expert = torch.arange(self._num_local_experts, device=rows.device) + self._first_expert
        expert = expert.repeat_interleave(plan.tokens_per_expert, output_size=num_rows)
        if num_rows == 0:  # kernels need a row, even one that they skip
            rows, weights = rows.new_zeros(1, rows.shape[1]), weights.new_zeros(1)
            expert = expert.new_full((1,), NOT_ROUTED)
        self.routing_map = expert.view(-1, 1)
        self._num_valid = torch.full((1,), len(rows), dtype=torch.int32, device=rows.device)
        return rows, weights.view(-1, 1)

    def _problem(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> str | None:
        """Say what is wrong with this rank's arguments, if anything is."""
        shape = (len(hidden_states), self.config.moe_router_topk)
        if tuple(routing_map.shape) != shape or tuple(probs.shape) != shape:
            return (
                f"the router gave experts {list(routing_map.shape)} and probabilities "
                f"{list(probs.shape)}: generating text needs {list(shape)} of both, the experts' "
                "numbers, from a layer built with get_inference_optimized_moe_spec (its "
                "InferenceTopKRouter)"
            )
        if hidden_states.dtype != DTYPE or probs.dtype != torch.float32:
            return (
                f"rows are {hidden_states.dtype} and probabilities {probs.dtype}: Megatron-Core's "
                f"inference experts take {DTYPE} (params_dtype) and torch.float32 "
                "(moe_router_dtype='fp32')"
            )
        return None
