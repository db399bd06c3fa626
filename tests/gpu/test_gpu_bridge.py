"""Recipes of Megatron-Bridge on one GPU: 20 steps with our dispatcher, by one override."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from bridge_recipe import RECIPES
from small_job import environment

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None
        or importlib.util.find_spec("megatron.bridge") is None,
        reason="Megatron-Bridge, which needs TransformerEngine, is not installed",
    ),
]

PROGRAM = Path(__file__).with_name("bridge_recipe.py")
TIMEOUT_S = 240
# In bf16, with up to eight assignments a token: sums of their rows round in two orders.
TOLERANCE = 2e-2


def train(folder: Path, recipe: str, *overrides: str) -> tuple[str, list[float]]:
    """The log of 20 steps, and their losses."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*launch, str(PROGRAM), recipe, *overrides],
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
    )
    (folder / "log.txt").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout, [float(loss) for loss in re.findall(r"lm loss: ([-+.\dE]+)", done.stdout)]


@pytest.mark.limit_s(2 * TIMEOUT_S)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains(tmp_path: Path, engine_name: str, recipe: str) -> None:
    """Also where it names HybridEP; and `native` reaches the layer by an override of its own."""
    kind = "model.moe_token_dispatcher_type"
    log, ours = train(tmp_path, recipe, f"{kind}=ncclep", f"model.ncclep.engine={engine_name}")
    assert f"engine {engine_name!r} for 1 ranks" in log
    _, theirs = train(tmp_path, recipe, f"{kind}=alltoall")
    assert len(ours) == len(theirs) == 20
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert ours[-1] < ours[0]
