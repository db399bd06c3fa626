"""A GPU that is handed over and taken back: what the driver has left before, between and after, and
graphs that hold addresses of what is given back.

Windows are gigabytes that torch knows nothing of: a generator lacked them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from contract_cases import caps_of, config_of
from rank_pool import RankContext, RankPool
from run_case import fitted
from test_gpu_rebuilding import LEAST_WINDOWS, TOLERANCE, free_bytes
from test_graphs import CASE, Layer, captured
from timeouts import PatientPool

import megatron_ncclep
from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.low_latency import create_low_latency
from megatron_ncclep.errors import InputError

pytestmark = pytest.mark.needs_caps(test=lambda caps: caps.name == "native")

PHASES = 50
# As large as those of test_gpu_rebuilding.py.
TOKENS, HIDDEN, TOP_K = 16384, 1024, 2
# Of low-latency mode, the most: 512 rows of 2 KiB from each rank, and as many sums.
FEW, LEAST_FEW = 512, 2 * 512 * HIDDEN * 2


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.needs_ranks(2))])
def alone(request: pytest.FixtureRequest, backend: str) -> Iterator[RankPool]:
    """Processes in which nothing else runs."""
    pool = PatientPool(request.param, backend)
    yield pool
    pool.close()


def phases_on_rank(ctx: RankContext, engine_name: str) -> tuple[list[int], list[int], list[bool]]:
    """Free memory while everything is there and in between, by phase; whether bits are the same."""
    num_experts = 8 * ctx.num_ranks
    generator = torch.Generator(ctx.device).manual_seed(ctx.rank)
    scores = torch.rand(TOKENS, num_experts, device=ctx.device, generator=generator)
    topk_idx = scores.topk(TOP_K).indices
    x = torch.randn(TOKENS, HIDDEN, device=ctx.device, generator=generator).bfloat16()
    weights = scores.gather(1, topk_idx)
    there, between, same = [], [], []
    first: torch.Tensor | None = None
    with closing(create_engine(ctx.group, num_experts, {"engine": engine_name})) as engine:
        sizes = {"max_tokens": FEW, "hidden": HIDDEN, "top_k": TOP_K}
        with closing(create_low_latency(engine, **sizes)) as low_latency:
            for phase in range(PHASES):
                plan = engine.plan(topk_idx)
                if phase % 2:  # a pass that has begun goes on afterwards
                    megatron_ncclep.release_memory(ctx.group)
                rows, _ = engine.dispatch(plan, x)
                out, _ = engine.combine(plan, rows)
                few = low_latency.dispatch(x[:FEW], topk_idx[:FEW], weights[:FEW])
                back = low_latency.combine(few.rows)
                result = torch.cat([out.flatten(), back.flatten()])
                first = result if first is None else first
                same.append(torch.equal(result, first))
                del plan, rows, out, few, back, result
                there.append(free_bytes())
                megatron_ncclep.release_memory()
                between.append(free_bytes())
    return there, between, same


def test_fifty_phases(alone: RankPool, engine_name: str) -> None:
    for there, between, same in alone.run(phases_on_rank, engine_name, timeout=480):
        assert all(same)
        given_back = [b - t for t, b in zip(there, between, strict=True)]
        assert min(given_back) >= LEAST_WINDOWS + LEAST_FEW, given_back
        for seen in (there[1:], between[1:]):
            assert max(seen) - min(seen) < TOLERANCE, seen


def graphs_on_rank(ctx: RankContext, case: Case, engine_name: str) -> str:
    """What is said while there is a graph; raises if a new one computes anything else."""
    case = case.on(ctx.device)
    with closing(
        create_engine(ctx.group, case.num_experts, config_of(case, engine_name))
    ) as engine:
        layer = Layer(ctx, case, engine)
        layer.step()
        torch.cuda.synchronize()
        replay, (plan, results) = captured(layer)
        with pytest.raises(InputError) as refused:
            megatron_ncclep.release_memory(ctx.group)
        layer.fill(1)
        replay()  # as good as before
        torch.cuda.synchronize()
        layer.check(plan, results, 1)
        del replay, plan, results
        megatron_ncclep.release_memory(ctx.group, graphs_are_dropped=True)
        layer.step()
        torch.cuda.synchronize()
        replay, (plan, results) = captured(layer)
        layer.fill(2)
        replay()
        torch.cuda.synchronize()
        layer.check(plan, results, 2)
    return str(refused.value)


def test_a_graph_that_holds_the_addresses(pool: RankPool, engine_name: str) -> None:
    assert caps_of(engine_name).captures_static
    case = fitted(CASE, pool, engine_name)
    for text in pool.run(graphs_on_rank, case, engine_name, ranks=case.num_ranks):
        assert "a CUDA graph holds calls of the expert-parallel group" in text
