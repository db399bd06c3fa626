"""The plan of the engine `hierarchical`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ncclep.engines.engine import Engine, RoutePlan


@dataclass(eq=False)
class HierarchicalPlan(RoutePlan):
    """Which tokens cross to which node, and the plan inside the node.

    Attributes:
        inside: plan of `engine`, for the tokens that came over this rank's rail.
        engine: the node's engine, which made `inside`.
        most_tokens: the most tokens of any rank; in static mode, the number that fits.
        sent_token: int32 [tokens sent]: by node, then token; None in static mode, where all tokens
            are sent.
        message_index: int32 [nodes, num_tokens]: the index of a token's message to a node among all
            messages; -1: the token has no assignments there.
        assignment_node: int32 [num_tokens, top_k]: the node of each assignment; -1: not
            routed.
        tokens_sent: for each node.
        tokens_received: from each node.
    """

    inside: RoutePlan
    engine: Engine
    most_tokens: int
    sent_token: torch.Tensor | None
    message_index: torch.Tensor
    assignment_node: torch.Tensor
    tokens_sent: list[int]
    tokens_received: list[int]

    def tokens_per_expert_on_host(self) -> torch.Tensor:
        """See `RoutePlan.tokens_per_expert_on_host`."""
        return self.inside.tokens_per_expert_on_host()
