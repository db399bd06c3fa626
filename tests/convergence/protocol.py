"""The runs of the convergence protocol on the CPU; docs/convergence.md says what they are for.

python tests/convergence/protocol.py --write-golden     writes golden.json again
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import small_job

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden.json"
SEEDS = (1, 2)
GOLDEN_STEPS = 5


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


def train(seed: int, folder: Path, run: Callable[..., str] = small_job.train) -> dict[str, Curve]:
    """Train the test (ncclep) and the control (alltoall) with one seed, on 2 ranks.

    Args:
        seed: of weights and data order.
        folder: for text and results.
        run: runs `ncclep train` with the arguments that it gets.

    Returns:
        dict: dispatcher -> curve.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text(), encoding="utf-8")
    run(
        *("--ranks", 2, "--device", "cpu", "--seed", seed, "--compare", "alltoall"),
        *("--model", HERE / "model.yaml", "--text", folder / "text.txt", "--out", folder / "out"),
    )
    return {"ncclep": read(folder / "out"), "alltoall": read(folder / "out" / "alltoall")}


def read(folder: Path) -> Curve:
    """Read the log of one training."""
    (settings,), (end,) = (small_job.entries(folder, kind) for kind in ("settings", "end"))
    norms = [entry["grad_norm"] for entry in small_job.entries(folder, "step")]
    return Curve(settings, small_job.losses(folder), norms, end["valid_loss"])


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
