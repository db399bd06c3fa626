"""Windows grow on all ranks or on none, and wrong addresses are found before anything uses them.

Ranks are threads, and device memory is a table from address to word; what NCCL and the device do is
in `Rank`, and each test breaks one thing of it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_extension import FakeExtension, FakeGroup, one_for_each_rank
from fakes import ThreadGroup, on_threads

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.native import windows as native_windows
from megatron_ncclep.engines.native.engine import NativeEngine, configuration
from megatron_ncclep.engines.native.group import NativeGroup
from megatron_ncclep.engines.native.windows import tokens_of_windows
from megatron_ncclep.errors import InputError, LibraryError
from megatron_ncclep.libraries import extension

NUM_RANKS = 3
DEADLINE_S = 30.0
WINDOW_BYTES = (4096, 8192)
Memory = dict[int, int]


def address_of(window: int, rank: int, generation: int) -> int:
    return (2 * generation + window + 1) << 40 | rank << 32


class Rank:
    """NCCL, and the device of one rank, right in every respect."""

    def __init__(self, rank: int, memory: Memory) -> None:
        self.rank, self.memory = rank, memory
        self.native = FakeGroup(open=self.open, clear=self.clear)
        self.module = FakeExtension(load_words=self.load_words, store_words=self.store_words)

    def open(self) -> None:
        self.native.windows = [
            SimpleNamespace(
                address=address_of(w, self.rank, self.native.generation),
                peers=[self.peer(w, r) for r in range(NUM_RANKS)],
                num_bytes=num_bytes,
            )
            for w, num_bytes in enumerate(WINDOW_BYTES)
        ]

    def peer(self, window: int, rank: int) -> int:
        return address_of(window, rank, self.native.generation)

    def load_words(self, addresses: list[int]) -> list[int]:
        return [self.memory.get(address, 0) for address in addresses]

    def store_words(self, addresses: list[int], words: list[int]) -> None:
        self.memory.update(zip(addresses, words, strict=True))

    def clear(self) -> None:
        for window in self.native.windows:
            for address in range(window.address, window.address + window.num_bytes, 8):
                self.memory.pop(address, None)


def grow(ranks: list[Rank], *sizes: int) -> list[Any]:
    def grow_rank(group: ThreadGroup) -> None:
        torch.cuda.set_device(group.device)
        native_windows.grow(group, ranks[group.rank].native, *sizes, DEADLINE_S)

    with one_for_each_rank([rank.module for rank in ranks]):
        return on_threads(NUM_RANKS, grow_rank)


def ranks_with(rank: int, broken: type[Rank]) -> list[Rank]:
    memory: Memory = {}
    return [(broken if r == rank else Rank)(r, memory) for r in range(NUM_RANKS)]


def error_of_all(errors: list[Any]) -> str:
    """The one text that all ranks raised."""
    assert [type(error) for error in errors] == [LibraryError] * NUM_RANKS, errors
    texts = {str(error) for error in errors}
    assert len(texts) == 1
    return texts.pop()


def test_every_end_of_every_window_is_written_and_cleared() -> None:
    written: set[int] = set()

    class Recording(Rank):
        def store_words(self, addresses: list[int], words: list[int]) -> None:
            written.update(addresses)
            super().store_words(addresses, words)

    memory: Memory = {}
    ranks = [Recording(rank, memory) for rank in range(NUM_RANKS)]
    assert grow(ranks, 128, 8, 16) == [None] * NUM_RANKS
    for window, num_bytes in enumerate(WINDOW_BYTES):
        for rank in range(NUM_RANKS):
            start = address_of(window, rank, 1)
            assert {start, start + num_bytes - 8} <= written
    assert memory == {}
    assert all(rank.native.names == ["allocate", "open", "clear"] for rank in ranks)


# --- wrong addresses -----------------------------------------------------------------------------


class SwappedPeers(Rank):
    def peer(self, window: int, rank: int) -> int:
        return super().peer(window, (0, 2, 1)[rank])


class OwnMemoryForAPeer(Rank):
    def peer(self, window: int, rank: int) -> int:
        return super().peer(window, self.rank)


class WrongOwnMapping(Rank):
    def peer(self, window: int, rank: int) -> int:
        return super().peer(window, rank) + 4096 * (rank == self.rank)


class AnotherWindow(Rank):
    def peer(self, window: int, rank: int) -> int:
        return super().peer(0, rank)


class ShiftedByAPage(Rank):
    def peer(self, window: int, rank: int) -> int:
        return super().peer(window, rank) + 4096


class LastPageIsNotMapped(Rank):
    def load_words(self, addresses: list[int]) -> list[int]:
        words = super().load_words(addresses)
        return [0 if a % 2**32 >= 4096 else w for a, w in zip(addresses, words, strict=True)]


class StoresAreLost(Rank):
    """Those to other ranks: what it reads is right."""

    def store_words(self, addresses: list[int], words: list[int]) -> None:
        pairs = zip(addresses, words, strict=True)
        mine = [(a, w) for a, w in pairs if a >> 32 & 0xFF == self.rank]
        self.memory.update(mine)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (SwappedPeers, r"rank 1: it reads 0x\w{16} from the start of the control window of rank 1"),
        (OwnMemoryForAPeer, r"rank 1: it reads 0x\w{16} from the start of the control .* rank 0"),
        (WrongOwnMapping, r"rank 1: it reads 0x0{16} from the start of the control .* rank 1, at"),
        (AnotherWindow, r"rank 1: it reads .* from the start of the rows window of rank 0"),
        (
            ShiftedByAPage,
            r"rank 1: it reads 0x0{16} from the start of the control window of rank 0",
        ),
        (
            LastPageIsNotMapped,
            r"rank 1: it reads 0x0{16} from the end of the rows window of rank 0",
        ),
        (StoresAreLost, r"rank 0: it finds 0x0{16} where rank 1 wrote to the start of its control"),
    ],
)
def test_wrong_addresses_are_an_error_on_all_ranks(
    broken: type[Rank], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_windows, "find_nccl", lambda: "9.9.9, libnccl.so.2 (loaded)")
    ranks = ranks_with(1, broken)
    text = error_of_all(grow(ranks, 128, 8, 16))
    assert re.search(message, text), text
    assert "use the engine nccl_ep or reference, and report this with NCCL 9.9.9" in text
    assert all(rank.native.names[-1] == "drop" for rank in ranks)


def test_windows_that_were_there_before_are_not_taken_for_the_new_ones() -> None:
    class StaysBehind(Rank):
        def peer(self, window: int, rank: int) -> int:
            return address_of(window, rank, 1)

    ranks = ranks_with(1, StaysBehind)
    for rank in ranks:
        rank.native.answers["clear"] = None
    assert grow(ranks, 128, 8, 16) == [None] * NUM_RANKS
    assert "rank 1: it reads" in error_of_all(grow(ranks, 256, 8, 16))


# --- steps that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "what", "remedy", "before"),
    [
        ("allocate", "allocating", "smaller micro-batches", []),
        ("open", "opening", "engine nccl_ep or reference", ["allocate"]),
        ("store_words", "writing to", "engine nccl_ep or reference", ["allocate", "open"]),
        ("load_words", "checking", "engine nccl_ep or reference", ["allocate", "open"]),
        ("clear", "clearing", "engine nccl_ep or reference", ["allocate", "open"]),
    ],
)
def test_a_step_that_fails_on_one_rank_fails_on_all(
    step: str, what: str, remedy: str, before: list[str]
) -> None:
    ranks = ranks_with(2, Rank)
    broken = ranks[2].module if step.endswith("words") else ranks[2].native
    broken.answers[step] = LibraryError(f"{step} went wrong")
    text = error_of_all(grow(ranks, 128, 8, 16))
    assert f"{what} its windows (tokens 0 -> 128" in text
    assert f"rank 2: {step} went wrong; " in text
    assert remedy in text
    done = before if step.endswith("words") else [*before, step]
    assert all(rank.native.names == [*done, "drop"] for rank in ranks)  # none goes on to the next


def test_a_step_that_fails_unexpectedly_is_told_too() -> None:
    """Only the extension's own errors were; after any other the ranks waited for the failed one."""
    ranks = ranks_with(2, Rank)
    ranks[2].native.answers["open"] = MemoryError("std::bad_alloc")
    text = error_of_all(grow(ranks, 128, 8, 16))
    assert "opening its windows" in text
    assert "rank 2: MemoryError('std::bad_alloc'); " in text


# --- CUDA graphs ---------------------------------------------------------------------------------


def engine_on(group: Any, native: Any, timeout_s: float = DEADLINE_S) -> NativeEngine:
    """An engine without a communicator."""
    engine = object.__new__(NativeEngine)
    engine._closed = False
    engine.group, engine._native, engine.num_sms, engine._described = group, native, 32, set()
    engine._shared = object.__new__(NativeGroup)
    engine._shared.group, engine._shared.native = group, native
    engine._shared._refusal = None
    engine.config = EpConfig(engine="native", timeout_s=timeout_s)
    return engine


def test_windows_that_a_graph_holds_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ranks = ranks_with(0, Rank)
    grow(ranks, 128, 8, 16)
    ranks[1].native.was_captured = True

    def reserve(num_tokens: int) -> list[Any]:
        return on_threads(
            NUM_RANKS,
            lambda group: engine_on(group, ranks[group.rank].native)._reserve(num_tokens, 8, 16),
        )

    assert reserve(128) == [None] * NUM_RANKS
    errors = reserve(129)
    assert [type(error) for error in errors] == [InputError] * NUM_RANKS, errors
    assert len({str(error) for error in errors}) == 1
    assert "cannot grow: rank 1: a CUDA graph holds calls of this group; " in str(errors[0])
    assert all(rank.native.names == ["allocate", "open", "clear"] for rank in ranks)


# --- what is said --------------------------------------------------------------------------------


def test_growth_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_ncclep")
    ranks = ranks_with(0, Rank)
    grow(ranks, 1024, 8, 16)  # of the first plan, which knows of no row: nothing worth saying
    grow(ranks, 1024, 8, 1024)
    grow(ranks, 1024, 8, 4096)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        (
            "INFO",
            "native: windows grew from 0.0 to 1.0 MiB on each of 3 ranks (row bytes 16 -> 1024)",
        ),
        (
            "INFO",
            "native: windows grew from 1.0 to 4.0 MiB on each of 3 ranks (row bytes 1024 -> 4096)",
        ),
    ]


def test_engines_of_a_group_have_deadlines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And longer ones in the first step, but not in a graph, which would keep them for good."""
    is_captured = False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)
    native = FakeGroup()
    (group,) = on_threads(1, lambda group: group)
    engines = [engine_on(group, native, timeout_s) for timeout_s in (2.0, 60.0)]

    def deadlines() -> list[float]:
        given = []
        for engine in (*engines, engines[0]):
            engine._begin()
            given.append(native.timeout_s)
        return given

    assert deadlines() == [2.0, 600.0, 2.0]
    is_captured = True
    assert deadlines() == [2.0, 60.0, 2.0]
    is_captured = False
    group.enter()
    assert deadlines() == [2.0, 600.0, 2.0]
    group.check()
    assert deadlines() == [2.0, 60.0, 2.0]


def test_an_engine_says_what_it_holds() -> None:
    native = FakeGroup()
    native.allocate(128, 8, 64)
    assert engine_on(None, native).nbytes() == 8192


needs_extension = pytest.mark.skipif(
    extension.unavailable_reason() is not None,
    reason=f"nothing to call: {extension.unavailable_reason()}",
)


@needs_extension
@pytest.mark.parametrize(("rank", "num_lines"), [(0, 2), (1, 0)])
def test_the_configuration_is_logged_at_debug(
    rank: int, num_lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    def describe(group: ThreadGroup) -> None:
        for _ in range(2):  # two layers
            engine = engine_on(group, None)
            for _ in range(2):
                engine._describe(14336, 8)
        engine._describe(7168, 8)

    caplog.set_level(logging.INFO, "megatron_ncclep")
    check_only(rank, describe)
    assert caplog.records == []
    caplog.set_level(logging.DEBUG, "megatron_ncclep")
    check_only(rank, describe)
    assert len(caplog.records) == num_lines
    if num_lines:
        assert caplog.records[0].getMessage() == (
            "native: rows of 14336 bytes, top-8, 4 ranks, 32 SMs: CTAs of dispatch: 11 staging, "
            "21 pulling; of combine: 13 adding, 0 sending, 19 summing"
        )


def test_windows_are_for_at_most_an_eighth_more_tokens() -> None:
    assert [tokens_of_windows(n) for n in (0, 1, 128, 129, 4096, 5000)] == [
        128, 128, 128, 256, 4096, 5120,
    ]  # fmt: skip
    for num_tokens in range(1, 65537, 61):
        made = tokens_of_windows(num_tokens)
        assert made % 128 == 0
        assert num_tokens <= made < num_tokens + max(128, num_tokens / 8 + 1)


def check_only(rank: int, function: Callable[[ThreadGroup], None]) -> None:
    """Call `function` as one rank of four."""
    results = on_threads(4, lambda group: function(group) if group.rank == rank else None)
    assert results == [None] * 4


@needs_extension
def test_the_configuration_follows_the_sms() -> None:
    assert "2 ranks, 3 SMs: CTAs of dispatch: 1 staging, 2 pulling; of combine" in configuration(
        3, 2, 1024, 8
    )
