"""Calls of one engine on several streams: in order, and each with its memory to itself.

On a CPU streams are dummies and the allocator knows of none, so only these tests see it when a call
waits for too much, or when memory is given away while a kernel uses it.  The order of two engines'
kernels, and deadlines that start with a kernel: tests/native/sanitized/host.cpp.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from compare import assert_same_bits
from rank_pool import RankContext, RankPool
from run_case import assert_steps, error_on_rank, fitted, local_ranks, opened, run_case

from megatron_ncclep.benchmark.cases import Case

# About 2 s: whatever does not wait for it is long over.
LONG_CYCLES = 4_000_000_000
# About half a second, in which the host has long queued, and dropped, what the test is about.
SLOW_CYCLES = 1_000_000_000

NO_HOST_WAITS = pytest.mark.needs_caps(test=lambda caps: caps.captures_static)

# T = 200: more than one chunk, so that a plan's tensors are no longer tiny.
CASE = Case("streams", (200, 131, 64, 200), 16, 4, hidden=256, dropped=0.1)


def is_still_asleep(ctx: RankContext, case: Case, engine_name: str) -> tuple[bool, str]:
    """Dispatch on one stream, queue something long there, dispatch on another one.

    Returns:
        whether the second dispatch was over before what is long; and the first difference between
        the two, if any.
    """
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        x = case.rows(ctx.rank, plan.num_tokens, salt=2)
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            rows, _ = engine.dispatch(plan, x)
            torch.cuda._sleep(LONG_CYCLES)
            slept = torch.cuda.Event()
            slept.record()
        with torch.cuda.stream(second):
            again, _ = engine.dispatch(plan, x)
            done = torch.cuda.Event()
            done.record()
        done.synchronize()
        is_asleep = not slept.query()
        torch.cuda.synchronize()
        try:
            assert_same_bits(again, rows, f"{case}, rank {ctx.rank}")
        except AssertionError as error:
            return is_asleep, str(error)
        return is_asleep, ""


def test_a_call_does_not_wait_for_what_follows_the_last_one(
    pool: RankPool, engine_name: str
) -> None:
    """If the event between two streams is recorded when the second call comes, it holds whatever
    the caller has queued since.  A pipeline's receive there, which another rank answers only after
    its own call, is a deadlock.
    """
    case = fitted(CASE, pool, engine_name)
    results = run_case(pool, is_still_asleep, case, engine_name)
    assert results is not None
    for rank, (is_asleep, difference) in enumerate(results):
        assert not difference
        assert is_asleep, f"rank {rank}: the call waited for what was queued after the last one"


def tensors_of(plan: object) -> list[torch.Tensor]:
    """What the plan keeps on the device, views of one tensor once."""
    values = [getattr(plan, field.name) for field in dataclasses.fields(plan)]  # type: ignore[arg-type]
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.is_cuda]
    return list({t.untyped_storage().data_ptr(): t for t in tensors}.values())


def steps_that_leave_nothing_behind(
    ctx: RankContext, case: Case, engine_name: str
) -> list[torch.Tensor]:
    """Plan on one stream, use the plan on another that is slow, and drop everything at once.

    Then the first stream takes memory of every size that was dropped and fills it.
    """
    with opened(ctx, case, engine_name) as (case, engine):
        first, other = torch.cuda.Stream(), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            plan = engine.plan(case.topk_idx(ctx.rank))
            x, w = case.rows(ctx.rank, plan.num_tokens, salt=2), case.weights(ctx.rank)
            y = case.rows(ctx.rank, plan.num_rows, salt=5)
            v = engine.dispatch(plan, x, w)[1]
            engine.combine(plan, y, v)  # windows grow now, not below
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.cuda._sleep(SLOW_CYCLES)
            rows, row_w = engine.dispatch(plan, x, w)
            out, topk_w = engine.combine(plan, y, v)
        sizes = [t.untyped_storage().nbytes() for t in (*tensors_of(plan), x, w, y, v)]
        del plan, x, w, y, v
        with torch.cuda.stream(first):
            spoilt = [
                torch.full((size,), 0x7F, dtype=torch.uint8, device=ctx.device)
                for size in sizes
                for _ in range(2)
            ]
        torch.cuda.synchronize()
        del spoilt
        return [rows, row_w, out, topk_w]


@pytest.mark.parametrize("rows", [None, pytest.param(1024, marks=NO_HOST_WAITS)], ids=str)
def test_memory_is_not_given_away_while_another_stream_uses_it(
    pool: RankPool, engine_name: str, rows: int | None
) -> None:
    """A plan is made on one stream, used on another and dropped, as schedules that overlap two
    micro-batches do: the first stream's next allocation must not overwrite its routes.

    In exact mode the hosts of `hierarchical` wait for the slow stream, so that nothing is dropped
    too early; in static mode they do not.  One GPU shows it, as a node of one rank:

        NCCLEP_LOCAL_RANKS=1 pytest tests/gpu/test_gpu_stream_order.py --backend nccl \
            --engine hierarchical --ranks 1
    """
    case = fitted(dataclasses.replace(CASE, max_recv_rows=rows), pool, engine_name)
    results = run_case(pool, steps_that_leave_nothing_behind, case, engine_name)
    assert results is not None
    assert_steps(case, engine_name, results)


def plan_in_a_capture(ctx: RankContext, case: Case, engine_name: str) -> None:
    with opened(ctx, case, engine_name) as (case, engine):
        topk_idx = case.topk_idx(ctx.rank)
        engine.plan(topk_idx)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            engine.plan(topk_idx)


@pytest.mark.needs_caps(test=lambda caps: caps.captures_static)
def test_an_exact_plan_is_refused_in_a_capture(pool: RankPool, engine_name: str) -> None:
    """It would wait for sizes that a captured kernel never reports."""
    case = fitted(CASE, pool, engine_name)
    answers = pool.run(error_on_rank, plan_in_a_capture, case, engine_name, ranks=case.num_ranks)
    ((kind, text),) = {(kinds[0], text) for kinds, text in answers}
    if local_ranks() is None:
        assert kind == "InputError"
        assert "set max_recv_rows" in text
    else:  # hosts that share no memory cannot even agree during a capture
        assert kind == "UnsupportedError"
        assert "capture" in text
