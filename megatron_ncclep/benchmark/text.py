"""Text in columns, and in lines of a readable length."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from typing import Any

WIDTH = 140


def align(rows: Iterable[list[str]]) -> list[str]:
    """Left-align the first column and right-align the others; no trailing blanks."""
    filled = list(rows)
    columns = max(len(row) for row in filled)
    filled = [row + [""] * (columns - len(row)) for row in filled]
    widths = [max(len(row[i]) for row in filled) for i in range(columns)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in filled
    ]


def wrap(text: str) -> list[str]:
    """Lines of at most `WIDTH` characters."""
    return textwrap.wrap(
        text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def memory_held(memory: dict[str, int] | None) -> str:
    """A subject's memory in GB: of torch's allocator, and outside of it."""
    if memory is None:
        return "-"
    return "+".join(f"{memory[name] / 1e9:.1f}" for name in ("torch_bytes", "other_bytes"))


def problems(subjects: Iterable[dict[str, Any]], title: Callable[[str], str]) -> list[str]:
    """Lines that say what was not measured and why, after an empty one; none if all is well."""
    words = {"unavailable": "not measured", "wrong": "WRONG", "failed": "FAILED"}
    reasons = [
        f"{title(s['name'])}: {words[s['status']]}: {s['reason']}"
        for s in subjects
        if s["status"] != "ok"
    ]
    return ["", *(line for reason in reasons for line in wrap(reason))] if reasons else []
