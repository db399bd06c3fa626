"""Whatever Megatron makes of a batch before and around the dispatcher, against `alltoall`: tokens
that routers drop or add, ranks with few tokens or none, other sizes in between, and every router.
Outputs and all gradients, in exact and static mode.

Nearly everywhere they are the same bits: with two assignments a sum over a token's rows has two
terms, and rows of an expert come in the order in which `alltoall` brings them, so that even weight
gradients add up alike.  Two cases differ in the order of sums, and are compared in fp64 within
1e-12 (layer_case.py): experts in slices, whose parts `alltoall` adds up first; and static mode,
where the last expert's product has rows of zeros at its end, which a GEMM may cut in other blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from layer_case import LayerCase, assert_same_training
from rank_pool import RankContext
from test_moe_layer import SHARED_OVERLAP

from megatron_ncclep.config import EpConfig

LAYOUTS: dict[str, dict[str, int]] = {
    "ep1": {"ep": 1},
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "slices": {"ep": 2, "etp": 2, "tp": 2},  # with sequence parallelism
}
CAPACITY = {"moe_expert_capacity_factor": 0.6}
BY_POSITION = {**CAPACITY, "moe_token_drop_policy": "position"}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
UNEVEN = (3, 6, 1, 9)
EMPTY = (0, 0, 0, 0)
# What has no option, for docs/support.md.
DIFFERENT = ("ranks with different numbers of tokens",)
NONE = ("ranks without tokens",)

# Sequence lengths are those of a rank's part; with tensor parallelism each two ranks have the same.
SHAPES: dict[str, dict[str, Any]] = {
    "capacity": {"options": CAPACITY},
    "capacity-by-position": {"options": BY_POSITION},
    "capacity-pre-softmax": {"options": {**CAPACITY, "moe_router_pre_softmax": True}},
    "capacity-uneven": {"options": CAPACITY, "sequences": UNEVEN, "shows": DIFFERENT},
    "pad-to-capacity": {"options": PADDED},
    "pad-to-capacity-by-position": {"options": {**PADDED, **BY_POSITION}},
    "uneven": {"sequences": UNEVEN, "shows": DIFFERENT},
    "one-token": {"sequences": (1, 1, 1, 1), "batch": 1},
    "rank-without-tokens": {"sequences": (6, 0, 3, 9), "shows": NONE},
    "no-tokens-at-all": {"sequences": EMPTY, "shows": NONE},
    "evaluations": {
        "evaluation": (11, 11, 11, 11),
        "micro_batches": 2,
        "shows": ("other sizes in evaluations",),
    },
    "evaluations-uneven": {
        "evaluation": (1, 9, 0, 2),
        "sequences": UNEVEN,
        "micro_batches": 2,
        "shows": ("other sizes in evaluations", *DIFFERENT),
    },
    "evaluations-padded": {
        "evaluation": (2, 2, 2, 2),
        "pads_decoding": True,
        "micro_batches": 2,
        "shows": ("moe_pad_experts_for_cuda_graph_inference",),
    },
    "shared-overlap-uneven": {"options": SHARED_OVERLAP, "sequences": UNEVEN, "same_bits": False},
    "shared-overlap-capacity": {"options": {**SHARED_OVERLAP, **CAPACITY}, "same_bits": False},
    "gradient-not-contiguous": {"transposed": True},
}
ROUTERS: dict[str, dict[str, Any]] = {
    "padding-mask": {"options": AUX_LOSS, "padding": 2, "shows": ("padding_mask",)},
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
    # Of 40 bytes, which kernels do not take.
    "odd-rows": {"options": {"hidden_size": 20}, "dtype": torch.bfloat16},
    "one-expert-on-each-rank": {"options": {"num_moe_experts": 4}},
}


def make_case(layout: str, name: str, fields: dict[str, Any], mode: str) -> LayerCase:
    """The case of that layout and mode; in static mode the batch decides on the number of rows
    where all ranks have as many tokens.
    """
    case = LayerCase(f"{layout}-{name}-{mode}", **LAYOUTS[layout], **{"same_bits": True, **fields})
    case = dataclasses.replace(
        case,
        same_bits=case.same_bits and case.etp == 1 and mode == "exact",
        sequences=tuple(case.tp * case.sequences[r // case.tp] for r in range(4)),
        evaluation=tuple(case.evaluation[r // case.tp] for r in range(4) if case.evaluation),
    )
    if mode == "exact":
        return case
    is_even = len({*case.sequences}) == 1 and len({*case.evaluation}) <= 1
    options = EpConfig(max_recv_rows="worst" if is_even else 512, alignment=16)
    return dataclasses.replace(case, options={**case.options, "ncclep": options})


# In which layouts each shape and each router comes with the installed release.  With each of them
# come both modes, and with each shape both modes.  Older releases have each of them once.
SHAPE_LAYOUTS = [("ep1", "ep2"), ("ep4",), ("slices",)]
ROUTER_LAYOUTS = [("ep4",), ("slices",)]
MODES = ("exact", "static")


def cases(kinds: dict[str, dict[str, Any]], layouts: list[tuple[str, ...]]) -> Iterator[Any]:
    for place, choice in enumerate(layouts):
        for number, (name, fields) in enumerate(kinds.items()):
            layout = choice[number % len(choice)]
            mode = MODES[(place + number // len(choice)) % len(MODES)]
            case = make_case(layout, name, fields, mode)
            marks = [pytest.mark.since(case.since)]
            if (place + number) % len(layouts) == 0:  # with older releases in this layout only
                marks.append(pytest.mark.each_release)
            yield pytest.param(case, marks=marks, id=case.name)


# Cases with the same groups one after the other: making groups takes longer than most cases.
CASES = sorted(
    [*cases(SHAPES, SHAPE_LAYOUTS), *cases(ROUTERS, ROUTER_LAYOUTS)],
    key=lambda param: (param.values[0].ep, param.values[0].etp),
)


@pytest.mark.supports(compared="outputs and all gradients with alltoall's, mostly to the bit")
@pytest.mark.parametrize("case", CASES)
def test_shape_equals_alltoall(ctx: RankContext, case: LayerCase) -> None:
    assert_same_training(ctx, case, "reference")
