"""The tables of docs/support.md, from the options that tests say they show.

    make support                      # writes them
    python tests/support_table.py     # says whether they are up to date

Tests are collected, not run.  An option is in the first table if a test has the marker

    @pytest.mark.supports("moe_some_option", compared="outputs with alltoall's, to the bit")

or, with no names, if a parameter of the test is a case that knows its options (`options_shown`).
Names are those of TransformerConfig's fields, with `=value` where the value matters, and
`--ncclep-...`.  The table of refusals is made from `refuses("moe_some_option", words="why, and what
to do")`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from megatron_versions import SUPPORTED
from packaging.version import Version

from megatron_ncclep.engines import ENGINES

HERE = Path(__file__).parent
ROOT = HERE.parent
DOCUMENT = ROOT / "docs" / "support.md"
MARK = "<!-- {} by make support: {} -->"
PLACES = ("CPU", "one GPU", "several GPUs")
# How a result was compared, the strictest first.
STRICTNESS = ("bits", "rounding", "behaviour")


class Collector:
    """A plugin of pytest that notes what the tests say which are left after collection.

    Attributes:
        works: option -> place -> how it is compared there.
        releases: option -> releases of Megatron-Core that it is compared with on a CPU.
        refused: words -> the options that are refused for this reason.
    """

    def __init__(self) -> None:
        self.works: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.releases: dict[str, set[str]] = defaultdict(set)
        self.refused: dict[str, dict[str, None]] = defaultdict(dict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Tell conftest.py that engines which cannot run here are not going to."""
        config.option.lists_only = True

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the options of each test."""
        for item in session.items:
            assert isinstance(item, pytest.Function)
            for mark in item.iter_markers("refuses"):
                self.refused[mark.kwargs["words"]].update(dict.fromkeys(mark.args))
            word, options = shown(item)
            for option in options:
                for place in places_of(item):
                    self.works[option][place].add(word)
                self.releases[option] |= releases_of(item)


def shown(item: pytest.Function) -> tuple[str, list[str]]:
    """How a test compares, and the options that it shows to work; nothing without the marker.

    Raises:
        pytest.UsageError: it does not say what it compares, or of which options.
    """
    marks = list(item.iter_markers("supports"))
    if not marks:
        return "", []
    said = [mark.kwargs["compared"] for mark in marks if "compared" in mark.kwargs]
    options = [option for mark in marks for option in mark.args]
    params = item.callspec.params if hasattr(item, "callspec") else {}
    cases = [value for value in params.values() if hasattr(value, "options_shown")]
    for case in cases:
        options += case.options_shown()
    if not said or not (options or cases):
        raise pytest.UsageError(
            f"{item.nodeid}: the marker supports needs {'an option' if said else 'compared=...'}"
        )
    return strictness(said[0], cases), options


def strictness(said: str, cases: list[Any]) -> str:
    """How strict a comparison is: by its cases, if they know, or by the words of the marker."""
    known = [case.same_bits or case.integers for case in cases if hasattr(case, "same_bits")]
    if known:
        return "bits" if all(known) else "rounding"
    if "to the bit" in said:
        return "bits"
    return "rounding" if " with " in said else "behaviour"


def places_of(item: pytest.Function) -> tuple[str, ...]:
    """Where a test runs: one that needs no several ranks, and makes none, shows one GPU."""
    if item.path.parent != HERE / "gpu":
        return PLACES[:1]
    if "one_rank" in item.fixturenames:
        return PLACES[1:2]
    needed = [mark.args[0] for mark in item.iter_markers("needs_ranks")]
    return PLACES[2:] if max(needed, default=1) > 1 else PLACES[1:]


def releases_of(item: pytest.Function) -> set[str]:
    """The releases of Megatron-Core that a test runs with on a CPU."""
    if item.path.parent == HERE / "gpu":
        return set()
    since = [Version(mark.args[0]) for mark in item.iter_markers("since")]
    each = item.get_closest_marker("each_release") is not None
    releases = SUPPORTED if each else SUPPORTED[-1:]
    return {name for name in releases if all(Version(name) >= oldest for oldest in since)}


def collect() -> Collector:
    """Collect the tests: those of the CPU, and those of GPUs.

    Raises:
        RuntimeError: pytest could not; with its output.
    """
    collector = Collector()
    for folder, *rest in (["integration"], ["gpu", "--backend=nccl", "--ranks=4"]):
        engines = [f"--engine={name}" for name in ENGINES if name != "reference"] if rest else []
        with contextlib.redirect_stdout(io.StringIO()) as output:
            options = ["--collect-only", "-qq", "-p", "no:cacheprovider", *rest, *engines]
            status = pytest.main([str(HERE / folder), *options], plugins=[collector])
        if status != pytest.ExitCode.OK:
            raise RuntimeError(output.getvalue()[-4000:])
    return collector


def table(*rows: list[str]) -> str:
    """A table of Markdown; the first row has the heads."""
    texts = [[" ".join(cell.split()).replace("|", r"\|") for cell in row] for row in rows]
    texts.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in row)}|" for row in texts)


def oldest(releases: set[str]) -> str:
    """The oldest release, where it is not the oldest supported one."""
    found = next((name for name in SUPPORTED if name in releases), SUPPORTED[0])
    return "" if found == SUPPORTED[0] else f"from {found}"


def works(collector: Collector) -> str:
    """One row for each option, or for those of its values that are compared alike."""
    rows: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, by_place in sorted(collector.works.items()):
        option, _, value = name.partition("=")
        cells = [
            next((word for word in STRICTNESS if word in by_place[place]), "") for place in PLACES
        ]
        cells.append(oldest(collector.releases[name]))
        rows[(option, *cells)].append(f"`{value}`" if value else "")
    return table(
        ["option", *PLACES, "Megatron-Core"],
        *(
            [" ".join(filter(None, [f"`{option}`", ", ".join(filter(None, values))])), *cells]
            for (option, *cells), values in rows.items()
        ),
    )


def refusals(collector: Collector) -> str:
    """One row for each reason."""
    rows = sorted((sorted(options), words) for words, options in collector.refused.items())
    return table(
        ["option", "why, and what to do"],
        *([", ".join(f"`{option}`" for option in options), words] for options, words in rows),
    )


def tables(collector: Collector) -> dict[str, str]:
    """All tables, by name."""
    return {"what works": works(collector), "what is refused": refusals(collector)}


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
