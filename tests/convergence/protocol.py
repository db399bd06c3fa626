"""The runs of the convergence protocol on the CPU; docs/convergence.md says what they are for.

python tests/convergence/protocol.py --write-golden     writes golden.json again
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GOLDEN = HERE / "golden.json"
SEEDS = (1, 2, 3)
GOLDEN_STEPS = 5
TIMEOUT_S = 600  # a hung run must end the test; a busy machine must not


def text() -> str:
    """30 kB of sentences from a small grammar: the same text in every Python, and learnable."""
    choose = random.Random(0).choice
    subjects = ("the router", "an expert", "every rank", "a token", "the dispatcher")
    verbs = ("sends", "receives", "sorts", "weighs", "adds")
    objects = ("its rows", "the hidden states", "four copies", "a gradient", "nothing at all")
    places = ("in order", "at home", "over the link", "before the barrier", "twice")
    lines = [
        f"{choose(subjects)} {choose(verbs)} {choose(objects)} {choose(places)}."
        for _ in range(700)
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Curve:
    """What one training logged.

    Attributes:
        settings: the log's first line.
        losses, grad_norms: of each step.
        valid_loss: after the last step.
    """

    settings: dict[str, Any]
    losses: list[float]
    grad_norms: list[float]
    valid_loss: float


def train(seed: int, folder: Path) -> dict[str, Curve]:
    """Train the test (ncclep) and the control (alltoall) with one seed, on 2 ranks.

    Returns:
        dict: dispatcher -> curve.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text(), encoding="utf-8")
    command = [sys.executable, "-m", "megatron_ncclep", "train", "--ranks", "2", "--device", "cpu"]
    command += ["--model", str(HERE / "model.yaml"), "--text", str(folder / "text.txt")]
    command += ["--out", str(folder / "out"), "--seed", str(seed), "--compare", "alltoall"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return {"ncclep": read(folder / "out"), "alltoall": read(folder / "out" / "alltoall")}


def read(folder: Path) -> Curve:
    """Read the log of one training."""
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    steps = [entry for entry in entries if entry["type"] == "step"]
    return Curve(
        settings=entries[0],
        losses=[entry["loss"] for entry in steps],
        grad_norms=[entry["grad_norm"] for entry in steps],
        valid_loss=entries[-1]["valid_loss"],
    )


def write_golden() -> None:
    """Run the control and write its first losses under this platform's key."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.is_file() else {}
    losses = {}
    versions = {}
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            control = train(seed, Path(folder))["alltoall"]
        losses[str(seed)] = control.losses[:GOLDEN_STEPS]
        versions = control.settings["versions"]
    golden[platform.machine()] = {"written_with": versions, "losses": losses}
    GOLDEN.write_text(json.dumps(golden, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {GOLDEN}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-golden", action="store_true", required=True)
    parser.parse_args()
    write_golden()
