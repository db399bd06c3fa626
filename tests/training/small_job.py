"""A job of seconds for the tests of `ncclep train`, and how they run it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_versions import INSTALLED, python_path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600  # a hung run must end the test; a busy machine must not

MODEL = {
    "num-layers": 2,
    "hidden-size": 32,
    "ffn-hidden-size": 64,
    "num-attention-heads": 2,
    "seq-length": 32,
    "max-position-embeddings": 32,
    "position-embedding-type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    # So that a resumed run needs the right random numbers.
    "hidden-dropout": 0.1,
    "attention-dropout": 0.0,
    "num-experts": 8,
    "moe-ffn-hidden-size": 32,
    "moe-router-topk": 4,
    "moe-router-dtype": "fp32",
    "moe-router-load-balancing-type": "aux_loss",
    "moe-aux-loss-coeff": 0.01,
    "transformer-impl": "local",
    "no-persist-layer-norm": True,
    "micro-batch-size": 2,
    "global-batch-size": 8,
    "train-iters": 8,
    "eval-iters": 2,
    "lr": 0.005,
    "lr-decay-style": "cosine",
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
