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
from test_recipes import MLA
from trainer import ModelCase, differences, train

from megatron_ncclep.config import EpConfig

pytestmark = pytest.mark.each_release

AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
EXPERT_BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
QUANTILES = {"moe_router_load_balancing_type": "quantile_balancing"}
REPEATED = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True}
LATENT = {"multi_latent_attention": True}
CASES = [
    ModelCase("dense-and-moe-layers", {"moe_layer_freq": [0, 1, 0, 1]}, {"num_layers": 4}),
    ModelCase("every-second-layer", {"moe_layer_freq": 2}, {"num_layers": 3}),
    ModelCase("mtp", {"mtp_num_layers": 1}),
    ModelCase("mtp-repeated", REPEATED, {"num_layers": 1}, since="0.17"),
    # Without TransformerEngine from 0.17 on.
    ModelCase("multi-latent-attention", LATENT, MLA | {"rope_type": "rope"}, since="0.17"),
    ModelCase("per-token-loss", {"calculate_per_token_loss": True}, padding=3),
    ModelCase("padding-mask", AUX_LOSS, padding=3),
    ModelCase("expert-bias-updates", EXPERT_BIAS),
    ModelCase("quantile-balancing", QUANTILES, since="0.19"),
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
# The marks of each mode.
MARKS = {"exact": [], "static": [pytest.mark.supports("--ncclep-max-recv-rows")]}


@pytest.mark.supports(compared="losses and all gradients with alltoall's, step by step, in fp64")
# Exact mode for one model, static mode for the next one.
@pytest.mark.parametrize(
    ("case", "mode"),
    [
        pytest.param(case, mode, marks=[pytest.mark.since(case.since), *MARKS[mode]])
        for case, mode in [*zip(CASES, cycle(MARKS)), (PACKED, "exact"), (PACKED, "static")]
    ],
    ids=str,
)
def test_model_equals_alltoall(ctx: RankContext, case: ModelCase, mode: str) -> None:
    # A limit in words follows from the number of tokens, which ranks do not share if packed.
    static = EpConfig(max_recv_rows=512 if case.lengths else "worst", alignment=16)
    options = {**case.options, "ncclep": static if mode == "static" else None}
    ours = train(ctx, "ncclep", replace(case, options=options))
    assert differences(ours, train(ctx, "alltoall", case), tolerance=1e-11) == []
