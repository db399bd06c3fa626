"""Results of benchmarks, as pages and figures read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Subjects = dict[str, dict[str, Any]]  # of one shape, by name


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; a column holds numbers if its head ends in ':', and text otherwise."""
    rule = ["---:" if name.endswith(":") else "---" for name in head]
    lines = [[name.removesuffix(":") for name in head], rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def read(path: Path, failing: Sequence[str] = ()) -> dict[str, Any]:
    """A result in which every check has passed, but for those of the subjects in `failing`."""
    result: dict[str, Any] = json.loads(path.read_text())
    left = [text for text in result["failures"] if not any(name in text for name in failing)]
    assert not left, f"{path} has failures: do not publish this result: {left}"
    return result


def subjects(result: dict[str, Any], kind: str) -> dict[str, Subjects]:
    """The subjects of each shape, by the shape's name.  `kind`: shapes or trainings."""
    return {
        one["shape"]["name"]: {s["name"]: s for s in one["subjects"] if s["status"] == "ok"}
        for one in result[kind]
    }


def measured_on(result: dict[str, Any]) -> str:
    """GPUs, date and versions of a result, in a line."""
    machine, v = result["machine"], result["versions"]
    return (
        f"{machine['gpus']} x {machine['gpu']}, {result['date'][:10]}; torch {v['torch']}, "
        f"NCCL {v['nccl']}, Megatron-Core {v['megatron-core']}, TE {v['transformer-engine']}"
    )
