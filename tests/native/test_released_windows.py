"""What the native engine asks of the extension when a process hands its GPU over and takes it back.

Windows are of NCCL, not of torch: frameworks of reinforcement learning moved weights, gradients and
optimizer to the host, and gigabytes stayed on the GPU that the generator then lacked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_extension import FakeGroup, play
from fakes import ThreadGroup, on_threads

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.low_latency import LowLatency, create_low_latency
from megatron_ncclep.engines.native import low_latency as native_low_latency
from megatron_ncclep.engines.native.engine import NativeEngine
from megatron_ncclep.engines.native.low_latency import NativeLowLatency
from megatron_ncclep.errors import InputError, RefusedError

NUM_RANKS, TOP_K, HIDDEN = 2, 2, 8
PHASES = 50
# A model with four experts, and one with eight.
EXPERTS = (4, 8)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)
    monkeypatch.setattr(NativeEngine, "_describe", lambda *_: None)
    monkeypatch.setattr(native_low_latency, "_num_sms", lambda device: 132)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(
        NativeLowLatency, "_view", lambda self, address, dtype, *shape: torch.zeros(shape).to(dtype)
    )


def on_ranks(function: Callable[[ThreadGroup, list[NativeEngine]], Any], **options: Any) -> None:
    """Call `function` on each rank with the engines of two models."""

    def run(group: ThreadGroup) -> None:
        group.device = torch.device("cpu")
        config = EpConfig(engine="native", **options)
        function(group, [NativeEngine(group, number, config) for number in EXPERTS])

    for result in on_threads(NUM_RANKS, run):
        if result is not None:
            raise result


def fakes_of(engines: list[NativeEngine]) -> list[FakeGroup]:
    return [engine._shared.native for engine in engines]  # type: ignore[misc]


def plan_of(engine: NativeEngine, num_tokens: int) -> Any:
    return engine.plan(torch.arange(4).repeat(num_tokens)[: num_tokens * TOP_K].view(-1, TOP_K))


def move(engine: NativeEngine, plan: Any) -> None:
    rows, _ = engine.dispatch(plan, torch.zeros(plan.num_tokens, HIDDEN))
    engine.combine(plan, rows)


def pair(low_latency: LowLatency) -> None:
    topk_idx = torch.zeros(3, TOP_K, dtype=torch.int64)
    rows = low_latency.dispatch(torch.zeros(3, HIDDEN).bfloat16(), topk_idx, torch.zeros(3, TOP_K))
    low_latency.combine(rows.rows)


def sizes_of(native: FakeGroup) -> list[tuple[int, ...]]:
    """Of the windows that were made."""
    return [call[:3] for call in native.named("reserve")]


@pytest.mark.parametrize("options", [{}, {"max_recv_rows": 64}], ids=["exact", "static"])
def test_fifty_phases(options: dict[str, int]) -> None:
    """Windows of both models and of low-latency mode are gone, and come back as large as they were,
    whatever comes first: a plan of a few tokens, or the rest of a pass that had begun.
    """

    def use(group: ThreadGroup, engines: list[NativeEngine]) -> None:
        natives = fakes_of(engines)
        sizes = {"max_tokens": 8, "hidden": HIDDEN, "top_k": TOP_K}
        low_latency = create_low_latency(engines[0], **sizes)
        calls: Any = low_latency._calls
        for engine in engines:
            move(engine, plan_of(engine, 300))
        held = [native.num_bytes for native in natives]
        assert all(held)
        for phase in range(PHASES):
            begun = plan_of(engines[0], 300)
            handle = calls._native
            group.release_memory(False)
            assert [native.num_bytes for native in natives] == [0, 0]
            assert handle.names[-1] == "close"
            group.release_memory(False)  # nothing is left
            assert handle.names.count("close") == 1
            if phase % 2:
                move(engines[0], begun)
            if phase % 3:
                pair(low_latency)
                assert natives[0].num_bytes == held[0]
            for engine in engines:
                for num_tokens in (1 + group.rank, 300 - group.rank):
                    move(engine, plan_of(engine, num_tokens))
            assert [native.num_bytes for native in natives] == held
            pair(low_latency)
        assert all(size == (384, TOP_K, 32) for n in natives for size in sizes_of(n)[2:])
        low_latency.close()

    on_ranks(use, **options)


def test_a_graph_that_holds_the_addresses() -> None:
    """A replay would write to memory that is another's by then.  On every rank, whichever has the
    graph; and nothing was released.
    """

    def use(group: ThreadGroup, engines: list[NativeEngine]) -> None:
        engine, (native, _) = engines[0], fakes_of(engines)
        move(engine, plan_of(engine, 10))
        native.was_captured = group.rank == 1
        with pytest.raises(InputError, match="release_memory: rank 1: a CUDA graph holds calls of"):
            group.release_memory(False)
        assert native.num_bytes
        with pytest.raises(InputError, match=r"graphs_are_dropped differs .* 0 has False, rank 1 "):
            group.release_memory(group.rank == 1)
        native.was_captured = False
        group.release_memory(True)
        assert not native.num_bytes
        move(engine, plan_of(engine, 10))

    on_ranks(use)


def test_not_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = threading.local()
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: getattr(capturing, "yes", False)
    )

    def use(group: ThreadGroup, engines: list[NativeEngine]) -> None:
        low_latency = create_low_latency(engines[0], max_tokens=8, hidden=HIDDEN, top_k=TOP_K)
        group.device = torch.device("cuda", group.rank)
        capturing.yes = group.rank == 0
        with pytest.raises(InputError, match="rank 0: a CUDA graph is being captured"):
            group.release_memory(True)
        group.device, capturing.yes = torch.device("cpu"), False
        group.release_memory(True)
        capturing.yes = True
        with pytest.raises(
            RefusedError, match="its memory was released: run the model once before"
        ):
            pair(low_latency)

    on_ranks(use)


def test_rows_that_have_not_been_combined() -> None:
    """Low-latency rows are in the window itself."""

    def use(group: ThreadGroup, engines: list[NativeEngine]) -> None:
        low_latency = create_low_latency(engines[0], max_tokens=8, hidden=HIDDEN, top_k=TOP_K)
        topk_idx, w = torch.zeros(3, TOP_K, dtype=torch.int64), torch.zeros(3, TOP_K)
        refused = "a low-latency dispatch has no combine yet"
        low_latency.send_dispatch(torch.zeros(3, HIDDEN).bfloat16(), topk_idx, w)
        with pytest.raises(InputError, match=refused):
            group.release_memory(True)
        received = low_latency.complete_dispatch()
        with pytest.raises(InputError, match=refused):
            group.release_memory(True)
        low_latency.send_combine(received.rows)
        with pytest.raises(InputError, match=refused):
            group.release_memory(True)
        low_latency.complete_combine()
        group.release_memory(False)
        low_latency.close()  # without a window

    on_ranks(use)
