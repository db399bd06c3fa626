"""What kernels cost the SMs, on one GPU: time plan, dispatch and combine of virtual ranks.

python tests/virtual/timing.py [EXTENSION.so ...]      default: the package's own

For comparing builds with each other, turn by turn, with 4 and with 8 ranks.  What it shows: the
work of SMs on rows, routes and flags, when each rank has 128 / R of them.  What it cannot show: a
link.  All ranks' windows are in one GPU's memory, whose bandwidth and L2 they share, a peer is as
near as oneself, and no two SMs of different ranks compete for a port.  So a build that is faster
here does less work on the SMs, and need not be faster over NVLink.

Of each step, in microseconds: the median over iterations of the fastest rank (which waits for no
other one) and of the median rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import virtual_ranks
from mistakes import use_extension
from virtual_pool import compile_stand_in

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.ranks.pool import RankContext

RANKS = (4, 8)
TURNS, WARM_UP, ITERATIONS = 3, 5, 30
TOKENS, TOP_K, HIDDEN, EXPERTS_OF_A_RANK = 4096, 8, 4096, 8
STEPS = ("plan", "dispatch", "combine")
# About 5 ms, in which the hosts agree on and queue all that is timed.
HEAD_START_CYCLES = 10_000_000
PROCESS_S = 300.0


def steps_on_rank(ctx: RankContext) -> list[list[float]]:
    """Microseconds of each iteration's steps on this rank."""
    num_experts = EXPERTS_OF_A_RANK * ctx.num_ranks
    generator = torch.Generator(ctx.device).manual_seed(ctx.rank)
    score = torch.rand(TOKENS, num_experts, generator=generator, device=ctx.device)
    topk_idx = score.topk(TOP_K).indices
    limit = TOKENS * TOP_K * 5 // 4
    x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16, device=ctx.device)
    w = torch.ones(TOKENS, TOP_K, device=ctx.device)
    y = torch.ones(limit, HIDDEN, dtype=torch.bfloat16, device=ctx.device)
    engine = create_engine(
        ctx.group, num_experts, EpConfig(engine="native", max_recv_rows=limit, timeout_s=20)
    )
    times = []
    for _ in range(WARM_UP + ITERATIONS):
        torch.cuda.synchronize()
        dist.barrier(ctx.group)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(STEPS) + 1)]
        torch.cuda._sleep(HEAD_START_CYCLES)
        events[0].record()
        plan = engine.plan(topk_idx)
        events[1].record()
        engine.dispatch(plan, x, w)
        events[2].record()
        engine.combine(plan, y)
        events[3].record()
        torch.cuda.synchronize()
        times.append([1e3 * start.elapsed_time(end) for start, end in pairwise(events)])
    engine.close()
    return times[WARM_UP:]


def all_on_rank(ctx: RankContext) -> dict[int, list[list[float]]]:
    times = {}
    for num_ranks in RANKS:
        group = dist.new_group(list(range(num_ranks)))
        if ctx.rank < num_ranks:
            few = RankContext(ctx.rank, num_ranks, group, ctx.device)
            times[num_ranks] = virtual_ranks.on_rank(few, steps_on_rank)
        dist.barrier(ctx.group)
    return times


def one(extension: str) -> None:
    """The process of a turn; prints ranks -> step -> [fastest, median rank]."""
    if extension != "-":
        use_extension(Path(extension))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libvirtual_nccl.so"
        compile_stand_in(library)
        results = virtual_ranks.Host(max(RANKS), "cuda", library).run(all_on_rank)
    found: dict[int, dict[str, list[float]]] = {}
    for num_ranks in RANKS:
        of_ranks = [result[num_ranks] for result in results[:num_ranks]]
        found[num_ranks] = {
            step: [
                median(assignment(times[i][s] for times in of_ranks) for i in range(ITERATIONS))
                for assignment in (min, median)
            ]
            for s, step in enumerate(STEPS)
        }
    print(json.dumps(found), flush=True)
    os._exit(0)


def main(extensions: list[str]) -> None:
    turns: dict[str, list[dict]] = {extension: [] for extension in extensions}
    for _ in range(TURNS):
        for extension in extensions:
            done = subprocess.run(
                [sys.executable, __file__, "--one", extension],
                env={**os.environ, **virtual_ranks.ENVIRONMENT, "NCCLEP_LOG": "warning"},
                text=True,
                stdout=subprocess.PIPE,
                timeout=PROCESS_S,
                check=True,
            )
            turns[extension].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{TOKENS} tokens a rank, top-{TOP_K}, {HIDDEN} columns of bf16; fastest/median rank, us")
    for num_ranks in map(str, RANKS):
        for extension, found in turns.items():
            cells = [
                "/".join(f"{median(t[num_ranks][step][i] for t in found):.0f}" for i in (0, 1))
                for step in STEPS
            ]
            columns = "  ".join(f"{s} {c:>11}" for s, c in zip(STEPS, cells, strict=True))
            print(f"{num_ranks} ranks  {columns}  {extension}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2])
    else:
        main(sys.argv[1:] or ["-"])
