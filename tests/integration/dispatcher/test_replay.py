"""Replayed routing, as reinforcement learning trains with what the generator's routers chose (R3):
other experts than the router's, fewer of them than top-k, and expert 0 for every padded token.

There one expert stands for several of a token's assignments, and `alltoall`, which counts on top-k
rows for each token, fails; with a capacity that drops nothing it counts rows itself, and is what we
compare with.
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import layer_case
import pytest
import torch
from layer_case import LayerCase, assert_same_training, train_on_rank
from megatron_setup import EXPERTS, selective
from rank_pool import RankContext

from megatron_ncclep.config import EpConfig

pytestmark = pytest.mark.each_release

TOP_K = 2


def experts_of(kind: str, num_tokens: int, rank: int) -> torch.Tensor:
    """What is replayed: [num_tokens, top-k]."""
    generator = torch.Generator().manual_seed(3 + rank)
    chosen = torch.rand(num_tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
    if kind == "fewer":
        chosen[::2, 1] = chosen[::2, 0]
    if kind == "padded":
        chosen[-num_tokens // 3 :] = 0
    return chosen


def train(ctx: RankContext, case: LayerCase, dispatcher: str) -> dict[str, Any]:
    """As `train_on_rank`, with replayed experts; the case's name begins with their kind."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    num_tokens = case.sequences[ctx.rank] * case.batch
    options = {**case.options, "moe_enable_routing_replay": True}
    if dispatcher == "alltoall":
        options["moe_expert_capacity_factor"] = EXPERTS / TOP_K  # all tokens

    def build(*args: Any) -> torch.nn.Module:
        RouterReplay.clear_global_router_replay_instances()
        layer = layer_case_build(*args)
        RouterReplay.set_replay_data([experts_of(case.name.split("-")[0], num_tokens, ctx.rank)])
        act = RouterReplay.set_global_router_replay_action
        act(RouterReplayAction.REPLAY_FORWARD)
        layer.register_forward_hook(lambda *_: act(RouterReplayAction.REPLAY_BACKWARD))
        return layer

    layer_case_build = layer_case.build_layer
    with mock.patch.object(layer_case, "build_layer", build):
        return train_on_rank(ctx, dataclasses.replace(case, options=options), dispatcher)


@pytest.mark.supports(
    "moe_enable_routing_replay",
    compared="outputs and all gradients with alltoall's, mostly to the bit",
)
@pytest.mark.parametrize("mode", ["exact", "static", "recomputed"])
@pytest.mark.parametrize("kind", ["others", "fewer", "padded"])
def test_replayed_experts(ctx: RankContext, kind: str, mode: str) -> None:
    options: dict[str, Any] = selective("moe") if mode == "recomputed" else {}
    if mode == "static":
        options["ncclep"] = EpConfig(max_recv_rows="worst", alignment=16)
    case = LayerCase(f"{kind}-{mode}", ep=2, options=options, same_bits=mode != "static")
    assert_same_training(ctx, case, "reference", train)
