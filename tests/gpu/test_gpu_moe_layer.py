"""A whole MoELayer on GPUs with each engine against `alltoall`: outputs and all gradients.

The tolerances are those of the CPU's test (`layer_case.py`), and so are their reasons: the same
sums of at most six rows in another order, and weight gradients over at most 128 rows.  Experts in
slices are compared to the bit, with whole numbers that a bf16 has.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from deselect import needs_te
from layer_case import LayerCase, assert_same_training
from megatron_setup import ep_config
from rank_pool import RankContext

# One hidden size and one number of experts: an engine that compiles at run time does so twice,
# once for each dtype.
SHAPE = {"hidden_size": 64, "num_moe_experts": 16}
SEQUENCES = (16,) * 4

CASES = [
    LayerCase("top-2", sequences=SEQUENCES),
    LayerCase("top-6", options={"moe_router_topk": 6}, sequences=SEQUENCES),
    LayerCase("uneven", sequences=(3, 16, 1, 9)),
    LayerCase(
        "recompute",
        options={"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        micro_batches=2,
        sequences=SEQUENCES,
    ),
    LayerCase("two-in-flight", micro_batches=2, in_flight=True, sequences=SEQUENCES),
    LayerCase("aligned", sequences=SEQUENCES),
]
ALIGNMENT = {"aligned": 32}


@pytest.mark.supports(compared="outputs and all gradients with alltoall's, within rounding")
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.supports(f"params_dtype={name}"), id=f"torch.{name}")
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
    ],
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            marks=pytest.mark.supports("--ncclep-alignment") if case.name in ALIGNMENT else (),
            id=case.name,
        )
        for case in CASES
    ],
)
def test_layer_equals_alltoall(
    ctx: RankContext, engine_name: str, case: LayerCase, dtype: torch.dtype
) -> None:
    ncclep = ep_config(engine_name, alignment=ALIGNMENT.get(case.name, 1))
    options = {**SHAPE, **case.options, "ncclep": ncclep}
    case = dataclasses.replace(case, ep=ctx.num_ranks, dtype=dtype, options=options)
    assert_same_training(ctx, case, engine_name)


EXPERTS = {
    "local": {},
    "te": {"te": True},
    "grouped": {"te": True, "ncclep": {"experts": "grouped"}},
    "grouped-static": {
        "te": True,
        "ncclep": {"experts": "grouped", "max_recv_rows": "worst"},
        "micro_batches": 2,
        "in_flight": True,
    },
}


@pytest.mark.needs_ranks(2)
@pytest.mark.supports(
    "expert_tensor_parallel_size",
    "tensor_model_parallel_size",
    compared="outputs and all gradients with alltoall's, to the bit, with whole numbers in bf16",
)
@pytest.mark.parametrize("on_all", [False, True], ids=["2-slices", "slices-on-all-ranks"])
@pytest.mark.parametrize(
    "experts", [pytest.param(name, marks=needs_te if name != "local" else ()) for name in EXPERTS]
)
def test_experts_in_slices_equal_alltoall(
    ctx: RankContext, engine_name: str, experts: str, on_all: bool
) -> None:
    """Expert tensor parallelism, with tensor and sequence parallelism of the same size."""
    case = slices_case(ctx.num_ranks, engine_name, experts, on_all)
    assert_same_training(ctx, case, engine_name)


def slices_case(num_ranks: int, engine_name: str, experts: str, on_all: bool) -> LayerCase:
    slices = num_ranks if on_all else 2
    fields = dict(EXPERTS[experts])
    ncclep = ep_config(engine_name, **fields.pop("ncclep", {}))
    return LayerCase(
        experts,
        ep=num_ranks // slices,
        etp=slices,
        tp=slices,
        dtype=torch.bfloat16,
        options={
            **SHAPE,
            "activation_func": F.relu,
            "moe_grouped_gemm": fields.get("te", False),
            "use_cpu_initialization": False,
            "ncclep": ncclep,
        },
        integers=True,
        sequences=(16,) * num_ranks,
        **fields,
    )
