"""Time training steps of Megatron's schedules: one micro-batch after the other, and two overlapped.

    python tests/gpu/schedule_timing.py [RANKS]        default: 1

A line for each way to overlap: milliseconds of a step, of which dispatch and combine, as kernels of
one stream, take so much, and of theirs so much runs beside kernels of other streams.  Experts are
grouped ones, so that no host waits.  It needs TransformerEngine.  Nothing here is checked: what is
faster is for people to read.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "integration"))

from schedule_case import ScheduledModel

from megatron_ncclep.benchmark.kernel_kinds import kind_of
from megatron_ncclep.config import EpConfig
from megatron_ncclep.testing.launcher import RankContext, RankPool

SEQUENCE, MICRO_BATCHES, WARM_UP, STEPS = 4096, 4, 2, 3
OPTIONS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "moe_ffn_hidden_size": 1024,
    "moe_router_topk": 8,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "bias_activation_fusion": True,
    "moe_grouped_gemm": True,
    "gradient_accumulation_fusion": True,
    "use_cpu_initialization": False,
}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
HIGH = {**OVERLAP, "high_priority_a2a_comm_stream": True}
# Name, fields of TransformerConfig, and SMs that TransformerEngine's and torch's GEMMs leave free.
WAYS = (
    ("one after the other", {}, 0),
    ("overlapped", OVERLAP, 0),
    ("overlapped, 32 SMs free", OVERLAP, 32),
    ("overlapped, high priority", HIGH, 0),
    ("overlapped, high priority, 32 SMs free", HIGH, 32),
)


def line_on_rank(ctx: RankContext, name: str, more: dict[str, Any], num_free: int) -> str:
    from megatron.core.pipeline_parallel import utils
    from torch.profiler import ProfilerActivity, profile

    os.environ["NVTE_EXT_MARGIN_SM"] = str(num_free)
    torch._C._set_sm_carveout_experimental(num_free or None)
    utils._COMM_STREAM = None  # made once per process, with the priority of the first
    ncclep = EpConfig(engine="native", experts="grouped", max_recv_rows="1.25x")
    fields = {
        **OPTIONS,
        "num_moe_experts": 32 * ctx.num_ranks,
        "expert_model_parallel_size": max(2, ctx.num_ranks),  # Megatron wants more than one
        "ncclep": ncclep,
        **more,
    }
    model = ScheduledModel(ctx, "ncclep", ctx.num_ranks, fields, True, SEQUENCE, MICRO_BATCHES)
    times = []
    for step in range(WARM_UP + STEPS):
        torch.cuda.synchronize()
        torch.distributed.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        model.gradients(step)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        model.gradients(STEPS)
        torch.cuda.synchronize()
    kernels = [
        (event.device_resource_id, kind_of(event.name), event.time_range)
        for event in sorted(recorded.events() or (), key=lambda event: event.time_range.start)
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    ours = [kernel for kernel in kernels if kernel[1] in ("dispatch", "combine")]
    total = sum(span.end - span.start for _, _, span in ours)
    beside = sum(
        max(0.0, min(mine.end, other.end) - max(mine.start, other.start))
        for stream, _, mine in ours
        for other_stream, _, other in kernels
        if other_stream != stream
    )
    return (
        f"{name:40} {statistics.median(times[WARM_UP:]):7.2f} ms, dispatch and combine "
        f"{total / 1000:6.2f} ms, {100 * beside / total:3.0f}% of them beside others"
    )


def main(num_ranks: int) -> None:
    pool = RankPool(num_ranks, "nccl")
    for name, more, num_free in WAYS:
        print(pool.run(line_on_rank, name, more, num_free)[0], flush=True)
    pool.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
