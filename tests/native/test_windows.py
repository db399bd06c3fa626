"""Windows grow on all ranks or on none, and wrong addresses are found before anything uses them.

`window_check.cpp` runs the check between threads, one of them broken; a stand-in for
the extension shows what the engine asks of it.
"""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_extension import STREAM, FakeGroup, play
from fakes import ThreadGroup, on_threads

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.native.engine import NativeEngine
from megatron_ncclep.engines.native.group import NativeGroup, tokens_of_windows

NUM_RANKS = 3
DEADLINE_S = 30.0
CSRC = Path(__file__).parents[2] / "csrc"
CXX = shutil.which("g++")


# --- wrong addresses and steps that fail ---------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`window_check.cpp`, with what it runs, under sanitizers."""
    if CXX is None:
        pytest.skip("no g++ on PATH")
    path = tmp_path_factory.mktemp("window_check") / "window_check"
    sources = [
        Path(__file__).with_name("window_check.cpp"),
        *(CSRC / "native" / "host" / f"{name}.cpp" for name in ("window_check", "agreement")),
    ]
    options = ["-std=c++20", "-Wall", "-Werror", "-g1", "-fsanitize=address,undefined", f"-I{CSRC}"]
    subprocess.run([CXX, *options, *sources, "-o", path, "-lpthread", "-ldl"], check=True)
    return path


def thrown(program: Path, broken: str) -> str:
    """The one text that all ranks throw when rank 1 is broken so; empty if none does."""
    ran = subprocess.run(
        [program, broken], check=True, text=True, capture_output=True, timeout=DEADLINE_S
    )
    lines = ran.stdout.split("\n")[:NUM_RANKS]
    assert len(lines) == NUM_RANKS
    assert len(set(lines)) == 1, lines
    return lines[0]


def test_right_windows_are_written_at_every_end(program: Path) -> None:
    """The program looks for the words itself."""
    assert thrown(program, "") == ""


START = r"rank 1: it reads 0x\w{16} from the start of the"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("swapped peers", rf"{START} control window of rank 1"),
        (
            "wrong own mapping",
            r"rank 1: it reads 0x0{16} from the start of the control .* rank 1, at",
        ),
        ("another window", rf"{START} rows window of rank 0"),
        ("the last page is not mapped", "rank 1: it reads 0x0{16} from the end of the rows window"),
        ("stores are lost", "rank 0: it finds 0x0{16} where rank 1 wrote to the start of its"),
        # Windows that were there before are not taken for the new ones.
        ("stays behind", rf"{START} control window of rank 0"),
    ],
)
def test_wrong_addresses_are_an_error_on_all_ranks(
    program: Path, broken: str, message: str
) -> None:
    text = thrown(program, broken)
    assert text.startswith("engine 'native', checking its windows (tokens 0 -> 128): ")
    assert re.search(message, text), text
    assert text.endswith("words are wrong); a remedy")


def test_a_step_that_fails_on_one_rank_fails_on_all(program: Path) -> None:
    """With any exception: only the extension's own were, and after others the ranks waited."""
    text = "engine 'native', opening its windows (tokens 0 -> 128): rank 1: std::bad_alloc"
    assert thrown(program, "a step") == f"{text}; a remedy"


# --- what the engine asks for and says -----------------------------------------------------------


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


def test_growth_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megatron_ncclep")
    play(monkeypatch)

    def reserve(group: ThreadGroup) -> list[Any]:
        native, shared = FakeGroup(), object.__new__(NativeGroup)
        shared.group, shared.native, shared._sizes = group, native, (0, 0, 0)
        # The first plan knows of no row: nothing worth saying.  The last one fits.
        for row_bytes in (16, 1024, 4096, 1024):
            shared.reserve(1000, 8, row_bytes)
        return [
            (*call[:4], call.all_gather == group.hosts.exchange) for call in native.named("reserve")
        ]

    asked = [(1024, 8, row_bytes, STREAM, True) for row_bytes in (16, 1024, 4096, 4096)]
    assert on_threads(NUM_RANKS, reserve) == [asked] * NUM_RANKS
    said = [record.getMessage().partition(" (")[0] for record in caplog.records]
    assert said == [
        "native: windows grew from 0.0 to 1.0 MiB on each of 3 ranks",
        "native: windows grew from 1.0 to 4.0 MiB on each of 3 ranks",
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
            engine._shared.begin(engine.timeout_s)
            given.append(native.timeout_s)
        return given

    assert deadlines() == [2.0, 600.0, 2.0]
    is_captured = True
    assert deadlines() == [2.0, 60.0, 2.0]
    is_captured = False
    group.hosts.enter()
    assert deadlines() == [2.0, 600.0, 2.0]
    group.check()
    assert deadlines() == [2.0, 60.0, 2.0]


def test_windows_are_for_at_most_an_eighth_more_tokens() -> None:
    assert [tokens_of_windows(n) for n in (0, 1, 128, 129, 4096, 5000)] == [
        128, 128, 128, 256, 4096, 5120,
    ]  # fmt: skip
    for num_tokens in range(1, 65537, 61):
        made = tokens_of_windows(num_tokens)
        assert made % 128 == 0
        assert num_tokens <= made < num_tokens + max(128, num_tokens / 8 + 1)
