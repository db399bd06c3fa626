"""Parts of README.md and docs/ that a command writes, and whole files."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
END = "\n<!-- end -->"


def update(
    command: str, parts: Mapping[str, str], write: bool, files: Mapping[Path, str] | None = None
) -> int:
    """Write what is out of date, or print how and return 1.

    Args:
        command: such as `make pages`.
        parts: texts by name, each between `<!-- written by COMMAND: NAME -->` and the next END.
        write: whether to write.
        files: whole files.

    Raises:
        ValueError: a part has no place, or several.
    """
    wanted, places = dict(files or {}), dict.fromkeys(parts, 0)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        for name, content in parts.items():
            begin, middle, rest = text.partition(f"<!-- written by {command}: {name} -->\n")
            if middle:
                places[name] += 1
                text = f"{begin}{middle}\n{content}\n{rest[rest.index(END) :]}"
        wanted[page] = text
    if wrong := [name for name, count in places.items() if count != 1]:
        raise ValueError(f"parts of `{command}` without a place of their own in the pages: {wrong}")
    is_stale = False
    for path, after in wanted.items():
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        if after == before:
            continue
        if write:
            path.write_text(after, encoding="utf-8")
        else:
            is_stale, name = True, str(path.relative_to(ROOT))
            texts = before.splitlines(), after.splitlines()
            print(
                *difflib.unified_diff(*texts, name, f"of `{command}`", n=0, lineterm=""), sep="\n"
            )
    return int(is_stale)
