"""The check of `ncclep bench`: it says what the oracle says and rejects what a bug would give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron_ncclep.benchmark import payload
from megatron_ncclep.benchmark.check import combine_problem, dispatch_problem
from megatron_ncclep.benchmark.routes import Routes, routes_of, wire_rows
from megatron_ncclep.benchmark.subjects import make_workload
from megatron_ncclep.engines.engine import (
    EVERY_PART_ROUNDED,
    HOME_PART_UNROUNDED,
    MACHINE_SUMS_ROUNDED,
)
from megatron_ncclep.testing.cases import Case, contract_cases
from megatron_ncclep.testing.oracle import (
    OraclePlan,
    oracle_combine,
    oracle_dispatch,
    oracle_plan,
    sources_in_order,
)

# Benchmarks have no static mode and no fp64.
CASES = [
    case
    for num_ranks in (1, 2, 3, 4)
    for case in contract_cases(num_ranks)
    if case.max_recv_rows is None and case.dtype != torch.float64
]
REJECTED = Case("rejected", (9, 7), 8, top_k=4, dtype=torch.bfloat16, alignment=16, dropped=0.1)


def routes(case: Case, ranks_on_machine: int | None = None) -> Routes:
    topk_idx = [case.topk_idx(rank) for rank in range(case.num_ranks)]
    sources = sources_in_order(case.num_ranks, ranks_on_machine)
    return routes_of(topk_idx, case.num_experts, case.alignment, sources)


def grids(case: Case) -> list[int | None]:
    """Ranks on a machine, for an engine to which they matter."""
    return [None, *(n for n in (1, 2) if case.num_ranks % n == 0)]


def oracle(case: Case, ranks_on_machine: int | None = None) -> OraclePlan:
    topk_idx = [case.topk_idx(rank) for rank in range(case.num_ranks)]
    return oracle_plan(
        topk_idx, case.num_experts, case.alignment, ranks_on_machine=ranks_on_machine
    )


def rows(kind: int, rank: int, length: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    row = torch.arange(length)
    return payload.rows(kind, torch.full_like(row, rank), row, width, dtype)


def dispatched(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the oracle makes of the payload."""
    x = [rows(payload.X, r, t, case.hidden, case.dtype) for r, t in enumerate(case.tokens)]
    w = [rows(payload.WEIGHTS, r, t, case.top_k, torch.float32) for r, t in enumerate(case.tokens)]
    return oracle_dispatch(oracle(case), x, w)


def combined(
    case: Case, reduction: str = HOME_PART_UNROUNDED, ranks_on_machine: int | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    plan = oracle(case, ranks_on_machine)
    sizes = [len(slots) for slots in plan.slots]
    y = [rows(payload.Y, r, n, case.hidden, case.dtype) for r, n in enumerate(sizes)]
    w = [rows(payload.GRAD_WEIGHTS, r, n, 1, torch.float32)[:, 0] for r, n in enumerate(sizes)]
    return oracle_combine(plan, y, w, reduction == EVERY_PART_ROUNDED, ranks_on_machine)


# --- it says what the oracle says ----------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case}-{case.num_ranks}")
def test_routes_are_the_oracles(case: Case) -> None:
    for grid in grids(case):
        plan, found = oracle(case, grid), routes(case, grid)
        assert found.routed.tolist() == plan.routed
        assert found.padded.tolist() == plan.padded
        for rank, slots in enumerate(plan.slots):
            expected = [
                -1 if s is None else (found.first[s.source] + s.token) * case.top_k + s.pick
                for s in slots
            ]
            assert found.picks_on(rank).tolist() == expected, grid


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case}-{case.num_ranks}")
def test_the_oracles_results_pass(case: Case) -> None:
    found = routes(case)
    for rank, (out, out_w) in enumerate(zip(*dispatched(case), strict=True)):
        assert dispatch_problem(found, rank, out, out_w, payload.X) is None
    for reduction in (HOME_PART_UNROUNDED, EVERY_PART_ROUNDED):
        for rank, (out, out_w) in enumerate(zip(*combined(case, reduction), strict=True)):
            assert combine_problem(found, rank, out, out_w, payload.Y, reduction) is None
    for grid in grids(case)[1:]:
        how = (payload.Y, MACHINE_SUMS_ROUNDED, grid)
        for rank, sums in enumerate(zip(*combined(case, how[1], grid), strict=True)):
            assert combine_problem(routes(case, grid), rank, *sums, *how) is None


def test_the_workload_is_what_the_check_expects() -> None:
    for rank in range(2):
        work = make_workload(REJECTED, rank)
        assert torch.equal(work.x, rows(payload.X, rank, len(work.x), 16, torch.bfloat16))
        assert torch.equal(work.w, rows(payload.WEIGHTS, rank, len(work.w), 4, torch.float32))
        assert len(work.y) == len(oracle(REJECTED).slots[rank])


def test_chunks_do_not_change_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ncclep.benchmark.check.CHUNK", 3 * REJECTED.hidden)
    found = routes(REJECTED)
    out, out_w = (both[1] for both in dispatched(REJECTED))
    assert dispatch_problem(found, 1, out, out_w, payload.X) is None
    out[-17] += 1  # in the last block; the padding follows
    assert f"row {len(out) - 17} " in (dispatch_problem(found, 1, out, out_w, payload.X) or "")
    sums, sums_w = (both[1] for both in combined(REJECTED))
    assert combine_problem(found, 1, sums, sums_w, payload.Y, HOME_PART_UNROUNDED) is None
    sums[5, 2] += 1
    problem = combine_problem(found, 1, sums, sums_w, payload.Y, HOME_PART_UNROUNDED)
    assert problem is not None
    assert "rank 1, token 5" in problem
    assert "column 2" in problem


# --- it rejects what a bug would give ------------------------------------------------------------

Wrong = Callable[[torch.Tensor, torch.Tensor], object]


def swap(tensor: torch.Tensor, one: int, other: int) -> None:
    tensor[[one, other]] = tensor[[other, one]].clone()


DISPATCH_BUGS: dict[str, Wrong] = {
    "two rows swapped": lambda rows, w: swap(rows, 0, 1),
    "two weights swapped": lambda rows, w: swap(w, 0, 1),
    "a row twice": lambda rows, w: rows[1].copy_(rows[0]),
    "one element": lambda rows, w: rows[2, 3].add_(0.0625),
    "padding not zero": lambda rows, w: rows[15].fill_(1),
    "padding minus zero": lambda rows, w: rows[15].fill_(-0.0),
    "a weight in the padding": lambda rows, w: w[15].fill_(1),
    "NaN": lambda rows, w: rows[0, 0].fill_(float("nan")),
}


@pytest.mark.parametrize("bug", DISPATCH_BUGS)
def test_wrong_dispatches_are_rejected(bug: str) -> None:
    out, out_w = (both[0] for both in dispatched(REJECTED))
    assert int(routes(REJECTED).routed[0, 0]) < 15  # rows 14 and 15 are padding
    DISPATCH_BUGS[bug](out, out_w)
    assert "rank 0, row" in (dispatch_problem(routes(REJECTED), 0, out, out_w, payload.X) or "")


def test_rows_of_another_rank_or_pass_are_rejected() -> None:
    found, (out, out_w) = routes(REJECTED), dispatched(REJECTED)
    assert dispatch_problem(found, 0, out[0], out_w[0], payload.GRAD_OUT)
    other = dispatched(Case("other", REJECTED.tokens, 8, 4, dtype=torch.bfloat16, alignment=16))
    assert dispatch_problem(found, 0, other[0][0], None, payload.X)
    assert "rows, expected" in (dispatch_problem(found, 0, out[0][1:], None, payload.X) or "")


COMBINE_BUGS: dict[str, Wrong] = {
    "two tokens swapped": lambda sums, w: swap(sums, 0, 1),
    "two picks swapped": lambda sums, w: w[0].copy_(w[0].flip(0)),
    "one element": lambda sums, w: sums[3, 1].add_(0.0625),
    "NaN": lambda sums, w: sums[0, 0].fill_(float("nan")),
    "a token left out": lambda sums, w: sums[2].zero_(),
}


@pytest.mark.parametrize("bug", COMBINE_BUGS)
def test_wrong_combines_are_rejected(bug: str) -> None:
    sums, sums_w = (both[0] for both in combined(REJECTED))
    COMBINE_BUGS[bug](sums, sums_w)
    problem = combine_problem(routes(REJECTED), 0, sums, sums_w, payload.Y, HOME_PART_UNROUNDED)
    assert "rank 0, token" in (problem or "")


def test_another_reduction_is_rejected() -> None:
    """Rounding the home rank's part changes bits, and the check sees it."""
    found = routes(REJECTED)
    for actual, declared in (
        (EVERY_PART_ROUNDED, HOME_PART_UNROUNDED),
        (HOME_PART_UNROUNDED, EVERY_PART_ROUNDED),
    ):
        sums, _ = combined(REJECTED, actual)
        assert combine_problem(found, 0, sums[0], None, payload.Y, declared)
    case = next(c for c in CASES if c.num_ranks == 4 and str(c) == "bfloat16-top-6")
    sums, _ = combined(case, MACHINE_SUMS_ROUNDED, 2)
    by_rail = (routes(case, 2), 3, sums[3], None, payload.Y)
    assert combine_problem(*by_rail, HOME_PART_UNROUNDED)
    assert combine_problem(*by_rail, MACHINE_SUMS_ROUNDED, 1)


# --- payload -------------------------------------------------------------------------------------


def test_payload_names_its_owner() -> None:
    """Rows differ between kinds, ranks and row numbers, also in 8 bits; and values are bounded."""
    row = torch.tensor([0, 1, 2, 1000, 65536])
    made = [
        tuple(values)
        for kind in range(6)
        for rank in range(8)
        for values in payload.rows(
            kind, torch.full_like(row, rank), row, 16, torch.bfloat16
        ).tolist()
    ]
    assert len(set(made)) == len(made)
    values = rows(payload.X, 3, 100, 100, torch.float32)
    assert 0.5 <= float(values.min()) < 0.51
    assert 1.49 < float(values.max()) < 1.5
    assert len(values.unique()) > 9900


# --- what crosses the wire -----------------------------------------------------------------------


def test_wire_rows_of_the_worked_example() -> None:
    """The example of wire_rows."""
    found = routes_of([torch.tensor([[2, 3], [0, 1]]), torch.tensor([[1, 2]])], 4, 1)
    assert wire_rows(found) == 1


def test_wire_rows_count_each_rank_once_and_take_the_busiest() -> None:
    """Three ranks with two experts each, top-3.

    rank 0, token 0: experts 2, 3, 4   a row to rank 1 (once for two experts) and one to rank 2
    rank 0, token 1: experts 0, 1, 5   a row to rank 2
    rank 1, token 0: experts 4, 5, -   a row to rank 2
    rank 2, token 0: experts 4, 5, 0   a row to rank 0
    Sent: 3, 1, 1.  Received: 1, 1, 3.  The busiest sends 3 or receives 3.
    """
    topk_idx = [
        torch.tensor([[2, 3, 4], [0, 1, 5]]),
        torch.tensor([[4, 5, -1]]),
        torch.tensor([[4, 5, 0]]),
    ]
    assert wire_rows(routes_of(topk_idx, 6, 16)) == 3
    # Without rank 0's second token the busiest receives: rank 2, from ranks 0 and 1.
    topk_idx[0] = topk_idx[0][:1]
    assert wire_rows(routes_of(topk_idx, 6, 1)) == 2


def test_one_rank_sends_nothing() -> None:
    assert wire_rows(routes_of([torch.tensor([[0, 1]])], 2, 1)) == 0
