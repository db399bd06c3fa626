"""Low-latency mode on GPUs: graphs replayed with other routings, and a rank that does not come."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract_cases import local_ranks
from rank_pool import RankContext, RankPool
from test_low_latency import LowLatencyCase, engine_of, object_for

from megatron_ncclep.engines.low_latency import LowLatency
from megatron_ncclep.errors import PeerError
from megatron_ncclep.ranks.group import EpGroup

pytestmark = pytest.mark.needs_caps(
    test=lambda caps: caps.low_latency_tokens > 0 and caps.captures_static
)

# Rounds whose inputs lie ready on the device; a replay takes the next one.
NUM_READY = 16
# GPU cycles that ranks are held up before a dispatch or a combine: one graph for each.
PAUSES = ((0, 0), (20_000, 0), (0, 20_000), (3_000, 9_000))


class Rounds:
    """Rounds in a graph, with their own check: what is wrong is counted on the device."""

    def __init__(self, ctx: RankContext, case: LowLatencyCase, ll: LowLatency) -> None:
        self.ll, self.case, self.rank = ll, case, ctx.rank
        T, E = case.max_tokens, case.num_local * case.num_ranks
        generator = torch.Generator().manual_seed(77 + ctx.rank)
        shape = (NUM_READY, T, E)
        topk = torch.rand(shape, generator=generator).argsort(dim=2)[:, :, : case.top_k]
        x = torch.randint(-64, 64, (NUM_READY, T, case.hidden), generator=generator)
        parts = torch.stack(
            [(topk // case.num_local == rank).any(dim=2) for rank in range(case.num_ranks)]
        ).sum(dim=0)
        self.topk, self.x = topk.to(ctx.device), x.to(case.dtype).to(ctx.device)
        # Small whole numbers: sums of them are exact.
        self.by_rank = (x * parts[:, :, None]).to(case.dtype).to(ctx.device)
        self.by_expert = (x * case.top_k).to(case.dtype).to(ctx.device)
        self.weights = torch.rand(T, case.top_k, generator=generator).to(ctx.device)
        self.number = torch.zeros(1, dtype=torch.int64, device=ctx.device)
        self.num_wrong = torch.zeros(1, dtype=torch.int64, device=ctx.device)

    def step(self, before: int, between: int) -> None:
        """Two rounds: rows come back as they are, and by expert."""
        for is_by_expert in (False, True):
            ready = self.number % NUM_READY
            chosen = lambda tensor, ready=ready: tensor.index_select(0, ready)[0]  # noqa: E731
            if before:
                torch.cuda._sleep(before * (1 + self.rank))
            rows = self.ll.dispatch(chosen(self.x), chosen(self.topk), self.weights)
            if between:
                torch.cuda._sleep(between * (1 + self.rank))
            if is_by_expert:
                blocks = rows.by_expert()
                out = self.ll.combine(blocks.rows, blocks.rows_of)
                expected = chosen(self.by_expert)
            else:
                out = self.ll.combine(rows.rows)
                expected = chosen(self.by_rank)
            self.num_wrong += (out != expected).sum()
            self.number += 1


def rounds_on_rank(
    ctx: RankContext, engine_name: str, case: LowLatencyCase, num_replays: int
) -> tuple[int, int]:
    engine = engine_of(ctx, engine_name, case.num_local * case.num_ranks)
    ll = object_for(engine, case)
    rounds = Rounds(ctx, case, ll)
    rounds.step(0, 0)
    torch.cuda.synchronize()
    graphs = []
    for pauses in PAUSES:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            rounds.step(*pauses)
        graphs.append(graph)
    for number in range(num_replays):
        # Long runs of one graph, and then every one in turn.
        graphs[number // 50 % 2 * (number % len(graphs))].replay()
        if number % 500 == 499:  # the queue of launches must not grow without end
            torch.cuda.current_stream().synchronize()
    torch.cuda.current_stream().synchronize()
    EpGroup.of(ctx.group).check()  # raises what has failed
    result = int(rounds.number), int(rounds.num_wrong)
    ll.close()
    engine.close()
    return result


def test_graphs_are_replayed_with_changing_routings(
    pool: RankPool, engine_name: str, iterations: int
) -> None:
    """With --iterations 50000: 100,000 rounds."""
    case = LowLatencyCase("graphs", pool.size, 4, 24, 4, hidden=1024)
    for number, num_wrong in pool.run(
        rounds_on_rank, engine_name, case, iterations, ranks=pool.size, timeout=600
    ):
        assert number == 2 * (iterations + 1)
        assert num_wrong == 0


def missed_on_rank(
    ctx: RankContext, engine_name: str, case: LowLatencyCase, missed: str
) -> tuple[str, list[torch.Tensor]]:
    """In a group of its own, which is of no use afterwards, not even for a close."""
    group = dist.new_group(list(range(ctx.num_ranks)))
    answer = miss(ctx, group, engine_name, case, missed)
    torch.cuda.synchronize()
    dist.barrier(ctx.group)  # no rank takes the group away while another one waits
    dist.destroy_process_group(group)
    return answer


def miss(
    ctx: RankContext, group: dist.ProcessGroup, engine_name: str, case: LowLatencyCase, missed: str
) -> tuple[str, list[torch.Tensor]]:
    """The last rank leaves a call out; returns what the others have of it, and their error.

    Before that all ranks complete one operation: to make windows and to load kernels takes ranks
    that share a GPU longer than the deadline.
    """
    own = dataclasses.replace(ctx, group=group)
    engine = engine_of(own, engine_name, case.num_local * case.num_ranks, 60.0)
    ll = object_for(engine, case)
    tensors = (case.x(1, 0), case.topk_idx(1, 0), case.weights(1, 0))
    arguments = [tensor.to(ctx.device) for tensor in tensors]
    ll.combine(ll.dispatch(*arguments).rows.clone())
    torch.cuda.current_stream().synchronize()
    calls: Any = ll._calls
    calls._config = dataclasses.replace(calls._config, timeout_s=2.0)
    dist.barrier(ctx.group)
    is_late = ctx.rank == ctx.num_ranks - 1
    kept = []
    if missed == "combine" or not is_late:
        rows = ll.dispatch(*arguments)
        kept = [rows.counts, rows.topk_idx, rows.weights]
    if missed == "combine" and not is_late:
        torch.cuda.current_stream().synchronize()
        kept = [ll.combine(rows.rows.clone())]
    torch.cuda.current_stream().synchronize()
    kept = [tensor.cpu() for tensor in kept]
    try:
        EpGroup.of(group).check()
    except PeerError as error:
        return str(error), kept
    return "", kept


@pytest.mark.needs_ranks(2)
@pytest.mark.parametrize("missed", ["dispatch", "combine"])
def test_a_rank_that_does_not_come(pool: RankPool, engine_name: str, missed: str) -> None:
    """Weights that did not come become NaN wherever they begin: written as vectors of 16 bytes they
    once were a misaligned address, after which the process could not use its GPU.
    """
    case = LowLatencyCase("missed", pool.size, 4, 9, 3)
    *others, (late, _) = pool.run(missed_on_rank, engine_name, case, missed, ranks=pool.size)
    assert late == ""
    named = [f"rank {pool.size - 1} did not come in" in text for text, _ in others]
    if missed == "dispatch" or local_ranks() is None:
        assert all(named), [text for text, _ in others]
    else:  # another domain waits for the rank's rail peers, which say for whom they wait
        assert any(named), [text for text, _ in others]
    for text, kept in others:
        assert f" did not come in low-latency {missed}, operation 2 " in text
        if missed == "combine":
            assert torch.isnan(kept[0]).all()
            continue
        counts, topk_idx, weights = kept
        assert (counts == 0).all()
        assert (topk_idx == -1).all()
        assert torch.isnan(weights).all()
