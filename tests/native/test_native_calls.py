"""What the native engine asks of the extension: for how many tokens, how often, with which memory.

A stand-in for the extension writes down every call, and says what the device would have said.  Four
mistakes of the engine went unnoticed without it: on GPUs most batches are equal on all ranks, most
plans fit, few waits fail, and torch's own allocations start at multiples of 512 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import ThreadGroup, on_threads

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import native_windows
from megatron_ncclep.engines.native import NativeEngine
from megatron_ncclep.errors import GroupClosedError, PeerError, RefusedError, RowsDroppedError
from megatron_ncclep.libraries import extension

NUM_RANKS, NUM_EXPERTS, TOP_K, HIDDEN = 2, 4, 2, 8
STREAM = 7
# More than the engine has room for when nobody has told it what comes.
MANY = 10**4


class RecordingNative:
    """A `_C.NativeGroup` that does nothing.

    Attributes:
        calls: name and arguments of each call that queues work or makes windows.
        sizes: what the device says of the next plan.
    """

    def __init__(self, *_: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.held = (0, 0, 0)
        self.failed: Any = None
        self.was_captured = False
        self.timeout_s = 0.0
        self.sizes = SimpleNamespace(num_rows=5, num_pairs=2, num_assignments=3, bad_ranks=0)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]

    def fits(self, *wanted: int) -> bool:
        return all(n <= held for n, held in zip(wanted, self.held, strict=True))

    def grow(self, *wanted: int) -> None:
        self.calls.append(("grow", wanted))
        self.held = wanted

    @property
    def max_tokens(self) -> int:
        return self.held[0]

    def routes_size(self, max_pairs: int, max_assignments: int, most_tokens: int) -> int:
        return max_pairs + max_assignments

    def sums_size(self, *_: Any) -> int:
        return 0

    def bad_ranks(self, forget: bool) -> int:
        return 0

    def failure(self) -> Any:
        return self.failed

    def wait_for_sizes(self, *_: Any) -> Any:
        return self.sizes

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in ("plan", "plan_receive", "dispatch", "combine", "refuse"):
            raise AttributeError(name)

        def record(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            return 1

        return record


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        NativeGroup=RecordingNative, NativePlan=lambda *arguments: SimpleNamespace(made=arguments)
    )
    monkeypatch.setattr(extension, "load", lambda: module)
    monkeypatch.setattr(extension.StreamKeeper, "keep", lambda *_: STREAM)
    monkeypatch.setattr(extension, "current_stream", lambda: STREAM)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        "megatron_ncclep.engines.native_group.communicator_of", lambda group, timeout_s: None
    )
    monkeypatch.setattr(NativeEngine, "_describe", lambda *_: None)
    monkeypatch.setattr(
        native_windows, "grow", lambda group, native, *sizes: native.grow(*sizes[:3])
    )


def on_ranks(function: Callable[[NativeEngine, RecordingNative, int], Any], **options: Any) -> None:
    """Call `function` with the engine, the stand-in and the number of each rank, on the CPU."""

    def run(group: ThreadGroup) -> None:
        group.device = torch.device("cpu")
        engine = NativeEngine(group, NUM_EXPERTS, EpConfig(engine="native", **options))
        function(engine, engine._shared.native, group.rank)

    for result in on_threads(NUM_RANKS, run):
        if result is not None:
            raise result


def assignments(num_tokens: int) -> torch.Tensor:
    return torch.arange(NUM_EXPERTS).repeat(num_tokens)[: num_tokens * TOP_K].view(-1, TOP_K)


@pytest.mark.parametrize("options", [{}, {"max_recv_rows": 64}], ids=["exact", "static"])
def test_windows_and_chunks_are_for_the_rank_with_the_most_tokens(options: dict[str, int]) -> None:
    """Windows and what a plan keeps have the same layout on all ranks, which read each other's."""
    tokens = (3, 300)

    def plan(engine: NativeEngine, native: RecordingNative, rank: int) -> None:
        made = engine.plan(assignments(tokens[rank]))
        assert native.named("grow") == [(384, TOP_K, 16)]
        counts, token_routes, most_tokens, top_k, number = made.handle.made
        assert number == made.plan_id
        assert (most_tokens, top_k) == (made.most_tokens, TOP_K)
        assert (counts.shape, token_routes.shape) == (
            (NUM_EXPERTS // NUM_RANKS * 2 + 1,),
            (4, tokens[rank]),
        )
        ((*_, max_pairs, max_assignments, _, _, _),) = native.named("plan")
        assert max_pairs <= NUM_RANKS * max(tokens)
        assert max_assignments == (64 if options else int(1.25 * max(tokens) * TOP_K))
        # In static mode as many as there are windows for: no host asks the others.
        assert made.most_tokens == (384 if options else max(tokens))

    on_ranks(plan, **options)


def test_a_limit_in_words_follows_the_batch() -> None:
    """Two assignments of every token of both ranks, at worst; a plan has room for all of them."""

    def plan(engine: NativeEngine, native: RecordingNative, rank: int) -> None:
        for num_tokens, num_rows in ((300, 1200), (10, 40)):
            native.calls.clear()
            assert engine.plan(assignments(num_tokens)).num_rows == num_rows
            ((_, _, alignment, limit, kept, _, max_pairs, max_assignments, *_),) = native.named(
                "plan"
            )
            assert (alignment, limit) == (1, num_rows)
            assert kept is None  # nothing can be dropped
            assert max_pairs >= NUM_RANKS * num_tokens
            assert max_assignments == num_rows

    on_ranks(plan, max_recv_rows="worst")


def test_the_kernel_writes_down_what_ranks_lack() -> None:
    """With on_overflow="raise" only: the host asks before an optimizer steps."""

    def plan(engine: NativeEngine, native: RecordingNative, rank: int) -> None:
        engine.plan(assignments(10))
        ((_, _, _, _, _, lacked, *_),) = native.named("plan")
        if engine.config.on_overflow == "drop":
            assert lacked is None
            return
        lacked[1] = 16 << 32 | 64
        shortage = engine.group._shared["rows lacked of 64"].thing
        with pytest.raises(RowsDroppedError, match="rank 1 needed 80 rows and had 64"):
            shortage.check()
        engine.group.is_rehearsal = True
        engine.plan(assignments(10))
        assert native.named("plan")[-1][5] is None

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

    def plan(engine: NativeEngine, native: RecordingNative, rank: int) -> None:
        native.sizes = SimpleNamespace(
            num_rows=5, num_pairs=num_pairs, num_assignments=num_assignments, bad_ranks=0
        )
        made = engine.plan(assignments(10))
        received = native.named("plan_receive")
        assert len(received) == times
        # A plan is made with its first routes; those that follow take their place.
        handle, *_, max_pairs, max_assignments, routes, _, _ = (native.named("plan") + received)[-1]
        assert handle is made.handle
        assert max_pairs >= num_pairs
        assert max_assignments >= num_assignments
        assert made.routes is routes
        assert len(routes) == max_pairs + max_assignments
        assert made.num_rows == 5

    on_ranks(plan)


def test_a_wait_that_failed_on_the_device_is_raised_by_the_next_call() -> None:
    """The kernels end, with NaN: nothing but the next call can say that a rank did not come."""

    def use(engine: NativeEngine, native: RecordingNative, rank: int) -> None:
        plan = engine.plan(assignments(4))
        native.calls.clear()
        native.failed = SimpleNamespace(
            reason="late", phase="dispatch", peer=1, epoch=9, deadline_s=2.0
        )
        for call in (
            lambda: engine.plan(assignments(4)),
            lambda: engine.dispatch(plan, torch.zeros(4, HIDDEN)),
            lambda: engine.combine(plan, torch.zeros(5, HIDDEN)),
        ):
            with pytest.raises(PeerError, match="rank 1 did not come in dispatch, operation 9"):
                call()
        assert native.calls == []  # and nothing is queued after it

    on_ranks(use)


def misaligned(num_rows: int) -> torch.Tensor:
    """Rows that start 4 bytes after a multiple of 16, as those of a slice of a flat buffer may."""
    rows = torch.arange(num_rows * HIDDEN + 1, dtype=torch.float32)[1:].view(num_rows, HIDDEN)
    assert rows.is_contiguous()
    assert rows.data_ptr() % 16 == 4
    return rows


def test_rows_reach_the_kernels_at_multiples_of_16_bytes() -> None:
    """The kernels copy 16 bytes at a time; elsewhere a GPU faults, and the process is lost."""

    def use(engine: NativeEngine, native: RecordingNative, rank: int) -> None:
        plan = engine.plan(assignments(4))
        x, y = misaligned(4), misaligned(5)
        engine.dispatch(plan, x)
        engine.combine(plan, y)
        for name, rows in (("dispatch", x), ("combine", y)):
            ((_, passed, *_),) = native.named(name)
            assert passed.data_ptr() % 16 == 0
            assert torch.equal(passed, rows)
        # What is right is not copied.
        aligned = x.clone()
        engine.dispatch(plan, aligned)
        assert native.named("dispatch")[-1][1].data_ptr() == aligned.data_ptr()

    on_ranks(use)


def test_hosts_meet_only_where_they_must() -> None:
    """In exact mode once a layer; in static mode when windows grow, and never again."""

    def use(engine: NativeEngine, native: RecordingNative, rank: int) -> None:
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


def test_a_refusal_waits_for_nobody() -> None:
    """The other rank hears of it on its device; no call of the two meets on the host."""

    def use(engine: NativeEngine, native: RecordingNative, rank: int) -> None:
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


@pytest.mark.parametrize("options", [{}, {"max_recv_rows": 64}], ids=["exact", "static"])
def test_nothing_is_asked_of_a_group_that_was_closed(options: dict[str, int]) -> None:
    """What the extension keeps for it is freed."""

    def use(engine: NativeEngine, native: RecordingNative, rank: int) -> None:
        plan, x = engine.plan(assignments(3)), torch.zeros(3, HIDDEN)
        engine.group.is_closed, engine._shared.native, engine._native = True, None, None
        for call in (
            lambda: engine.plan(assignments(3)),
            lambda: engine.dispatch(plan, x),
            lambda: engine.combine(plan, x),
        ):
            with pytest.raises(GroupClosedError, match="anew"):
                call()

    on_ranks(use, **options)
