"""The doctor's findings, and how they look in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# A column of values narrower than this is harder to read than a line wrapped by the terminal.
MIN_VALUE_WIDTH = 40


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: the thing examined; unique in the whole report.
        value: its state.
        problem: what is wrong with it, and the remedy; None if nothing is.
    """

    subject: str
    value: str
    problem: str | None = None


def render(title: str, findings: Sequence[Finding], columns: int) -> str:
    """Return a section as text: a header, then subjects and values in two aligned columns.

    Args:
        title: the header.
        findings: the lines.
        columns: width of the terminal; longer values are wrapped, words such as paths stay whole.
    """
    width = max((len(finding.subject) for finding in findings), default=0)
    value_width = max(columns - width - 4, MIN_VALUE_WIDTH)
    lines = [title]
    for finding in findings:
        texts = [finding.value]
        if finding.problem is not None:
            texts.append(f"PROBLEM: {finding.problem}")
        subject = finding.subject
        for line in "\n".join(texts).splitlines():
            for part in textwrap.wrap(
                line, value_width, break_long_words=False, break_on_hyphens=False
            ):
                lines.append(f"  {subject:{width}}  {part}")
                subject = ""
    return "\n".join(lines)


def ranges(numbers: Iterable[int]) -> str:
    """Abbreviate ascending numbers: 1, 2, 3, 5 as `1..3, 5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return ", ".join("..".join(map(str, span)) for span in spans)


def by_num_ranks(texts: Mapping[int, str]) -> str:
    """Join the texts for each number of ranks, equal ones once: `1 rank: a`, `2..4 ranks: b`.

    One line for each text; for a single number of ranks, the text alone.
    """
    if len(texts) == 1:
        return next(iter(texts.values()))
    numbers: dict[str, list[int]] = {}
    for num_ranks, text in texts.items():
        numbers.setdefault(text, []).append(num_ranks)
    return "\n".join(
        f"{ranges(n)} rank{'' if n == [1] else 's'}: {text}" for text, n in numbers.items()
    )
