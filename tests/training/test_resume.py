"""A run that was stopped and resumed equals one that was not stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_job import MODEL, TIMEOUT_S, Finished, Trainer, entries, environment, losses

from megatron_ncclep import cli
from megatron_ncclep.training.log import read

STOP = 3
STEPS = MODEL["train-iters"]


@pytest.fixture(scope="session")
def stopped(
    arguments: tuple[str, ...], trainer: Trainer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of the small job that stopped after `STOP` steps; copy it before going on."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    trainer.train(*arguments, "--out", out, "--exit-at-step", STOP)
    assert len(losses(out)) == STOP
    assert not entries(out, "end")
    return out


def copy(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "out"))


def test_resumed_run_is_the_uninterrupted_one(
    finished: Finished, stopped: Path, trainer: Trainer, tmp_path: Path
):
    """Also if it had logged steps after the checkpoint, and died while it wrote another one."""
    out = copy(stopped, tmp_path)
    (out / "checkpoint" / "unfinished").mkdir()
    (out / "checkpoint" / "unfinished" / "old.distcp").touch()
    with (out / "log.jsonl").open("a", encoding="utf-8") as log:
        log.write('{"type": "step", "step": 4, "loss": -1.0}\n')
    trainer.train(*finished.arguments, "--out", out, "--resume")

    def curve(folder: Path) -> list[tuple[float, ...]]:
        names = ("step", "loss", "grad_norm", "lr")
        return [tuple(entry[name] for name in names) for entry in entries(folder, "step")]

    assert curve(out) == curve(finished.out)
    for kind in ("validation", "end"):
        assert entries(out, kind) == entries(finished.out, kind)
    assert [entry["resumed_from"] for entry in entries(out, "settings")] == [0, STOP]
    (kept,) = (out / "checkpoint").iterdir()
    assert kept.name == f"step-{STEPS:06d}"
    assert not (kept / "old.distcp").exists()


def test_resume_on_more_ranks_with_another_dispatcher(
    arguments: tuple[str, ...], finished: Finished, stopped: Path, trainer: Trainer, tmp_path: Path
):
    """Four ranks with two experts each resume from two ranks with four.

    Dropout and the auxiliary loss are others then: hence a wide bound, far below the 1.5 nats that
    lost weights would make.  test_checkpoints.py compares without these.
    """
    out = copy(stopped, tmp_path)
    other = ("--resume", "--dispatcher", "alltoall", "--steps", STOP + 1)
    trainer.train(*arguments, "--out", out, *other, ranks=4)
    assert len(losses(out)) == STOP + 1
    assert abs(losses(out)[STOP] - losses(finished.out)[STOP]) < 0.1
    first, last = entries(out, "settings")
    assert last["expert_parallel"] == 4
    assert first["dispatcher_classes"] == ["NcclEpTokenDispatcher"]
    assert last["dispatcher_classes"] == ["MoEAlltoAllTokenDispatcher"]


def test_another_job_is_refused(
    arguments: tuple[str, ...], stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Both messages about a folder without a checkpoint name --overwrite: they used to refer to
    each other.  A user's step-000003.bak was a ValueError: its end is no number.
    """
    out, empty = copy(stopped, tmp_path), tmp_path / "empty"
    (out / "checkpoint" / f"step-{STOP:06d}.bak").mkdir()
    empty.mkdir()
    (empty / "log.jsonl").touch()
    for folder, change, message in (
        (out, "--resume --set lr=0.001", "lr was 0.005"),
        (out, f"--resume --text {__file__}", "the text has changed since"),
        (out, "--resume --expert-parallel 1", "between one rank and several"),
        (out, "", "--resume"),  # a run is not replaced by accident
        (empty, "--resume", "no checkpoint"),
        (empty, "", "(log.jsonl): give --overwrite"),
    ):
        assert cli.main(["train", *arguments, "--out", str(folder), *change.split()]) == 2
        text = capsys.readouterr().err
        assert message in text
        assert folder == out or "--overwrite" in text
    assert len(losses(out)) == STOP, "the run there is left alone"


def test_a_damaged_checkpoint_is_named(
    arguments: tuple[str, ...], stopped: Path, trainer: Trainer, tmp_path: Path, capsys
):
    """One that was cut off was an EOFError of each rank: no file was named, and no way out."""
    out = copy(stopped, tmp_path)
    folder = out / "checkpoint" / f"step-{STOP:06d}"
    os.truncate(folder / "__0_0.distcp", 1000)
    output = trainer.train(*arguments, "--out", out, "--resume", status=2)
    for rank in range(2):
        assert f"rank {rank}: error: --resume: {folder} cannot be read, it is damaged" in output
    assert "put a copy of it back, or start again with --overwrite" in output
    os.truncate(folder / "settings.json", 10)
    assert cli.main(["train", *arguments, "--out", str(out), "--resume"]) == 2
    assert f"--resume: {folder / 'settings.json'} cannot be read" in capsys.readouterr().err


def test_a_full_disk_is_named(
    arguments: tuple[str, ...], stopped: Path, trainer: Trainer, tmp_path: Path, capsys
):
    """It was said to be stdout's where the log met it, and --text's before the ranks started."""
    out = copy(stopped, tmp_path)
    log = out / "log.jsonl"
    whole = log.read_text(encoding="utf-8")
    log.write_text(whole + '{"type": "st', encoding="utf-8")
    assert len(read(log, "step")) == STOP, "a line that was cut off does not count"
    log.unlink()
    log.symlink_to("/dev/full")
    output = trainer.train(*arguments, "--out", out, "--resume", status=2)
    assert f"rank 0: error: {log}: No space left on device: make room for it" in output
    full = tmp_path / "full"
    (full / "data").mkdir(parents=True)
    (full / "data" / "text.bin").symlink_to("/dev/full")
    assert cli.main(["train", *arguments, "--out", str(full)]) == 2
    text = capsys.readouterr().err
    assert f"error: {full}: No space left on device: make room for --out, or give another" in text


def test_ctrl_c_saves_a_checkpoint(arguments: tuple[str, ...], trainer: Trainer, tmp_path: Path):
    """It ended in tracebacks of all processes, and what was done since the last one was lost."""
    arguments = (*arguments, "--out", str(tmp_path))
    output = trainer.train(*arguments, "--compare", "alltoall", entry="be_rank_with_ctrl_c")
    assert "stopped and saved after step 1: --resume continues from there\n" in output
    assert not (tmp_path / "alltoall").exists()
    trainer.train(*arguments, "--resume", "--exit-at-step", 2)
    assert [entry["resumed_from"] for entry in entries(tmp_path, "settings")] == [0, 1]
    assert len(losses(tmp_path)) == 2


RANK = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
A_LAUNCHER = """#!{python}
import subprocess, sys
sys.exit(subprocess.call([{python!r}, "-c", {rank!r}]))
"""
START = """
import os, sys, types
from megatron_ncclep.training.command import _start_ranks
sys.executable = sys.argv[1]
lock = os.open(os.devnull, os.O_RDONLY)
sys.exit(_start_ranks(types.SimpleNamespace(ranks=2, device="cpu"), [], "/tmp", lock))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_for_the_ranks(tmp_path: Path, number: signal.Signals):
    """The command waits for its ranks at Ctrl-C; the second time it ends them.  torchrun gets a
    SIGTERM, with which it ends its ranks.
    """
    launcher = tmp_path / "python"
    text = A_LAUNCHER if number == signal.SIGINT else "#!{python}\n{rank}"
    launcher.write_text(text.format(python=sys.executable, rank=RANK))
    launcher.chmod(0o755)
    job = subprocess.Popen(
        [sys.executable, "-c", START, str(launcher)], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert job.stdout is not None
    assert job.stderr is not None
    assert [next(job.stdout) for _ in range(2)][-1] == "ready\n"
    if number == signal.SIGTERM:
        job.send_signal(number)
        assert job.wait(timeout=TIMEOUT_S) == 128 + number
        assert job.communicate(timeout=TIMEOUT_S)[1] == ""
        return
    job.send_signal(signal.SIGINT)
    assert next(job.stderr) == "stopping after this step; press Ctrl-C again to stop at once\n"
    job.send_signal(signal.SIGINT)
    assert job.communicate(timeout=TIMEOUT_S)[1] == ""
    assert job.returncode == 130
