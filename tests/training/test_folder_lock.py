"""One run at a time writes to a folder of results.

Two `ncclep train` with one --out wrote one log and deleted each other's unfinished checkpoints, and
of two `ncclep bench` the later replaced what the earlier had measured, without a word.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from errno import ENOLCK
from pathlib import Path

import pytest
from small_job import TIMEOUT_S, Trainer, environment

from megatron_ncclep import cli
from megatron_ncclep.cli import folder_lock
from megatron_ncclep.errors import InputError

HOLD = """
import pathlib, subprocess, sys
from megatron_ncclep.cli import folder_lock
with folder_lock.held(pathlib.Path(sys.argv[1])) as lock:
    child = subprocess.Popen(["sleep", "1000"], pass_fds=[lock], stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    child.wait()
"""


@pytest.fixture
def holders(tmp_path: Path) -> Iterator[list[int]]:
    """A process that holds `tmp_path`, and its child that does, too."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], env=environment(), text=True,
        stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        child = int(process.stdout.readline())
        yield [process.pid, child]
        for number in (process.pid, child):
            end(number)


def end(process: int) -> None:
    """Kill a process that may be gone, and wait until its files are closed."""
    try:
        watched = os.pidfd_open(process)
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return
    with open(watched, "rb", buffering=0):
        assert select.select([watched], [], [], TIMEOUT_S)[0]


def test_a_lock_lives_as_long_as_what_was_started(holders: list[int], tmp_path: Path):
    """A killed run leaves no lock, and ranks that outlive their command keep it."""
    for process in holders:
        busy = f"--out {tmp_path}: process {holders[0]} on .* or one that it started"
        with pytest.raises(InputError, match=busy), folder_lock.held(tmp_path):
            pass
        end(process)
    with folder_lock.held(tmp_path):
        assert f"process {os.getpid()} on " in (tmp_path / folder_lock.NAME).read_text()


def test_the_commands_and_ranks_of_torchrun_hold_it(
    holders: list[int], arguments: tuple[str, ...], trainer: Trainer, tmp_path: Path, capsys,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    out, busy = ("--out", str(tmp_path)), f"error: --out {tmp_path}: process {holders[0]} on "
    for command in (["train"], ["bench", "--smoke", "--ranks", "1"]):
        assert cli.main([*command, *out, "--overwrite"]) == 2
        assert busy in capsys.readouterr().err
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    assert cli.main([*command, *out]) == 2
    said = trainer.train(*arguments, *out, "--expert-parallel", 1, ranks=1, status=2)
    for text in (said, capsys.readouterr().err):
        assert f"rank 0: {busy}" in text


def test_a_folder_that_cannot_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    """File systems of clusters may be mounted without locks."""

    def flock(file: int, operation: int) -> None:
        raise OSError(ENOLCK, os.strerror(ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with folder_lock.held(tmp_path):
        assert f"--out {tmp_path} cannot be locked (No locks available)" in caplog.text
    text = "Not a directory: .* another folder that can be written"
    with pytest.raises(InputError, match=text), folder_lock.held(Path(os.devnull, "out")):
        pass
