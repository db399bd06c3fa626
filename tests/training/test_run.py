"""A whole run: it learns, and its log, plot, summary and comparison say what happened."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from small_job import MODEL, TIMEOUT_S, Finished, Trainer, command, entries, environment, losses
from timeouts import patient

from megatron_ncclep.cli import folder_lock
from megatron_ncclep.errors import InputError
from megatron_ncclep.libraries import extension
from megatron_ncclep.version import __version__

STEPS, EVERY = MODEL["train-iters"], MODEL["eval-interval"]


def test_log_and_output(finished: Finished):
    (settings,) = entries(finished.out, "settings")
    assert settings["dispatcher"] == "ncclep"
    assert settings["dispatcher_classes"] == ["NcclEpTokenDispatcher"]
    assert settings["options"]["alignment"] is None, "nothing was asked for"
    assert settings["settings"]["moe-router-topk"] == MODEL["moe-router-topk"]
    assert settings["settings"]["seed"] == 1234, "defaults are effective settings too"
    assert set(settings["versions"]) == {"megatron_ncclep", "megatron_core", "torch", "python"}
    assert (settings["ranks"], settings["expert_parallel"]) == (2, 2)
    assert [len(e["metrics"]) for e in entries(finished.out, "step")] == [0, 1] * (STEPS // 2)
    for name, folder in (("ncclep", finished.out), ("alltoall", finished.out / "alltoall")):
        steps = entries(folder, "step")
        assert [entry["step"] for entry in steps] == list(range(1, STEPS + 1))
        for entry in steps:
            numbers = [entry[key] for key in ("loss", "grad_norm", "lr", "tokens_per_s")]
            assert all(map(math.isfinite, numbers))
            assert f"{name}: step {entry['step']}/{STEPS}  loss " in finished.output
        (end,) = entries(folder, "end")
        at = {entry["step"]: entry["valid_loss"] for entry in entries(folder, "validation")}
        assert list(at) == list(range(EVERY, STEPS, EVERY))  # and not twice after the last one
        assert end["valid_loss"] < at[2 * EVERY] < at[EVERY] < math.log(257)
    for row in ("validation loss", "unigram entropy", "tokens/s", "largest difference"):
        assert row in finished.output
    assert "engine reference: the readable engine for CPUs" in finished.output
    assert f"{losses(finished.out)[-1]:.4f}" in finished.output
    assert (finished.out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_metrics_are_logged(finished: Finished):
    known = [each for entry in entries(finished.out, "step") for each in entry["metrics"]]
    tokens = MODEL["global-batch-size"] * MODEL["seq-length"]
    for number, interval in enumerate(known):
        assert interval["steps"] == 2
        # Validation after step 3 and 6 counts in the interval that it falls into.
        passes = 2 * (2 + MODEL["eval-iters"] * (number % 2))
        # Both layers, over both steps; with 4 of 8 experts on each of 2 ranks.
        assert sum(interval["assignments"]) == passes * tokens * MODEL["moe-router-topk"]
        rows = [*interval["rows"][0], *interval["rows"][1]]
        assert all(0 < number <= passes * tokens // 2 for number in rows)
        assert sum(rows) >= passes * tokens, "each token goes somewhere"
        assert interval["dropped"] == 0


@pytest.mark.each_release
def test_each_release_trains(
    trainer: Trainer, arguments: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
):
    """That losses are alltoall's is shown by integration/models/test_gpt_model.py.

    One run in a hundred with torch 2.6 hung when all was done: a thread of gloo, late on a busy
    machine, freed the last barrier while the rank destroyed the group.
    """
    output = trainer.train(
        *(*arguments, "--out", tmp_path / "out"), entry="be_rank_that_holds_its_last_barrier"
    )
    assert output.count("the last barrier is held") == 2
    release = request.config.getoption("--megatron")
    (settings,) = entries(tmp_path / "out", "settings")
    # In a git checkout newer ones add "+" and the checkout's commit.
    assert settings["versions"]["megatron_core"].partition("+")[0] == release
    assert settings["dispatcher_classes"] == ["NcclEpTokenDispatcher"]
    values = losses(tmp_path / "out")
    assert values[-1] < values[0] - 0.5


def test_the_share_that_was_dropped_is_told(
    arguments: tuple[str, ...], trainer: Trainer, tmp_path: Path
):
    """There is room for half of a balanced load; a warning alone does not say how much is lost.

    What evaluations dropped was counted as the training's: one that evaluated often told of more
    than was there.
    """
    shares = []
    for name, more in (("rarely", ()), ("often", ("--set", "eval-interval=1"))):
        out = tmp_path / name
        output = trainer.train(
            *(*arguments, "--out", out, "--steps", 2, "--ncclep-max-recv-rows", 128, *more)
        )
        assert "assignments dropped" in output
        shares.append(entries(out, "end")[0]["dropped_share"])
    assert 0.4 < shares[0] < 0.7
    assert shares[0] == shares[1]


def test_indexed_prefix(arguments: tuple[str, ...], trainer: Trainer, tmp_path: Path):
    """A .bin/.idx pair with tokens above 256."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.int32)
    generator = np.random.default_rng(0)
    for _ in range(40):
        builder.add_item(torch.from_numpy(generator.integers(0, 500, 100)))
        builder.end_document()
    builder.finalize(str(tmp_path / "corpus.idx"))
    out = tmp_path / "out"
    trainer.train(
        *("--model", arguments[1], "--text", tmp_path / "corpus", "--out", out, "--steps", 2),
        *("--dispatcher", "allgather", "--set", "global-batch-size=4"),
    )
    (settings,) = entries(out, "settings")
    assert settings["ranks"] == 2
    assert settings["dispatcher_classes"] == ["MoEAllGatherTokenDispatcher"]
    assert settings["vocab_size"] == 501, "one more than occurs, for the end of a document"
    assert settings["num_train_tokens"] == 38 * 100
    assert settings["unigram_entropy"] == pytest.approx(math.log(500), abs=0.1)
    assert losses(out)[0] == pytest.approx(math.log(501), abs=0.1)


def test_the_last_line_says_what_a_killed_rank_did(arguments: tuple[str, ...], tmp_path: Path):
    """The survivor's line stood above 40 lines of torchrun, which did not know the reason."""
    with (tmp_path / "stderr").open("wb") as stderr:
        job = subprocess.Popen(
            command(*arguments, "--out", tmp_path / "out", "--steps", 100_000),
            env=environment(), stdout=subprocess.DEVNULL, stderr=stderr,
        )  # fmt: skip
    log = tmp_path / "out" / "log.jsonl"
    deadline = time.monotonic() + TIMEOUT_S
    while not (log.is_file() and entries(log.parent, "step")):
        assert job.poll() is None, "the job ended by itself"
        assert time.monotonic() < deadline, "the job does not start to train"
        time.sleep(0.2)
    with pytest.raises(InputError, match=f"process {job.pid} on "), folder_lock.held(log.parent):
        pass
    children = psutil.Process(job.pid).children(recursive=True)
    assert len(children) >= 3, "torchrun and two ranks"
    ranks = {child.environ().get("RANK"): child for child in children}
    survivor, killed = ranks["0"], ranks["1"]
    killed.kill()
    assert job.wait(timeout=TIMEOUT_S) != 0
    assert not psutil.wait_procs(children, timeout=TIMEOUT_S)[1]
    text = (tmp_path / "stderr").read_text()
    # torchrun ends it too, perhaps before it has found out.
    was_ended = f"exitcode  : -15 (pid: {survivor.pid})" in text
    lines = text.splitlines()
    assert was_ended or lines[-1].startswith("ncclep train: error: rank 0: "), lines[-3:]
    if not was_ended and extension.unavailable_reason() is None:
        assert f"rank 1 (process {killed.pid}) has died" in lines[-1]


NAMELESS = """
import socket
socket.getfqdn = lambda name="": "nothing-resolves-this.invalid"
"""


def test_ranks_start_where_the_name_of_the_host_is_unknown(tmp_path: Path):
    """In a container without its name in /etc/hosts, `ncclep train` only repeated a warning.

    torchrun looked for itself by that name, for five minutes and then again.
    """
    (tmp_path / "sitecustomize.py").write_text(NAMELESS)
    start = (
        "import types, pathlib; from megatron_ncclep.training.command import _start_ranks; "
        "job = types.SimpleNamespace(ranks=2, device='cpu'); "
        "_start_ranks(job, ['--version'], pathlib.Path(), 0)"
    )
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", start], env={**environment(), "PYTHONPATH": path}, cwd=tmp_path,
        capture_output=True, text=True, timeout=patient(60),
    )  # fmt: skip
    assert done.stdout.splitlines()[1:] == [__version__] * 2, done.stderr
