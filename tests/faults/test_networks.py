"""Two nodes: namespaces of this one with a network each, and a cable that can be slow or cut.

Nothing of the ranks is made up: they have host names, and find the nodes by themselves; those of
two nodes share no memory, and gloo goes over the cable.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from timeouts import patient

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine

PORT, NUM_RANKS = 29500, 4
# For starting, and for a call; what a link that is slow, or a busy machine, does not come near.
LONG_S, DEADLINE_S = patient(60.0), 6.0
# For all ranks to start on a busy machine, and far above the deadline: for them to end.
START_S, SOON_S = patient(180.0), 6 * DEADLINE_S


def be_a_rank() -> None:
    """Make step after step, until the network is cut."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    first, second = (
        create_engine(
            dist.group.WORLD, 2 * num_ranks, EpConfig(engine="hierarchical", timeout_s=timeout_s)
        )
        for timeout_s in (LONG_S, DEADLINE_S)
    )
    generator = torch.Generator().manual_seed(rank)
    topk_idx = torch.rand(50, 2 * num_ranks, generator=generator).topk(3, dim=1).indices
    x = torch.randn(50, 64, generator=generator)
    start, step = time.monotonic(), 0
    try:
        while True:
            engine = first if step == 0 else second
            if step == 1:  # everything is made
                # torch lets no process end before a collective that it has given up is over.
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=DEADLINE_S))
            plan = engine.plan(topk_idx)
            rows, _ = engine.dispatch(plan, x)
            scale = 1 + torch.arange(len(rows))[:, None] + 1000 * rank
            out, _ = engine.combine(plan, rows * scale)
            digest = hashlib.sha256(out.numpy().tobytes()).hexdigest()
            step, start = step + 1, time.monotonic()
            print(f"step {step}: {digest}", flush=True)
    finally:
        print(f"over after {time.monotonic() - start:.1f} s", flush=True)


def can_make_networks() -> bool:
    """Containers may keep even root from it."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        return False
    name = f"ncclep-{os.getpid()}"
    commands = (
        ["unshare", "--uts", "--net", "true"],
        ["ip", "netns", "add", name],
        ["ip", "netns", "delete", name],
    )
    done = (subprocess.run(each, capture_output=True, timeout=patient(60)) for each in commands)
    return all(each.returncode == 0 for each in done)


pytestmark = [
    pytest.mark.needs_ranks(4),
    pytest.mark.cpu_only,  # nothing of it depends on the device
    pytest.mark.skipif(
        "RANK" not in os.environ and not can_make_networks(),
        reason="network namespaces take root that may make them, iproute2 and util-linux",
    ),
]


def run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=patient(60))


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces, joined by a cable whose ends are called net0."""
    names = [f"ncclep-{os.getpid()}-{number}" for number in range(2)]
    made: list[str] = []
    try:
        for name in names:
            run("ip", "netns", "add", name)
            made.append(name)

        cable = ["netns", names[0], "type", "veth", "peer", "name", "net0", "netns", names[1]]
        run("ip", "link", "add", "net0", *cable)
        for number, name in enumerate(names):
            run("ip", "-n", name, "address", "add", f"10.0.0.{1 + number}/24", "dev", "net0")
            for device in ("lo", "net0"):
                run("ip", "-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in made:
            run("ip", "netns", "delete", name)


@pytest.fixture
def ranks(machines: list[str], tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Four ranks, two on each node; what rank R says is in tmp_path/R."""
    started = []
    with contextlib.ExitStack() as files:
        for rank in range(NUM_RANKS):
            machine = rank // 2
            program = f"{sys.executable} -c 'import test_networks; test_networks.be_a_rank()'"
            shell = ["sh", "-c", f"hostname machine-{machine} && exec {program}"]
            variables = {
                "RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "10.0.0.1",
                "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "net0", "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # this folder is in it
            }  # fmt: skip
            started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", machines[machine], "unshare", "--uts", *shell],
                    env={**os.environ, **variables},
                    stdout=files.enter_context((tmp_path / str(rank)).open("wb")),
                    stderr=subprocess.STDOUT,
                )
            )
        yield started
        for process in started:
            process.kill()
            process.wait()


def wait_for_steps(folder: Path, ranks: list[subprocess.Popen[bytes]], wanted: int) -> None:
    """Wait until every rank has made so many steps."""
    give_up = time.monotonic() + START_S
    while True:
        said = [(folder / str(rank)).read_text() for rank in range(len(ranks))]
        if all(f"step {wanted}:" in text for text in said):
            return
        ended = [rank for rank, process in enumerate(ranks) if process.poll() is not None]
        assert not ended, f"ranks {ended} have ended\n{story(said)}"
        assert time.monotonic() < give_up, story(said)
        time.sleep(0.1)


def story(said: list[str]) -> str:
    return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in enumerate(said))


def steps_of(text: str) -> list[str]:
    """What each step gave."""
    return re.findall(r"^step \d+: (\w+)$", text, re.MULTILINE)


def test_a_slow_cable_changes_no_bit_and_a_cut_one_ends_every_rank(
    machines: list[str], ranks: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    wait_for_steps(tmp_path, ranks, 3)
    slow = ["root", "tbf", "rate", "4mbit", "burst", "16kb", "latency", "1s"]
    run("ip", "netns", "exec", machines[0], "tc", "qdisc", "add", "dev", "net0", *slow)
    done = max(len(steps_of((tmp_path / str(rank)).read_text())) for rank in range(4))
    wait_for_steps(tmp_path, ranks, done + 5)

    run("ip", "-n", machines[0], "link", "set", "net0", "down")
    for process in ranks:
        process.wait(START_S)
    said = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert "hierarchical: 2 x 2 (nodes x ranks)" in said[0]
    for rank, text in enumerate(said):
        assert ranks[rank].returncode == 1, story(said)
        assert len(set(steps_of(text))) == 1, story(said)
        took = re.search(r"over after ([\d.]+) s", text)
        assert took, story(said)
        assert float(took[1]) < SOON_S, story(said)
        # A rank may be inside its node, where it waits for one that waits for the network.
        place = f"inside node {rank // 2}, whose ranks 0 to 1 are ranks .* of the group: "
        pattern = (
            rf"PeerError: (rank {rank} of 4|{place}rank {rank % 2} of 2): no answer .* "
            rf"\(deadline {DEADLINE_S:g} s\)"
        )
        assert re.search(pattern, text), story(said)
    assert any(re.search(r"PeerError: rank \d of 4", text) for text in said), story(said)
