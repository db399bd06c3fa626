"""Megatron's schedule that overlaps two micro-batches (overlap_moe_expert_parallel_comm), and
delayed weight gradients: the bits of its schedule without, and no memory given away too early.

On a CPU streams are dummies and the allocator knows of none.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from deselect import needs_te
from megatron_setup import build_layer, ep_config, initialize, make_config
from rank_pool import RankContext, RankPool
from test_gpu_memory import HIDDEN, SIZES
from trainer import ModelCase, differences, train

from megatron_ncclep.config import EpConfig

# About half a second, in which the host has long queued, and dropped, what the test is about.
SLOW_CYCLES = 1_000_000_000
SEQUENCE = 256
OVERLAP = {"overlap_moe_expert_parallel_comm": True}
# What needs TransformerEngine.
OF_TE = ("moe_grouped_gemm", "gradient_accumulation_fusion", "use_cpu_initialization")
LOCAL = {name: value for name, value in SIZES.items() if name not in OF_TE}


def scheduled(name: str, options: dict[str, Any], te: bool = True) -> ModelCase:
    how = {"te": te, "sequence": SEQUENCE, "micro_batches": 3, "dtype": torch.bfloat16}
    return ModelCase(name, options, SIZES if te else LOCAL, **how)


CASES = [
    scheduled("local", OVERLAP, te=False),
    *(
        pytest.param(scheduled(name, options), marks=needs_te, id=name)
        for name, options in {
            "te": OVERLAP,
            "delayed": {**OVERLAP, "delay_wgrad_compute": True},
            # The norm's output, which dispatch reads, is freed and computed again.
            "recompute": {
                **OVERLAP,
                "recompute_granularity": "selective",
                "recompute_modules": ["layernorm", "moe_act"],
            },
            "early": {**OVERLAP, "ep_overlap_early_attn_memory_release": True},
            "grouped-static": {
                **OVERLAP,
                "ncclep": EpConfig(experts="grouped", max_recv_rows="worst"),
            },
            "delayed-in-one-micro-batch": {"overlap_dispatch_backward_with_experts_wgrad": True},
        }.items()
    ),
]
# Fields that are not part of the schedule that is compared with.
OF_OVERLAP = re.compile("overlap|delay")


@pytest.mark.supports(
    compared="losses and all gradients with those of the schedule without overlap, to the bit"
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_overlap_changes_no_bits(ctx: RankContext, engine_name: str, case: ModelCase) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what it would compile takes longer than all the rest
    from megatron.core.transformer.enums import AttnBackend

    sizes = {
        **case.sizes,
        # Megatron wants more than one; one rank is as good for what is compared.
        "expert_model_parallel_size": max(2, ctx.num_ranks),
        # The others add up in whatever order their blocks come, run by run.
        "attention_backend": AttnBackend.unfused,
    }
    ncclep = case.options.get("ncclep") or ep_config(engine_name)
    options = {**case.options, "ncclep": replace(ncclep, engine=engine_name)}
    overlapped = replace(case, ep=ctx.num_ranks, sizes=sizes, options=options)
    plain = {name: value for name, value in options.items() if not OF_OVERLAP.search(name)}
    expected = train(ctx, "ncclep", replace(overlapped, options=plain))
    assert differences(train(ctx, "ncclep", overlapped), expected) == []


def given_on_rank(ctx: RankContext, engine_name: str) -> list[bool]:
    """Dispatch on one stream, read what comes on another that is slow, and drop it at once.

    Then the first stream asks for memory of every size that was dropped.  Returns whether it got
    any of what the other has yet to read, of rows, weights and numbers of rows.
    """
    initialize(ctx.num_ranks, device="cuda")
    ncclep = EpConfig(engine=engine_name, experts="grouped", max_recv_rows="worst")
    options = {"hidden_size": HIDDEN, "num_moe_experts": 16, "moe_router_topk": 4}
    config = make_config("ncclep", torch.bfloat16, ctx.num_ranks, ncclep=ncclep, **options)
    config.overlap_moe_expert_parallel_comm = True
    dispatcher = build_layer(config, "cuda").token_dispatcher
    generator = torch.Generator().manual_seed(ctx.rank)
    hidden = torch.randn(SEQUENCE, 2, HIDDEN, generator=generator).to("cuda", torch.bfloat16)
    probs = torch.rand(SEQUENCE * 2, 16, generator=generator).cuda()
    routing_map = torch.zeros_like(probs, dtype=torch.bool)
    routing_map.scatter_(1, probs.topk(4).indices, True)
    comm, comp = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.no_grad():
        with torch.cuda.stream(comp):
            tokens, weights = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
        comm.wait_stream(comp)
        with torch.cuda.stream(comm):
            rows, row_weights = dispatcher.token_dispatch(tokens, weights)
        comp.wait_stream(comm)
        with torch.cuda.stream(comp):
            rows, counts, row_weights = dispatcher.dispatch_postprocess(rows, row_weights)
            # Made before the stream is slow: new memory from the driver may wait for the device.
            read = [torch.empty_like(t) for t in (rows, row_weights, counts)]
            torch.cuda._sleep(SLOW_CYCLES)
            for copy, dispatched in zip(read, (rows, row_weights, counts), strict=True):
                copy.copy_(dispatched)
            has_read = comp.record_event()
        dropped = [_bytes_of(t) for t in (rows, row_weights, counts)]
        dispatcher._plan = None
        del rows, row_weights, counts, dispatched
        with torch.cuda.stream(comm):
            given = [
                torch.empty(len(span), dtype=torch.uint8, device="cuda")
                for span in dropped
                for _ in range(16)
            ]
        assert not has_read.query(), "the host waited for the slow stream: this shows nothing"
        torch.cuda.synchronize()
    dispatcher.engine.close()
    return [
        any(max(one.start, span.start) < min(one.stop, span.stop) for one in map(_bytes_of, given))
        for span in dropped
    ]


def _bytes_of(tensor: torch.Tensor) -> range:
    """Addresses of the tensor's storage."""
    storage = tensor.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def test_memory_is_not_given_away_while_the_other_stream_reads_it(
    megatron_pool: RankPool, engine_name: str
) -> None:
    """The next micro-batch's dispatch takes the memory that the experts' backward lets go of, on
    another stream than the one on which they still read it.
    """
    found = megatron_pool.run(given_on_rank, engine_name)
    assert found == [[False, False, False]] * megatron_pool.size
