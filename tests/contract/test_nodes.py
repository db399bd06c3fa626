"""Several nodes: the grid of ranks, and the contract over it, with ranks of one host.

All of the contract's tests run over a grid with, for 2 x 2:

    NCCLEP_LOCAL_RANKS=2 pytest tests/contract --engine hierarchical --ranks 4
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from compare import assert_same_bits
from contract_cases import caps_of, contract_cases, for_engine
from on_ranks import gathered
from rank_pool import RankContext, RankPool
from run_case import all_steps_on_rank, assert_steps, ranks_on_node
from test_autograd import step_of_both
from test_batch_invariance import BATCHES, CASES, watch
from test_overflow import TOO_MUCH, raised_on_rank
from timeouts import PatientPool, patient

from megatron_ncclep.benchmark.cases import Case, refusal
from megatron_ncclep.benchmark.shapes import network_rows, tables_of
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.hierarchical import engine as hierarchical
from megatron_ncclep.engines.hierarchical.engine import HierarchicalPlan
from megatron_ncclep.errors import EngineUnavailableError, InputError, PeerError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.nodes import Nodes, nodes_from
from megatron_ncclep.ranks.resources import Resource

ENGINE = "hierarchical"
# Ranks of this host that count as several nodes.
pytestmark = [pytest.mark.needs_ranks(4), pytest.mark.ranks(4), pytest.mark.cpu_only]


@contextmanager
def grid(ctx: RankContext, local_ranks: Any = 2) -> Iterator[None]:
    """So many ranks (each rank: its own entry) are a node."""
    own = local_ranks[ctx.rank] if isinstance(local_ranks, tuple) else local_ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCLEP_LOCAL_RANKS", str(own))
        EpGroup.of(ctx.group).close()  # the grid that another test has found
        try:
            yield
        finally:
            EpGroup.of(ctx.group).close()


# --- the grid ------------------------------------------------------------------------------------


def test_the_docstrings_grid() -> None:
    nodes = nodes_from(["a", "a", "a", "b", "b", "b"])
    assert nodes == Nodes(2, 3)
    assert [nodes.rail_of(rank) for rank in (1, 4)] == [[1, 4], [1, 4]]
    assert nodes.ranks_of(1) == [3, 4, 5]
    assert (nodes.node_of(4), nodes.local_index(4)) == (1, 1)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("aaab", "same number of ranks: a has ranks 0 to 2, b has rank 3; choose an expert-"),
        ("abab", "must be consecutive: a has rank 0, b has rank 1, a has rank 2, b has rank 3;"),
        ("aabbccddeeffgghhiij", "g has ranks 12 to 13, h has ranks 14 to 15, and so on; choose"),
    ],
)
def test_ranks_that_are_no_grid(names: str, text: str) -> None:
    found = nodes_from(list(names))
    assert isinstance(found, str)
    assert text in found


@pytest.mark.parametrize(
    ("local_ranks", "error", "text"),
    [
        (3, EngineUnavailableError, "node 0 has ranks 0 to 2, node 1 has rank 3"),
        ((2, 2, 2, 0), InputError, "rank 3: NCCLEP_LOCAL_RANKS='0': not a positive number"),
        ((2, 2, 1, 2), EngineUnavailableError, "node 0 has ranks 0 to 1, node 2 has rank 2"),
    ],
)
def test_every_rank_is_told_that_there_is_no_grid(
    ctx: RankContext, local_ranks: Any, error: type, text: str
) -> None:
    with grid(ctx, local_ranks), pytest.raises(error, match=re.escape(text)) as caught:
        create_engine(ctx.group, 8, EpConfig(engine=ENGINE))
    assert caught.type is error


def test_auto_leaves_nodes_without_gpus_to_reference(ctx: RankContext) -> None:
    with grid(ctx), closing(create_engine(ctx.group, 8, EpConfig())) as engine:
        assert engine.caps.name == "reference"


# --- the contract over it ------------------------------------------------------------------------


def possible_cases(num_ranks: int) -> list[Case]:
    return [c for c in contract_cases(num_ranks) if refusal(c, caps_of(ENGINE)) is None]


def every_case_on_rank(
    ctx: RankContext, local_ranks: int, cases: list[Case], chunks: int | None = None
) -> list[list[torch.Tensor]]:
    with grid(ctx, local_ranks):
        return [all_steps_on_rank(ctx, case, ENGINE, network_chunks=chunks) for case in cases]


def assert_all_steps(cases: list[Case], results: list[list[list[torch.Tensor]]]) -> None:
    """Compare what `every_case_on_rank` gave on each rank with the oracle."""
    assert len(cases) > 5
    for case, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        assert_steps(case, ENGINE, list(of_ranks))


@pytest.mark.parametrize(
    ("local_ranks", "chunks"), [(1, None), (2, None), (4, None), (2, 1), (2, 2), (2, 3)]
)
def test_every_step_is_the_oracles(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, local_ranks: int, chunks: int | None
) -> None:
    monkeypatch.setenv("NCCLEP_LOCAL_RANKS", str(local_ranks))
    cases = possible_cases(4)
    assert ranks_on_node(4) == local_ranks
    results = pool.run(every_case_on_rank, local_ranks, cases, chunks, ranks=4)
    assert_all_steps(cases, results)


@pytest.mark.parametrize("local_ranks", [1, 2])
def test_company_changes_no_bit(ctx: RankContext, local_ranks: int) -> None:
    with grid(ctx, local_ranks):
        assert watch(ctx, CASES[0], ENGINE) > BATCHES // 2


def test_three_nodes(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLEP_LOCAL_RANKS", "2")
    cases = possible_cases(6)[::4]  # what is new are sums of three terms
    with closing(PatientPool(6, imports=pool.imports)) as more:
        assert_all_steps(cases, more.run(every_case_on_rank, 2, cases))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_the_reference_engines(ctx: RankContext, dtype: torch.dtype) -> None:
    """Forward and backward, compared with the reference engine on the same grid."""
    case = Case("gradients", (25, 12, 0, 31), 16, 4, dtype=dtype, alignment=16, dropped=0.2)
    case = for_engine(case, caps_of(ENGINE))
    with grid(ctx):
        mine, expected = step_of_both(ctx, case, ENGINE)
    for what, a, b in zip(("out", "x.grad", "w.grad"), mine, expected, strict=True):
        assert_same_bits(a, b, f"rank {ctx.rank}, {what}")


@pytest.mark.parametrize("rows", [64, "0.5x"])
def test_all_nodes_are_told_that_rows_were_dropped(ctx: RankContext, rows: int | str) -> None:
    """Rows are dropped on node 0 alone; the other one's ranks must not step on."""
    case = dataclasses.replace(TOO_MUCH, tokens=(40,) * 4, max_recv_rows=rows)
    step = dataclasses.replace(case, skew=0.0, dropped=0.9)
    with grid(ctx):
        first, raised, last = raised_on_rank(ctx, case, ENGINE, step)
    assert first == last == ""
    assert f"with max_recv_rows={rows}, rank 0 needed " in raised
    assert gathered(ctx, raised) == [raised] * 4


def test_all_nodes_are_told_of_a_wrong_argument(ctx: RankContext) -> None:
    """And the next dispatch is right."""
    config = EpConfig(engine=ENGINE, timeout_s=patient(60))
    with grid(ctx), closing(create_engine(ctx.group, 8, config)) as engine:
        plan = engine.plan(torch.tensor([[0, 7]]))
        x = torch.ones(1 + (ctx.rank == 3), 16)
        with pytest.raises(InputError) as caught:
            engine.dispatch(plan, x)
        rows, _ = engine.dispatch(plan, x[:1])
    said = "dispatch: rank 3: x has shape [2, 16]: the plan expects [1, hidden]"
    assert str(caught.value) == said
    assert list(rows.shape) == [[4, 16], [0, 16], [0, 16], [4, 16]][ctx.rank]


def test_what_fails_inside_a_node_is_told_before_an_optimizer_steps(ctx: RankContext) -> None:
    """The group of a node's ranks is not in torch's list, so only this engine checks it."""
    with grid(ctx):
        engine = create_engine(ctx.group, 8, EpConfig(engine=ENGINE))
        assert isinstance(engine, hierarchical.HierarchicalEngine)
        group = EpGroup.of(ctx.group)
        group.check()
        failed = {"check.side_effect": PeerError("rank 1 did not come in dispatch")}
        engine._grid.local.resources.share("planted", lambda: mock.Mock(Resource, **failed))
        with pytest.raises(PeerError, match="rank 1 did not come in dispatch"):
            group.check()


def test_the_ranks_of_a_node_are_in_the_step_of_the_group(ctx: RankContext) -> None:
    """Deadlines within a node: in an engine's first step, after it, and in another engine's."""
    config = EpConfig(engine=ENGINE, timeout_s=50.0, first_timeout_s=70.0)
    with grid(ctx):
        engine = create_engine(ctx.group, 8, config)
        assert isinstance(engine, hierarchical.HierarchicalEngine)
        inside = engine._grid.local
        assert inside.deadline_s(config) == 70.0
        engine.plan(torch.tensor([[0, 7]]))
        EpGroup.of(ctx.group).check()
        assert inside.deadline_s(config) == 50.0
        create_engine(ctx.group, 8, config)
        assert inside.deadline_s(config) == 70.0


# --- chunks --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("local_ranks", "chunks", "expected"),
    [(2, None, [1, 1, 2, 3, 4]), (4, None, [1] * 5), (2, 3, [3] * 5)],
)
def test_how_many_chunks_there_are(
    ctx: RankContext, local_ranks: int, chunks: int | None, expected: list[int]
) -> None:
    """Rows of 16 KiB: 1024 of them to a node are two chunks of 8 MiB."""
    config = EpConfig(engine=ENGINE, network_chunks=chunks)
    with grid(ctx, local_ranks), closing(create_engine(ctx.group, 4, config)) as engine:
        plan = engine.plan(torch.tensor([[0, 3]]))
        found = [
            len(engine._pieces(dataclasses.replace(plan, most_tokens=tokens), torch.empty(1, 4096)))
            for tokens in (1, 1023, 1024, 1536, 10**6)
        ]
    assert found == expected, found


def test_chunks_that_differ_are_refused(ctx: RankContext) -> None:
    config = EpConfig(engine=ENGINE, network_chunks=3 if ctx.rank == 2 else 2)
    text = "network_chunks differs.*rank 1 has 2, rank 2 has 3"
    with grid(ctx), pytest.raises(InputError, match=text):
        create_engine(ctx.group, 8, config)


# --- what crosses --------------------------------------------------------------------------------


# Rank r has expert r.  The assignments of a token that are on one node cross together.
CROSSING = torch.tensor([[0, 1], [2, 3], [1, 2], [-1, -1], [3, -1]])


@pytest.mark.parametrize(
    ("max_recv_rows", "received"), [(None, [2, 2, 3, 3]), ("worst", [5, 5, 5, 5])]
)
def test_a_token_crosses_once_for_each_node_that_needs_it(
    ctx: RankContext, max_recv_rows: str | None, received: list[int]
) -> None:
    config = EpConfig(engine=ENGINE, max_recv_rows=max_recv_rows)
    with grid(ctx), closing(create_engine(ctx.group, 4, config)) as engine:
        plan = engine.plan(CROSSING)
    assert isinstance(plan, HierarchicalPlan)
    assert plan.crossing.sent == [received[0], received[2]]
    assert plan.crossing.received == [received[ctx.rank]] * 2
    # What the benchmark prints of exact mode: the busiest ranks, those of node 0, send 3.
    assert network_rows(tables_of([CROSSING] * 4, 4), [len(CROSSING)] * 4, 2) == (3, 4)
