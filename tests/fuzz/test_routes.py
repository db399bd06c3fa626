"""Any routing map and any routing: what loops over tokens and assignments make of them."""

from __future__ import annotations

from typing import Any

import torch
from anything import FUZZ, attempt
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ncclep.engines.engine import NOT_ROUTED, TOO_MANY_EXPERTS
from megatron_ncclep.engines.overflow import drop_what_does_not_fit
from megatron_ncclep.ops.routing import routes_and_weights

NAN = float("nan")
probabilities = st.sampled_from([0.0, -0.0, 1.0, 0.25, NAN, float("inf"), -1e30, 1e-40])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


@st.composite
def maps(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A map, probabilities for it and top-k."""
    tokens, experts = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    cells = tokens * experts
    chosen = draw(st.lists(st.booleans(), min_size=cells, max_size=cells))
    probs = draw(st.lists(probabilities, min_size=cells, max_size=cells))
    shape = (tokens, experts)
    routing_map = torch.tensor(chosen, dtype=torch.bool).view(shape)
    return routing_map, torch.tensor(probs).view(shape).to(draw(DTYPES)), draw(st.integers(1, 6))


@FUZZ
@given(case=maps())
def test_any_map(case: tuple[torch.Tensor, torch.Tensor, int]) -> None:
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


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@FUZZ
@given(shape=SHAPES, other=SHAPES, dtypes=st.tuples(DTYPES | st.just(torch.bool), DTYPES))
@example(shape=(2, 3), other=(3, 2), dtypes=(torch.bool, torch.float32))
def test_a_map_of_another_form(shape: Any, other: Any, dtypes: Any) -> None:
    routing_map, probs = torch.zeros(shape, dtype=dtypes[0]), torch.zeros(other, dtype=dtypes[1])
    _, refusal = attempt(lambda: routes_and_weights(routing_map, probs, 2))
    is_map = len(shape) == 2 and shape[1] > 0 and dtypes[0] == torch.bool
    assert (refusal is None) == (is_map and other == shape)


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[list[list[int]]], int, int, int]:
    """Distinct assignments of each token of each rank, local experts, alignment, rows that fit."""
    ranks, local = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    top_k = draw(st.integers(1, ranks * local))
    assignment = st.permutations([*range(ranks * local), *[NOT_ROUTED] * top_k]).map(
        lambda p: p[:top_k]
    )
    routing = draw(st.lists(st.lists(assignment, max_size=4), min_size=ranks, max_size=ranks))
    alignment = draw(st.sampled_from([1, 2, 3]))
    return routing, local, alignment, alignment * draw(st.integers(1, 6))


@FUZZ
@given(case=routings())
def test_what_fits_is_what_a_loop_over_assignments_keeps(
    case: tuple[list[list[list[int]]], int, int, int],
) -> None:
    """By destination, in the order (source rank, token, local expert), until one does not fit."""
    routing, local, alignment, limit = case
    num_ranks, num_experts = len(routing), len(routing) * local
    kept = [[[NOT_ROUTED for _ in token] for token in tokens] for tokens in routing]
    for rank in range(num_ranks):
        rows, used, is_full = [0] * num_experts, 0, False
        for source, tokens in enumerate(routing):
            for place, token in enumerate(tokens):
                for expert in range(rank * local, (rank + 1) * local):
                    if expert not in token:
                        continue
                    used += alignment if rows[expert] % alignment == 0 else 0
                    is_full = is_full or used > limit
                    rows[expert] += 1
                    if not is_full:
                        kept[source][place][token.index(expert)] = expert
    counts = torch.zeros(num_ranks, num_experts, dtype=torch.int64)
    for source, tokens in enumerate(routing):
        for token in tokens:
            for expert in token:
                if expert != NOT_ROUTED:
                    counts[source, expert] += 1
    for rank, tokens in enumerate(routing):
        width = len(tokens[0]) if tokens else 1
        topk_idx = torch.tensor(tokens, dtype=torch.int64).view(-1, width)
        found = drop_what_does_not_fit(topk_idx, counts, rank, alignment, limit)
        assert found.tolist() == kept[rank]
