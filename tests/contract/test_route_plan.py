"""Routing map to top-k indices and weights."""

from __future__ import annotations

import pytest
import torch

from megatron_ncclep.errors import InputError
from megatron_ncclep.route_plan import topk_from_routing_map, weights_from_probs

F, T = False, True


def test_the_docstrings_example() -> None:
    routing_map = torch.tensor([[F, T, F, T], [F, F, T, F]])
    assert topk_from_routing_map(routing_map, 2).tolist() == [[1, 3], [2, -1]]


def test_the_map_is_the_truth_not_the_probabilities() -> None:
    """Equal probabilities for all experts, as some routers give: only the map tells them apart."""
    generator = torch.Generator().manual_seed(0)
    for top_k in (1, 3, 8):
        routing_map = torch.rand(50, 8, generator=generator).argsort(dim=1) < top_k
        topk_idx = topk_from_routing_map(routing_map, top_k)
        back = torch.zeros(50, 8, dtype=torch.bool).scatter(1, topk_idx, True)
        assert torch.equal(back, routing_map)
        assert bool((topk_idx[:, 1:] > topk_idx[:, :-1]).all())


def test_no_tokens() -> None:
    assert topk_from_routing_map(torch.zeros(0, 4, dtype=torch.bool), 2).shape == (0, 2)


def test_top_k_may_exceed_what_any_token_has() -> None:
    assert topk_from_routing_map(torch.tensor([[T, F]]), 4).tolist() == [[0, -1, -1, -1]]


@pytest.mark.parametrize("wrong", [torch.zeros(3, 4), torch.zeros(4, dtype=torch.bool)])
def test_a_wrong_map_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(InputError, match="must be bool"):
        topk_from_routing_map(wrong, 2)


def test_weights_and_their_gradient() -> None:
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]], requires_grad=True)
    weights = weights_from_probs(probs, torch.tensor([[1, 3], [2, -1]]))
    assert weights.tolist() == torch.tensor([[0.2, 0.4], [0.7, 0.0]]).tolist()
    weights.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert probs.grad.tolist() == [[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, 0.0]]


def test_nan_stays_with_its_pick() -> None:
    probs = torch.tensor([[float("nan"), 0.2], [float("nan"), 0.4]])
    weights = weights_from_probs(probs, torch.tensor([[1, -1], [0, 1]]))
    assert weights[0].tolist() == pytest.approx([0.2, 0.0])
    assert weights[1].isnan().tolist() == [True, False]
