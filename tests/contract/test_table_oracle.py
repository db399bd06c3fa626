"""The table oracle and the payloads of large tests: what the slow oracle says, on every case."""

from __future__ import annotations

import itertools

import pytest
import torch
from compare import assert_same_bits
from contract_cases import contract_cases, rows_limit_of
from draws import SAME_EXAMPLES, cases
from hypothesis import given, settings
from oracle import oracle_combine, oracle_dispatch, oracle_plan

from megatron_ncclep.benchmark import contents
from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.benchmark.contents import rows_of, weights_of
from megatron_ncclep.benchmark.table_oracle import slot_table, table_combine, table_dispatch


def check(case: Case) -> None:
    ranks = range(case.num_ranks)
    topk_idx = [case.topk_idx(rank) for rank in ranks]
    routing = (topk_idx, case.num_experts, case.alignment, rows_limit_of(case))
    plan = oracle_plan(*routing)
    tables = [slot_table(rank, *routing) for rank in ranks]
    for rank, table in enumerate(tables):
        assert table.num_rows == len(plan.slots[rank])
        assert table.routed.tolist() == plan.routed[rank]
        assert table.padded.tolist() == plan.padded[rank]
        assert int(table.num_dropped) == plan.num_dropped[rank]

    x = [case.rows(rank, case.tokens[rank], salt=2) for rank in ranks]
    w = [case.weights(rank) for rank in ranks]
    rows, row_w = oracle_dispatch(plan, x, w)
    for rank, table in enumerate(tables):
        received, values = table_dispatch(table, x, w)
        assert_same_bits(received, rows[rank], f"rows of rank {rank}")
        assert_same_bits(values, row_w[rank], f"weights of rank {rank}")
        middle = slice(len(received) // 3, 2 * len(received) // 3)
        received, values = table_dispatch(table, x, rows=middle)
        assert_same_bits(received, rows[rank][middle], f"some rows of rank {rank}")
        assert values is None

    y = [case.rows(rank, len(plan.slots[rank]), salt=5) for rank in ranks]
    for rounded, rank in itertools.product((False, True), ranks):
        out, topk_w = oracle_combine(plan, y, row_w, rounded)
        arguments = (tables, list(case.tokens), rank, case.top_k, y)
        for weights, expected in ((row_w, topk_w[rank]), (None, None)):
            sums, values = table_combine(*arguments, weights, rounded)
            assert_same_bits(sums, out[rank], f"output of rank {rank}")
            assert_same_bits(values, expected, f"weights back at rank {rank}")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_contract_cases(ranks: int) -> None:
    for case in contract_cases(ranks):
        check(case)


@settings(SAME_EXAMPLES)
@given(case=cases())
def test_random_cases(case: Case) -> None:
    check(case)


def all_rows(salt: int) -> torch.Tensor:
    return torch.cat([rows_of(rank, 300, 8, torch.bfloat16, salt, "cpu") for rank in range(3)])


def test_rows_name_rank_row_and_salt() -> None:
    rows = torch.cat([all_rows(salt) for salt in (0, 1, 2**31 - 1)])
    assert len(rows.unique(dim=0)) == len(rows)
    assert len(rows_of(0, 1, 4096, torch.float32, 7, "cpu").unique()) > 4000  # and the column
    assert -1 <= float(rows.min()) < -0.99 < 0.99 < float(rows.max()) <= 1


def test_rows_do_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = all_rows(salt=3)
    monkeypatch.setattr(contents, "PIECE", 56)
    assert torch.equal(all_rows(salt=3), whole)


def test_weights_are_all_different() -> None:
    weights = torch.cat([weights_of(rank, (2**16, 16), 5, "cpu").flatten() for rank in (0, 1, 15)])
    assert len(weights.unique()) == len(weights)
    assert 0 < float(weights.min()) < float(weights.max()) <= 1
