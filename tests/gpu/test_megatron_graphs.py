"""Megatron's CUDA graphs around our dispatcher: the bits of a training without any.

Each kind has a process of its own, because Megatron keeps graphs, and that it has made them, in
classes.  Every training has micro-batches whose gradients add up, routings that differ in every
call, and evaluations of another size between steps.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graph_training import SEQUENCE, STEPS, Job, Trained, train
from layer_case import options_shown
from rank_pool import RankContext, RankPool
from timeouts import PatientPool
from trainer import differences

from megatron_ncclep.errors import UnsupportedError

pytestmark = pytest.mark.needs_caps(test=lambda caps: caps.captures_static)

# What all assignments need at most, with every block padded to 16 rows.
ALL_ROWS = 384
STATIC = {"experts": "grouped", "max_recv_rows": ALL_ROWS}
OVERFLOW = {**STATIC, "max_recv_rows": 208}
# All assignments of one rank, and one block.
RERUN = {**STATIC, "max_recv_rows": 272, "on_overflow": "rerun"}
RECOMPUTE_ALL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def graphs(impl: str, *modules: str) -> dict[str, Any]:
    return {"cuda_graph_impl": impl, "cuda_graph_modules": list(modules)}


FULL = Job("full iteration", graphs("full_iteration"), STATIC)
TE = Job("whole layers", graphs("transformer_engine"), STATIC)
PARTS = Job(
    "before the dispatch",
    graphs("transformer_engine", "attn", "moe_router", "moe_preprocess"),
    holds_dispatch=False,
)
ATTENTION = dataclasses.replace(
    PARTS,
    name="attention",
    graphs=graphs("transformer_engine", "attn"),
    options={"recompute_granularity": "selective", "recompute_modules": ["moe"]},
)
LOCAL_PARTS = dataclasses.replace(
    PARTS,
    name="around the dispatch",
    graphs=graphs("local", "moe_router", "moe_preprocess"),
    hybrid=True,
    eval_sequence=SEQUENCE,
)
SHARED = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_overlap": True}
# Megatron wants more than one rank; one is as good for what is compared.
OVERLAPPED = {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2}
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
FP8 = dataclasses.replace(
    FULL, name="FP8", options=BLOCKWISE, sizes={"hidden_size": 256, "moe_ffn_hidden_size": 256}
)
FUSER = {"use_transformer_engine_op_fuser": True}
GROUPED_TENSORS = {"moe_use_grouped_tensor": True}
# Room for 8 blocks, each padded to a multiple of 256 rows.
ALL_PADDED = {"max_recv_rows": 4096}
JOBS = {
    "full_iteration": [
        FULL,
        # What does not fit is counted once, although it is dispatched twice.
        dataclasses.replace(FULL, name="recompute", options=RECOMPUTE_ALL, ncclep=OVERFLOW),
        dataclasses.replace(FULL, name="overflow", ncclep=OVERFLOW),
    ],
    "transformer_engine": [
        TE,
        dataclasses.replace(TE, name="overflow", ncclep=OVERFLOW),
        PARTS,
        dataclasses.replace(PARTS, name="before the dispatch, static", ncclep=STATIC),
        ATTENTION,
    ],
    # Evaluations are replays as well, of the same graphs: Megatron has no others.
    "local": [Job("whole layers", graphs("local"), OVERFLOW, eval_sequence=SEQUENCE)],
    "local parts": [LOCAL_PARTS],
    **{
        f"reruns, {impl}": [
            Job(impl, graphs(impl), RERUN, eval_sequence=SEQUENCE, collapses=range(0, STEPS, 2))
        ]
        for impl in ("full_iteration", "transformer_engine", "local")
    },
    "shared experts": [
        dataclasses.replace(TE, name="shared experts in whole layers", options=SHARED),
        dataclasses.replace(PARTS, name="shared experts beside the dispatch", options=SHARED),
    ],
    # Weights are quantised once a step, inside the graph, or outside of those of parts.
    "fp8, full iteration": [FP8],
    "fp8, before the dispatch": [
        dataclasses.replace(
            FP8, graphs=PARTS.graphs, ncclep={"experts": "grouped"}, holds_dispatch=False
        )
    ],
    "shared experts, full iteration": [dataclasses.replace(FULL, name="shared", options=SHARED)],
    # With micro-batches overlapped by Megatron's schedule, on two streams.
    "overlapped": [
        dataclasses.replace(PARTS, name="overlapped", options=OVERLAPPED),
        dataclasses.replace(PARTS, name="overlapped, static", options=OVERLAPPED, ncclep=STATIC),
    ],
}
OP_FUSER, TENSORS = (
    dataclasses.replace(FULL, name=name, ncclep=ALL_PADDED, options=options)
    for name, options in (("op fuser", FUSER), ("grouped tensors", GROUPED_TENSORS))
)


@pytest.fixture
def one_rank(backend: str) -> Iterator[RankPool]:
    """A process for one test."""
    pool = PatientPool(1, backend)
    yield pool
    pool.close()


def jobs_on_rank(ctx: RankContext, engine: str, jobs: list[Job]) -> None:
    """Train without graphs, with, and without again, in one process; all graphs stay alive."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what it would compile takes longer than all the rest
    os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"  # the op fuser asks for it
    torch.cuda.set_stream(torch.cuda.Stream())  # as megatron.training does for graphs
    alive = []
    for job in jobs:
        if job in (OP_FUSER, TENSORS) and not reads_on_device(job.options):
            with pytest.raises(UnsupportedError, match="TEGroupedMLP reads on the host"):
                train(ctx, engine, job, with_graphs=True)
            continue
        eager = train(ctx, engine, job, with_graphs=False)
        graphed = train(ctx, engine, job, with_graphs=True)
        after = train(ctx, engine, job, with_graphs=False)
        assert len(eager.training.routings) > STEPS, "the routings hardly change"
        check_replayed(job, eager, graphed)
        assert differences(graphed.values, eager.values) == [], f"{job.name}: with graphs"
        assert differences(after.values, eager.values) == [], f"{job.name}: after graphs"
        alive.append(graphed)


def reads_on_device(options: dict[str, Any]) -> bool:
    """What TransformerEngine says of such experts on this GPU; older releases have no such word."""
    from transformer_engine.pytorch.module import grouped_linear as module
    from transformer_engine.pytorch.ops.basic import grouped_linear as op

    place, kind = (op, "op_fuser") if options == FUSER else (module, "module")
    has_kernels = getattr(place, f"is_{kind}_grouped_tensor_path_supported", None)
    return has_kernels is not None and has_kernels(None, torch.bfloat16)


def check_replayed(job: Job, eager: Trained, graphed: Trained) -> None:
    """There were graphs, and they were used."""
    captured = graphed.training.graphs()
    assert captured
    assert all(graph is not None for graph in captured)
    assert all(number > 0 for number in eager.dispatches)
    expected = [0, 0] if job.holds_dispatch else eager.dispatches[-2:]
    if job.is_rerun:
        expected[0] = eager.dispatches[-2]
    assert graphed.dispatches[-2:] == expected, f"{job.name}: {graphed.dispatches}"


@pytest.mark.supports(compared="losses and gradients with those without graphs, to the bit")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            marks=pytest.mark.supports(
                *(
                    option
                    for job in jobs
                    for option in options_shown({**job.graphs, **job.options})
                    if option != "expert_model_parallel_size"  # one rank has none
                )
            ),
        )
        for kind, jobs in JOBS.items()
    ],
)
def test_graphs_give_the_same_bits(one_rank: RankPool, engine_name: str, kind: str) -> None:
    one_rank.run(jobs_on_rank, engine_name, JOBS[kind])


@pytest.mark.parametrize(
    "job",
    [OP_FUSER, pytest.param(TENSORS, marks=pytest.mark.since("0.20"))],
    ids=lambda job: job.name,
)
def test_graphs_are_refused_or_give_the_same_bits(
    one_rank: RankPool, engine_name: str, job: Job
) -> None:
    """Refused where TransformerEngine has no kernels for it: this does not show that it works."""
    one_rank.run(jobs_on_rank, engine_name, [job])
