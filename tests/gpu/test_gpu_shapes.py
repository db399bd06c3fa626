"""What only TransformerEngine has, rows in a latent size, routers in one kernel and packed
sequences, and the batches of tests/integration/dispatcher/test_shapes.py that kernels must take:
each engine against `alltoall`, outputs and all gradients.

A bf16 has 8 bits; `layer_case.py` says how far sums in another order may be apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_case import LayerCase, assert_same_training
from megatron_setup import ep_config
from rank_pool import RankContext
from test_shapes_of_models import LENGTHS
from trainer import ModelCase, train

# One size of rows nearly everywhere: an engine that compiles at run time does so for each.
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_moe_experts": 16,
    "moe_grouped_gemm": True,
    "use_cpu_initialization": False,
}
CAPACITY = {"moe_expert_capacity_factor": 0.6}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
FUSED = {"moe_router_fusion": True}
CASES = [
    LayerCase("latent", options={"moe_latent_size": 64, "hidden_size": 128}),
    LayerCase("router-fusion", options=FUSED),
    LayerCase(
        "router-fusion-sigmoid-capacity",
        options={**FUSED, **CAPACITY, "moe_router_score_function": "sigmoid"},
    ),
    LayerCase(
        "router-fusion-aux-loss",
        options={**FUSED, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    ),
    LayerCase("fp64-router", options={"moe_router_dtype": "fp64"}),
    LayerCase("capacity-by-position", options={**CAPACITY, "moe_token_drop_policy": "position"}),
    LayerCase("pad-to-capacity", options=PADDED),
    LayerCase("one-token", sequences=(1,) * 4, batch=1),
    LayerCase(
        "evaluations-padded",
        evaluation=(40,) * 4,
        pads_decoding=True,
        micro_batches=2,
        shows=("other sizes in evaluations", "moe_pad_experts_for_cuda_graph_inference"),
    ),
    LayerCase("gradient-not-contiguous", transposed=True),
]
# The batch decides how many rows there are; capacity padding may give a token all 16 experts.
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "static": {"max_recv_rows": "worst", "alignment": 16},
}
each_mode = pytest.mark.parametrize(
    "mode", ["exact", pytest.param("static", marks=pytest.mark.supports("--ncclep-max-recv-rows"))]
)


@pytest.mark.supports(compared="outputs and all gradients with alltoall's, within rounding")
@each_mode
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shape_equals_alltoall(
    ctx: RankContext, engine_name: str, case: LayerCase, mode: str
) -> None:
    ncclep = ep_config(engine_name, **MODES[mode])
    case = replace(
        case,
        ep=ctx.num_ranks,
        dtype=torch.bfloat16,
        te=True,
        options={**SHAPE, **case.options, "ncclep": ncclep},
        sequences=case.sequences if case.batch == 1 else (16,) * 4,
    )
    assert_same_training(ctx, case, engine_name)


# The longest batch of `LENGTHS` has 43 tokens.
PACKED_MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "static": {"max_recv_rows": 2048},
    "declared": {"max_recv_rows": "worst", "max_tokens_per_rank": 43},
}
PACKED = ModelCase("packed", sizes=SHAPE, dtype=torch.bfloat16, te=True, steps=3, lengths=LENGTHS)


@pytest.mark.supports(
    "packed sequences (THD)",
    "ranks with different numbers of tokens",
    compared="losses and all gradients with alltoall's, step by step, within rounding; in exact "
    "mode to the bit where alltoall repeats its own",
)
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.supports("--ncclep-max-recv-rows") if options else ())
        for mode, options in PACKED_MODES.items()
    ],
)
def test_packed_sequences_equal_alltoall(ctx: RankContext, engine_name: str, mode: str) -> None:
    """Three steps; a step's weights come from the gradients before it.

    In exact mode the bits are those of `alltoall` wherever it has the same when it runs again.  The
    experts' blocks are longer in static mode, for which cuBLAS may take another kernel.
    """
    ncclep = ep_config(engine_name, **PACKED_MODES[mode])
    case = replace(PACKED, ep=ctx.num_ranks, options={"ncclep": ncclep})
    ours = train(ctx, "ncclep", case)
    theirs, again = (train(ctx, "alltoall", case) for _ in range(2))
    assert any("experts" in name and value.any() for name, value in theirs.items())
    for name, value in theirs.items():
        is_fixed = mode == "exact" and torch.equal(value, again[name])
        bound = 0.0 if is_fixed else 3e-2 * value.abs().max().item()
        error = (ours[name] - value).abs().max().item()
        assert error <= bound, f"{name}: differs by {error}, at most {bound}"
