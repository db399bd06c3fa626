"""A training of days: what a process holds does not depend on how many rounds or engines it had.

`--iterations N` makes it N rounds and a tenth as many engines, if that is more than the default.
On 2026-11-22, 10,000 rounds of two ranks over gloo took 101 s and left a process 0.4 MB of heap and
2 MB of resident memory more than after 500; 1,000 engines took 16 s.
"""

from __future__ import annotations

import ctypes
import gc
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from contract_cases import COMPILING, deadline_s
from rank_pool import RankContext, RankPool

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.ops.combine import combine
from megatron_ncclep.ops.dispatch import dispatch

pytestmark = pytest.mark.needs_ranks(2)

NUM_ROUNDS, NUM_ENGINES = 300, 50
# What is kept on purpose is full after so many: torch remembers the last 2000 collectives of a
# process, and a round has four or more.
FIRST_ROUNDS, FIRST_ENGINES = 500, 10
MOST_TOKENS, MOST_HIDDEN, LOCAL_EXPERTS = 60, 64, 4
# A round has six calls at least, each with a message of 96 bytes from either rank: to keep what one
# of them took would be more than that, and without a leak it is 10 to 70 bytes.
HEAP_BYTES_PER_STEP = 512
# Bytes that may be more: pages that malloc has touched, wherever its free blocks lie, and code that
# was first needed; what the driver keeps of kernels, while windows of one engine are as large.
SLACK = {"resident": 2**24, "device_used": 2**25}


def test_nothing_grows(pool: RankPool, engine_name: str, iterations: int) -> None:
    num_rounds, num_engines = max(NUM_ROUNDS, iterations), max(NUM_ENGINES, iterations // 10)
    timeout = 300 + num_rounds
    pool.run(grow_on_rank, engine_name, num_rounds, num_engines, ranks=2, timeout=timeout)


def grow_on_rank(ctx: RankContext, engine_name: str, num_rounds: int, num_engines: int) -> None:
    """Make rounds with one engine, and engines; require that they leave nothing behind."""
    rng = random.Random(0)  # the same on every rank
    rounds = Rounds(ctx, rng, engine_name)
    for _ in range(3):  # everything gets the size that it can get
        rounds.forward([MOST_TOKENS] * ctx.num_ranks, MOST_HIDDEN, LOCAL_EXPERTS)

    def engine() -> None:
        another = Rounds(ctx, rng, engine_name)
        another.round()
        another.engine.close()

    for what, step, first, count in (
        ("rounds", rounds.round, FIRST_ROUNDS, num_rounds),
        ("engines", engine, FIRST_ENGINES, num_engines),
    ):
        for _ in range(first):
            step()
        rounds.graphs.clear()
        before = held()
        for _ in range(count):
            step()
        rounds.graphs.clear()
        slack = {**SLACK, "heap": count * HEAP_BYTES_PER_STEP}
        for name, value in held().items():
            where = f"rank {ctx.rank}, {count} {what}: {name} was {before[name]}"
            if name in slack:
                assert value <= before[name] + slack[name], where
            else:
                assert value == before[name], where
    rounds.engine.close()


class Rounds:
    """Rounds of random shapes, with plans that stay alive for a while.

    Attributes:
        graphs: those whose backward pass is still to come.
    """

    def __init__(self, ctx: RankContext, rng: random.Random, engine_name: str) -> None:
        config = EpConfig(engine=engine_name, timeout_s=deadline_s(engine_name, ctx.device))
        self.ctx, self.rng = ctx, rng
        self.engine = create_engine(ctx.group, LOCAL_EXPERTS * ctx.num_ranks, config)
        self.graphs: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def round(self) -> None:
        """Forward, and backward for one of those that are waiting; the order of both is random."""
        tokens = [self.rng.randint(0, MOST_TOKENS) for _ in range(self.ctx.num_ranks)]
        self.forward(tokens, 8 * self.rng.randint(1, MOST_HIDDEN // 8), self.rng.randint(1, 4))
        if len(self.graphs) > 3:
            out, x, top_k = self.graphs.pop(self.rng.randrange(len(self.graphs)))
            out.sum().backward()
            assert torch.equal(x.grad, torch.full_like(x, top_k))

    def forward(self, tokens: list[int], hidden: int, top_k: int) -> None:
        """Every token's row comes back once for each of its experts, exactly."""
        if self.engine.caps.name in COMPILING:  # libraries that know few shapes
            hidden, top_k = MOST_HIDDEN, 2
        num_tokens, device = tokens[self.ctx.rank], self.ctx.device
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31) + self.ctx.rank)
        scores = torch.rand(num_tokens, LOCAL_EXPERTS * self.ctx.num_ranks, generator=generator)
        plan = self.engine.plan(scores.topk(top_k, dim=1).indices.to(device))
        x = torch.arange(float(num_tokens * hidden), device=device).view(-1, hidden)
        x.requires_grad_()
        rows, _ = dispatch(self.engine, plan, x, torch.ones(num_tokens, top_k, device=device))
        out = combine(self.engine, plan, rows)
        assert torch.equal(out, top_k * x)
        self.graphs.append((out, x, top_k))


class Heap(ctypes.Structure):
    """`struct mallinfo2` of glibc: ten counts of bytes or blocks."""

    _fields_ = [("counts", ctypes.c_size_t * 10)]
    MAPPED, ALLOCATED = 4, 7  # hblkhd and uordblks


def held() -> dict[str, Any]:
    """What this process holds after a garbage collection."""
    for _ in range(2):
        gc.collect()
    # Without the descriptor of the folder that is being read.
    links = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    files = [re.sub(r"\d+", "N", str(link.readlink())) for link in links]
    kinds = Counter(type(thing) for thing in gc.get_objects())
    libc, process = ctypes.CDLL(None), psutil.Process()
    libc.mallinfo2.restype = Heap
    heap = libc.mallinfo2().counts
    resident = process.memory_info()
    memory = len(re.findall(r"/memfd:ncclep|/dev/shm/", Path("/proc/self/maps").read_text()))
    found = {
        "files": Counter(files),
        "shared memory": memory,
        "threads": process.num_threads(),
        # Of the package's classes, and what it makes of torch's.
        "objects": {
            kind: count
            for kind, count in kinds.items()
            if str(kind.__module__).startswith("megatron_ncclep.")
            or issubclass(kind, torch.Tensor | torch.cuda.Event | dist.ProcessGroup)
        },
        "heap": heap[Heap.ALLOCATED] + heap[Heap.MAPPED],
        # Without pages of files, which come and go on a machine that is short of memory.
        "resident": resident.rss - resident.shared,
    }
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        found |= {"device": torch.cuda.memory_allocated(), "device_used": total - free}
    return found
