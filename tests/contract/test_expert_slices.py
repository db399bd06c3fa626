"""Assignments of experts that several ranks hold in slices."""

from __future__ import annotations

import pytest
import torch

from megatron_ncclep.engines.engine import TOO_MANY_EXPERTS
from megatron_ncclep.ops.expert_slices import to_all_slices
from megatron_ncclep.ops.routing import Routes


def test_the_docstrings_example_and_its_gradient() -> None:
    topk_idx = torch.tensor([[1, 2], [3, -1], [TOO_MANY_EXPERTS] * 2])
    weights = torch.tensor([[0.5, 0.25], [2.0, 0.0], [0.0, 0.0]])
    routes = Routes(topk_idx, num_experts=4, block=1)
    sliced, copied = to_all_slices(routes, weights, num_local_experts=2, num_slices=2)
    assert sliced.topk_idx.tolist() == [[1, 3, 4, 6], [5, 7, -1, -1], [TOO_MANY_EXPERTS] * 4]
    assert copied.tolist() == [[0.5, 0.5, 0.25, 0.25], [2.0, 2.0, 0.0, 0.0], [0.0] * 4]
    grad = torch.tensor([[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 0.0, 0.0], [0.0] * 4])
    assert sliced.probs_gradient(grad).tolist() == [[0, 3, 12, 0], [0, 0, 0, 48], [0] * 4]


@pytest.mark.parametrize(("num_local", "num_slices"), [(1, 3), (3, 2), (3, 4)])
def test_against_a_table_of_ranks(num_local: int, num_slices: int) -> None:
    """Two expert-parallel ranks: what each rank of the engine's group holds, slice by slice."""
    held = [
        (rank * num_local + local, piece)
        for rank in range(2)
        for piece in range(num_slices)
        for local in range(num_local)
    ]
    topk_idx = torch.arange(2 * num_local)[:, None]
    routes = Routes(topk_idx, 2 * num_local, block=1)
    sliced, _ = to_all_slices(routes, torch.ones_like(topk_idx), num_local, num_slices)
    for expert, row in enumerate(sliced.topk_idx.tolist()):
        assert [held[i] for i in row] == [(expert, piece) for piece in range(num_slices)]


def test_no_tokens() -> None:
    none = Routes(torch.empty(0, 2, dtype=torch.int64), num_experts=8, block=1)
    sliced, copied = to_all_slices(none, torch.empty(0, 2), 4, 3)
    assert sliced.topk_idx.shape == copied.shape == (0, 6)
    assert sliced.probs_gradient(torch.empty(0, 6)).shape == (0, 8)
