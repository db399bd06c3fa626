"""log.jsonl: one JSON object per line.

{"type": "settings", ...}   first line: the effective settings and versions; one more each time the
                            run was resumed
{"type": "step", "step": 1, "loss": ..., "grad_norm": ..., "lr": ..., "tokens_per_s": ...,
 "metrics": [...]}          loss in nats per token; metrics only with --ncclep-metrics-interval:
                            those that became known in this step, each a
                            `megatron_ncclep.metrics.Interval`
{"type": "validation", "step": 100, "valid_loss": ...}
                            after every `eval-interval` steps
{"type": "end", "valid_loss": ...}
                            after the last step; "dropped_share" if static mode dropped
                            assignments: their share in training steps since the start or the
                            last resumption
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ncclep.errors import InputError

NAME = "log.jsonl"


def read(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The entries of the log `path` of type `kind` (None: all), in order; empty without a log.

    A last line that was cut off, because the disk was full or the rank was killed, does not count.

    Raises:
        InputError: a line of the file was not written by `write`.
    """
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", errors="replace") as lines:
        numbered = enumerate(lines, 1)
        entries = [_entry(path, number, line) for number, line in numbered if line.endswith("\n")]
    return [entry for entry in entries if kind in (None, entry["type"])]


def _entry(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    wanted: dict[Any, tuple[str, ...]] = {
        "step": ("step", "loss"),
        "settings": ("dispatcher", "unigram_entropy"),
    }
    needs = wanted.get(entry.get("type"), ("type",)) if isinstance(entry, dict) else ()
    if not isinstance(entry, dict) or not all(name in entry for name in needs):
        raise InputError(f"{path}, line {number}: this is not a log.jsonl of `ncclep train`")
    return entry


def truncate(path: Path, steps_to_keep: int) -> None:
    """Drop the entries after step `steps_to_keep` (0: all), because these steps are repeated."""
    kept = [
        entry
        for entry in (read(path) if steps_to_keep else [])
        if entry["type"] == "settings" or entry.get("step", steps_to_keep + 1) <= steps_to_keep
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_to(path, "w", "".join(json.dumps(entry) + "\n" for entry in kept))


def write(path: Path, kind: str, **values: Any) -> None:
    """Append one entry of type `kind`; it is on disk when this returns.

    Raises:
        InputError: it cannot be written.
    """
    _write_to(path, "a", json.dumps({"type": kind, **values}) + "\n")


def _write_to(path: Path, mode: str, text: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: make room for it, and --resume") from error
