"""Payload, what crosses links, and the check of rows: it says what the oracle says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_cases import contract_cases
from oracle import oracle_combine, oracle_dispatch, oracle_plan

import benchmarks.__main__ as benchmarks
from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.benchmark.engines import COMBINES, results_problem
from megatron_ncclep.benchmark.shapes import (
    GRAD_OUT,
    WEIGHTS,
    Workload,
    X,
    tables_of,
    wire_rows,
)
from megatron_ncclep.cli import config_files
from megatron_ncclep.engines.engine import (
    BY_RAIL,
    BY_RANK,
    EVERY_PART_ROUNDED,
    NODE_SUMS_ROUNDED,
    SOURCE_PART_UNROUNDED,
    EngineCaps,
)
from megatron_ncclep.engines.reference.engine import CAPS
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.nodes import Nodes

# Benchmarks have no words for rows and no fp64; tests/contract/test_table_oracle.py has more cases.
CASES = [
    case
    for case in contract_cases(4)
    if not isinstance(case.max_recv_rows, str) and case.dtype != torch.float64
]
needs_extension = pytest.mark.skipif(
    extension.unavailable_reason() is not None,
    reason=f"nothing to ask for sizes: {extension.unavailable_reason()}",
)
REJECTED = Case("rejected", (9, 7), 8, top_k=4, dtype=torch.bfloat16, alignment=16, dropped=0.1)
Results = dict[str, tuple[Any, Any]]


ROUNDED, UNROUNDED, BY_NODE, BY_NODE_AND_RAIL = (
    dataclasses.replace(CAPS, reduction=reduction, slot_order=order)
    for reduction, order in (
        (EVERY_PART_ROUNDED, BY_RANK), (SOURCE_PART_UNROUNDED, BY_RANK),
        (NODE_SUMS_ROUNDED, BY_RANK), (NODE_SUMS_ROUNDED, BY_RAIL),
    )
)  # fmt: skip


def results(
    case: Case, rank: int, caps: EngineCaps = UNROUNDED, ranks_on_node: int | None = None
) -> Results:
    """What the oracle makes of the payload."""
    work = Workload(case, rank)
    topk_idx = [case.topk_idx(r) for r in range(case.num_ranks)]
    order = ranks_on_node if caps.slot_order == BY_RAIL else None
    limit = (case.alignment, case.max_recv_rows)
    plan = oracle_plan(topk_idx, case.num_experts, *limit, ranks_on_node=order)
    rounded = caps.reduction == EVERY_PART_ROUNDED
    found: Results = {}
    for name, kind, kind_w in (("dispatch", X, WEIGHTS), ("bwd_dispatch", GRAD_OUT, WEIGHTS)):
        rows, w = oracle_dispatch(plan, work.every(kind), work.every(kind_w))
        found[name] = (rows[rank], w[rank] if name == "dispatch" else None)
    for name, (kind, kind_w) in COMBINES.items():
        w = work.every(kind_w) if kind_w else [rows[:, 0] for rows in work.every(kind)]
        sums, topk_w = oracle_combine(plan, work.every(kind), w, rounded, ranks_on_node)
        found[name] = (sums[rank], topk_w[rank] if kind_w else None)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_oracles_results_pass(case: Case) -> None:
    for caps in (UNROUNDED, ROUNDED):
        found = results(case, 1, caps)
        assert results_problem(found, Workload(case, 1), caps) is None
    for caps in (BY_NODE, BY_NODE_AND_RAIL):
        found = results(case, 1, caps, 2)
        assert results_problem(found, Workload(case, 1), caps, Nodes(2, 2)) is None


def swap(tensor: torch.Tensor) -> None:
    tensor[[0, 1]] = tensor[[1, 0]].clone()


# Row 15 of rank 0 is padding.
@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("dispatch", lambda f: swap(f["dispatch"][0])),
        ("dispatch", lambda f: swap(f["dispatch"][1])),
        ("dispatch", lambda f: f["dispatch"][0][2, 3].add_(0.0625)),
        ("dispatch", lambda f: f["dispatch"][0][15].fill_(-0.0)),
        ("dispatch", lambda f: f["dispatch"][1][15].fill_(1)),
        ("dispatch", lambda f: f["dispatch"][0][0, 0].fill_(float("nan"))),
        ("dispatch", lambda f: f["dispatch"][0].copy_(f["bwd_dispatch"][0])),
        ("dispatch", lambda f: f.update(dispatch=(f["dispatch"][0][1:], f["dispatch"][1]))),
        ("bwd_dispatch", lambda f: f["bwd_dispatch"][0][2, 3].add_(0.0625)),
        ("combine", lambda f: swap(f["combine"][0])),
        ("combine", lambda f: f["combine"][0][3, 1].add_(0.0625)),
        ("combine", lambda f: f["combine"][0][2].zero_()),
        ("bwd_combine", lambda f: f["bwd_combine"][1][0].copy_(f["bwd_combine"][1][0].flip(0))),
        ("bwd_combine", lambda f: f["bwd_combine"][0].copy_(f["combine"][0])),
    ],
)
def test_wrong_results_are_rejected(name: str, spoil: Callable[[Results], object]) -> None:
    work, found = Workload(REJECTED, 0), results(REJECTED, 0)
    assert results_problem(found, work, UNROUNDED) is None
    assert int(work.tables[0].routed[0]) < 15
    spoil(found)
    assert str(results_problem(found, work, UNROUNDED)).startswith(f"{name}: rank 0, ")


def test_another_reduction_is_rejected() -> None:
    """Rounding the source rank's part changes bits, and the check sees it."""
    work = Workload(REJECTED, 0)
    both = (ROUNDED, UNROUNDED)
    for actual, declared in (both, both[::-1]):
        assert results_problem(results(REJECTED, 0, actual), work, declared)
    case = next(c for c in CASES if str(c) == "bfloat16-top-6")
    by_rail, work = results(case, 3, BY_NODE_AND_RAIL, 2), Workload(case, 3)
    for caps, nodes in ((UNROUNDED, None), (BY_NODE, Nodes(2, 2)), (BY_NODE_AND_RAIL, Nodes(4, 1))):
        assert results_problem(by_rail, work, caps, nodes)


# --- what crosses the wire -----------------------------------------------------------------------


def crossing(topk_idx: list[torch.Tensor], num_experts: int, **options: bool) -> int:
    tables = tables_of(topk_idx, num_experts, 16)
    return wire_rows(tables, [len(mine) for mine in topk_idx], **options)


def test_wire_rows_count_each_rank_once_and_take_the_busiest() -> None:
    """Three ranks with two experts each, top-3.

    rank 0, token 0: experts 2, 3, 4   a row to rank 1 (once for two experts) and one to rank 2
    rank 0, token 1: experts 0, 1, 5   a row to rank 2
    rank 1, token 0: experts 4, 5, -   a row to rank 2
    rank 2, token 0: experts 4, 5, 0   a row to rank 0
    Sent: 3, 1, 1.  Received: 1, 1, 3.  The busiest sends 3 or receives 3.
    """
    first = torch.tensor([[2, 3, 4], [0, 1, 5]])
    topk_idx = [first, torch.tensor([[4, 5, -1]]), torch.tensor([[4, 5, 0]])]
    assert crossing(topk_idx, 6) == 3
    # Without rank 0's second token the busiest receives: rank 2, from ranks 0 and 1.
    assert crossing([topk_idx[0][:1], *topk_idx[1:]], 6) == 2
    assert crossing([torch.tensor([[0, 1]])], 2) == 0  # one rank sends nothing
    # The example of wire_rows.
    topk_idx = [torch.tensor([[2, 3], [0, 1]]), torch.tensor([[1, 2]])]
    assert crossing(topk_idx, 4) == 1
    assert crossing(topk_idx, 4, with_own=True) == 2


# --- the model of several nodes ------------------------------------------------------------------


@needs_extension
def test_the_command_prints_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Worked out by hand when the engine was planned: 46 GB/s, T=4096, H=7168, K=8."""
    assert benchmarks.main(["--model-network"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("A model, not a measurement")
    bytes_, messages, memory = re.split(r"\n\n(?:Messages|GPU memory)", text)
    rows = [line.split() for line in bytes_.splitlines()[-5:]]
    # 256 experts are at most 32 nodes of 8.
    assert [row[:2] for row in rows] == [[str(n), str(8 * n)] for n in (2, 4, 8, 16, 32)]
    assert [(row[3], row[8]) for row in rows[:3]] == [
        ("1.27", "5.11"), ("3.46", "7.66"), ("5.91", "8.94"),
    ]  # fmt: skip
    # 0.9965 of the tokens cross, with 128 KiB of weights; 9 phases of two messages, and an entry.
    # tests/gpu/test_gpu_network.py counts the messages of the engine.
    nodes, plan_puts, _, puts, megabytes, *_, rounds = messages.splitlines()[-5].split()
    assert (nodes, plan_puts, puts, megabytes, rounds) == ("2", "26", "19", "58.6", "1")
    held = [line.split() for line in memory.splitlines()[-6:]]
    assert [row[0] for row in held] == ["1", "2", "4", "8", "16", "32"]
    # Rows of 56 MiB: 2 halves of 3, 16 ranks, 1 on its way and 2 nodes.
    # On 8 nodes 4 rounds of 14 MiB: 2 halves of 15, 64 ranks, and of two rounds 7 on their way and
    # 8 nodes.
    assert (held[1][2], held[3][2]) == ("1.47", "1.82")
    # vLLM's objects for 680 tokens in all, on one node of 8 ranks: a row and a sum of a token of
    # each rank, and 8 experts with their weights.
    assert held[0][5] == f"{680 * 8 * (2 * 14336 + 64) / 1e9:.2f}"
    assert benchmarks.main(["--model-network", "nic_gb_s=92,num_experts=512"]) == 0
    text = capsys.readouterr().out
    assert "92 GB/s" in text
    assert text.splitlines()[-1].split()[0] == "64"


@needs_extension
@pytest.mark.parametrize("name", config_files.names("model"))
def test_every_model_has_its_memory(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Windows for control and low-latency objects were left out, and all models but one."""
    sizes, ranks = config_files.load("model", name), 4
    assert benchmarks.main(["--model-network", f"model={name},ranks_on_each={ranks}"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    tokens = int(str(sizes["seq-length"])) * int(str(sizes["micro-batch-size"]))
    assert f"of {tokens} tokens per rank" in text
    rows = f"rows of {2 * int(str(sizes['hidden-size']))} bytes"
    assert f"{rows}, top-{sizes['moe-router-topk']} of {sizes['num-experts']} equally" in text
    held = text.split("low latency GB ")[1].split()
    most = int(str(sizes["num-experts"])) // ranks
    assert held[::6] == [str(nodes) for nodes in (1, 2, 4, 8, 16, 32, 64) if most % nodes == 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nics=8"], "nics=8: the names are num_tokens, row_bytes"),
        (["top_k=two"], "'two' is not a number"),
        (["top_k=300"], "there are too few"),
        (["nic_gb_s=0"], "must be a positive number"),
        (["--subjects", "native"], "leave --subjects out"),
        (["model=gpt-3"], "model configuration 'gpt-3': "),
        (["model=tiny,model=tiny"], "model is given twice"),
        pytest.param(
            ["ranks_on_each=3"],
            "256 experts are not divisible by the 3 ranks",
            marks=needs_extension,
        ),
    ],
)
def test_what_the_model_refuses(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert benchmarks.main(["--model-network", *words]) == 2
    assert message in capsys.readouterr().err
