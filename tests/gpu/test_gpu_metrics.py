"""Metrics on GPUs: no host waits for them, a replayed CUDA graph counts, and kernels tell how long
they have waited for a rank that is late.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankContext, RankPool
from run_case import fitted
from test_gpu_static_mode import CASE, Layer, waiting_is_an_error

from megatron_ncclep import metrics
from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.config import EpConfig
from megatron_ncclep.metrics import Interval

NO_WAIT = pytest.mark.needs_caps(test=lambda caps: caps.captures_static)
LATE_CYCLES = 200_000_000  # about a tenth of a second


class MeteredLayer(Layer):
    """A layer with metrics after every step."""

    def __init__(self, ctx: RankContext, case: Case, engine_name: str) -> None:
        class Metered(Case):
            def config(self) -> EpConfig:
                return dataclasses.replace(super().config(), metrics_interval=1)

        values = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
        super().__init__(ctx, Metered(**values), engine_name, counts_on_device=True)


def steps_on_rank(
    ctx: RankContext, case: Case, engine_name: str, replays: bool
) -> tuple[list[list[int]], list[Interval]]:
    """A step and three more, in which the last rank is late; returns what each token's assignments
    are, and the intervals in which anything went anywhere.
    """
    layer = MeteredLayer(ctx, case, engine_name)
    with closing(layer.dispatcher.engine):
        metrics.after_step()  # ends the interval of other layers
        torch.cuda.synchronize()
        metrics.after_step()  # tells of that one, if the call that began it did not
        layer.step()  # windows grow, and kernels are loaded
        torch.cuda.synchronize()
        known = metrics.after_step()
        step: Any = layer.step
        if replays:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                layer.step()
            step = graph.replay
        dist.barrier()
        for _ in range(3):
            with waiting_is_an_error():
                if ctx.rank == ctx.num_ranks - 1:
                    torch.cuda._sleep(LATE_CYCLES)
                step()
                known += metrics.after_step()
            torch.cuda.synchronize()
        # What was under way; in these steps nothing happens.
        known += metrics.after_step()
        torch.cuda.synchronize()
        known += metrics.after_step()
    assert not any(map(sum, known[-1].rows)), known[-1].rows
    return layer.routing_map.int().tolist(), [one for one in known if any(map(sum, one.rows))]


@NO_WAIT
@pytest.mark.parametrize("replays", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("rows", ["worst", 1024])
def test_metrics(pool: RankPool, engine_name: str, rows: int | str, replays: bool) -> None:
    case = fitted(dataclasses.replace(CASE, max_recv_rows=rows), pool, engine_name)
    results = pool.run(steps_on_rank, case, engine_name, replays, ranks=case.num_ranks)
    num_ranks, num_local = case.num_ranks, case.num_experts // case.num_ranks
    expected = [[0] * num_ranks for _ in range(num_ranks)]
    wanted = 0
    for source, (routing, _) in enumerate(results):
        for token in routing:
            wanted += sum(token)
            for rank in range(num_ranks):
                expected[source][rank] += any(token[rank * num_local : (rank + 1) * num_local])
    known = results[0][1]
    assert len(known) == 4
    assert all(theirs == known for _, theirs in results), "the same on every rank"
    for interval in known[1:]:
        assert interval.rows == expected
        assert sum(interval.assignments) == wanted
        assert (interval.dropped > 0) == (rows != "worst")
        if num_ranks > 1:
            late = interval.wait_s[-1]
            assert min(interval.wait_s[:-1]) > late, "the late one waits least"
