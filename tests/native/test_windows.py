"""Windows grow on all ranks or on none, and wrong addresses are found before anything uses them.

`window_check.cpp` runs the check between threads, one of them broken.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

NUM_RANKS = 3
DEADLINE_S = 30.0
CSRC = Path(__file__).parents[2] / "csrc"
CXX = shutil.which("g++")


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


def test_right_windows_and_a_step_that_fails(program: Path) -> None:
    """The program looks itself whether words are written at every end.  A step may fail with any
    exception: only the extension's own were told, and after others the ranks waited.
    """
    assert thrown(program, "") == ""
    text = "engine 'native', opening its windows (tokens 0 -> 128): rank 1: std::bad_alloc"
    assert thrown(program, "a step") == f"{text}; a remedy"
