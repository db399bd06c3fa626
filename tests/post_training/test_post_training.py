"""Post-training frameworks train with `ncclep`, as docs/bridge.md says, where they are installed.

On a CPU (without_gpu.py), with the page's commands: verl's and ms-swift's own trainers, two ranks.
The environment that has run them is in benchmarks/results/2026-11-27-post-training.txt.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_model
from timeouts import patient

ROOT = Path(__file__).resolve().parents[2]
OURS, THEIRS = "NcclEpTokenDispatcher", "MoEAlltoAllTokenDispatcher"
NEEDED = ("transformers", "megatron.bridge")


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in (*NEEDED, *modules) if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


def words_of_page(program: str) -> list[str]:
    """What follows `...` in the page's one command of a program, with the reference engine."""
    page = (ROOT / "docs" / "bridge.md").read_text().replace("native", "reference")
    (found,) = re.findall(rf"^{program} (.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [word for word in shlex.split(found.replace("\\\n", " ")) if word != "..."]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model.make(folder)
    return folder


def run(script: str, model: Path, words: list[str], replaced: str = "") -> str:
    """The output of two ranks, whether or not they have succeeded."""
    here = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{here}", "NCCLEP_IN_PLACE_OF": replaced}
    done = subprocess.run(
        [*command, str(here / script), str(model), *words],
        cwd=model,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=patient(300),
    )
    return done.stdout


def assert_trains_alike(
    script: str, model: Path, asks: list[str], asks_not: list[str], loss: str
) -> list[str]:
    """As asked for, in place of `alltoall`, and with `alltoall`; returns the outputs."""
    cases = ((asks, "", OURS), (asks_not, "alltoall", OURS), (asks_not, "", THEIRS))
    outputs = [run(script, model, words, replaced) for words, replaced, _ in cases]
    losses = []
    for output, (_, replaced, dispatcher) in zip(outputs, cases, strict=True):
        built = re.findall(r"^dispatchers (.*)$", output, re.MULTILINE)
        assert built == [f"{dispatcher} {dispatcher}"] * 2, output[-3000:]
        assert output.count("NCCLEP_IN_PLACE_OF=alltoall: configs with") == bool(replaced)
        found = [float(n) for text in re.findall(loss, output) for n in text.split()]
        assert len(found) >= 4, output[-3000:]
        losses.append(sorted(found))
        print(f"{' '.join(asks)} {replaced}: {dispatcher}, losses {found}")
    for found in losses[:2]:
        assert found == pytest.approx(losses[2], rel=1e-2)  # bf16
    return outputs


@needs("verl", "hydra")
def test_verl(model: Path) -> None:
    words = words_of_page("python -m verl.trainer.main_ppo")
    first, *_ = assert_trains_alike("train_verl.py", model, words, words[:1], r"(?m)^losses (.*)$")
    assert (first.count("actor ncclep"), first.count("ref ncclep")) == (2, 2)


@needs("swift")
def test_swift(model: Path) -> None:
    words = words_of_page("megatron sft")
    assert_trains_alike("train_swift.py", model, words, [], r"'loss': ([0-9.]+)")


@needs("swift")
def test_what_swift_says_is_in_troubleshooting(model: Path) -> None:
    output = run("train_swift.py", model, ["--moe_token_dispatcher_type", "ncclep"])
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    (message,) = re.findall(r"^### `(argument --moe_token_dispatcher_type.*)`$", page, re.M)
    assert message in output
