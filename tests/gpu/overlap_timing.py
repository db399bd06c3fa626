"""Time GEMMs beside dispatch and combine, on two streams, by what could help them to run at once.

    python tests/gpu/overlap_timing.py [RANKS]        default: 1

GEMMs run on one stream and the native engine's kernels on another, as in Megatron's schedule that
overlaps two micro-batches.  A line for each kind of GEMM, number of SMs that GEMMs leave free,
priority of the stream that communicates, and stream that is queued first:

    alone      microseconds of the GEMMs, and of dispatch + combine, each by itself
    together   of both
    hidden     how much of the shorter of the two no longer shows

Nothing here is checked: what is faster is for people to read.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.ranks.pool import RankContext, RankPool

TOKENS, HIDDEN, FFN, TOP_K, EXPERTS_PER_RANK = 8192, 4096, 8192, 8, 8
# In one pass; about as long as two dispatches and combines, and six times as long.
GEMMS, ROUNDS = (2, 12), 2
MARGINS = (0, 32)
REPETITIONS = 7
# About 5 ms: the host has queued everything when the device begins.
SLOW_CYCLES = 10_000_000

Run = Callable[[], Any]


def gemms(kind: str) -> Run:
    """One GEMM of half a teraflop of the given kind; of "grouped", eight with an eighth each."""
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    if kind == "te":
        import transformer_engine.pytorch as te

        linear = te.Linear(HIDDEN, FFN, bias=False, params_dtype=torch.bfloat16, device="cuda")
        return lambda: linear(x)
    if kind == "grouped":
        weights = torch.randn(8, HIDDEN, FFN, device="cuda", dtype=torch.bfloat16)
        ends = torch.arange(1, 9, device="cuda", dtype=torch.int32) * (TOKENS // 8)
        return lambda: torch._grouped_mm(x, weights, offs=ends)
    weight = torch.randn(FFN, HIDDEN, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.mm(x, weight.t())


def leave_free(kind: str, num_sms: int) -> None:
    """Have GEMMs take at most the other SMs; TransformerEngine's by its own variable."""
    if kind == "te":
        os.environ["NVTE_EXT_MARGIN_SM"] = str(num_sms)
    else:
        torch._C._set_sm_carveout_experimental(num_sms or None)


def timed(ctx: RankContext, compute: Run, communicate: Run, priority: int, first: str) -> float:
    """Median microseconds in which both are over; `first` is queued first, and starts first."""
    main, other = torch.cuda.current_stream(), torch.cuda.Stream(priority=priority)
    times = []
    for _ in range(REPETITIONS):
        torch.cuda.synchronize()
        torch.distributed.barrier()
        torch.cuda._sleep(SLOW_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        other.wait_event(start)
        if first == "GEMM":
            compute()
        with torch.cuda.stream(other):
            communicate()
        if first == "comm":
            compute()
        main.wait_stream(other)
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return statistics.median(times)


def lines_on_rank(ctx: RankContext) -> list[str]:
    num_experts = EXPERTS_PER_RANK * ctx.num_ranks
    engine: Any = create_engine(
        ctx.group, num_experts, EpConfig(engine="native", max_recv_rows="worst")
    )
    generator = torch.Generator().manual_seed(ctx.rank)
    routes = torch.rand(TOKENS, num_experts, generator=generator).topk(TOP_K).indices.cuda()
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    plan = engine.plan(routes)
    y = engine.dispatch(plan, x)[0]

    def communicate() -> None:
        for _ in range(ROUNDS):
            engine.dispatch(plan, x)
            engine.combine(plan, y)

    def nothing() -> None:
        pass

    torch.backends.cuda.preferred_blas_library("cublaslt")  # the one that can leave SMs free
    low, high = torch.cuda.Stream.priority_range()
    kinds = ["torch", "grouped"]
    if importlib.util.find_spec("transformer_engine") is not None:
        kinds.append("te")
    lines = []
    with torch.no_grad():
        communicate()
        alone = timed(ctx, nothing, communicate, low, "comm")
        for kind, number, margin in itertools.product(kinds, GEMMS, MARGINS):
            leave_free(kind, margin)
            one = gemms(kind)

            def compute(one: Run = one, number: int = number) -> None:
                for _ in range(number):
                    one()

            compute()
            gemm = timed(ctx, compute, nothing, low, "GEMM")
            for priority, first in itertools.product((low, high), ("comm", "GEMM")):
                both = timed(ctx, compute, communicate, priority, first)
                hidden = 100 * (gemm + alone - both) / min(gemm, alone)
                lines.append(
                    f"{number:2} x {kind:8} {margin:3} SMs free, "
                    f"priority {'high' if priority == high else 'low':4}, {first:4} first: "
                    f"alone {gemm:6.0f} and {alone:6.0f}, together {both:6.0f}, "
                    f"hidden {hidden:4.0f}%"
                )
            leave_free(kind, 0)
    engine.close()
    return lines


def main(num_ranks: int) -> None:
    pool = RankPool(num_ranks, "nccl")
    print("\n".join(pool.run(lines_on_rank)[0]))
    pool.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
