"""What the native engine asks of the extension: for how many tokens, how often, with which memory.

A stand-in for the extension writes down every call, and says what the device would have said.  Four
mistakes of the engine went unnoticed without it: on GPUs most batches are equal on all ranks, most
plans fit, few waits fail, and torch's own allocations start at multiples of 512 bytes.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from fake_extension import (
    HIDDEN,
    NUM_EXPERTS,
    STREAM,
    TOP_K,
    FakeGroup,
    FakePlanSizes,
    assignments,
    on_ranks,
)

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

NUM_RANKS = 2
# More than the engine has room for before it knows what comes.
MANY = 10**4
MODES = pytest.mark.parametrize("options", [{}, {"max_recv_rows": 64}], ids=["exact", "static"])

pytestmark = pytest.mark.usefixtures("stand_in")


def use_all(engine: NativeEngine, num_tokens: int) -> list[str]:
    """Make a plan, a dispatch and a combine; returns where the hosts have met."""
    group: Any = engine.group
    group.exchanged.clear()
    plan = engine.plan(assignments(num_tokens))
    engine.dispatch(plan, torch.zeros(num_tokens, HIDDEN))
    engine.combine(plan, torch.zeros(plan.num_rows, HIDDEN))
    return [what.split(",")[0] for what in group.exchanged]


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


@MODES
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


@pytest.mark.parametrize("num_pairs", [2, MANY])
@pytest.mark.parametrize("num_assignments", [3, MANY])
def test_routes_that_do_not_fit_are_received_again(num_pairs: int, num_assignments: int) -> None:
    """The first time the device has written nothing: memory as it was would be taken for routes."""

    def plan(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        native.sizes = FakePlanSizes(5, num_pairs, num_assignments)
        made = engine.plan(assignments(10))
        received = native.named("plan_receive")
        assert len(received) == (MANY in (num_pairs, num_assignments))
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
def test_a_rank_without_memory_for_routes_tells_the_others(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They had gone on, and waited for it in their next plan until the deadline."""
    new_empty = torch.Tensor.new_empty

    def on_a_small_gpu(tensor: torch.Tensor, size: int) -> torch.Tensor:
        if size > MANY:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 TiB")
        return new_empty(tensor, size)

    monkeypatch.setattr(torch.Tensor, "new_empty", on_a_small_gpu)

    def plan(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        if rank != num_ranks - 1:
            engine.plan(assignments(10))
            return
        native.sizes = FakePlanSizes(num_assignments=MANY)
        text = "no GPU memory for a plan's routes: CUDA out"
        for _ in range(num_ranks):
            with pytest.raises(InputError, match=text) as caught:
                engine.plan(assignments(10))
            assert caught.type is (InputError if num_ranks == 1 else RefusedError)
        assert native.named("plan_receive") == []
        assert native.named("refuse") == [("plan", STREAM)] * (num_ranks - 1)
        if num_ranks == 1:
            native.sizes = FakePlanSizes()
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


@MODES
def test_memory_is_kept_for_the_stream_that_uses_it(options: dict[str, int]) -> None:
    """A plan made on one stream, used on another and dropped: its routes were overwritten."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        keeper: Any = mock.Mock()
        engine.streams = keeper
        keeper.keep.return_value = STREAM

        def lacks(*tensors: torch.Tensor) -> bool:
            kept = [id(tensor) for call in keeper.keep.call_args_list for tensor in call.args]
            return not {id(tensor) for tensor in tensors}.issubset(kept)

        topk_idx = assignments(4)
        plan = engine.plan(topk_idx)
        assert not lacks(topk_idx)
        routes, rows_w = (plan.counts, plan.token_routes, plan.routes), torch.zeros(plan.num_rows)
        for call, rows, w in (
            (engine.dispatch, torch.zeros(4, HIDDEN), torch.zeros(4, TOP_K)),
            (engine.combine, torch.zeros(plan.num_rows, HIDDEN), rows_w),
        ):
            for stream, lacks_routes in ((STREAM, True), (STREAM + 1, False)):
                keeper.keep.reset_mock()
                keeper.keep.return_value = stream
                call(plan, rows, w)
                assert not lacks(rows, w)
                assert lacks(*routes) == lacks_routes  # they belong to the plan's stream

    on_ranks(use, **options)


def test_rows_reach_the_kernels_at_multiples_of_16_bytes() -> None:
    """The kernels copy 16 bytes at a time; elsewhere a GPU faults, and the process is lost."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        plan = engine.plan(assignments(4))
        # As those of a slice of a flat buffer may be, 4 bytes after such a multiple.
        x, y = (torch.arange(n * HIDDEN + 1.0)[1:].view(n, HIDDEN) for n in (4, 5))
        assert x.data_ptr() % 16 == y.data_ptr() % 16 == 4
        engine.dispatch(plan, x)
        engine.combine(plan, y)
        (sent,), (returned,) = native.named("dispatch"), native.named("combine")
        for passed, rows in ((sent.tokens, x), (returned.rows, y)):
            assert passed.data_ptr() % 16 == 0
            assert torch.equal(passed, rows)

    on_ranks(use)


@pytest.mark.parametrize("check_calls", [False, True])
@MODES
def test_hosts_meet_only_where_they_must(options: dict[str, int], check_calls: bool) -> None:
    """In exact mode once a layer; in static mode when windows grow, and never again."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        for num_tokens in (10, 300):  # and windows grow
            assert "plan" in use_all(engine, num_tokens)
        expected = ["plan", "dispatch", "combine"] if check_calls else [] if options else ["plan"]
        assert use_all(engine, 300 - rank) == expected

    on_ranks(use, check_calls=check_calls, **options)


def test_declared_tokens_are_what_windows_are_for_from_the_first_plan_on() -> None:
    """Hosts of ranks with uneven batches met in each of the next hundred plans, and a batch that
    only some ranks' windows were too small for was refused.
    """
    tokens = ((3, 0), (1, 100), (200, 7), (0, 200))

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        met = [bool(use_all(engine, each[rank])) for each in tokens]
        assert met == [True, False, False, False]
        assert {len(call.rows) for call in native.named("dispatch")} == {600}
        assert {call.most_tokens for call in native.named("plan")} == {256}
        assert [call.num_tokens for call in native.named("reserve")] == [256, 256]
        if rank == 0:
            with pytest.raises(RefusedError, match="has 201 tokens, more than max_tokens_per_rank"):
                engine.plan(assignments(201))
        else:
            engine.plan(assignments(200))

    on_ranks(use, max_recv_rows="1.5x", max_tokens_per_rank=200)


def test_windows_grow_for_longer_rows() -> None:
    """On all ranks together; the next rows of that length need no other host."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        group: Any = engine.group
        plan = engine.plan(assignments(4))
        for num_met, hidden in ((1, HIDDEN), (0, HIDDEN), (1, 2 * HIDDEN)):
            group.exchanged.clear()
            engine.dispatch(plan, torch.zeros(4, hidden))
            assert len(group.exchanged) == num_met
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
        group: Any = engine.group
        plan = engine.plan(assignments(4))
        engine.dispatch(plan, torch.zeros(4, HIDDEN))
        native.calls.clear()
        group.exchanged.clear()
        if rank == 1:
            with pytest.raises(RefusedError, match=r"dispatch: rank 1: x has shape \[5, 8\]"):
                engine.dispatch(plan, torch.zeros(5, HIDDEN))
            assert native.calls == [("refuse", ("dispatch", STREAM))]
        else:
            engine.dispatch(plan, torch.zeros(4, HIDDEN))
        assert group.exchanged == []

    on_ranks(use)


@pytest.mark.parametrize("is_dead", [False, True], ids=["a device", "a dead device"])
@pytest.mark.parametrize("step", ["plan", "plan_receive", "dispatch", "combine"])
def test_every_launch_that_fails_is_refused(step: str, is_dead: bool) -> None:
    """In a green context with few SMs launches did: the other ranks, which were in the call, waited
    for their whole deadline.  They hear of it on their devices; a rank alone goes on.
    """

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        native.sizes = FakePlanSizes(5, MANY, MANY)  # so that routes are received again
        use_all(engine, 4)
        if rank == 0 and engine.group.size > 1:
            use_all(engine, 4)
            return
        native.answers[step] = LibraryError("launching it failed")
        if is_dead:
            native.answers["refuse"] = LibraryError("an illegal memory access")
        phase, alone = step.partition("_")[0], engine.group.size == 1
        kind, start = (LibraryError, "") if alone else (RefusedError, f"{phase}: rank 1: ")
        with pytest.raises(kind, match=f"^{start}launching it failed$"):
            use_all(engine, 4)
        assert native.named("refuse") == ([] if alone else [(phase, STREAM)])

    on_ranks(use)
    on_ranks(use, 1)
