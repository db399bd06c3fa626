"""A signal to a rank under a launcher: the job ends, says why, and leaves nothing.

What `ncclep train` does with signals is in tests/training.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from timeouts import patient

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


def test_sigterm_to_a_rank_ends_the_job(tmp_path: Path) -> None:
    """torchrun's status says so, and the rank that is left names the one that died, in a line."""
    output, script = tmp_path / "output", tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    before = set(os.listdir("/dev/shm"))
    with output.open("wb") as file:
        job = psutil.Popen(
            [sys.executable, *torchrun, "-m", "megatron_ncclep", "run", str(script)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    processes: list[psutil.Process] = []
    try:
        give_up = time.monotonic() + LONG_S
        while b"step of rank 1" not in output.read_bytes():
            assert job.poll() is None, output.read_text()
            assert time.monotonic() < give_up, output.read_text()
            time.sleep(0.1)
        processes = job.children(recursive=True)
        ranks = {int(process.environ()["RANK"]): process for process in job.children()}
        ranks[0].terminate()
        assert job.wait(LONG_S) == 1, output.read_text()
        assert not psutil.wait_procs(processes, LONG_S)[1]
    finally:
        for process in (*processes, job):
            if process.is_running():
                process.kill()
    left = set(os.listdir("/dev/shm")) - before
    assert not [name for name in left if "ncclep" in name]
    text = output.read_text()
    assert f"exitcode  : -15 (pid: {ranks[0].pid})" in text
    errors = re.findall("^ncclep run: rank 1: error: .*", text, re.MULTILINE)
    assert all("rank 1 of 2: no answer from" in error for error in errors), text
    assert all(f"rank 0 (process {ranks[0].pid}) has died" in error for error in errors), text
    # torchrun ends it too, perhaps before it has found out.
    assert errors or f"exitcode  : -15 (pid: {ranks[1].pid})" in text, text
