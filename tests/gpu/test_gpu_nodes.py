"""Chunks in which rows cross the network between nodes, on GPUs: several at a time, in graphs.

    NCCLEP_LOCAL_RANKS=1 pytest tests/gpu/test_gpu_nodes.py --backend nccl \
        --engine hierarchical --ranks 2

What else static mode promises over several nodes: test_gpu_static_mode.py and test_graphs.py, in
the same way; the kernels of messages: tests/contract/test_network_rows.py.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing

import pytest
import torch
from compare import assert_same_bits
from contract_cases import config_of
from rank_pool import RankContext, RankPool
from run_case import fitted
from test_graphs import CASES, Layer, captured

from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import RoutePlan

Steps = list[torch.Tensor | None]

pytestmark = pytest.mark.needs_caps(test=lambda caps: "network_chunks" in caps.options)
NUM_REPLAYS = 4


def chunked_on_rank(ctx: RankContext, case: Case, engine_name: str, chunks: int) -> str:
    """Steps in exact and static mode and replays of the latter; returns the first difference."""
    case = case.on(ctx.device)
    config = dataclasses.replace(config_of(case, engine_name), network_chunks=chunks)
    exact = dataclasses.replace(config, max_recv_rows=None)
    difference = ""

    def compare(layer: Layer, plan: RoutePlan, results: Steps, number: int) -> None:
        nonlocal difference
        torch.cuda.synchronize()
        try:
            layer.check(plan, results, number)
        except AssertionError as error:
            difference = difference or f"chunks {chunks}: {error}"

    with (
        closing(create_engine(ctx.group, case.num_experts, config)) as engine,
        closing(create_engine(ctx.group, case.num_experts, exact)) as other,
    ):
        layer = Layer(ctx, case, engine)
        layer.fill(1)
        compare(layer, *layer.step(), 1)
        replay, kept = captured(layer)
        for number in range(2, 2 + NUM_REPLAYS):
            layer.fill(number)
            replay()
            compare(layer, *kept, number)
        # Nothing is dropped: the same rows as in static mode, and none after the last block.
        plan = other.plan(layer.topk_idx)
        rows, row_w = other.dispatch(plan, layer.x, layer.w)
        again, again_w = engine.dispatch(kept[0], layer.x, layer.w)
        if difference or row_w is None or again_w is None or int(kept[0].num_dropped):
            return difference
        try:
            assert_same_bits(rows, again[: plan.num_rows], f"chunks {chunks}, exact: rows")
            assert_same_bits(row_w, again_w[: plan.num_rows], f"chunks {chunks}, exact: weights")
        except AssertionError as error:
            return str(error)
    return difference


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_chunks_change_no_bit(pool: RankPool, engine_name: str, case: Case, chunks: int) -> None:
    case = fitted(case, pool, engine_name)
    results = pool.run(chunked_on_rank, case, engine_name, chunks, ranks=case.num_ranks)
    assert [text for text in results if text] == []
