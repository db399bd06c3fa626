"""log.jsonl: one JSON object a line.

{"type": "settings", ...}   first line: the effective settings and versions; one more for each
                            time the run was resumed
{"type": "step", "step": 1, "loss": ..., "grad_norm": ..., "lr": ..., "tokens_per_s": ...,
 "balance": ...}            loss in nats per token; balance as in balance.py
{"type": "end", "valid_loss": ...}
                            when the last step was done
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAME = "log.jsonl"


def read(folder: Path) -> list[dict[str, Any]]:
    """All entries of the log in `folder`, in order; empty if there is none."""
    path = folder / NAME
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def steps(folder: Path) -> list[dict[str, Any]]:
    """The `step` entries of the log in `folder`."""
    return [entry for entry in read(folder) if entry["type"] == "step"]


class LogWriter:
    """Appends entries to the log; each one is on disk when `write` returns."""

    def __init__(self, folder: Path, steps_to_keep: int) -> None:
        """Open the log in `folder` and drop what is after step `steps_to_keep` (0: everything).

        Steps after the last checkpoint are done again when a run is resumed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        kept = [
            entry
            for entry in (read(folder) if steps_to_keep else [])
            if entry["type"] == "settings"
            or (entry["type"] == "step" and entry["step"] <= steps_to_keep)
        ]
        self._path = folder / NAME
        self._path.write_text("".join(json.dumps(e) + "\n" for e in kept), encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        """Append one entry of type `kind`."""
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"type": kind, **values}) + "\n")
