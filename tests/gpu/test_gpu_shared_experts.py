"""Shared experts beside dispatch and combine (moe_shared_expert_overlap): the bits of a layer
without overlap, and kernels that do run at one time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_case import LayerCase, assert_overlap_changes_no_bits
from megatron_setup import build_layer, initialize, make_config

from megatron_ncclep.benchmark.kernel_kinds import Interval, kind_of
from megatron_ncclep.config import EpConfig
from megatron_ncclep.testing.launcher import RankContext, RankPool

pytestmark = pytest.mark.needs_processes("Megatron keeps its groups of ranks once per process")

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


@pytest.mark.parametrize("max_recv_rows", [None, "worst"], ids=["exact", "static"])
def test_overlap_changes_no_bits(
    megatron_pool: RankPool, engine_name: str, max_recv_rows: str | None
) -> None:
    small = {"hidden_size": 1024, "moe_shared_expert_intermediate_size": 2048}
    ncclep = EpConfig(engine=engine_name, max_recv_rows=max_recv_rows)
    case = LayerCase(
        "bits",
        ep=megatron_pool.size,
        dtype=torch.bfloat16,
        options={**OPTIONS, **small, "ncclep": ncclep},
        micro_batches=3,
        sequences=(512,) * 4,
    )
    assert_overlap_changes_no_bits(megatron_pool, case)


def timeline_on_rank(
    ctx: RankContext, engine_name: str
) -> tuple[list[Interval], list[Interval], list[Interval]]:
    """Kernels of a forward and a backward pass, in order: our dispatches, our combines, and the
    GEMMs on other streams than ours.
    """
    from torch.profiler import ProfilerActivity, profile

    initialize(ctx.num_ranks, device="cuda")
    # Static mode: no host waits between the plan and the shared expert's first half.
    ncclep = EpConfig(engine=engine_name, max_recv_rows="worst")
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
    found: dict[str, list[Interval]] = {"dispatch": [], "combine": [], "GEMM": []}
    streams: set[int] = set()
    for stream, name, start, end in kernels:
        kind = kind_of(name)
        if kind in ("dispatch", "combine"):
            streams.add(stream)
            found[kind].append(Interval(name, start, end, kind))
    for stream, name, start, end in kernels:
        if kind_of(name) == "GEMM" and stream not in streams:
            found["GEMM"].append(Interval(name, start, end, "GEMM"))
    return found["dispatch"], found["combine"], found["GEMM"]


def time_in_common(one: Interval, others: list[Interval]) -> float:
    """Microseconds of `one` in which others run, which do not overlap each other."""
    return sum(max(0.0, min(one.end, o.end) - max(one.start, o.start)) for o in others)


@pytest.mark.needs_caps(test=lambda caps: caps.device_deadline)
def test_shared_experts_run_beside_dispatch_and_combine(
    megatron_pool: RankPool, engine_name: str
) -> None:
    """Queued before our kernels, or after them on the same stream, they would run alone."""
    for rank, (dispatches, combines, gemms) in enumerate(
        megatron_pool.run(timeline_on_rank, engine_name)
    ):
        # The backward of combine is a dispatch, and the other way round.
        assert len(dispatches) == len(combines) == 2, (dispatches, combines)
        assert gemms
        for kernel in (*dispatches, *combines):
            common = time_in_common(kernel, gemms)
            print(
                f"rank {rank}: {kernel.kind} of {kernel.end - kernel.start:.0f} us, "
                f"{common:.0f} us of them beside the shared experts"
            )
            assert common > 0, (kernel, gemms)
