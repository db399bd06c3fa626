"""Whole models whose layers, losses or batches are unusual, against `alltoall`: losses and all
gradients, step by step, and what they say in between.

In fp64, where two orders of a sum of some numbers of size 1 are about 1e-15 apart: a bound of 1e-11
leaves room for the steps of training, and none for a row that is missing or another's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
from rank_pool import RankContext
from trainer import ModelCase, differences, train

from megatron_ncclep.config import EpConfig

pytestmark = pytest.mark.each_release

MODES = ("exact", "static")
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
]


# Lengths of the packed sequences of each rank's batch, step by step: more and fewer tokens than
# before, ranks that have many times those of others, and a batch of one token.  Megatron's flex
# dispatcher with NCCL EP makes room for the first batch, and traps in a longer one; and all its
# ranks must have as many tokens.
LENGTHS = (
    ((3, 2), (7,), (1, 1, 1), (4, 9)),
    ((12, 1, 30), (2, 2), (1,), (5,)),
    ((1,), (9, 8, 7, 6), (20,), (3, 3)),
)
PACKED = ModelCase("packed", ep=4, steps=3, lengths=LENGTHS)


@pytest.mark.supports(compared="losses and all gradients with alltoall's, step by step, in fp64")
@pytest.mark.parametrize(
    ("case", "mode"),
    [
        # Exact mode for one model, static mode for the next one.
        pytest.param(case, mode, marks=[pytest.mark.since(case.since), *MARKS[mode]])
        for case, mode in [*zip(CASES, cycle(MODES)), (PACKED, "exact"), (PACKED, "static")]
    ],
    ids=str,
)
def test_model_equals_alltoall(ctx: RankContext, case: ModelCase, mode: str) -> None:
    ncclep = None
    if mode == "static":
        # A limit in words follows from the number of tokens, which ranks do not share if packed.
        ncclep = EpConfig(max_recv_rows=512 if case.lengths else "worst", alignment=16)
    ours = train(ctx, "ncclep", replace(case, options={**case.options, "ncclep": ncclep}))
    assert differences(ours, train(ctx, "alltoall", case), tolerance=1e-11) == []
