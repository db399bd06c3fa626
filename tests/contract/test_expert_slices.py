"""Assignments of experts that several ranks hold in slices."""

from __future__ import annotations

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
