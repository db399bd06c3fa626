"""Signals to what people start: `ncclep run` under torchrun, and `ncclep train`.

What `ncclep train` does with SIGTERM is in tests/training/test_run.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from outcome import shared_memory
from patience import patient

# On a machine where everything else runs too; nothing here takes longer than the start of torch.
LONG_S = patient(300.0)

# The launchers run on CPUs whatever the tests' backend is.
pytestmark = [pytest.mark.needs_ranks(2), pytest.mark.cpu_only]

SCRIPT = """
import time, torch, torch.distributed as dist
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
dist.init_process_group("gloo")
engine = create_engine(dist.group.WORLD, 4, EpConfig(engine="reference"))
while True:
    plan = engine.plan(torch.tensor([[0, 3], [1, 2]]))
    rows, _ = engine.dispatch(plan, torch.ones(2, 8))
    engine.combine(plan, rows)
    print(f"step of rank {dist.get_rank()}", flush=True)
    time.sleep(0.05)
"""


@contextmanager
def started(command: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command and whatever it starts; all of it has ended, and left nothing, in the end."""
    before = shared_memory()
    with output.open("wb") as file:
        job = subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
            start_new_session=True,
            # What a shell starts in the background ignores it, and so does all that that starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
    try:
        yield job
    finally:
        left = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
        for process in [*left, job]:
            process.kill()
        job.wait()
    assert not shared_memory() - before


def wait_until(holds: Callable[[], bool], job: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert job.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)


def status_of(job: subprocess.Popen[bytes], processes: list[psutil.Process]) -> int:
    """The exit status, once none of the processes is left."""
    status = job.wait(LONG_S)
    _, alive = psutil.wait_procs(processes, LONG_S)
    assert not alive
    return status


def test_sigterm_to_a_rank_ends_the_job(tmp_path: Path) -> None:
    """torchrun's status says so, and the rank that is left names the one that died, in a line."""
    output, script = tmp_path / "output", tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with started([*command, "-m", "megatron_ncclep", "run", str(script)], output) as job:
        wait_until(lambda: b"step of rank 1" in output.read_bytes(), job, output)
        ranks = {
            int(process.environ()["RANK"]): process
            for process in psutil.Process(job.pid).children()
        }
        ranks[0].send_signal(signal.SIGTERM)
        assert status_of(job, list(ranks.values())) == 1, output.read_text()
    text = output.read_text()
    assert f"exitcode  : -15 (pid: {ranks[0].pid})" in text
    errors = re.findall("^ncclep run: rank 1: error: .*", text, re.MULTILINE)
    assert all("rank 1 of 2: no answer from" in error for error in errors), text
    assert all(f"rank 0 (process {ranks[0].pid}) has died" in error for error in errors), text
    # torchrun ends it too, perhaps before it has found out.
    assert errors or f"exitcode  : -15 (pid: {ranks[1].pid})" in text, text


def test_ctrl_c_ends_a_training(tmp_path: Path) -> None:
    """Its ranks used to print 150 lines of tracebacks, and one that waited took 20 seconds.

    It comes while the ranks import: nothing is different later, and a user can be as impatient.
    """
    output, text = tmp_path / "output", tmp_path / "text.txt"
    text.write_text("expert token router rank slot plan dispatch combine gate " * 400)
    command = ["megatron_ncclep", "train", "--device", "cpu", "--ranks", "2", "--text", str(text)]
    with started([*command, "--out", str(tmp_path / "out")], output) as job:
        wait_until(lambda: len(ranks_of(job)) == 2, job, output)
        processes = psutil.Process(job.pid).children(recursive=True)
        os.killpg(job.pid, signal.SIGINT)
        assert status_of(job, processes) == 128 + signal.SIGINT, output.read_text()
    assert "KeyboardInterrupt" not in output.read_text()


def ranks_of(job: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The ranks of `ncclep train` that have begun to import torch."""
    found = []
    for process in psutil.Process(job.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            is_rank = "train" in process.cmdline()
            if is_rank and "RANK" in process.environ() and imports_torch(process.pid):
                found.append(process)
    return found


def imports_torch(process: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return "libtorch" in Path(f"/proc/{process}/maps").read_text()
    return False
