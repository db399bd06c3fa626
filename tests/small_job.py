"""`ncclep train` as tests run it: jobs of seconds, a small model, and what they logged."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from megatron_versions import INSTALLED, python_path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
TIMEOUT_S = 600  # a hung run must end the test; a busy machine must not

MODEL: dict[str, Any] = yaml.safe_load((TESTS / "convergence" / "model.yaml").read_text()) | {
    # So that a resumed run needs the right random numbers.
    "hidden-dropout": 0.1,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "train-iters": 8,
    "eval-iters": 2,
    "lr-warmup-fraction": 0.25,
}


@dataclass(frozen=True)
class Finished:
    """One uninterrupted run with --compare alltoall."""

    arguments: tuple[str, ...]
    out: Path
    output: str


def write_text(path: Path, num_bytes: int = 20_000) -> Path:
    """Write `num_bytes` of words to `path`, the same every time."""
    choose = random.Random(0).choice
    words = ("expert", "token", "router", "rank", "slot", "plan", "dispatch", "combine", "gate")
    text = " ".join(choose(words) for _ in range(num_bytes // 3))
    path.write_text(text[:num_bytes], encoding="utf-8")
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "megatron_ncclep", "train", *map(str, arguments)]


def environment(release: str = INSTALLED) -> dict[str, str]:
    """Variables for this package and that release of Megatron-Core."""
    folders = [*python_path(release), str(ROOT), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def run(
    *arguments: object, cwd: Path | None = None, release: str = INSTALLED
) -> subprocess.CompletedProcess[str]:
    """Run `ncclep train`; stdout and stderr come in one text."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(release),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )


def train(*arguments: object, release: str = INSTALLED) -> str:
    """Run `ncclep train`, which must succeed, and return its output."""
    done = run(*arguments, release=release)
    assert done.returncode == 0, done.stdout
    return done.stdout


def entries(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if entry["type"] == kind]


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in entries(folder, "step")]
