"""Routing map and probabilities to top-k indices and weights, in plain torch."""

from __future__ import annotations

import pytest
import torch

from megatron_ncclep.errors import InputError
from megatron_ncclep.ops.routing import routes_and_weights

F, T = False, True
NAN = float("nan")


def topk_of(routing_map: torch.Tensor, top_k: int) -> torch.Tensor:
    return routes_and_weights(routing_map, routing_map.float(), top_k)[0].topk_idx


def test_the_docstrings_example_and_its_gradient() -> None:
    routing_map = torch.tensor([[F, T, F, T], [F, F, T, F]])
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]], requires_grad=True)
    routes, weights = routes_and_weights(routing_map, probs, 2)
    assert not weights.requires_grad
    assert routes.topk_idx.tolist() == [[1, 3], [2, -1]]
    assert weights.tolist() == torch.tensor([[0.2, 0.4], [0.7, 0.0]]).tolist()
    grad_probs = routes.probs_gradient(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert grad_probs.tolist() == [[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 3.0, 0.0]]


def test_the_map_is_the_truth_not_the_probabilities() -> None:
    """Equal probabilities for all experts, as some routers give: only the map tells them apart."""
    generator = torch.Generator().manual_seed(0)
    for top_k in (1, 3, 8):
        routing_map = torch.rand(50, 8, generator=generator).argsort(dim=1) < top_k
        topk_idx = topk_of(routing_map, top_k)
        back = torch.zeros(50, 8, dtype=torch.bool).scatter(1, topk_idx, True)
        assert torch.equal(back, routing_map)
        assert bool((topk_idx[:, 1:] > topk_idx[:, :-1]).all())


def test_experts_numbered_backwards_in_blocks() -> None:
    """Of 2 ranks with 3 experts each, the map's columns are experts 2, 1, 0 and 5, 4, 3."""
    routing_map = torch.tensor([[T, F, F, F, T, F], [F, T, F, F, F, T]])
    probs = torch.arange(12.0).view(2, 6)
    routes, weights = routes_and_weights(routing_map, probs, 2, 3)
    assert routes.topk_idx.tolist() == [[2, 4], [1, 3]]
    assert weights.tolist() == [[0.0, 4.0], [7.0, 11.0]]
    grad_probs = routes.probs_gradient(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert grad_probs.tolist() == [[1, 0, 0, 0, 2, 0], [0, 3, 0, 0, 0, 4]]


def test_no_tokens() -> None:
    assert topk_of(torch.zeros(0, 4, dtype=torch.bool), 2).shape == (0, 2)


def test_top_k_may_exceed_what_any_token_has() -> None:
    assert topk_of(torch.tensor([[T, F]]), 4).tolist() == [[0, -1, -1, -1]]


@pytest.mark.parametrize("wrong", [torch.zeros(3, 4), torch.zeros(4, dtype=torch.bool)])
def test_a_wrong_map_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(InputError, match="must be bool"):
        topk_of(wrong, 2)


@pytest.mark.parametrize("wrong", [torch.zeros(4, 3), torch.zeros(3, 4, device="meta")])
def test_probabilities_unlike_the_map_are_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(InputError, match=r"like routing_map, \[3, 4\] on cpu"):
        routes_and_weights(torch.zeros(3, 4, dtype=torch.bool), wrong, 2)


def test_nan_stays_with_its_assignment() -> None:
    probs = torch.tensor([[NAN, 0.2], [NAN, 0.4]])
    _, weights = routes_and_weights(torch.tensor([[F, T], [T, T]]), probs, 2)
    assert weights[0].tolist() == pytest.approx([0.2, 0.0])
    assert weights[1].isnan().tolist() == [True, False]
