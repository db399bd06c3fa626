"""The dispatcher trains as `alltoall` does; docs/convergence.md is the protocol and its reasons."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
from small_job import Trainer, entries, losses

HERE = Path(__file__).resolve().parent
SEEDS = (1, 2)
# fp32 losses near 5 are 4.8e-7 apart.  The first forward adds the same numbers in another order.
FIRST_STEP_NATS = 1e-6
# After 40 steps at most one spacing (4.8e-7) was seen for each seed; twenty of them are allowed.
WHOLE_RUN_NATS = 1e-5
# Two seeds must differ by so many times more than two orders of summation may.
SPREAD_RATIO = 100

pytestmark = pytest.mark.any_python(
    "it trains longer than tests/training and tests/integration do, which compare with alltoall too"
)


def sentences() -> str:
    """30 kB from a small grammar: the same text in every Python, and learnable."""
    choose = random.Random(0).choice
    subjects = ("the router", "an expert", "every rank", "a token", "the dispatcher")
    verbs = ("sends", "receives", "sorts", "weighs", "adds")
    objects = ("its rows", "the hidden states", "four copies", "a gradient", "nothing at all")
    places = ("in order", "at home", "over the link", "before the barrier", "twice")
    parts = (subjects, verbs, objects, places)
    return "".join(" ".join(choose(part) for part in parts) + ".\n" for _ in range(700))


@pytest.fixture(scope="module")
def folders(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Seed -> what `ncclep train --compare alltoall` wrote."""
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text(sentences(), encoding="utf-8")
    found = {seed: tmp_path_factory.mktemp(f"seed{seed}") / "out" for seed in SEEDS}
    for seed, out in found.items():
        arguments = ("--device", "cpu", "--seed", seed, "--compare", "alltoall", "--text", text)
        trainer.train(*arguments, "--model", HERE / "model.yaml", "--out", out)
    return found


@pytest.fixture(scope="module", params=SEEDS)
def pair(request: pytest.FixtureRequest, folders: dict[int, Path]) -> tuple[Path, Path]:
    """The logs of ncclep and of alltoall with one seed."""
    return folders[request.param], folders[request.param] / "alltoall"


def largest(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_the_two_sets_differ_by_their_dispatchers(pair: tuple[Path, Path]):
    test, control = (entries(folder, "settings")[0] for folder in pair)
    assert test["dispatcher_classes"] == ["NcclEpTokenDispatcher"]
    assert control["dispatcher_classes"] == ["MoEAlltoAllTokenDispatcher"]
    assert test["settings"] == control["settings"]
    assert test["settings"]["moe-router-topk"] > 2, "two assignments have one summation order only"


def test_curves_are_the_same(pair: tuple[Path, Path]):
    test, control = (entries(folder, "step") for folder in pair)
    assert abs(test[0]["loss"] - control[0]["loss"]) <= FIRST_STEP_NATS
    assert math.isclose(test[0]["grad_norm"], control[0]["grad_norm"], rel_tol=1e-6)
    assert largest(*map(losses, pair)) <= WHOLE_RUN_NATS
    ends = [entries(folder, "end")[0]["valid_loss"] for folder in pair]
    assert abs(ends[0] - ends[1]) <= WHOLE_RUN_NATS
    assert max(ends) < entries(pair[0], "settings")[0]["unigram_entropy"], "nothing was learnt"


def test_the_bound_is_far_below_the_spread_of_the_seeds(folders: dict[int, Path]):
    controls = [losses(folder / "alltoall") for folder in folders.values()]
    spread = min(largest(a, b) for a, b in itertools.combinations(controls, 2))
    assert spread > SPREAD_RATIO * WHOLE_RUN_NATS
