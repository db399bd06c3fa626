"""Routing map and probabilities to top-k indices and weights, in plain torch."""

from __future__ import annotations

import pytest
import torch
from draws import SAME_EXAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ncclep.engines.engine import NOT_ROUTED, TOO_MANY_EXPERTS
from megatron_ncclep.errors import InputError
from megatron_ncclep.ops.expert_slices import to_all_slices
from megatron_ncclep.ops.routing import Routes, routes_and_weights

F, T = False, True
PROBABILITIES = st.sampled_from([0.0, -0.0, 1.0, 0.25, float("nan"), float("inf"), -1e30, 1e-40])


def test_experts_numbered_backwards_in_blocks() -> None:
    """Of 2 ranks with 3 experts each, the map's columns are experts 2, 1, 0 and 5, 4, 3."""
    routing_map = torch.tensor([[T, F, F, F, T, F], [F, T, F, F, F, T]])
    probs = torch.arange(12.0, requires_grad=True).view(2, 6)
    routes, weights = routes_and_weights(routing_map, probs, 2, 3)
    assert not weights.requires_grad
    assert routes.topk_idx.tolist() == [[2, 4], [1, 3]]
    assert weights.tolist() == [[0.0, 4.0], [7.0, 11.0]]
    grad_probs = routes.probs_gradient(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert grad_probs.tolist() == [[1, 0, 0, 0, 2, 0], [0, 3, 0, 0, 0, 4]]


NOTHING_ROUTED = torch.zeros(3, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("routing_map", "probs", "words"),
    [
        (torch.zeros(3, 4), torch.zeros(3, 4), "must be bool"),
        (NOTHING_ROUTED[0], torch.zeros(4), "must be bool"),
        (NOTHING_ROUTED, torch.zeros(4, 3), r"match routing_map, \[3, 4\] on cpu"),
        (NOTHING_ROUTED, torch.zeros(3, 4, device="meta"), r"match routing_map, \[3, 4\] on cpu"),
    ],
)
def test_what_is_refused(routing_map: torch.Tensor, probs: torch.Tensor, words: str) -> None:
    with pytest.raises(InputError, match=words):
        routes_and_weights(routing_map, probs, 2)


@st.composite
def maps(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A map, probabilities for it and top-k."""
    tokens, experts = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    cells = tokens * experts
    chosen = draw(st.lists(st.booleans(), min_size=cells, max_size=cells))
    probs = draw(st.lists(PROBABILITIES, min_size=cells, max_size=cells))
    shape = (tokens, experts)
    routing_map = torch.tensor(chosen, dtype=torch.bool).view(shape)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    return routing_map, torch.tensor(probs).view(shape).to(dtype), draw(st.integers(1, 6))


@settings(SAME_EXAMPLES, max_examples=150)
@given(case=maps())
def test_any_map(case: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    """The map is the truth: equal probabilities, infinities and NaN stay with their assignments."""
    routing_map, probs, top_k = case
    routes, weights = routes_and_weights(routing_map, probs, top_k)
    topk_idx = routes.topk_idx
    assert topk_idx.shape == weights.shape == (len(routing_map), top_k)
    assert weights.dtype == probs.dtype
    grad = torch.arange(1.0, 1.0 + weights.numel()).view(weights.shape).to(probs.dtype)
    expected_grad = torch.zeros_like(probs)
    for token, row in enumerate(routing_map.tolist()):
        experts = [expert for expert, is_chosen in enumerate(row) if is_chosen]
        filler = NOT_ROUTED
        if len(experts) > top_k:
            experts, filler = [], TOO_MANY_EXPERTS
        missing = top_k - len(experts)
        expected_grad[token, experts] = grad[token, : len(experts)]
        assert topk_idx[token].tolist() == experts + [filler] * missing
        expected = torch.cat([probs[token, experts], probs.new_zeros(missing)])
        # The same bits, NaN and the sign of zero included.
        assert torch.equal(weights[token].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(routes.probs_gradient(grad), expected_grad)


def test_assignments_of_sliced_experts_and_their_gradient() -> None:
    topk_idx = torch.tensor([[1, 2], [3, -1], [TOO_MANY_EXPERTS] * 2])
    weights = torch.tensor([[0.5, 0.25], [2.0, 0.0], [0.0, 0.0]])
    routes = Routes(topk_idx, num_experts=4, experts_per_block=1)
    sliced, copied = to_all_slices(routes, weights, num_local_experts=2, num_slices=2)
    assert sliced.topk_idx.tolist() == [[1, 3, 4, 6], [5, 7, -1, -1], [TOO_MANY_EXPERTS] * 4]
    assert copied.tolist() == [[0.5, 0.5, 0.25, 0.25], [2.0, 2.0, 0.0, 0.0], [0.0] * 4]
    grad = torch.tensor([[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 0.0, 0.0], [0.0] * 4])
    assert sliced.probs_gradient(grad).tolist() == [[0, 3, 12, 0], [0, 0, 0, 48], [0] * 4]
