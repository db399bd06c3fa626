"""The oracle itself: right on examples worked by hand, and it rejects what a bug would produce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from oracle import Slot, oracle_combine, oracle_dispatch, oracle_plan

from megatron_ncclep.benchmark.cases import Case


def test_the_worked_example_of_the_reference_engine() -> None:
    """The example at the top of engines/reference/engine.py, slot by slot."""
    plan = oracle_plan([torch.tensor([[0, 1], [3, 0]]), torch.tensor([[2, 1]])], num_experts=4)
    assert plan.slots[0] == [Slot(0, 0, 0, 0), Slot(0, 1, 1, 0), Slot(0, 0, 1, 1), Slot(1, 0, 1, 1)]
    assert plan.slots[1] == [Slot(1, 0, 0, 0), Slot(0, 1, 0, 1)]
    assert plan.routed == [[2, 2], [1, 1]]


def test_alignment_pads_each_block() -> None:
    plan = oracle_plan([torch.tensor([[0], [0], [1]])], num_experts=3, alignment=16)
    assert plan.padded == [[16, 16, 0]]
    assert [row for row, slot in enumerate(plan.slots[0]) if slot] == [0, 1, 16]


def test_overflow_drops_the_last_tokens_first() -> None:
    """Expert 0 gets tokens 0 and 1, expert 1 would get token 1."""
    topk = [torch.tensor([[0, -1], [0, 1]])]
    plan = oracle_plan(topk, num_experts=2, max_recv_rows=2)
    assert plan.slots == [[Slot(0, 0, 0, 0), Slot(0, 1, 0, 0)]]
    assert plan.num_dropped == [1]
    # On two ranks each has one expert, with at most three rows.
    plan = oracle_plan([*topk, torch.tensor([[1, 0]])], num_experts=2, max_recv_rows=3)
    assert plan.num_dropped == [0, 0]


def test_overflow_counts_whole_blocks_of_the_alignment() -> None:
    """Expert 0 opens a block of 16; 16 rows fit only one, and nothing fits after what did not."""
    plan = oracle_plan([torch.tensor([[0, 1], [0, -1]])], 2, alignment=16, max_recv_rows=16)
    assert plan.slots[0][:2] == [Slot(0, 0, 0, 0), None]
    assert plan.num_dropped == [2]


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


class Result:
    """A right result of rank 0, and what belongs to it."""

    def __init__(self) -> None:
        topk_idx = [CASE.topk_idx(0), CASE.topk_idx(1)]
        self.plan = oracle_plan(topk_idx, CASE.num_experts, CASE.alignment)
        self.x = [CASE.rows(r, CASE.tokens[r], salt=2) for r in range(2)]
        self.w = [CASE.weights(r) for r in range(2)]
        (self.rows, self.others), (self.row_w, _) = oracle_dispatch(self.plan, self.x, self.w)
        self.padding = self.plan.slots[0].index(None)

    def where(self, **wanted: int) -> list[int]:
        """Rows whose slot has the wanted values."""
        return [
            row
            for row, slot in enumerate(self.plan.slots[0])
            if slot is not None and all(getattr(slot, k) == v for k, v in wanted.items())
        ]

    def of_one_token(self) -> list[int]:
        """The rows of a token with two experts here."""
        tokens = ((source, token) for source in range(2) for token in range(CASE.tokens[source]))
        found = (self.where(source=source, token=token) for source, token in tokens)
        return next(rows for rows in found if len(rows) == 2)

    def received(self) -> list[Any]:
        """Rows and weights."""
        return [self.rows.tolist(), self.row_w.tolist()]

    def combined(self) -> list[torch.Tensor]:
        """What comes back to rank 0 from experts that differ: sums, and weights."""
        slots = self.plan.slots[0]
        factors = torch.tensor([float(slot.local_expert + 1) if slot else 0.0 for slot in slots])
        y, other = self.rows * factors[:, None], torch.ones_like(self.others)
        out, weights = oracle_combine(self.plan, [y, other], [self.row_w, other[:, 0]])
        return [out[0], weights[0]]


def swap(rows: list[int], *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor[rows] = tensor[rows[::-1]]


def repeat(rows: list[int], *tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor[rows[1]] = tensor[rows[0]]


SEEN_IN_BOTH: dict[str, Callable[[Result], object]] = {
    "two rows swapped": lambda r: swap(r.where(local_expert=0)[:2], r.rows),
    "a row of another rank": lambda r: r.rows[r.where(source=0)[0]].copy_(r.x[1][0]),
    "two weights of a token swapped": lambda r: swap(r.of_one_token(), r.row_w),
    "another local expert": lambda r: swap(
        [r.where(local_expert=0)[0], r.where(local_expert=1)[-1]], r.rows, r.row_w
    ),
    "one assignment twice, another never": lambda r: repeat(
        r.where(local_expert=1)[:2], r.rows, r.row_w
    ),
}
MUTATIONS: dict[str, Callable[[Result], object]] = {
    **SEEN_IN_BOTH,
    "padding is not zero": lambda r: r.rows[r.padding].fill_(1e-30),
    "the weight of padding is not zero": lambda r: r.row_w[r.padding].fill_(1e-30),
    "a row too many": lambda r: r.rows.resize_(len(r.rows) + 1, CASE.hidden),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_mistakes_are_seen(name: str) -> None:
    """In what dispatch delivers, and in sums of experts that differ."""
    expected, result = Result(), Result()
    assert result.received() == expected.received()
    MUTATIONS[name](result)
    assert result.received() != expected.received()
    if name in SEEN_IN_BOTH:
        assert not all(map(torch.equal, result.combined(), expected.combined()))


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), r"here\[0\] is 0.0, expected -0.0"),
        (torch.ones(2, 3), torch.ones(3, 2), r"here: torch.float32 \[2, 3\], expected"),
        (torch.ones(2), torch.ones(2).bfloat16(), "expected torch.bfloat16"),
        (torch.ones(2), None, "here: an unexpected tensor"),
        (
            torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
            torch.tensor([[1.0, 2.0], [3.0, 5.0]]),
            r"here\[1, 1\] is 4.0, expected 5.0; 1 of 4 elements differ",
        ),
    ],
)
def test_comparison_is_exact_and_says_where(
    actual: torch.Tensor, expected: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_bits(actual, expected, "here")


def test_comparison_takes_equal_nan_for_equal() -> None:
    nan = torch.tensor([float("nan")], dtype=torch.float16)
    assert_same_bits(nan, nan.clone(), "NaN")
