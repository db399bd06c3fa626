"""Time training steps of Megatron's schedules: one micro-batch after the other, and two overlapped.

    python tests/gpu/schedule_timing.py [RANKS]        default: 1

A line for each model, dispatcher and way to overlap: milliseconds of a step; for how many of them
the GPU is busy; how long what moves the tokens runs, dispatch and combine, or for `alltoall` all
collectives but the last, which reduces gradients; and how much of that runs beside kernels of other
streams.  It needs TransformerEngine.  Nothing here is checked: which is faster is for people to
read.
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

from megatron_ncclep.benchmark.kernel_kinds import COLLECTIVES, Interval, covered, kind_of
from megatron_ncclep.config import EpConfig
from megatron_ncclep.ranks.pool import RankContext, RankPool

SEQUENCE, MICRO_BATCHES, WARM_UP, STEPS = 4096, 4, 2, 3
OPTIONS: dict[str, Any] = {
    "num_layers": 4,
    "num_attention_heads": 16,
    "moe_router_topk": 8,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "bias_activation_fusion": True,
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "gradient_accumulation_fusion": True,
    "use_cpu_initialization": False,
}
# In the first, the host takes longer for a step than the GPU; in the second the GPU.
MODELS: dict[str, dict[str, Any]] = {
    "hidden 2048, experts of 1024": {"hidden_size": 2048, "moe_ffn_hidden_size": 1024},
    "hidden 4096, experts of 2048": {"hidden_size": 4096, "moe_ffn_hidden_size": 2048},
}
EXPERTS_PER_RANK = {2048: 32, 4096: 16}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
HIGH = {**OVERLAP, "high_priority_a2a_comm_stream": True}
# Name, dispatcher, fields of TransformerConfig, and SMs that TransformerEngine's and torch's GEMMs
# leave free.
WAYS = (
    ("alltoall, one after the other", "alltoall", {}, 0),
    ("alltoall, overlapped", "alltoall", OVERLAP, 0),
    ("one after the other", "ncclep", {}, 0),
    ("overlapped", "ncclep", OVERLAP, 0),
    ("overlapped, 32 SMs free", "ncclep", OVERLAP, 32),
    ("overlapped, high priority", "ncclep", HIGH, 0),
)


def line_on_rank(
    ctx: RankContext,
    name: str,
    dispatcher: str,
    model_fields: dict[str, Any],
    more: dict[str, Any],
    num_free: int,
) -> str:
    from megatron.core.pipeline_parallel import utils
    from torch.profiler import ProfilerActivity, profile

    os.environ["NVTE_EXT_MARGIN_SM"] = str(num_free)
    torch._C._set_sm_carveout_experimental(num_free or None)
    utils._COMM_STREAM = None  # made once per process, with the priority of the first
    ncclep = EpConfig(engine="native", experts="grouped", max_recv_rows="1.25x")
    fields = {
        **OPTIONS,
        **model_fields,
        "num_moe_experts": EXPERTS_PER_RANK[model_fields["hidden_size"]] * ctx.num_ranks,
        "expert_model_parallel_size": max(2, ctx.num_ranks),  # Megatron wants more than one
        **({"ncclep": ncclep} if dispatcher == "ncclep" else {}),
        **more,
    }
    model = ScheduledModel(ctx, dispatcher, ctx.num_ranks, fields, True, SEQUENCE, MICRO_BATCHES)
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
        (event.device_resource_id, Interval(event.name, span.start, span.end, kind_of(event.name)))
        for event in recorded.events() or ()
        for span in (event.time_range,)
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    moves = ("dispatch", "combine") if dispatcher == "ncclep" else (COLLECTIVES,)
    ours = [(stream, span) for stream, span in kernels if span.kind in moves]
    if dispatcher != "ncclep":  # the last one reduces the gradients
        ours.remove(max(ours, key=lambda kernel: kernel[1].end))
    total = sum(span.end - span.start for _, span in ours)
    beside = 0.0
    for stream, mine in ours:
        others = [
            Interval(other.name, max(mine.start, other.start), min(mine.end, other.end))
            for other_stream, other in kernels
            if other_stream != stream and other.start < mine.end and mine.start < other.end
        ]
        beside += covered(others)
    busy = covered(span for _, span in kernels)
    return (
        f"{name:34} {statistics.median(times[WARM_UP:]):7.2f} ms, GPU busy {busy / 1000:7.2f} ms, "
        f"moving tokens {total / 1000:6.2f} ms, {100 * beside / total:3.0f}% of it beside others"
    )


def main(num_ranks: int) -> None:
    pool = RankPool(num_ranks, "nccl")
    for model, fields in MODELS.items():
        print(model, flush=True)
        for name, dispatcher, more, free in WAYS:
            print(pool.run(line_on_rank, name, dispatcher, fields, more, free)[0], flush=True)
    pool.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
