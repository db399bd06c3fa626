"""Static mode by dropping at home: what is kept is what the oracle keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ncclep.engines.overflow import drop_what_does_not_fit
from megatron_ncclep.testing.cases import Case, contract_cases
from megatron_ncclep.testing.oracle import oracle_plan


def kept_by_the_oracle(case: Case, limit: int) -> list[torch.Tensor]:
    """Each rank's topk_idx, with -1 for the picks that have no slot."""
    topk = [case.topk_idx(rank) for rank in range(case.num_ranks)]
    kept = [torch.full_like(picks, -1) for picks in topk]
    for slots in oracle_plan(topk, case.num_experts, case.alignment, limit).slots:
        for slot in slots:
            if slot is not None:
                pick = topk[slot.source][slot.token, slot.pick]
                kept[slot.source][slot.token, slot.pick] = pick
    return kept


def check(case: Case, limit: int) -> None:
    topk = [case.topk_idx(rank) for rank in range(case.num_ranks)]
    counts = torch.stack([picks[picks >= 0].bincount(minlength=case.num_experts) for picks in topk])
    for rank, expected in enumerate(kept_by_the_oracle(case, limit)):
        kept = drop_what_does_not_fit(topk[rank], counts, rank, case.alignment, limit)
        assert torch.equal(kept, expected), f"rank {rank}"


@pytest.mark.parametrize(
    "case", [c for ranks in (1, 2, 3) for c in contract_cases(ranks) if c.max_recv_rows], ids=str
)
def test_contract_cases(case: Case) -> None:
    assert case.max_recv_rows is not None
    check(case, case.max_recv_rows)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    local_experts=st.integers(1, 4),
    alignment=st.sampled_from([1, 2, 16]),
    stretches=st.integers(1, 40),
    skew=st.sampled_from([0.0, 0.7, 100.0]),
    dropped=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 100),
)
def test_random_routings(
    tokens: list[int],
    local_experts: int,
    alignment: int,
    stretches: int,
    skew: float,
    dropped: float,
    seed: int,
) -> None:
    num_experts = local_experts * len(tokens)
    case = Case(
        "random",
        tuple(tokens),
        num_experts,
        top_k=min(3, num_experts),
        alignment=alignment,
        skew=skew,
        dropped=dropped,
        seed=seed,
    )
    check(case, alignment * stretches)


def test_worked_example() -> None:
    """The one in the module's docstring; a pick that opens no stretch fits after a full one."""
    first, second = torch.tensor([[0], [0], [0]]), torch.tensor([[0], [1]])
    counts = torch.tensor([[3, 0, 0, 0], [1, 1, 0, 0]])  # rank 0 has experts 0 and 1
    assert drop_what_does_not_fit(first, counts, 0, 2, 4).tolist() == [[0], [0], [0]]
    assert drop_what_does_not_fit(second, counts, 1, 2, 4).tolist() == [[0], [-1]]
