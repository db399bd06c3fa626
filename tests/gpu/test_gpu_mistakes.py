"""Kernels and host code broken on purpose, between real ranks: other tests must notice.

Each mistake is made in a copy of the tree, which is built, and whose tests then run.  A GPU
forgives most races: the emulator notices more of them (tests/native/test_emulation.py, whose
mistakes some of these are).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from emulation.translate import Change
from patience import patient
from test_emulation import MISTAKES

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("csrc", "configs", "megatron_ncclep", "tests", "setup.py", "pyproject.toml", "README.md")
BUILD_S, TESTS_S = patient(200.0), patient(200.0)

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc builds the mistakes")


@dataclass(frozen=True)
class Planted:
    """A mistake, and the tests that fail with it.

    Attributes:
        tests: what is run: paths, and more arguments of pytest.
        fails: the test that fails first, a regular expression.
        change: the mistake; None: the one of this name in MISTAKES.
    """

    tests: str
    fails: str
    engine: str = "native"
    ranks: int = 2
    hosts: int = 1
    change: Change | None = None


CONTRACT, LOW_LATENCY = "tests/contract", "tests/contract/test_low_latency.py"
FAILURES, NODES = "tests/gpu/test_failures.py", "tests/contract/test_nodes.py"
PLANTED = {
    # Epochs: what an earlier operation left is taken for this one's.
    "LL: the word of the operation before is taken": Planted(LOW_LATENCY, "test_low_latency"),
    # Waits and fences.
    "LL: a dispatch does not wait for one of the ranks": Planted(LOW_LATENCY, "test_low_latency"),
    "a call does not wait for the last one on another stream": Planted(
        "tests/gpu/test_gpu_stream_order.py tests/gpu/test_gpu_streams.py",
        "test_gpu_stream",
        change=Change("csrc/common/stream_order.cpp", "last.done.hold_back(stream);", ";"),
    ),
    # Slots and places.
    "an assignment that just fits is dropped": Planted(CONTRACT, "."),
    "padding is not zero": Planted(CONTRACT, "."),
    "rows after the last block are not zero": Planted(CONTRACT, "."),
    "own rows come before two parts": Planted(CONTRACT, ".", ranks=4),
    "a bad index is taken for not routed": Planted("tests/contract/test_errors.py", "test_errors"),
    "LL: scales stay where they are": Planted(LOW_LATENCY, "test_low_latency"),
    # Ranks that do not come, and ranks that make different calls.
    "rows that did not come are left as they are": Planted(FAILURES, "late|hosts_that_part"),
    "the phase is not in a call": Planted(
        f"{FAILURES} -k hosts_that_part", "hosts_that_part_spoil_nothing.*dispatches"
    ),
    # Hosts mixed up.
    "network: nodes are added downwards": Planted(
        f"{NODES} tests/contract/test_combine.py", "test_nodes|test_combine", "hierarchical", 4, 4
    ),
    "a token's assignments go to the wrong host": Planted(
        f"{NODES} tests/contract/test_dispatch.py",
        ".",
        "hierarchical",
        2,
        2,
        Change(
            "megatron_ncclep/engines/hierarchical/internode_routes.py",
            "return assignments[self.place >= 0]",
            "return assignments.flip(0)[self.place >= 0]",
        ),
    ),
    # A graph.
    "one rank replays a graph twice": Planted(
        "tests/gpu/test_graphs.py",
        "test_graphs_replayed",
        change=Change(
            "tests/gpu/test_graphs.py",
            "            replay()\n«            if eager_between:»",
            "            if ctx.rank == 0 and number == 3:\n"
            "                replay()\n"
            "            if eager_between:",
        ),
    ),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_mistake_is_noticed(tmp_path: Path, mistake: str) -> None:
    planted = PLANTED[mistake]
    for name in COPIED:
        source, target = ROOT / name, tmp_path / name
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        if source.is_dir():
            shutil.copytree(source, target, ignore=ignore)
        else:
            shutil.copy(source, target)
    change = planted.change
    if change is None:
        found = MISTAKES[mistake]
        change = Change(f"csrc/{found.file}", found.where, found.instead)
    path = tmp_path / change.file
    text = path.read_text()
    first, end = change.position(text)
    path.write_text(text[:first] + change.instead + text[end:])

    def run(*command: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )

    # Of this GPU only, which takes a third of the time.
    major, minor = torch.cuda.get_device_capability()
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "NCCLEP_CUDA_ARCHITECTURES": f"{major}{minor}",
        "NCCLEP_BUILD_EXTENSION": "1",
    }
    built = run("setup.py", "build_ext", "--inplace", limit_s=BUILD_S)
    assert built.returncode == 0, built.stdout
    options = ["--engine", planted.engine, "--ranks", str(planted.ranks)]
    options += ["--hosts", str(planted.hosts), "--backend", "nccl"]
    pytest_ = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *planted.tests.split()]
    ended = run(*pytest_, *options, limit_s=TESTS_S)
    story = f"exit status {ended.returncode}\n{ended.stdout}"
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, story
    assert re.search(rf"^FAILED .*({planted.fails})", ended.stdout, re.MULTILINE), story
    assert "EngineUnavailableError" not in ended.stdout, story
