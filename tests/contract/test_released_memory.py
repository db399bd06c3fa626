"""A process that hands the GPU over and takes it back 50 times, between any two calls.

That what was held is gone in between: tests/native/test_released_windows.py, and on GPUs
tests/gpu/test_gpu_released_memory.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankContext, RankPool
from run_case import assert_steps, calls, fitted, opened, own_group, run_case

import megatron_ncclep
from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.engines import create_engine
from megatron_ncclep.errors import GroupClosedError, InputError, PeerError
from megatron_ncclep.ranks.group import EpGroup

PHASES = 50


def phases_on_rank(ctx: RankContext, case: Case, engine_name: str) -> list[list[torch.Tensor]]:
    """The results of two engines in turn, one of them with other experts."""
    results = []
    other = dataclasses.replace(case, num_experts=2 * case.num_experts)
    with opened(ctx, case, engine_name) as one, opened(ctx, other, engine_name) as another:
        for phase in range(PHASES):
            batch, engine = one if phase % 2 else another
            turn = calls(engine, dataclasses.replace(batch, seed=phase), ctx.rank)
            for number in range(3):
                found = next(turn)
                if number in (phase % 3, 2):
                    megatron_ncclep.release_memory(ctx.group)
            results.append(found)
    return results


@pytest.mark.parametrize("rows", [None, 96], ids=["exact", "static"])
def test_every_batch_is_the_oracles(pool: RankPool, engine_name: str, rows: int | None) -> None:
    R = pool.size
    case = Case("phases", tuple(9 + r for r in range(R)), 4 * R, max_recv_rows=rows)
    case = fitted(case, pool, engine_name)
    results = run_case(pool, phases_on_rank, case, engine_name)
    if results is None:
        return  # refused, as it must be
    for phase in range(PHASES):
        factor = 1 if phase % 2 else 2
        batch = dataclasses.replace(case, seed=phase, num_experts=factor * case.num_experts)
        assert_steps(batch, engine_name, [mine[phase] for mine in results])


@pytest.mark.needs_ranks(2)
def test_all_ranks_release(ctx: RankContext, engine_name: str) -> None:
    """Who comes alone is told so, and where the others are."""
    group = dist.new_group(list(range(ctx.num_ranks)))
    options = {"engine": engine_name, "timeout_s": 20.0, "first_timeout_s": 20.0}
    engine = create_engine(group, 4 * ctx.num_ranks, options)
    topk_idx = torch.tensor([[0, 7]], device=ctx.device)
    engine.plan(topk_idx)
    with pytest.raises(InputError, match="graphs_are_dropped differs"):
        megatron_ncclep.release_memory(group, graphs_are_dropped=ctx.rank == 1)
    engine.plan(topk_idx)

    def call() -> None:
        megatron_ncclep.release_memory(group) if ctx.rank == 0 else engine.plan(topk_idx)

    with pytest.raises(PeerError, match="release_memory"):
        call()
    megatron_ncclep.close(group)
    megatron_ncclep.release_memory(group)  # nothing is left, as without engines
    with pytest.raises(GroupClosedError):
        engine.plan(topk_idx)
    create_engine(group, 4 * ctx.num_ranks, options).plan(topk_idx)
    dist.destroy_process_group(group)
    megatron_ncclep.release_memory(group)  # what torch has destroyed, close() frees
    megatron_ncclep.close(group)


@pytest.mark.needs_ranks(2)
def test_the_first_step_still_lies_ahead(ctx: RankContext, engine_name: str) -> None:
    """Who gave memory back twice before the first pass, for a generator that comes first, lost the
    longer deadline of the step in which ranks compile.
    """
    options = {"engine": engine_name, "timeout_s": 20.0, "first_timeout_s": 40.0}
    with own_group(ctx) as group:
        engine = create_engine(group, 4 * ctx.num_ranks, options)
        for _ in range(2):
            megatron_ncclep.release_memory(group)
        assert EpGroup.of(group).deadline_s(engine.config) == 40.0
        engine.plan(torch.tensor([[0, 7]], device=ctx.device))
        megatron_ncclep.release_memory(group)
        assert EpGroup.of(group).deadline_s(engine.config) == 20.0


def test_what_is_no_group(ctx: RankContext) -> None:
    """`release_memory(True)`, meant as graphs_are_dropped, did nothing, and said nothing."""
    for other in (True, "ep"):
        words = f"process_group {other!r}: must be a process group"
        for call in (megatron_ncclep.release_memory, megatron_ncclep.close):
            with pytest.raises(InputError, match=words):
                call(other)
    megatron_ncclep.close(dist.GroupMember.NON_GROUP_MEMBER)  # what new_group gives other ranks
