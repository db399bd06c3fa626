"""The plan of the engine `hierarchical`: which tokens cross to which nodes, and in what order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ncclep.engines.engine import NOT_ROUTED, RoutePlan

NO_MESSAGE = -1


@dataclass(frozen=True)
class Crossing:
    """The messages of one plan: by node, then token.

    Attributes:
        token: int32 [messages]: the token of each message; None in static mode, where every token
            has one to every node.
        message_index: int32 [nodes, num_tokens]: the index of a token's message to a node among all
            messages; -1: the token has no assignments there.
        sent: number of messages to each node.
        received: number of messages from each node.
    """

    token: torch.Tensor | None
    message_index: torch.Tensor
    sent: list[int]
    received: list[int]

    def rows_of(self, assignments: torch.Tensor) -> torch.Tensor:
        """The assignments of the messages, [messages, top_k].

        Args:
            assignments: of all tokens on all nodes, [nodes, num_tokens, top_k].
        """
        count, num_tokens, top_k = assignments.shape
        if self.token is not None:
            return assignments[self.message_index >= 0]
        padded = assignments.new_full((count, self.sent[0], top_k), NOT_ROUTED)
        padded[:, :num_tokens] = assignments
        return padded.view(-1, top_k)


@dataclass(eq=False)
class HierarchicalPlan(RoutePlan):
    """Which tokens cross to which node, and the plan inside the node.

    Attributes:
        inside: the plan of the node's engine, for the tokens that came over this rank's rail.
        most_tokens: the most tokens of any rank; in static mode, the number that fits.
        crossing: the messages of the tokens.
        assignment_node: int32 [num_tokens, top_k]: the node of each assignment; -1: not
            routed.
    """

    inside: RoutePlan
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


def all_cross(needed: torch.Tensor, most_tokens: int) -> Crossing:
    """Messages of all tokens to all nodes, `most_tokens` to each.  Does not wait.

    Args:
        needed: bool [nodes, num_tokens].
        most_tokens: at least as many as any rank has.
    """
    count, num_tokens = needed.shape
    start = torch.arange(count, dtype=torch.int32, device=needed.device) * most_tokens
    token = torch.arange(num_tokens, dtype=torch.int32, device=needed.device)
    message_index = torch.where(needed, start[:, None] + token, NO_MESSAGE)
    sizes = [most_tokens] * count
    return Crossing(None, message_index, sizes, sizes)


def needed_cross(needed: torch.Tensor, sent: list[int], received: list[int]) -> Crossing:
    """Messages of tokens to the nodes that need them.  Waits for the device.

    Args:
        needed: bool [nodes, num_tokens].
        sent: its sum for each node.
        received: number of messages from each node.
    """
    token = needed.nonzero()[:, 1].int()
    before = needed.reshape(-1).cumsum(0).view_as(needed) - 1
    return Crossing(token, torch.where(needed, before, NO_MESSAGE).int(), sent, received)
