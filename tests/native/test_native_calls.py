"""What the native engine asks of the extension: for how many tokens, how often, with which memory.

A stand-in for the extension writes down every call, and says what the device would have said.  Four
mistakes of the engine went unnoticed without it: on GPUs most batches are equal on all ranks, most
plans fit, few waits fail, and torch's own allocations start at multiples of 512 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_extension import STREAM, FakeGroup, FakePlanSizes, play
from fakes import ThreadGroup, on_threads

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.low_latency import create_low_latency
from megatron_ncclep.engines.native import group as native_group
from megatron_ncclep.engines.native.engine import NativeEngine
from megatron_ncclep.engines.native.plan import next_capacity_factor
from megatron_ncclep.errors import (
    EngineUnavailableError,
    InputError,
    LibraryError,
    RefusedError,
    RowsDroppedError,
)
from megatron_ncclep.libraries import extension

NUM_RANKS, NUM_EXPERTS, TOP_K, HIDDEN = 2, 4, 2, 8
# More than the engine has room for before it knows what comes.
MANY = 10**4
# What a stand-in for torch's allocator takes for more than there is.
NO_MEMORY = 2**40


def with_memory_for(num_allocations: int) -> Callable[..., int]:
    """`routes_size` on a GPU that has memory for so many."""
    left = iter(range(num_allocations))

    def routes_size(max_pairs: int, max_assignments: int, most_tokens: int) -> int:
        return NO_MEMORY if next(left, None) is None else max_pairs + max_assignments

    return routes_size


def allocator(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.empty` or `Tensor.new_empty` on a GPU that has no room for NO_MEMORY."""

    def allocated(*arguments: Any, **options: Any) -> torch.Tensor:
        if any(isinstance(size, int) and size == NO_MEMORY for size in arguments):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 TiB")
        return allocate(*arguments, **options)

    return allocated


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", allocator(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", allocator(torch.Tensor.new_empty))
    play(monkeypatch)
    monkeypatch.setattr(NativeEngine, "_describe", lambda *_: None)


def on_ranks(
    function: Callable[[NativeEngine, FakeGroup, int], Any],
    num_ranks: int = NUM_RANKS,
    **options: Any,
) -> None:
    """Call `function` with the engine, the stand-in and the number of each rank, on the CPU."""

    def run(group: ThreadGroup) -> None:
        group.device = torch.device("cpu")
        engine = NativeEngine(group, NUM_EXPERTS, EpConfig(engine="native", **options))
        function(engine, engine._shared.native, group.rank)

    for result in on_threads(num_ranks, run):
        if result is not None:
            raise result


def assignments(num_tokens: int) -> torch.Tensor:
    return torch.arange(NUM_EXPERTS).repeat(num_tokens)[: num_tokens * TOP_K].view(-1, TOP_K)


def test_wide_domains_have_more_token_routes_and_no_low_latency_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Racks of 72 GPUs in an NVLink domain could not use the engine: it had a bit for each of 32
    ranks, as low-latency mode still has.
    """
    monkeypatch.setattr(extension.load(), "NARROW_LOCAL_RANKS", NUM_RANKS - 1)

    def plan(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        native.num_token_routes = 6
        engine.plan(assignments(3))
        (call,) = native.named("plan")
        assert call.token_routes.shape == (6, 3)
        with pytest.raises(EngineUnavailableError, match="at most 32 ranks in an NVLink domain"):
            create_low_latency(engine, max_tokens=8, hidden=HIDDEN, top_k=TOP_K)

    on_ranks(plan)


@pytest.mark.parametrize("options", [{}, {"max_recv_rows": 64}], ids=["exact", "static"])
def test_windows_and_chunks_are_for_the_rank_with_the_most_tokens(options: dict[str, int]) -> None:
    """Windows and what a plan keeps have the same layout on all ranks, which read each other's."""
    tokens = (3, 300)

    def plan(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        made = engine.plan(assignments(tokens[rank]))
        assert [call[:3] for call in native.named("reserve")] == [(384, TOP_K, 16)]
        (call,) = native.named("plan")
        assert (call.number, call.most_tokens) == (made.plan_id, made.most_tokens)
        assert call.counts.shape == (NUM_EXPERTS // NUM_RANKS * 2 + 1,)
        assert call.token_routes.shape == (4, tokens[rank])
        assert call.max_pairs <= NUM_RANKS * max(tokens)
        assert call.max_assignments == (64 if options else int(1.25 * max(tokens) * TOP_K))
        # In static mode as many as there are windows for: no host asks the others.
        assert made.most_tokens == (384 if options else max(tokens))

    on_ranks(plan, **options)


def test_the_kernel_writes_down_what_ranks_lack() -> None:
    """With on_overflow="raise" only: the host asks before an optimizer steps."""

    def plan(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        engine.plan(assignments(10))
        (lacked,) = [call.lacked for call in native.named("plan")]
        if engine.config.on_overflow == "drop":
            assert lacked is None
            return
        lacked[1] = 16 << 32 | 64
        report = engine.group.resources.find("rows lacked of 64, raise")
        with pytest.raises(RowsDroppedError, match="rank 1 needed 80 rows and had 64"):
            report.check()
        engine.group.is_warmup = True
        engine.plan(assignments(10))
        assert native.named("plan")[-1].lacked is None

    on_ranks(plan, max_recv_rows=64, on_overflow="raise")
    on_ranks(plan, max_recv_rows=64)


@pytest.mark.parametrize(
    ("num_pairs", "num_assignments", "times"),
    [(2, 3, 0), (2, MANY, 1), (MANY, 3, 1), (MANY, MANY, 1)],
    ids=["all fit", "assignments do not fit", "pairs do not fit", "neither fits"],
)
def test_routes_that_do_not_fit_are_received_again(
    num_pairs: int, num_assignments: int, times: int
) -> None:
    """The first time the device has written nothing: memory as it was would be taken for routes."""

    def plan(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        native.sizes = FakePlanSizes(5, num_pairs, num_assignments)
        made = engine.plan(assignments(10))
        received = native.named("plan_receive")
        assert len(received) == times
        # A plan is made with its first routes; those that follow take their place.
        last = (native.named("plan") + received)[-1]
        assert all(call.plan is made.handle for call in received)
        assert last.max_pairs >= num_pairs
        assert last.max_assignments >= num_assignments
        assert made.routes is last.routes
        assert len(last.routes) == last.max_pairs + last.max_assignments
        assert made.num_rows == 5

    on_ranks(plan)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_without_memory_for_routes_tells_the_others(num_ranks: int) -> None:
    """They had gone on, and waited for it in their next plan until the deadline."""

    def plan(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        if rank != num_ranks - 1:
            engine.plan(assignments(10))
            return
        native.sizes = FakePlanSizes(num_assignments=MANY)
        native.answers["routes_size"] = with_memory_for(1)
        with pytest.raises(InputError, match="no GPU memory for a plan's routes: CUDA out") as told:
            engine.plan(assignments(10))
        assert native.named("plan_receive") == []
        assert native.named("refuse") == [("plan", STREAM)] * (num_ranks - 1)
        if num_ranks == 1:
            native.answers["routes_size"] = with_memory_for(MANY)
            engine.plan(assignments(10))
            return
        assert told.type is RefusedError
        with pytest.raises(RefusedError, match="no GPU memory for a plan's routes"):
            engine.plan(assignments(10))

    on_ranks(plan, num_ranks)


def test_room_for_a_skewed_batch_is_given_up() -> None:
    """One such batch, and all later plans of the layer had room for it."""
    factor = [6.25]
    for _ in range(2):
        factor.append(next_capacity_factor(factor[-1], 100, 100))
    assert factor == [6.25, 5.625, 5.078125]  # the docstring's

    def plan(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        for num_assignments in (400, *[200] * 60):
            native.sizes = FakePlanSizes(num_assignments=num_assignments)
            engine.plan(assignments(100))
        rooms = [call.max_assignments for call in native.named("plan")]
        assert rooms[:2] == [250, 400]  # a quarter more than balanced; all that can come
        assert rooms[1:] == sorted(rooms[1:], reverse=True)
        assert rooms[-1] == 250
        assert len(native.named("plan_receive")) == 1

    on_ranks(plan)


@pytest.mark.parametrize(
    ("num_ranks", "agree", "errors"),
    [(1, False, [InputError, None]), (2, True, [InputError, None]), (2, False, [RefusedError] * 2)],
    ids=["one rank", "hosts agree", "several ranks"],
)
def test_a_later_plan_tells_of_a_bad_routing(
    num_ranks: int, agree: bool, errors: list[type[Exception] | None]
) -> None:
    """Once where the group can go on; a group of one rank was told in all later plans."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        engine.plan(assignments(4))
        native.bad["bad_ranks"] = [0]
        for error in errors:
            if error is None:
                engine.plan(assignments(4))
                continue
            with pytest.raises(InputError, match=r"plan.* of rank 0 named an index") as caught:
                engine.plan(assignments(4))
            assert caught.type is error

    on_ranks(use, num_ranks, max_recv_rows=64, check_calls=agree)


@pytest.mark.parametrize("options", [{}, {"max_recv_rows": 64}], ids=["exact", "static"])
def test_memory_is_kept_for_the_stream_that_uses_it(options: dict[str, int]) -> None:
    """A plan made on one stream, used on another and dropped: its routes were overwritten."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        keeper: Any = engine.streams
        topk_idx = assignments(4)
        plan = engine.plan(topk_idx)
        assert not keeper.lacks(topk_idx)
        rows_w = torch.zeros(plan.num_rows)
        for call, rows, w in (
            (engine.dispatch, torch.zeros(4, HIDDEN), torch.zeros(4, TOP_K)),
            (engine.combine, torch.zeros(plan.num_rows, HIDDEN), rows_w),
        ):
            routes = (plan.counts, plan.token_routes, plan.routes)
            for stream, lacks_routes in ((STREAM, True), (STREAM + 1, False)):
                keeper.current, keeper.kept = stream, []
                call(plan, rows, w)
                assert not keeper.lacks(rows, w)
                assert keeper.lacks(*routes) == lacks_routes  # they belong to the plan's stream

    on_ranks(use, **options)


def misaligned(num_rows: int) -> torch.Tensor:
    """Rows that start 4 bytes after a multiple of 16, as those of a slice of a flat buffer may."""
    rows = torch.arange(num_rows * HIDDEN + 1, dtype=torch.float32)[1:].view(num_rows, HIDDEN)
    assert rows.is_contiguous()
    assert rows.data_ptr() % 16 == 4
    return rows


def test_rows_reach_the_kernels_at_multiples_of_16_bytes() -> None:
    """The kernels copy 16 bytes at a time; elsewhere a GPU faults, and the process is lost."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        plan = engine.plan(assignments(4))
        x, y = misaligned(4), misaligned(5)
        engine.dispatch(plan, x)
        engine.combine(plan, y)
        (sent,), (returned,) = native.named("dispatch"), native.named("combine")
        for passed, rows in ((sent.tokens, x), (returned.rows, y)):
            assert passed.data_ptr() % 16 == 0
            assert torch.equal(passed, rows)

    on_ranks(use)


def test_hosts_meet_only_where_they_must() -> None:
    """In exact mode once a layer; in static mode when windows grow, and never again."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        def layer(num_tokens: int) -> list[str]:
            engine.group.exchanged.clear()  # type: ignore[attr-defined]
            plan = engine.plan(assignments(num_tokens))
            engine.dispatch(plan, torch.zeros(num_tokens, HIDDEN))
            engine.combine(plan, torch.zeros(plan.num_rows, HIDDEN))
            return [what.split(",")[0] for what in engine.group.exchanged]  # type: ignore[attr-defined]

        for num_tokens in (10, 300):  # and windows grow
            assert "plan" in layer(num_tokens)
        is_static = engine.config.max_recv_rows is not None
        agreed = ["plan", "dispatch", "combine"] if engine.config.check_calls else ["plan"]
        assert layer(300 - rank) == ([] if is_static and not engine.config.check_calls else agreed)

    for options in ({}, {"max_recv_rows": 64}):
        for check_calls in (False, True):
            on_ranks(use, check_calls=check_calls, **options)


def test_declared_tokens_are_what_windows_are_for_from_the_first_plan_on() -> None:
    """Hosts of ranks with uneven batches met in each of the next hundred plans, and a batch that
    only some ranks' windows were too small for was refused.
    """
    tokens = ((3, 0), (1, 100), (200, 7), (0, 200))

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        met, plans = [], []
        for each in tokens:
            engine.group.exchanged.clear()  # type: ignore[attr-defined]
            plan = engine.plan(assignments(each[rank]))
            rows, _ = engine.dispatch(plan, torch.zeros(each[rank], HIDDEN))
            engine.combine(plan, rows)
            plans.append(plan)
            met.append(len(engine.group.exchanged))  # type: ignore[attr-defined]
        assert met[0] > 0
        assert met[1:] == [0] * 3
        assert {plan.num_rows for plan in plans} == {600}
        assert {plan.most_tokens for plan in plans} == {256}
        assert [call.num_tokens for call in native.named("reserve")] == [256, 256]
        many = assignments(201 if rank == 0 else 200)
        if rank == 0:
            with pytest.raises(RefusedError, match="has 201 tokens, more than max_tokens_per_rank"):
                engine.plan(many)

    on_ranks(use, max_recv_rows="1.5x", max_tokens_per_rank=200)


def test_windows_grow_for_longer_rows() -> None:
    """On all ranks together; the next rows of that length need no other host."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        plan = engine.plan(assignments(4))
        for num_met, hidden in ((1, HIDDEN), (0, HIDDEN), (1, 2 * HIDDEN)):
            engine.group.exchanged.clear()  # type: ignore[attr-defined]
            engine.dispatch(plan, torch.zeros(4, hidden))
            assert len(engine.group.exchanged) == num_met  # type: ignore[attr-defined]
        assert [call.row_bytes for call in native.named("reserve")] == [16, 32, 64]

    on_ranks(use, max_recv_rows=64)


def test_hosts_meet_in_some_plans_after_uneven_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One uneven batch, of an exact plan too, and they met in all later static plans."""
    monkeypatch.setattr(native_group, "EVEN_PLANS", 3)

    def use(static: NativeEngine, native: FakeGroup, rank: int) -> None:
        group: Any = static.group
        exact = NativeEngine(group, NUM_EXPERTS, EpConfig(engine="native"))

        def meet(engine: NativeEngine, num_tokens: int) -> bool:
            group.exchanged.clear()
            engine.plan(assignments(num_tokens))
            return bool(group.exchanged)

        assert meet(static, 300)  # windows grow, for 384 tokens
        assert meet(exact, 300 - rank)
        assert not meet(static, 300)
        assert meet(static, 500 - rank)  # windows grow
        assert [meet(static, n) for n in (300, 300)] == [True] * 2
        assert meet(static, 900 * rank)  # on rank 1 only, which others would know nothing of
        assert [meet(static, 300) for _ in range(5)] == [True] * 3 + [False] * 2

    on_ranks(use, max_recv_rows=64)


def test_a_refusal_does_not_wait() -> None:
    """The other rank hears of it on its device; no call of the two meets on the host."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        plan = engine.plan(assignments(4))
        engine.dispatch(plan, torch.zeros(4, HIDDEN))
        native.calls.clear()
        engine.group.exchanged.clear()  # type: ignore[attr-defined]
        if rank == 1:
            with pytest.raises(RefusedError, match=r"dispatch: rank 1: x has shape \[5, 8\]"):
                engine.dispatch(plan, torch.zeros(5, HIDDEN))
            assert native.calls == [("refuse", ("dispatch", STREAM))]
        else:
            engine.dispatch(plan, torch.zeros(4, HIDDEN))
        assert engine.group.exchanged == []  # type: ignore[attr-defined]

    on_ranks(use)


@pytest.mark.parametrize("step", ["plan", "plan_receive", "dispatch", "combine"])
def test_every_launch_that_fails_is_refused(step: str) -> None:
    """The other ranks are in the call, and hear of it on their devices."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        def call() -> None:
            plan = engine.plan(assignments(4))
            engine.dispatch(plan, torch.zeros(4, HIDDEN))
            engine.combine(plan, torch.zeros(5, HIDDEN))

        native.sizes = FakePlanSizes(5, MANY, MANY)  # so that routes are received again
        call()
        if rank == 0:
            return call()
        native.answers[step] = LibraryError("launching it failed")
        phase = step.partition("_")[0]
        with pytest.raises(RefusedError, match=f"^{phase}: rank 1: launching it failed$"):
            call()
        assert native.named("refuse") == [(phase, STREAM)]

    on_ranks(use)
