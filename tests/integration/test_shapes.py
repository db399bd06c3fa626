"""Whatever Megatron makes of a batch before and around the dispatcher, against `alltoall`: tokens
that routers drop or add, ranks with few tokens or none, other sizes in between, rows in a latent
size, and every router.  Outputs and all gradients, in exact and static mode.

Nearly everywhere they are the same bits: with two picks a sum over a token's rows has two terms,
and rows of an expert come in the order in which `alltoall` brings them, so that even weight
gradients add up alike.  Two cases differ in the order of sums, and are compared in fp64 within
1e-12 (layer_case.py): experts in slices, whose parts `alltoall` adds up first; and static mode,
where the last expert's product has rows of zeros at its end, which a GEMM may cut in other blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_case import LayerCase, assert_same_results, train_on_rank
from megatron_versions import INSTALLED
from packaging.version import Version

from megatron_ncclep.config import EpConfig
from megatron_ncclep.testing.launcher import RankPool

LAYOUTS: dict[str, dict[str, int]] = {
    "ep1": {"ep": 1},
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "slices": {"ep": 2, "etp": 2, "tp": 2},  # with sequence parallelism
}
CAPACITY = {"moe_expert_capacity_factor": 0.6}
BY_POSITION = {**CAPACITY, "moe_token_drop_policy": "position"}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
SHARED_OVERLAP = {
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_gate": True,
    "moe_shared_expert_overlap": True,
}
AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
UNEVEN = (3, 6, 1, 9)
EMPTY = (0, 0, 0, 0)

# Sequence lengths are those of a rank's part; with tensor parallelism each two ranks have the same.
SHAPES: dict[str, dict[str, Any]] = {
    "capacity": {"options": CAPACITY},
    "capacity-by-position": {"options": BY_POSITION},
    "capacity-pre-softmax": {"options": {**CAPACITY, "moe_router_pre_softmax": True}},
    "capacity-uneven": {"options": CAPACITY, "sequences": UNEVEN},
    "pad-to-capacity": {"options": PADDED},
    "pad-to-capacity-by-position": {"options": {**PADDED, **BY_POSITION}},
    "uneven": {"sequences": UNEVEN},
    "one-token": {"sequences": (1, 1, 1, 1), "batch": 1},
    "rank-without-tokens": {"sequences": (6, 0, 3, 9)},
    "no-tokens-at-all": {"sequences": EMPTY},
    "evaluations": {"evaluation": (11, 11, 11, 11), "micro_batches": 2},
    "evaluations-uneven": {"evaluation": (1, 9, 0, 2), "sequences": UNEVEN, "micro_batches": 2},
    "evaluations-padded": {"evaluation": (2, 2, 2, 2), "pads_decoding": True, "micro_batches": 2},
    "latent": {"options": {"moe_latent_size": 8}},
    "latent-uneven": {"options": {"moe_latent_size": 6}, "sequences": UNEVEN},
    "shared-overlap-uneven": {"options": SHARED_OVERLAP, "sequences": UNEVEN, "same_bits": False},
    "shared-overlap-capacity": {"options": {**SHARED_OVERLAP, **CAPACITY}, "same_bits": False},
    "gradient-not-contiguous": {"transposed": True},
}
ROUTERS: dict[str, dict[str, Any]] = {
    "padding-mask": {"options": AUX_LOSS, "padding": 2},
    "z-loss": {"options": {"moe_z_loss_coeff": 0.1}},
    "global-aux-loss": {
        "options": {**AUX_LOSS, "moe_router_load_balancing_type": "global_aux_loss"}
    },
    "two-aux-losses": {
        "options": {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.2],
        }
    },
    "jitter": {"options": {"moe_input_jitter_eps": 0.1}},
    "force-load-balancing": {"options": {"moe_router_force_load_balancing": True}},
    "force-biased": {"options": {"moe_router_force_biased": 0.5}, "since": "0.17"},
    "pre-softmax-scaled": {
        "options": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5}
    },
    "sqrtsoftplus": {"options": {"moe_router_score_function": "sqrtsoftplus"}, "since": "0.18"},
    "quantile-balancing": {
        "options": {"moe_router_load_balancing_type": "quantile_balancing"},
        "since": "0.19",
    },
    "fp64-router-of-fp32-rows": {
        "options": {"moe_router_dtype": "fp64"},
        "dtype": torch.float32,
        "same_bits": False,  # weights travel as fp32
    },
    "fp32-router-of-bf16-rows": {"dtype": torch.bfloat16},
    "odd-rows": {
        "options": {"hidden_size": 18, "num_attention_heads": 2},
        "dtype": torch.bfloat16,
    },
    "one-expert-on-each-rank": {"options": {"num_moe_experts": 4}},
}


def make_case(layout: str, name: str, fields: dict[str, Any]) -> LayerCase:
    """The case in exact mode."""
    fields = {"same_bits": True, **fields}
    case = LayerCase(name, **LAYOUTS[layout], **fields)
    return dataclasses.replace(
        case,
        same_bits=case.same_bits and case.etp == 1,
        sequences=tuple(case.tp * case.sequences[r // case.tp] for r in range(4)),
        evaluation=tuple(case.evaluation[r // case.tp] for r in range(4) if case.evaluation),
    )


def in_static_mode(case: LayerCase) -> LayerCase:
    """The case with a fixed number of rows, which the batch decides where all ranks have as many
    tokens.
    """
    is_even = len({*case.sequences}) == 1 and len({*case.evaluation}) <= 1
    options = EpConfig(max_recv_rows="worst" if is_even else 512, alignment=16)
    return dataclasses.replace(case, options={**case.options, "ncclep": options}, same_bits=False)


Alltoall = Callable[[LayerCase], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def alltoall(megatron_pool: RankPool) -> Alltoall:
    """What `alltoall` makes of a case: computed once for both modes, which come one after the
    other.
    """
    last: list[tuple[LayerCase, list[dict[str, Any]]]] = []

    def results(case: LayerCase) -> list[dict[str, Any]]:
        if not last or last[0][0] != case:
            last[:] = [(case, megatron_pool.run(train_on_rank, case, "alltoall"))]
        return last[0][1]

    return results


def assert_same_as_alltoall(pool: RankPool, alltoall: Alltoall, case: LayerCase, mode: str) -> None:
    ours = in_static_mode(case) if mode == "static" else case
    assert_same_results(ours, pool.run(train_on_rank, ours, "ncclep"), alltoall(case), "reference")


@pytest.mark.parametrize(
    ("layout", "shape", "mode"),
    [
        (layout, shape, mode)
        for layout in LAYOUTS
        for shape in SHAPES
        for mode in ("exact", "static")
    ],
)
def test_shape_equals_alltoall(
    megatron_pool: RankPool, alltoall: Alltoall, layout: str, shape: str, mode: str
) -> None:
    assert_same_as_alltoall(megatron_pool, alltoall, make_case(layout, shape, SHAPES[shape]), mode)


@pytest.mark.parametrize(
    ("layout", "router", "mode"),
    [
        (layout, name, mode)
        for layout, mode in (("ep4", "exact"), ("slices", "static"))
        for name, fields in ROUTERS.items()
        if Version(INSTALLED) >= Version(fields.get("since", "0"))
    ],
)
def test_router_equals_alltoall(
    megatron_pool: RankPool, alltoall: Alltoall, layout: str, router: str, mode: str
) -> None:
    case = make_case(layout, router, ROUTERS[router])
    assert_same_as_alltoall(megatron_pool, alltoall, case, mode)
