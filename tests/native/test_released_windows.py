"""What the native engine asks of the extension when a process hands its GPU over and takes it back.

Windows are of NCCL, not of torch: frameworks of reinforcement learning moved weights, gradients and
optimizer to the host, and gigabytes stayed on the GPU that the generator then lacked.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_extension import HIDDEN, TOP_K, FakeGroup, assignments, fake_of, on_ranks

from megatron_ncclep.engines.low_latency import LowLatency, create_low_latency
from megatron_ncclep.engines.native.engine import NativeEngine
from megatron_ncclep.errors import InputError, RefusedError

PHASES = 50

pytestmark = pytest.mark.usefixtures("stand_in", "idle_stream")


@pytest.fixture
def idle_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


def move(engine: NativeEngine, plan: Any) -> None:
    rows, _ = engine.dispatch(plan, torch.zeros(plan.num_tokens, HIDDEN))
    engine.combine(plan, rows)


def low_latency_of(engine: NativeEngine) -> LowLatency:
    return create_low_latency(engine, max_tokens=8, hidden=HIDDEN, top_k=TOP_K)


BATCH = (
    torch.zeros(3, HIDDEN).bfloat16(), torch.zeros(3, TOP_K, dtype=torch.int64),
    torch.zeros(3, TOP_K),
)  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"max_recv_rows": 64}], ids=["exact", "static"])
def test_fifty_phases(options: dict[str, int]) -> None:
    """Windows of two models and of low-latency mode are gone, and come back as large as they were,
    whatever comes first: a plan of a few tokens, or the rest of a pass that had begun.
    """

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        engines = [engine, NativeEngine(engine.group, 8, engine.config)]
        natives = [fake_of(each) for each in engines]
        low_latency = low_latency_of(engine)
        calls: Any = low_latency._calls
        for each in engines:
            move(each, each.plan(assignments(300)))
        held = [each.num_bytes for each in natives]
        assert all(held)
        for phase in range(PHASES):
            begun = engine.plan(assignments(300))
            handle = calls._native
            engine.group.release_memory(False)
            assert [each.num_bytes for each in natives] == [0, 0]
            assert handle.names[-1] == "close"
            engine.group.release_memory(False)  # nothing is left
            assert handle.names.count("close") == 1
            if phase % 2:
                move(engine, begun)
            if phase % 3:
                low_latency.combine(low_latency.dispatch(*BATCH).rows)
                assert native.num_bytes == held[0]
            for each in engines:
                for num_tokens in (1 + rank, 300 - rank):
                    move(each, each.plan(assignments(num_tokens)))
            assert [each.num_bytes for each in natives] == held
            low_latency.combine(low_latency.dispatch(*BATCH).rows)
        for each in natives:
            assert {call[:3] for call in each.named("reserve")[2:]} == {(384, TOP_K, 32)}
        low_latency.close()

    on_ranks(use, **options)


def test_a_graph_that_holds_the_addresses() -> None:
    """A replay would write to memory that is another's by then.  On every rank, whichever has the
    graph; and nothing was released.
    """

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        group = engine.group
        move(engine, engine.plan(assignments(10)))
        native.was_captured = rank == 1
        with pytest.raises(InputError, match="release_memory: rank 1: a CUDA graph holds calls of"):
            group.release_memory(False)
        assert native.num_bytes
        with pytest.raises(InputError, match=r"graphs_are_dropped differs .* 0 has False, rank 1 "):
            group.release_memory(rank == 1)
        native.was_captured = False
        group.release_memory(True)
        assert not native.num_bytes
        move(engine, engine.plan(assignments(10)))

    on_ranks(use)


def test_not_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = threading.local()
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: getattr(capturing, "yes", False)
    )

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        group, low_latency = engine.group, low_latency_of(engine)
        group.device, capturing.yes = torch.device("cuda", rank), rank == 0
        with pytest.raises(InputError, match="rank 0: a CUDA graph is being captured"):
            group.release_memory(True)
        group.device, capturing.yes = torch.device("cpu"), False
        group.release_memory(True)
        capturing.yes = True
        released = "its memory was released: run the model once before"
        with pytest.raises(RefusedError, match=released):
            low_latency.dispatch(*BATCH)

    on_ranks(use)


def test_rows_that_have_not_been_combined() -> None:
    """Low-latency rows are in the window itself."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        low_latency = low_latency_of(engine)

        def cannot_release() -> None:
            with pytest.raises(InputError, match="a low-latency dispatch has no combine yet"):
                engine.group.release_memory(True)

        low_latency.send_dispatch(*BATCH)
        cannot_release()
        received = low_latency.complete_dispatch()
        cannot_release()
        low_latency.send_combine(received.rows)
        cannot_release()
        low_latency.complete_combine()
        engine.group.release_memory(False)
        low_latency.close()  # without a window

    on_ranks(use)
