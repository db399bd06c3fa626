"""docs/support.md says what the tests show, and tests/support_table.py finds what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import support_table
from support_table import Collector, Shown, case_id, most_telling, shown, table, tables, updated

from megatron_ncclep.engines import ENGINES


@pytest.mark.skipif(
    sys.version_info < (3, 12), reason="with this Python tests run with one Megatron-Core only"
)
def test_the_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, support_table.__file__], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def item(name: str, *marks: pytest.Mark, **params: Any) -> Any:
    """A collected test, as far as the collector looks."""
    found = SimpleNamespace(
        name=name,
        originalname=name.partition("[")[0],
        nodeid=name,
        path=Path(support_table.HERE, "integration", "test_x.py"),
        callspec=SimpleNamespace(params=params),
        iter_markers=lambda wanted: [mark for mark in marks if mark.name == wanted],
    )
    return found


SUPPORTS = pytest.mark.supports("a", "b=x", compared="bits").mark
CASE = SimpleNamespace(options_shown=lambda: ["b=x", "c"])


def test_options_come_from_markers_and_cases() -> None:
    assert shown(item("test_t"), {}) == ("", [])
    assert shown(item("test_t", SUPPORTS), {"case": CASE}) == ("bits", ["a", "b=x", "c"])
    more = pytest.mark.supports("d").mark
    assert shown(item("test_t", more, SUPPORTS), {}) == ("bits", ["d", "a", "b=x"])
    nothing = SimpleNamespace(options_shown=list)  # every option has its default
    said = pytest.mark.supports(compared="bits").mark
    assert shown(item("test_t", said), {"case": nothing}) == ("bits", [])
    with pytest.raises(pytest.UsageError, match="test_t: the marker supports needs compared"):
        shown(item("test_t", more), {})
    with pytest.raises(pytest.UsageError, match="test_t: the marker supports needs an option"):
        shown(item("test_t", said), {})


def test_ids_of_cases() -> None:
    params = {"megatron_release": "0.18.2", "engine_name": "native", "case": "a-b"}
    assert case_id(item("test_t[0.18.2-native-a-b]"), params) == "a-b"
    assert case_id(item("test_t[native-a-b-0.18.2]"), params) == "a-b"
    assert case_id(item("test_t[0.18.2]"), {"megatron_release": "0.18.2"}) == ""
    assert case_id(item("test_t"), {}) == ""
    assert most_telling({"e": 9, "d": 2, "c": 2, "b": 1, "a": 3}) == "b, c, d, a, 1 more"
    assert most_telling({"b": 1, "a": 1}) == "a, b"


def test_what_tests_say_becomes_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest, "Function", SimpleNamespace)
    collector = Collector()
    every = ["0.16.1", "0.17.1", "0.18.2", "0.19.2"]
    refused = pytest.mark.refuses("no|t", words="leave it\nout").mark
    gpu = pytest.mark.supports("a", compared="sums").mark
    items = [
        *(item(f"test_t[{name}-one]", SUPPORTS, megatron_release=name) for name in every),
        item("test_t[0.19.2-two]", SUPPORTS, megatron_release="0.19.2", case=CASE),
        item("test_u[native]", gpu, engine_name="native"),
        item("test_v[0.17.1]", refused, megatron_release="0.17.1"),
        item("test_w"),
    ]
    collector.pytest_collection_finish(SimpleNamespace(items=items))
    assert collector.works["c", "reference", "integration/test_x.py::test_t"] == Shown(
        {"0.19.2"}, {"two": 3}
    )
    found = tables(collector)
    empty = " |" * (len(ENGINES) - 2)
    assert found["what works"].splitlines()[2:] == [
        f"| `a` | `test_x.py::test_t` one, two | `test_x.py::test_u` |{empty}",
        f"| `b=x` | `test_x.py::test_t` one, two | |{empty}",
        f"| `c` | `test_x.py::test_t` two (0.19.2) | |{empty}",
    ]
    assert found["what is compared"].splitlines()[2:] == [
        "| `tests/integration/test_x.py::test_t` | 0.16.1 to 0.19.2 | bits |",
        "| `tests/integration/test_x.py::test_u` | the installed one | sums |",
    ]
    assert found["what is refused"].splitlines()[2:] == [
        r"| `no\|t` | leave it out | 0.17.1 | `test_x.py::test_v` |"
    ]


def test_tables_are_written_in_their_places() -> None:
    begin, end = (
        support_table.MARK.format(what, "x") for what in ("written", "end of what is written")
    )
    page = f"before\n{begin}\nold\n{end}\nafter\n"
    new = updated(page, {"x": table(["a"], ["1"])})
    assert new == f"before\n{begin}\n\n| a |\n| --- |\n| 1 |\n\n{end}\nafter\n"
    assert updated(new, {"x": table(["a"], ["1"])}) == new
    with pytest.raises(ValueError, match="needs these two lines, once"):
        updated("before\n", {"x": ""})
