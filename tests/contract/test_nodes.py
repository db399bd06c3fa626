"""Several nodes: the grid of ranks, and the contract over it, with ranks of one host.

All of the contract's tests run over a grid with, for 2 x 2:

    NCCLEP_LOCAL_RANKS=2 pytest tests/contract --engine hierarchical --ranks 4
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from contract_cases import caps_of, contract_cases, for_engine
from patience import PatientPool, patient
from run_case import all_steps_on_rank, assert_steps, ranks_on_node
from test_autograd import step_of_both
from test_batch_invariance import BATCHES, CASES, watch
from test_overflow import TOO_MUCH, raised_on_rank

from megatron_ncclep.benchmark.shapes import network_rows, tables_of
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.hierarchical import engine as hierarchical
from megatron_ncclep.engines.hierarchical.engine import HierarchicalPlan
from megatron_ncclep.errors import EngineUnavailableError, EpError, InputError, PeerError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.nodes import Nodes, nodes_from
from megatron_ncclep.ranks.pool import RankContext, RankPool
from megatron_ncclep.testing.cases import Case, refusal

ENGINE = "hierarchical"
# Ranks of this host that count as several nodes.
pytestmark = [pytest.mark.needs_ranks(4), pytest.mark.cpu_only]


def in_grid(ctx: RankContext, local_ranks: Any, function: Callable[..., Any], *args: Any) -> Any:
    """What `function` returns where so many ranks (each rank: its own entry) are a node."""
    own = local_ranks[ctx.rank] if isinstance(local_ranks, tuple) else local_ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCLEP_LOCAL_RANKS", str(own))
        EpGroup.of(ctx.group).close()  # the grid that another test has found
        try:
            return function(ctx, *args)
        finally:
            EpGroup.of(ctx.group).close()


# --- the grid ------------------------------------------------------------------------------------


def test_the_docstrings_grid() -> None:
    nodes = nodes_from(["a", "a", "a", "b", "b", "b"])
    assert nodes == Nodes(2, 3)
    assert nodes.ranks_by_rail() == [0, 3, 1, 4, 2, 5]
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


def error_on_rank(ctx: RankContext) -> tuple[str, str]:
    with pytest.raises(EpError) as caught:
        create_engine(ctx.group, 8, EpConfig(engine=ENGINE))
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    ("local_ranks", "error", "text"),
    [
        (3, EngineUnavailableError, "node 0 has ranks 0 to 2, node 1 has rank 3"),
        ((2, 2, 2, 0), InputError, "rank 3: NCCLEP_LOCAL_RANKS='0': not a positive number"),
        ((2, 2, 1, 2), EngineUnavailableError, "node 0 has ranks 0 to 1, node 2 has rank 2"),
    ],
)
def test_every_rank_is_told_that_there_is_no_grid(
    pool: RankPool, local_ranks: Any, error: type, text: str
) -> None:
    for name, said in pool.run(in_grid, local_ranks, error_on_rank, ranks=4):
        assert name == error.__name__
        assert text in said


def auto_on_rank(ctx: RankContext) -> str:
    with closing(create_engine(ctx.group, 8, EpConfig())) as engine:
        return engine.caps.name


def test_auto_leaves_nodes_without_gpus_to_reference(pool: RankPool) -> None:
    assert pool.run(in_grid, 2, auto_on_rank, ranks=4) == ["reference"] * 4


# --- the contract over it ------------------------------------------------------------------------


def possible_cases(num_ranks: int) -> list[Case]:
    return [c for c in contract_cases(num_ranks) if refusal(c, caps_of(ENGINE)) is None]


def every_case_on_rank(
    ctx: RankContext, cases: list[Case], chunks: int | None = None
) -> list[list[torch.Tensor]]:
    return [all_steps_on_rank(ctx, case, ENGINE, network_chunks=chunks) for case in cases]


def assert_all_steps(cases: list[Case], results: list[list[list[torch.Tensor]]]) -> None:
    """Compare what `every_case_on_rank` gave on each rank with the oracle."""
    assert len(cases) > 5
    for case, of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        assert_steps(case, ENGINE, list(of_ranks))


@pytest.mark.parametrize("local_ranks", [1, 2, 4])
def test_every_step_is_the_oracles(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch, local_ranks: int
) -> None:
    monkeypatch.setenv("NCCLEP_LOCAL_RANKS", str(local_ranks))
    cases = possible_cases(4)
    assert ranks_on_node(4) == local_ranks
    assert_all_steps(cases, pool.run(in_grid, local_ranks, every_case_on_rank, cases, ranks=4))


@pytest.mark.parametrize("local_ranks", [1, 2])
def test_company_changes_no_bit(pool: RankPool, local_ranks: int) -> None:
    for times in pool.run(in_grid, local_ranks, watch, CASES[0], ENGINE, ranks=4):
        assert times > BATCHES // 2


def test_three_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLEP_LOCAL_RANKS", "2")
    cases = possible_cases(6)
    with closing(PatientPool(6)) as pool:
        assert_all_steps(cases, pool.run(every_case_on_rank, cases))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_the_reference_engines(pool: RankPool, dtype: torch.dtype) -> None:
    """Forward and backward, compared with the reference engine on the same grid."""
    case = Case("gradients", (25, 12, 0, 31), 16, 4, dtype=dtype, alignment=16, dropped=0.2)
    case = for_engine(case, caps_of(ENGINE))
    for rank, (mine, expected) in enumerate(
        pool.run(in_grid, 2, step_of_both, case, ENGINE, ranks=4)
    ):
        for what, a, b in zip(("out", "x.grad", "w.grad"), mine, expected, strict=True):
            assert_same_bits(a, b, f"rank {rank}, {what}")


@pytest.mark.parametrize("rows", [64, "0.5x"])
def test_all_nodes_are_told_that_rows_were_dropped(pool: RankPool, rows: int | str) -> None:
    """Rows are dropped on node 0 alone; the other one's ranks must not step on."""
    case = dataclasses.replace(TOO_MUCH, tokens=(40,) * 4, max_recv_rows=rows)
    step = dataclasses.replace(case, skew=0.0, dropped=0.9)
    results = pool.run(in_grid, 2, raised_on_rank, case, ENGINE, step, ranks=4)
    for first, raised, last in results:
        assert first == last == ""
        assert f"with max_recv_rows={rows}, rank 0 needed " in raised
        assert raised == results[0][1]


def wrong_on_rank(ctx: RankContext, culprit: int) -> tuple[str, str]:
    """The error of a wrong dispatch on one rank, and a result of the next dispatch."""
    with closing(
        create_engine(ctx.group, 8, EpConfig(engine=ENGINE, timeout_s=patient(60)))
    ) as engine:
        plan = engine.plan(torch.tensor([[0, 7]]))
        x = torch.ones(1 + (ctx.rank == culprit), 16)
        with pytest.raises(InputError) as caught:
            engine.dispatch(plan, x)
        rows, _ = engine.dispatch(plan, x[:1])
    return str(caught.value), str(list(rows.shape))


def test_all_nodes_are_told_of_a_wrong_argument(pool: RankPool) -> None:
    results = pool.run(in_grid, 2, wrong_on_rank, 3, ranks=4)
    assert {text for text, _ in results} == {
        "dispatch: rank 3: x has shape [2, 16]: the plan expects [1, hidden]"
    }
    assert [shape for _, shape in results] == ["[4, 16]", "[0, 16]", "[0, 16]", "[4, 16]"]


class Failed:
    """What engines of a group share, after a wait on its device that passed its deadline."""

    def check(self) -> None:
        raise PeerError("rank 1 did not come in dispatch")

    def close(self) -> None:
        pass


def failed_inside_on_rank(ctx: RankContext) -> None:
    engine = create_engine(ctx.group, 8, EpConfig(engine=ENGINE))
    assert isinstance(engine, hierarchical.HierarchicalEngine)
    group = EpGroup.of(ctx.group)
    group.check()
    engine._grid.local.share("planted", Failed)
    with pytest.raises(PeerError, match="rank 1 did not come in dispatch"):
        group.check()


def test_what_fails_inside_a_node_is_told_before_an_optimizer_steps(pool: RankPool) -> None:
    """The group of a node's ranks is not in torch's list, so only this engine checks it."""
    pool.run(in_grid, 2, failed_inside_on_rank, ranks=4)


def deadlines_on_rank(ctx: RankContext) -> list[float]:
    """Deadlines within a node: in an engine's first step, after it, and in another engine's."""
    config = EpConfig(engine=ENGINE, timeout_s=50.0, first_timeout_s=70.0)
    engine = create_engine(ctx.group, 8, config)
    assert isinstance(engine, hierarchical.HierarchicalEngine)
    inside, found = engine._grid.local, []
    found.append(inside.deadline_s(config))
    engine.plan(torch.tensor([[0, 7]]))
    EpGroup.of(ctx.group).check()
    found.append(inside.deadline_s(config))
    create_engine(ctx.group, 8, config)
    return [*found, inside.deadline_s(config)]


def test_the_ranks_of_a_node_are_in_the_step_of_the_group(pool: RankPool) -> None:
    assert pool.run(in_grid, 2, deadlines_on_rank, ranks=4) == [[70.0, 50.0, 70.0]] * 4


# --- chunks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_chunks_change_no_bit(pool: RankPool, monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    monkeypatch.setenv("NCCLEP_LOCAL_RANKS", "2")
    cases = possible_cases(4)
    assert_all_steps(cases, pool.run(in_grid, 2, every_case_on_rank, cases, chunks, ranks=4))


def number_of_chunks_on_rank(ctx: RankContext, chunks: int | None) -> list[int]:
    config = EpConfig(engine=ENGINE, network_chunks=chunks)
    with closing(create_engine(ctx.group, 4, config)) as engine:
        plan = engine.plan(torch.tensor([[0, 3]]))
        return [
            len(engine._pieces(dataclasses.replace(plan, most_tokens=tokens), torch.empty(1, 4096)))
            for tokens in (1, 1023, 1024, 1536, 10**6)
        ]


@pytest.mark.parametrize(
    ("local_ranks", "chunks", "expected"),
    [(2, None, [1, 1, 2, 3, 4]), (4, None, [1] * 5), (2, 3, [3] * 5)],
)
def test_how_many_chunks_there_are(
    pool: RankPool, local_ranks: int, chunks: int | None, expected: list[int]
) -> None:
    """Rows of 16 KiB: 1024 of them to a node are two chunks of 8 MiB."""
    found = pool.run(in_grid, local_ranks, number_of_chunks_on_rank, chunks, ranks=4)
    assert found == [expected] * 4


def ignored_on_rank(ctx: RankContext, chunks: tuple[int, ...], engine_name: str) -> str:
    config = EpConfig(engine=engine_name, network_chunks=chunks[ctx.rank])
    with pytest.raises(InputError) as caught:
        create_engine(ctx.group, 8, config)
    return str(caught.value)


def test_chunks_that_are_ignored_or_differ_are_refused(pool: RankPool) -> None:
    for text in pool.run(ignored_on_rank, (2, 2, 2, 2), "reference", ranks=4):
        assert "engine 'reference' would ignore network_chunks" in text
    for text in pool.run(in_grid, 2, ignored_on_rank, (2, 2, 3, 2), ENGINE, ranks=4):
        assert "network_chunks differs" in text
        assert "rank 1 has 2, rank 2 has 3" in text


# --- what crosses --------------------------------------------------------------------------------


# Rank r has expert r.  The assignments of a token that are on one node cross together.
CROSSING = torch.tensor([[0, 1], [2, 3], [1, 2], [-1, -1], [3, -1]])


def crossings_on_rank(ctx: RankContext, max_recv_rows: str | None) -> tuple[list[int], list[int]]:
    config = EpConfig(engine=ENGINE, max_recv_rows=max_recv_rows)
    with closing(create_engine(ctx.group, 4, config)) as engine:
        plan = engine.plan(CROSSING)
    assert isinstance(plan, HierarchicalPlan)
    return plan.tokens_sent, plan.tokens_received


def test_a_token_crosses_once_for_each_node_that_needs_it(pool: RankPool) -> None:
    exact = pool.run(in_grid, 2, crossings_on_rank, None, ranks=4)
    assert exact == [([2, 3], [2, 2]), ([2, 3], [2, 2]), ([2, 3], [3, 3]), ([2, 3], [3, 3])]
    # What the benchmark prints of it: the busiest ranks, those of node 0, send 3.
    assert network_rows(tables_of([CROSSING] * 4, 4), [len(CROSSING)] * 4, 2) == (3, 4)
    static = pool.run(in_grid, 2, crossings_on_rank, "worst", ranks=4)
    assert static == [([5, 5], [5, 5])] * 4
