"""Whole models whose layers, losses or batches are unusual, against `alltoall`: losses and all
gradients, step by step, and what they say in between.

In fp64, where two orders of a sum of some numbers of size 1 are about 1e-15 apart: a bound of 1e-11
leaves room for the steps of training, and none for a row that is missing or another's.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from model_case import ModelCase, train_model_on_rank
from packed_case import LENGTHS, train_packed_on_rank

from megatron_ncclep.config import EpConfig
from megatron_ncclep.ranks.pool import RankPool

pytestmark = pytest.mark.each_release

MODES = {"exact": None, "static": EpConfig(max_recv_rows="worst", alignment=16)}
# The marks of each mode.
MARKS = {"exact": [], "static": [pytest.mark.supports("--ncclep-max-recv-rows")]}

CASES = [
    ModelCase("dense-and-moe-layers", {"moe_layer_freq": [0, 1, 0, 1]}, {"num_layers": 4}),
    ModelCase("every-second-layer", {"moe_layer_freq": 2}, {"num_layers": 3}),
    ModelCase("mtp", {"mtp_num_layers": 1}),
    ModelCase(
        "mtp-repeated",
        {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
        {"num_layers": 1},
        since="0.17",
    ),
    ModelCase(
        "multi-latent-attention",
        {"multi_latent_attention": True},
        {
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_head_dim": 4,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 4,
            "rope_type": "rope",
        },
        since="0.17",  # without TransformerEngine
    ),
    ModelCase("per-token-loss", {"calculate_per_token_loss": True}, padding=3),
    ModelCase(
        "padding-mask",
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
        padding=3,
    ),
    ModelCase(
        "expert-bias-updates",
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    ),
    ModelCase(
        "quantile-balancing", {"moe_router_load_balancing_type": "quantile_balancing"}, since="0.19"
    ),
    ModelCase("expert-biases", {"add_bias_linear": True}),
    ModelCase("mlp-chunks", {"mlp_chunks_for_training": 3}, since="0.18"),
    ModelCase("generation", generates=True),
]


@pytest.mark.supports(compared="losses and all gradients with alltoall's, step by step, in fp64")
@pytest.mark.parametrize(
    ("case", "mode"),
    [
        # Exact mode for one model, static mode for the next one.
        pytest.param(case, mode, marks=[pytest.mark.since(case.since), *MARKS[mode]])
        for case, mode in zip(CASES, cycle(MODES), strict=False)
    ],
    ids=str,
)
def test_model_equals_alltoall(megatron_pool: RankPool, case: ModelCase, mode: str) -> None:
    ours = megatron_pool.run(train_model_on_rank, "ncclep", case, MODES[mode])
    assert_same(ours, megatron_pool.run(train_model_on_rank, "alltoall", case, None))


@pytest.mark.supports(
    "packed sequences (THD)",
    "ranks with different numbers of tokens",
    compared="losses and all gradients with alltoall's, step by step, in fp64",
)
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=MARKS[mode]) for mode in MODES])
def test_packed_sequences_equal_alltoall(megatron_pool: RankPool, mode: str) -> None:
    """Megatron's flex dispatcher with NCCL EP makes room for the first batch, and traps in a longer
    one; and all its ranks must have as many tokens.
    """
    # A limit in words follows from the number of tokens, which these ranks do not share.
    options: dict[str, Any] = {"ncclep": EpConfig(max_recv_rows=512 if mode == "static" else None)}
    assert len({sum(lengths) for step in LENGTHS for lengths in step}) > 6
    ours = megatron_pool.run(train_packed_on_rank, "ncclep", torch.float64, options)
    assert_same(ours, megatron_pool.run(train_packed_on_rank, "alltoall", torch.float64, {}))


def assert_same(ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]) -> None:
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == other.keys()
        assert any("experts" in name and value.any() for name, value in other.items())
        for name, value in other.items():
            error = (mine[name] - value).abs().max().item()
            assert error <= 1e-11 * max(1.0, value.abs().max().item()), f"rank {rank}: {name}"
