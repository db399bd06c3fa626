"""The plan of the engine `hierarchical`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.engines.hierarchical.internode_routes import Crossing


@dataclass(eq=False)
class HierarchicalPlan(RoutePlan):
    """Which tokens cross to which node, and the plan inside the node.

    Attributes:
        inside: plan of `engine`, for the tokens that came over this rank's rail.
        engine: the node's engine, which made `inside`.
        most_tokens: the most tokens of any rank; in static mode, the number that fits.
        crossing: the messages of the tokens.
        assignment_node: int32 [num_tokens, top_k]: the node of each assignment; -1: not
            routed.
    """

    inside: RoutePlan
    engine: Engine
    most_tokens: int
    crossing: Crossing
    assignment_node: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """See `RoutePlan.tensors`."""
        token = self.crossing.token
        own = [*super().tensors(), self.crossing.message_index]
        return own if token is None else [*own, token]

    def tokens_per_expert_on_host(self) -> torch.Tensor:
        """See `RoutePlan.tokens_per_expert_on_host`."""
        return self.inside.tokens_per_expert_on_host()
