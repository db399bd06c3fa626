"""The oracle itself: right on examples worked by hand, and it rejects what a bug would produce."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from compare import assert_dispatched, assert_same_bits
from oracle import (
    OraclePlan,
    Slot,
    oracle_combine,
    oracle_dispatch,
    oracle_plan,
)

from megatron_ncclep.testing.cases import Case


def test_the_worked_example_of_the_reference_engine() -> None:
    """The example at the top of engines/reference.py, slot by slot."""
    plan = oracle_plan([torch.tensor([[0, 1], [3, 0]]), torch.tensor([[2, 1]])], num_experts=4)
    assert plan.slots[0] == [Slot(0, 0, 0, 0), Slot(0, 1, 1, 0), Slot(0, 0, 1, 1), Slot(1, 0, 1, 1)]
    assert plan.slots[1] == [Slot(1, 0, 0, 0), Slot(0, 1, 0, 1)]
    assert plan.routed == [[2, 2], [1, 1]]


def test_alignment_pads_each_block() -> None:
    plan = oracle_plan([torch.tensor([[0], [0], [1]])], num_experts=3, alignment=16)
    assert plan.padded == [[16, 16, 0]]
    assert [row for row, slot in enumerate(plan.slots[0]) if slot] == [0, 1, 16]


def test_overflow_drops_the_last_source_and_token_first() -> None:
    # Expert 0 gets (0, t0) (0, t1) (1, t0); expert 1 gets (0, t1) (1, t0).  Three rows fit.
    topk = [torch.tensor([[0, -1], [0, 1]]), torch.tensor([[1, 0]])]
    plan = oracle_plan([torch.cat([t]) for t in topk], num_experts=2, max_recv_rows=3)
    assert plan.num_dropped == [0, 0]  # each rank holds one expert, with at most three rows
    plan = oracle_plan([topk[0]], num_experts=2, max_recv_rows=2)
    assert plan.slots == [[Slot(0, 0, 0, 0), Slot(0, 1, 0, 0)]]
    assert plan.num_dropped == [1]


def test_overflow_counts_whole_blocks_of_the_alignment() -> None:
    # Expert 0 opens an alignment block of 16, expert 1 would open a second one; 16 rows fit only
    # one.
    plan = oracle_plan([torch.tensor([[0, 1], [0, -1]])], 2, alignment=16, max_recv_rows=16)
    assert plan.slots[0][:2] == [Slot(0, 0, 0, 0), None]
    assert plan.num_dropped == [2]  # the assignment that did not fit and everything after it


@pytest.mark.parametrize(
    ("of_source", "of_other", "round_source_part", "total"),
    [
        # Source part 256 + 1 = 257 in fp32, not rounded; the other's 2 is exact; 259 rounds to 260.
        ((256.0, 1.0), (1.0, 1.0), False, 260.0),
        # With the other reduction the source part becomes 256, and 256 + 2 is 258.
        ((256.0, 1.0), (1.0, 1.0), True, 258.0),
        # The other's 256 + 1 becomes 256 on the wire; with 1 the sum is 257, so 256.
        ((1.0,), (256.0, 1.0), False, 256.0),
    ],
)
def test_combine_rounds_where_the_contract_says(
    of_source: tuple[float, ...], of_other: tuple[float, ...], round_source_part: bool, total: float
) -> None:
    """A token of rank 0 with experts on both ranks, in bf16, whose 8 bits round 256 + 1 to 256."""
    experts = [*range(len(of_source)), *range(2, 2 + len(of_other))]
    topk = [torch.tensor([experts]), torch.empty(0, len(experts), dtype=torch.long)]
    y = [torch.tensor(part).bfloat16()[:, None] for part in (of_source, of_other)]
    weights = [torch.zeros(len(part)) for part in (of_source, of_other)]
    out, _ = oracle_combine(oracle_plan(topk, num_experts=4), y, weights, round_source_part)
    assert out[0].item() == total


# -- What a bug would produce, made from a right result of rank 0. --------------------------------

CASE = Case("mutated", (6, 5), 4, 3, hidden=4, alignment=16, seed=1)
Result = tuple[torch.Tensor, torch.Tensor]


def right_result() -> tuple[OraclePlan, list[torch.Tensor], list[torch.Tensor], Result]:
    plan = oracle_plan([CASE.topk_idx(0), CASE.topk_idx(1)], CASE.num_experts, CASE.alignment)
    x = [CASE.rows(r, CASE.tokens[r], salt=2) for r in range(2)]
    w = [CASE.weights(r) for r in range(2)]
    rows, row_w = oracle_dispatch(plan, x, w)
    return plan, x, w, (rows[0], row_w[0])


def rows_of(plan: OraclePlan, **wanted: int) -> list[int]:
    """Rows of rank 0 whose slot has the wanted values."""
    return [
        row
        for row, slot in enumerate(plan.slots[0])
        if slot is not None and all(getattr(slot, k) == v for k, v in wanted.items())
    ]


def swap(tensor: torch.Tensor, a: int, b: int) -> None:
    tensor[[a, b]] = tensor[[b, a]]


def two_rows_swapped(plan: OraclePlan, x: list, rows: torch.Tensor, w: torch.Tensor) -> None:
    a, b = rows_of(plan, local_expert=0)[:2]
    swap(rows, a, b)


def another_ranks_row(plan: OraclePlan, x: list, rows: torch.Tensor, w: torch.Tensor) -> None:
    row = rows_of(plan, source=0)[0]
    rows[row] = x[1][0]


def two_weights_of_a_token_swapped(
    plan: OraclePlan, x: list, rows: torch.Tensor, w: torch.Tensor
) -> None:
    for row in rows_of(plan, source=0):
        slot = plan.slots[0][row]
        others = [r for r in rows_of(plan, source=0, token=slot.token) if r != row]
        if others:
            swap(w, row, others[0])
            return
    raise AssertionError("the case has no token with two experts on rank 0")


def wrong_local_expert(plan: OraclePlan, x: list, rows: torch.Tensor, w: torch.Tensor) -> None:
    a, b = rows_of(plan, local_expert=0)[0], rows_of(plan, local_expert=1)[-1]
    swap(rows, a, b)
    swap(w, a, b)


def one_assignment_twice_and_another_never(
    plan: OraclePlan, x: list, rows: torch.Tensor, w: torch.Tensor
) -> None:
    a, b = rows_of(plan, local_expert=1)[:2]
    rows[b], w[b] = rows[a], w[a]


def padding_row_not_zero(plan: OraclePlan, x: list, rows: torch.Tensor, w: torch.Tensor) -> None:
    rows[plan.slots[0].index(None)] = 1e-30


def padding_weight_not_zero(plan: OraclePlan, x: list, rows: torch.Tensor, w: torch.Tensor) -> None:
    w[plan.slots[0].index(None)] = 1e-30


def a_row_too_many(plan: OraclePlan, x: list, rows: torch.Tensor, w: torch.Tensor) -> None:
    rows.resize_(len(rows) + 1, rows.shape[1])


MUTATIONS = [
    two_rows_swapped,
    another_ranks_row,
    two_weights_of_a_token_swapped,
    wrong_local_expert,
    one_assignment_twice_and_another_never,
    padding_row_not_zero,
    padding_weight_not_zero,
    a_row_too_many,
]


def test_the_right_result_is_accepted() -> None:
    plan, x, w, (rows, row_w) = right_result()
    assert_dispatched(plan, x, w, 0, rows, row_w)


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_dispatch_rejects(mutate: Callable[..., None]) -> None:
    plan, x, w, (rows, row_w) = right_result()
    mutate(plan, x, rows, row_w)
    with pytest.raises(AssertionError, match=r"rank 0(, row \d+ \(| has \d+ rows)"):
        assert_dispatched(plan, x, w, 0, rows, row_w)


@pytest.mark.parametrize(
    "mutate",
    [
        two_rows_swapped,
        another_ranks_row,
        wrong_local_expert,
        one_assignment_twice_and_another_never,
    ],
    ids=lambda f: f.__name__,
)
def test_combine_rejects(mutate: Callable[..., None]) -> None:
    """Experts that differ turn a wrong row into a wrong sum, which the exact comparison sees."""
    plan, x, _, (rows, row_w) = right_result()
    other = torch.ones(len(plan.slots[1]), CASE.hidden)

    def sums() -> list[torch.Tensor]:
        experts = torch.tensor([float(s.local_expert + 1) if s else 0.0 for s in plan.slots[0]])
        y = [rows * experts[:, None] * row_w[:, None], other]
        return oracle_combine(plan, y, [row_w, torch.zeros(len(other))])[0]

    expected = sums()
    mutate(plan, x, rows, row_w)
    wrong = sums()
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(torch.cat(wrong), torch.cat(expected), "outputs")


def test_returned_weights_reject_a_swap() -> None:
    plan, _, _, (rows, row_w) = right_result()
    other = torch.zeros(len(plan.slots[1]), CASE.hidden)
    y = [rows, other]
    _, expected = oracle_combine(plan, y, [row_w.clone(), other[:, 0]])
    two_weights_of_a_token_swapped(plan, [], rows, row_w)
    _, wrong = oracle_combine(plan, y, [row_w, other[:, 0]])
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(wrong[0], expected[0], "weights")


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), r"here\[0\] is 0.0, expected -0.0"),
        (torch.ones(2, 3), torch.ones(3, 2), r"here: torch.float32 \[2, 3\], expected"),
        (torch.ones(2), torch.ones(2).bfloat16(), "expected torch.bfloat16"),
        (
            torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
            torch.tensor([[1.0, 2.0], [3.0, 5.0]]),
            r"here\[1, 1\] is 4.0, expected 5.0; 1 of 4 elements differ",
        ),
    ],
)
def test_comparison_is_exact_and_says_where(
    actual: torch.Tensor, expected: torch.Tensor, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(actual, expected, "here")


def test_comparison_takes_equal_nan_for_equal() -> None:
    nan = torch.tensor([float("nan")], dtype=torch.float16)
    assert_same_bits(nan, nan.clone(), "NaN")
