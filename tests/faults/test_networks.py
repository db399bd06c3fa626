"""Two nodes: namespaces of this one with a network each, and a cable that can be slow or cut.

Nothing of the ranks is made up: they have host names, and find the nodes by themselves; those of
two nodes share no memory, and gloo goes over the cable.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fork_server import ForkServer
from processes import Ended
from timeouts import patient

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine

PORT, NUM_RANKS = 29500, 4
# For starting, and for a call; what a link that is slow, or a busy machine, does not come near.
LONG_S, DEADLINE_S = patient(60.0), 6.0
# For all ranks to start on a busy machine, and far above the deadline: for them to end.
START_S, SOON_S = patient(180.0), 6 * DEADLINE_S
# Of Linux: namespaces of the network and of a host's name.
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


def move_to(machine: str) -> None:
    """Have this process be on a node, `machine`, whose network is made already."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", machine).open() as network:
        if libc.setns(network.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"cannot move to {machine}")
    socket.sethostname(machine)


def be_a_rank(machines: list[str], folder: str) -> None:
    """Make step after step, until the network is cut; what rank R says is in `folder`/R."""
    with Path(folder, os.environ["RANK"]).open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    move_to(machines[int(os.environ["RANK"]) * len(machines) // NUM_RANKS])
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


pytestmark = [
    pytest.mark.needs_ranks(4),
    pytest.mark.cpu_only,  # nothing of it depends on the device
]


def run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=patient(60))


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces, joined by a cable whose ends are called net0."""
    first, second = names = [f"ncclep-{os.getpid()}-{number}" for number in range(2)]
    with ExitStack() as stack:
        for name in names:
            try:
                run("ip", "netns", "add", name)
            except (OSError, subprocess.CalledProcessError):  # containers may keep root from it
                pytest.skip("network namespaces take root that may make them, and iproute2")
            stack.callback(run, "ip", "netns", "delete", name)
        cable = ("type", "veth", "peer", "name", "net0", "netns", second)
        run("ip", "link", "add", "net0", "netns", first, *cable)
        for number, name in enumerate(names):
            run("ip", "-n", name, "address", "add", f"10.0.0.{1 + number}/24", "dev", "net0")
            for device in ("lo", "net0"):
                run("ip", "-n", name, "link", "set", device, "up")
        yield names


def texts_of(folder: Path) -> list[str]:
    """What each rank has said so far."""
    paths = [folder / str(rank) for rank in range(NUM_RANKS)]
    return [path.read_text() if path.exists() else "" for path in paths]


def steps_of(text: str) -> list[str]:
    """What each step gave."""
    return re.findall(r"^step \d+: (\w+)$", text, re.MULTILINE)


def wait_for_steps(folder: Path, ranks: Future[list[Ended]], wanted: int) -> None:
    """Wait until every rank has made so many steps."""
    give_up = time.monotonic() + START_S
    while not all(len(steps_of(text)) >= wanted for text in texts_of(folder)):
        assert not ranks.done(), texts_of(folder)
        assert time.monotonic() < give_up, texts_of(folder)
        time.sleep(0.1)


def test_a_slow_cable_changes_no_bit_and_a_cut_one_ends_every_rank(
    machines: list[str], server: ForkServer, tmp_path: Path
) -> None:
    """Two ranks are on each node; what rank R says is in tmp_path/R."""
    variables = {
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "net0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    job = ("test_networks:be_a_rank", [machines, str(tmp_path)], NUM_RANKS, 3 * START_S)
    with ThreadPoolExecutor() as thread:
        ranks = thread.submit(server.run, *job, **variables)
        try:
            wait_for_steps(tmp_path, ranks, 3)
            slow = ["root", "tbf", "rate", "4mbit", "burst", "16kb", "latency", "1s"]
            run("ip", "netns", "exec", machines[0], "tc", "qdisc", "add", "dev", "net0", *slow)
            done = max(len(steps_of(text)) for text in texts_of(tmp_path))
            wait_for_steps(tmp_path, ranks, done + 5)
        finally:  # whatever is left ends
            run("ip", "-n", machines[0], "link", "set", "net0", "down")
        ended = ranks.result(START_S)
    said = texts_of(tmp_path)
    assert "hierarchical: 2 x 2 (nodes x ranks)" in said[0]
    for rank, text in enumerate(said):
        assert ended[rank].exit_code == 1, said
        assert len(set(steps_of(text))) == 1, said
        took = re.search(r"over after ([\d.]+) s", text)
        assert took, said
        assert float(took[1]) < SOON_S, said
        # A rank may be inside its node, where it waits for one that waits for the network.
        place = f"inside node {rank // 2}, whose ranks 0 to 1 are ranks .* of the group: "
        pattern = (
            rf"PeerError: (rank {rank} of 4|{place}rank {rank % 2} of 2): no answer .* "
            rf"\(deadline {DEADLINE_S:g} s\)"
        )
        assert re.search(pattern, text), said
    assert any(re.search(r"PeerError: rank \d of 4", text) for text in said), said
