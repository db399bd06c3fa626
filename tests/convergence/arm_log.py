"""What arms logged: read from the files of the lanes, and compared bit by bit."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Training:
    """What one arm logged with one seed, as far as it came.

    Attributes:
        arm, seed: which.
        settings: the log's first line.
        losses, grad_norms: of each step.
        seconds: (steps, seconds that they took), in order.
        validated: step -> validation loss.
        start: how it begins, against the control.
        end: the last line; None if it did not get there.
        failed: why not, if it said so.
    """

    arm: str
    seed: int
    settings: dict[str, Any]
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    seconds: list[tuple[int, float]] = field(default_factory=list)
    validated: dict[int, float] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    failed: str | None = None

    @property
    def learnt(self) -> float:
        """Mean validation loss of the second half, in nats a token: the statistic that decides."""
        return statistics.fmean(self.validated.values())

    @property
    def is_whole(self) -> bool:
        """Whether it went through all steps, and not only a part of them."""
        steps: int = self.settings["settings"]["train-iters"]
        return self.end is not None and len(self.losses) == steps

    @property
    def tokens_per_s(self) -> float:
        """Median over the lines of the log; the first has compiled and captured."""
        values = self.settings["settings"]
        tokens = values["global-batch-size"] * values["seq-length"]
        return statistics.median(
            tokens * steps / seconds for steps, seconds in self.seconds[1:] or self.seconds
        )

    def add(self, line: dict[str, Any]) -> None:
        """Take one line of the log in."""
        if line["type"] == "steps":
            self.losses += line["loss"]
            self.grad_norms += line["grad_norm"]
            self.seconds.append((len(line["loss"]), line["seconds"]))
        elif line["type"] == "valid":
            self.validated[line["step"]] = line["loss"]
        elif line["type"] == "start":
            self.start = line
        elif line["type"] == "end":
            self.end = line


def read(folder: Path) -> list[Training]:
    """The trainings in the logs of `folder`; of one that was begun twice, the last."""
    found: dict[tuple[str, int], Training] = {}
    for path in sorted(folder.glob("lane-*.jsonl")):
        for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not text.endswith("\n"):
                break  # the process was ended while it wrote
            line = json.loads(text)
            key = line["arm"], line["seed"]
            if line["type"] == "settings" or key not in found:
                found[key] = Training(*key, settings=line)
            if line["type"] == "failed":
                found[key].failed = line["reason"]
            found[key].add(line)
    return list(found.values())


def first_difference(mine: Training, theirs: Training) -> str | None:
    """Say where two trainings part, as far as both go; None if they have the same bits."""
    for what, a, b in (
        ("loss", mine.losses, theirs.losses),
        ("gradient norm", mine.grad_norms, theirs.grad_norms),
    ):
        for step, (x, y) in enumerate(zip(a, b, strict=False), start=1):
            if x != y:
                return f"step {step}: {what} {x!r}, and {y!r}"
    for step in sorted(mine.validated.keys() & theirs.validated.keys()):
        if mine.validated[step] != theirs.validated[step]:
            x, y = mine.validated[step], theirs.validated[step]
            return f"step {step}: validation loss {x!r}, and {y!r}"
    return None
