"""What a process holds, and rounds of random shapes after which it must hold no more."""

from __future__ import annotations

import ctypes
import gc
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from contract_cases import deadline_s

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine
from megatron_ncclep.ops.combine import combine
from megatron_ncclep.ops.dispatch import dispatch
from megatron_ncclep.ranks.pool import RankContext

MOST_TOKENS, MOST_HIDDEN, LOCAL_EXPERTS = 60, 64, 4
# Torch remembers the last 2000 collectives of a process, and a round has four or more.
FIRST_ROUNDS, FIRST_ENGINES = 500, 10
# The libraries that an engine compiles at run time know few shapes.
COMPILED_HIDDEN, COMPILED_TOP_K = 64, 2


class Heap(ctypes.Structure):
    """`struct mallinfo2` of glibc: ten counts of bytes or blocks."""

    _fields_ = [("counts", ctypes.c_size_t * 10)]
    MAPPED, ALLOCATED = 4, 7  # hblkhd and uordblks


@dataclass(frozen=True)
class Held:
    """What a process holds at one moment, after a garbage collection.

    Attributes:
        files: descriptors that are open, by kind.
        memories: nameless memory of the package's and files in /dev/shm that are mapped.
        threads: how many.
        objects: live ones of the package's classes, tensors and CUDA events, by class.
        heap: bytes that malloc has given out and not got back.
        resident: bytes of the process in memory.
        device: bytes of live tensors on the GPU; 0 on a CPU.
        device_used: bytes of the GPU in use, by anything.
    """

    files: Counter[str]
    memories: int
    threads: int
    objects: Counter[str]
    heap: int
    resident: int
    device: int
    device_used: int

    @classmethod
    def now(cls) -> Held:
        """Collect garbage, and look."""
        for _ in range(2):
            gc.collect()
        files: Counter[str] = Counter()
        for file in Path("/proc/self/fd").iterdir():
            if file.exists() or file.is_symlink():  # not the folder that is being read
                files[re.sub(r"\d+", "N", str(file.readlink()))] += 1
        libc, process = ctypes.CDLL(None), psutil.Process()
        libc.mallinfo2.restype = Heap
        heap = libc.mallinfo2().counts
        device = device_used = 0
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            device = torch.cuda.memory_allocated()
            free, total = torch.cuda.mem_get_info()
            device_used = total - free
        maps = Path("/proc/self/maps").read_text()
        return cls(
            files=files,
            memories=len(re.findall(r"/memfd:ncclep|/dev/shm/", maps)),
            threads=process.num_threads(),
            objects=live_objects(),
            heap=heap[Heap.ALLOCATED] + heap[Heap.MAPPED],
            resident=process.memory_info().rss,
            device=device,
            device_used=device_used,
        )


def live_objects() -> Counter[str]:
    """The objects of the package's classes, and what it makes of torch's, by class."""
    kinds = Counter(type(thing) for thing in gc.get_objects())
    return Counter({
        f"{kind.__module__}.{kind.__qualname__}": count
        for kind, count in kinds.items()
        if str(kind.__module__).startswith("megatron_ncclep.")
        or issubclass(kind, torch.Tensor | torch.cuda.Event | dist.ProcessGroup)
    })  # fmt: skip


def grow_on_rank(
    ctx: RankContext, engine_name: str, num_rounds: int, num_engines: int
) -> dict[str, tuple[Held, Held]]:
    """Many rounds with one engine, and many engines; return what was held before and after each.

    Before either, as much is done as fills what is kept on purpose.
    """
    config = EpConfig(engine=engine_name, timeout_s=deadline_s(engine_name, ctx.device))
    rng = random.Random(0)  # the same on every rank

    def new_engine() -> Engine:
        return create_engine(ctx.group, LOCAL_EXPERTS * ctx.num_ranks, config)

    rounds = Rounds(ctx, rng, new_engine())
    rounds.largest()

    def engine() -> None:
        another = Rounds(ctx, rng, new_engine())
        another.round()
        another.engine.close()

    held = {}
    for name, step, first, number in (
        ("rounds", rounds.round, FIRST_ROUNDS, num_rounds),
        ("engines", engine, FIRST_ENGINES, num_engines),
    ):
        moments = []
        for count in (first, number):
            for _ in range(count):
                step()
            rounds.kept.clear()
            moments.append(Held.now())
        held[name] = (moments[0], moments[1])
    rounds.engine.close()
    return held


class Rounds:
    """Rounds of random shapes, with plans that stay alive for a while.

    Attributes:
        kept: graphs whose backward pass is still to come.
    """

    def __init__(self, ctx: RankContext, rng: random.Random, engine: Engine) -> None:
        self.ctx, self.rng, self.engine = ctx, rng, engine
        self.kept: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def largest(self) -> None:
        """Let everything have the size that it can get."""
        tokens = [MOST_TOKENS] * self.ctx.num_ranks
        top_k = COMPILED_TOP_K if self.compiles else LOCAL_EXPERTS
        for _ in range(3):
            self._forward(tokens, MOST_HIDDEN, top_k)
        self._backward()

    def round(self) -> None:
        """Forward, and backward for some of what is kept; the order of both is random."""
        tokens = [self.rng.randint(0, MOST_TOKENS) for _ in range(self.ctx.num_ranks)]
        hidden, top_k = 8 * self.rng.randint(1, MOST_HIDDEN // 8), self.rng.randint(1, 4)
        if self.compiles:
            hidden, top_k = COMPILED_HIDDEN, COMPILED_TOP_K
        self._forward(tokens, hidden, top_k)
        if len(self.kept) > 3:
            self.rng.shuffle(self.kept)
            self._backward()

    @property
    def compiles(self) -> bool:
        return self.engine.caps.compiles_at_run_time

    def _forward(self, tokens: list[int], hidden: int, top_k: int) -> None:
        """Every token's row comes back once for each of its experts, exactly."""
        num_tokens, num_experts = tokens[self.ctx.rank], LOCAL_EXPERTS * self.ctx.num_ranks
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31) + self.ctx.rank)
        scores = torch.rand(num_tokens, num_experts, generator=generator)
        plan = self.engine.plan(scores.topk(top_k, dim=1).indices.to(self.ctx.device))
        x = torch.arange(float(num_tokens * hidden), device=self.ctx.device).view(-1, hidden)
        x.requires_grad_()
        w = torch.ones(num_tokens, top_k, device=self.ctx.device)
        rows, _ = dispatch(self.engine, plan, x, w)
        out = combine(self.engine, plan, rows)
        assert torch.equal(out, top_k * x)
        self.kept.append((out, x, top_k))

    def _backward(self) -> None:
        out, x, top_k = self.kept.pop()
        out.sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, top_k))
