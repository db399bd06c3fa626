"""The tables of docs/support.md, from what the tests say of themselves: which options they show.

    make support                      # writes them
    python tests/support_table.py     # says whether they are up to date

Tests are collected, not run.  A test is in the first table if it has the marker

    @pytest.mark.supports("moe_some_option", compared="the bits of alltoall")

or, with no names, if its parameter is a case that knows its options (`options_shown`).  Names are
those of TransformerConfig's fields, with `=value` where the value matters, and `--ncclep-...`.  In
the table of refusals it is with `refuses("moe_some_option", words="why, and what to do")`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from megatron_versions import SUPPORTED

from megatron_ncclep.engines import ENGINES

HERE = Path(__file__).parent
ROOT = HERE.parent
DOCUMENT = ROOT / "docs" / "support.md"
# Parameters of tests that are releases of Megatron-Core.
RELEASES = ("megatron_release", "megatron_version", "megatron")
MOST_CASES = 4
MARK = "<!-- {} by make support: {} -->"


@dataclass
class Shown:
    """What one test function shows of one option.

    Attributes:
        releases: of Megatron-Core; empty: whichever is installed.
        cases: ids of its parameters, releases and engines apart -> how many options each shows.
    """

    releases: set[str] = field(default_factory=set)
    cases: dict[str, int] = field(default_factory=dict)


class Collector:
    """A plugin of pytest that notes what the tests say which are left after collection.

    Attributes:
        works: option, engine and test -> what is shown.
        compared: test -> what it compares.
        refused: option, words and test -> releases.
    """

    def __init__(self) -> None:
        self.works: dict[tuple[str, str, str], Shown] = defaultdict(Shown)
        self.compared: dict[str, dict[str, None]] = defaultdict(dict)
        self.refused: dict[tuple[str, str, str], set[str]] = defaultdict(set)

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Tell conftest.py that engines which cannot run here are not going to."""
        config.option.lists_only = True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note what each test says; releases and engines are parameters."""
        for item in session.items:
            assert isinstance(item, pytest.Function)
            params = item.callspec.params if hasattr(item, "callspec") else {}
            test = f"{item.path.relative_to(HERE)}::{item.originalname}"
            releases = {params[name] for name in RELEASES if name in params}
            for mark in item.iter_markers("refuses"):
                for option in mark.args:
                    self.refused[option, mark.kwargs["words"], test] |= releases
            said, options = shown(item, params)
            for option in options:
                self.compared[test][said] = None
                found = self.works[option, params.get("engine_name", "reference"), test]
                found.releases |= releases
                if case := case_id(item, params):
                    found.cases[case] = len(options)


def shown(item: pytest.Function, params: dict[str, Any]) -> tuple[str, list[str]]:
    """What a test compares, and the options that it shows to work; nothing without the marker.

    Raises:
        pytest.UsageError: it does not say what it compares, or of which options.
    """
    marks = list(item.iter_markers("supports"))
    if not marks:
        return "", []
    said = [mark.kwargs["compared"] for mark in marks if "compared" in mark.kwargs]
    options = [option for mark in marks for option in mark.args]
    cases = [value for value in params.values() if hasattr(value, "options_shown")]
    for case in cases:
        options += case.options_shown()
    if not said or not (options or cases):
        raise pytest.UsageError(
            f"{item.nodeid}: the marker supports needs {'an option' if said else 'compared=...'}"
        )
    return said[0], list(dict.fromkeys(options))


def case_id(item: pytest.Function, params: dict[str, Any]) -> str:
    """The id of an item's parameters, without releases and engines."""
    inside = item.name.removeprefix(item.originalname)[1:-1]
    for name in (*RELEASES, "engine_name"):
        if name in params:
            inside = re.sub(rf"(^|-){re.escape(str(params[name]))}(-|$)", r"\1", inside, count=1)
    return inside.strip("-")


def collect() -> Collector:
    """Collect the tests: those of the CPU, and those of GPUs with every engine that needs one.

    Raises:
        RuntimeError: pytest could not; with its output.
    """
    engines = [f"--engine={name}" for name in ENGINES if name != "reference"]
    collector = Collector()
    for arguments in (["integration"], ["gpu", "--backend=nccl", "--ranks=4", *engines]):
        folder, *rest = arguments
        with contextlib.redirect_stdout(io.StringIO()) as output:
            status = pytest.main(
                [str(HERE / folder), "--collect-only", "-qq", "-p", "no:cacheprovider", *rest],
                plugins=[collector],
            )
        if status != pytest.ExitCode.OK:
            raise RuntimeError(output.getvalue()[-4000:])
    return collector


def several(releases: set[str]) -> str:
    """Releases as people name them, from the oldest to the newest."""
    assert releases <= set(SUPPORTED), releases
    if releases == set(SUPPORTED):
        return f"{SUPPORTED[0]} to {SUPPORTED[-1]}"
    return ", ".join(name for name in SUPPORTED if name in releases) or "the installed one"


def most_telling(cases: dict[str, int]) -> str:
    """The ids of some cases: those with the fewest options beside the one in question."""
    some = sorted(cases, key=lambda case: (cases[case], case))[:MOST_CASES]
    more = [f"{len(cases) - len(some)} more"] if len(cases) > len(some) else []
    return ", ".join(some + more)


def table(*rows: list[str]) -> str:
    """A table of Markdown; the first row has the heads."""
    texts = [[" ".join(cell.split()).replace("|", r"\|") for cell in row] for row in rows]
    texts.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|" for row in texts)


def tables(collector: Collector) -> dict[str, str]:
    """All tables, by name."""
    # The one that every machine has first.
    engines = ["reference", *(name for name in ENGINES if name != "reference")]
    rows: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    releases: dict[str, set[str]] = defaultdict(set)
    for (_, _, test), what in collector.works.items():
        releases[test] |= what.releases
    for (option, engine, test), what in sorted(collector.works.items()):
        parts = [f"`{test.rpartition('/')[2]}`", most_telling(what.cases)]
        if what.releases != releases[test]:
            parts.append(f"({several(what.releases)})")
        rows[option][engine].append(" ".join(part for part in parts if part))
    return {
        "what works": table(
            ["option", *(f"`{name}`" for name in engines)],
            *(
                [f"`{option}`", *("; ".join(found[name]) for name in engines)]
                for option, found in rows.items()
            ),
        ),
        "what is compared": table(
            ["test", "Megatron-Core", "what it compares"],
            *(
                [f"`tests/{test}`", several(releases[test]), "; ".join(compared)]
                for test, compared in sorted(collector.compared.items())
            ),
        ),
        "what is refused": table(
            ["option", "why, and what to do", "Megatron-Core", "test"],
            *(
                [f"`{option}`", words, several(found), f"`{test.rpartition('/')[2]}`"]
                for (option, words, test), found in sorted(collector.refused.items())
            ),
        ),
    }


def updated(document: str, generated: dict[str, str]) -> str:
    """The document with the tables in their places, between two comments that name each.

    Raises:
        ValueError: a place is missing.
    """
    for name, table in generated.items():
        begin, end = MARK.format("written", name), MARK.format("end of what is written", name)
        if document.count(begin) != 1 or document.count(end) != 1:
            raise ValueError(f"{DOCUMENT.name} needs these two lines, once: {begin} {end}")
        before, _, rest = document.partition(begin)
        document = f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return document


def main() -> int:
    """Compare, or write with --write; 1 if the document was not up to date and still is not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    before = DOCUMENT.read_text(encoding="utf-8")
    after = updated(before, tables(collect()))
    if write:
        DOCUMENT.write_text(after, encoding="utf-8")
    elif after != before:
        old, new = (set(text.splitlines()) for text in (before, after))
        for line in sorted(old ^ new):
            print("-" if line in old else "+", line)
        print("docs/support.md does not say what the tests show: run `make support`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
