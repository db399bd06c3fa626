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
from megatron_ncclep.engines import extension, native_windows
from megatron_ncclep.engines.native import NativeEngine
from megatron_ncclep.errors import PeerError

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
        self.sizes = SimpleNamespace(num_rows=5, num_pairs=2, num_picks=3, bad_ranks=0)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]

    def fits(self, *wanted: int) -> bool:
        return all(n <= held for n, held in zip(wanted, self.held, strict=True))

    def grow(self, *wanted: int) -> None:
        self.calls.append(("grow", wanted))
        self.held = wanted

    def routes_size(self, max_pairs: int, max_picks: int, num_chunks: int) -> int:
        return max_pairs + max_picks

    def sums_size(self, *_: Any) -> int:
        return 0

    def bad_ranks(self, forget: bool) -> int:
        return 0

    def failure(self) -> Any:
        return self.failed

    def wait_for_sizes(self, *_: Any) -> Any:
        return self.sizes

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in ("plan_drop", "plan_count", "plan_receive", "dispatch", "combine"):
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
    monkeypatch.setattr(extension, "keep_for_current_stream", lambda *_: STREAM)
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


def picks(num_tokens: int) -> torch.Tensor:
    return torch.arange(NUM_EXPERTS).repeat(num_tokens)[: num_tokens * TOP_K].view(-1, TOP_K)


@pytest.mark.parametrize("options", [{}, {"max_recv_rows": 64}], ids=["exact", "static"])
def test_windows_and_chunks_are_for_the_rank_with_the_most_tokens(options: dict[str, int]) -> None:
    """Windows and what a plan keeps have the same layout on all ranks, which read each other's."""
    tokens = (3, 300)

    def plan(engine: NativeEngine, native: RecordingNative, rank: int) -> None:
        made = engine.plan(picks(tokens[rank]))
        assert native.named("grow") == [(384, TOP_K, 16)]
        counts, home, num_chunks, top_k = made.handle.made
        assert (num_chunks, top_k) == (3, TOP_K)
        assert (counts.shape, home.shape) == (
            (NUM_EXPERTS // NUM_RANKS * 2 + 1,),
            (4, tokens[rank]),
        )
        (received,) = native.named("plan_receive")
        assert received[1] <= NUM_RANKS * max(tokens)
        assert received[2] == (64 if options else int(1.25 * max(tokens) * TOP_K))
        assert made.most_tokens == max(tokens)

    on_ranks(plan, **options)


@pytest.mark.parametrize(
    ("num_pairs", "num_picks", "times"),
    [(2, 3, 1), (2, MANY, 2), (MANY, 3, 2), (MANY, MANY, 2)],
    ids=["all fit", "picks do not fit", "pairs do not fit", "neither fits"],
)
def test_routes_that_do_not_fit_are_received_again(
    num_pairs: int, num_picks: int, times: int
) -> None:
    """The first time the device has written nothing: memory as it was would be taken for routes."""

    def plan(engine: NativeEngine, native: RecordingNative, rank: int) -> None:
        native.sizes = SimpleNamespace(
            num_rows=5, num_pairs=num_pairs, num_picks=num_picks, bad_ranks=0
        )
        made = engine.plan(picks(10))
        received = native.named("plan_receive")
        assert len(received) == times
        handle, max_pairs, max_picks, routes, *_ = received[-1]
        assert handle is made.handle
        assert max_pairs >= num_pairs
        assert max_picks >= num_picks
        assert made.routes is routes
        assert len(routes) == max_pairs + max_picks
        assert made.num_rows == 5

    on_ranks(plan)


def test_a_wait_that_failed_on_the_device_is_raised_by_the_next_call() -> None:
    """The kernels end, with NaN: nothing but the next call can say that a rank did not come."""

    def use(engine: NativeEngine, native: RecordingNative, rank: int) -> None:
        plan = engine.plan(picks(4))
        native.calls.clear()
        native.failed = SimpleNamespace(phase=3, peer=1, epoch=9, deadline_s=2.0)
        for call in (
            lambda: engine.plan(picks(4)),
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
        plan = engine.plan(picks(4))
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
