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
BY_POSITION = {"moe_token_drop_policy": "position"}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
PRE_SOFTMAX = {"moe_router_pre_softmax": True}
BF16 = {"dtype": torch.bfloat16}
# Sequence lengths are those of a rank's part; with tensor parallelism each two ranks have the same.
UNEVEN = (3, 6, 1, 9)
# What has no option, for docs/support.md.
DIFFERENT = ("ranks with different numbers of tokens",)
NONE = ("ranks without tokens",)
SIZES = ("other sizes in evaluations",)


def of(*options: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Fields of a LayerCase."""
    return {"options": {k: v for part in options for k, v in part.items()}, **fields}


def evaluated(*sequences: int, shows: tuple[str, ...] = SIZES, **fields: Any) -> dict[str, Any]:
    return of(evaluation=sequences, micro_batches=2, shows=shows, **fields)


def balanced(kind: Any, coeff: Any = None, **fields: Any) -> dict[str, Any]:
    coeffs = {} if coeff is None else {"moe_aux_loss_coeff": coeff}
    return of({"moe_router_load_balancing_type": kind}, coeffs, **fields)


SHAPES: dict[str, dict[str, Any]] = {
    "capacity": of(CAPACITY),
    "capacity-by-position": of(CAPACITY, BY_POSITION),
    "capacity-pre-softmax": of(CAPACITY, PRE_SOFTMAX),
    "capacity-uneven": of(CAPACITY, sequences=UNEVEN, shows=DIFFERENT),
    "pad-to-capacity": of(PADDED),
    "pad-to-capacity-by-position": of(PADDED, BY_POSITION),
    "uneven": of(sequences=UNEVEN, shows=DIFFERENT),
    "one-token": of(sequences=(1, 1, 1, 1), batch=1),
    "rank-without-tokens": of(sequences=(6, 0, 3, 9), shows=NONE),
    "no-tokens-at-all": of(sequences=(0, 0, 0, 0), shows=NONE),
    "evaluations": evaluated(11, 11, 11, 11),
    "evaluations-uneven": evaluated(1, 9, 0, 2, sequences=UNEVEN, shows=(*SIZES, *DIFFERENT)),
    "evaluations-padded": evaluated(
        2, 2, 2, 2, pads_decoding=True, shows=("moe_pad_experts_for_cuda_graph_inference",)
    ),
    "shared-overlap-uneven": of(SHARED_OVERLAP, sequences=UNEVEN, same_bits=False),
    "shared-overlap-capacity": of(SHARED_OVERLAP, CAPACITY, same_bits=False),
    "gradient-not-contiguous": of(transposed=True),
}
ROUTERS: dict[str, dict[str, Any]] = {
    "padding-mask": balanced("aux_loss", 0.1, padding=2, shows=("padding_mask",)),
    "z-loss": of({"moe_z_loss_coeff": 0.1}),
    "global-aux-loss": balanced("global_aux_loss", 0.1),
    "two-aux-losses": balanced(["aux_loss", "seq_aux_loss"], [0.1, 0.2]),
    "jitter": of({"moe_input_jitter_eps": 0.1}),
    "force-load-balancing": of({"moe_router_force_load_balancing": True}),
    "force-biased": of({"moe_router_force_biased": 0.5}, since="0.17"),
    "pre-softmax-scaled": of(PRE_SOFTMAX, {"moe_router_topk_scaling_factor": 2.5}),
    "sqrtsoftplus": of({"moe_router_score_function": "sqrtsoftplus"}, since="0.18"),
    "quantile-balancing": balanced("quantile_balancing", since="0.19"),
    # Weights travel as fp32.
    "fp64-router-of-fp32-rows": of(
        {"moe_router_dtype": "fp64"}, dtype=torch.float32, same_bits=False
    ),
    "fp32-router-of-bf16-rows": of(**BF16),
    # Of 40 bytes, which kernels do not take.
    "odd-rows": of({"hidden_size": 20}, **BF16),
    "one-expert-on-each-rank": of({"num_moe_experts": 4}),
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
