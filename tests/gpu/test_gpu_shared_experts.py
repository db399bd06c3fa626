"""Shared experts beside dispatch and combine (moe_shared_expert_overlap): the bits of a layer
without overlap, and kernels that do run at one time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_case import LayerCase, assert_overlap_changes_no_bits
from megatron_setup import build_layer, ep_config, initialize, make_config

from megatron_ncclep.benchmark.training import Interval, kernel_kind
from megatron_ncclep.config import EpConfig
from megatron_ncclep.ranks.pool import RankContext, RankPool

# About 100 ms: the host has queued a whole pass when the device begins with it.
SLOW_CYCLES = 200_000_000
SEQUENCE, BATCH = 4096, 2
# At these sizes dispatch and combine move about half a gigabyte each, and one GEMM of the shared
# expert is half a teraflop: hundreds of microseconds either way, in which the others start.
OPTIONS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_moe_experts": 16,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 8192,
    "moe_shared_expert_gate": True,
    "moe_shared_expert_overlap": True,
}


@pytest.mark.supports(
    "moe_shared_expert_overlap",
    compared="outputs and all gradients with those without overlap, to the bit (input gradients: "
    "one rounding)",
)
@pytest.mark.parametrize("max_recv_rows", [None, "worst"], ids=["exact", "static"])
def test_overlap_changes_no_bits(
    ctx: RankContext, engine_name: str, max_recv_rows: str | None
) -> None:
    small = {"hidden_size": 1024, "moe_shared_expert_intermediate_size": 2048}
    ncclep = ep_config(engine_name, max_recv_rows=max_recv_rows)
    case = LayerCase(
        "bits",
        ep=ctx.num_ranks,
        dtype=torch.bfloat16,
        options={**OPTIONS, **small, "ncclep": ncclep},
        micro_batches=3,
        sequences=(512,) * 4,
    )
    assert_overlap_changes_no_bits(ctx, case)


def timeline_on_rank(
    ctx: RankContext, engine_name: str
) -> tuple[list[Interval], list[Interval], list[Interval]]:
    """Kernels of a forward and a backward pass, in order: our dispatches, our combines, and those
    on other streams than ours.
    """
    from torch.profiler import ProfilerActivity, profile

    initialize(ctx.num_ranks, device="cuda")
    # So no host waits for anything, and all is queued while the device still sleeps.
    ncclep = EpConfig(engine=engine_name, max_recv_rows="worst", experts="grouped")
    config = make_config("ncclep", torch.bfloat16, ctx.num_ranks, ncclep=ncclep, **OPTIONS)
    layer = build_layer(config, "cuda")
    shape = (SEQUENCE, BATCH, config.hidden_size)
    hidden = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    probe = torch.randn_like(hidden)

    def train() -> None:
        torch.cuda._sleep(SLOW_CYCLES)
        out, _ = layer(hidden)
        torch.cuda._sleep(SLOW_CYCLES)
        out.backward(probe)
        torch.cuda.synchronize()

    train()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        train()
    kernels = [
        (event.device_resource_id, event.name, event.time_range.start, event.time_range.end)
        for event in sorted(recorded.events() or (), key=lambda event: event.time_range.start)
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
    ours: dict[str, list[Interval]] = {"dispatch": [], "combine": []}
    streams: set[int] = set()
    for stream, name, start, end in kernels:
        if (kind := kernel_kind(name)) in ours:
            streams.add(stream)
            ours[kind].append(Interval(name, start, end, kind))
    others = [Interval(name, *times) for stream, name, *times in kernels if stream not in streams]
    return ours["dispatch"], ours["combine"], others


def time_in_common(one: Interval, others: list[Interval]) -> float:
    """Microseconds of `one` in which others run; these are of one stream."""
    return sum(max(0.0, min(one.end, o.end) - max(one.start, o.start)) for o in others)


@pytest.mark.needs_caps(test=lambda caps: caps.device_deadline)
def test_shared_experts_run_beside_dispatch_and_combine(
    megatron_pool: RankPool, engine_name: str
) -> None:
    """Queued before our kernels, or after them on the same stream, they would run alone."""
    for rank, (dispatches, combines, others) in enumerate(
        megatron_pool.run(timeline_on_rank, engine_name)
    ):
        # The backward of combine is a dispatch, and the other way round.
        assert len(dispatches) == len(combines) == 2, (dispatches, combines)
        assert any(kernel_kind(other.name) == "GEMM" for other in others)
        for kernel in (*dispatches, *combines):
            common = time_in_common(kernel, others)
            print(
                f"rank {rank}: {kernel.kind} of {kernel.end - kernel.start:.0f} us, "
                f"{common:.0f} us of them beside the shared experts"
            )
            assert common > 0, (kernel, [o for o in others if o.end > kernel.start][:3])
