"""Mistakes in low-latency mode are errors for people, and the group can be used afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from compare import assert_same_bits
from rank_pool import RankContext
from test_low_latency import HAS_MODE, LowLatencyCase, engine_of, object_for

from megatron_ncclep.engines.low_latency import LowLatency, create_low_latency
from megatron_ncclep.errors import EngineUnavailableError, InputError

CASE = LowLatencyCase("mistakes", 1, 4, 8, 2)


def good(ll: LowLatency, number: int) -> list[torch.Tensor]:
    arguments = (CASE.x(number, 0), CASE.topk_idx(number, 0), CASE.weights(number, 0))
    return [argument.to(ll.group.device) for argument in arguments]


def wrong_dispatch(ll: LowLatency, change: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    ll.dispatch(*change(*good(ll, 5)))


def wrong_combine(ll: LowLatency, *shape: int, is_first: bool = False) -> None:
    if not is_first:
        ll.dispatch(*good(ll, 3))
    ll.combine(torch.zeros(shape, dtype=CASE.dtype, device=ll.group.device))


def no_expert(ll: LowLatency) -> None:
    """An engine need not wait for the device: then a later call says it."""
    x, topk_idx, weights = good(ll, 5)
    topk_idx[0, 0] = 1000
    for _ in range(3):
        rows = ll.dispatch(x, topk_idx, weights)
        ll.combine(rows.rows)
        if ll.group.device.type == "cuda":
            torch.cuda.synchronize()


# In a group of one rank.
MISTAKES: dict[str, tuple[Callable[[LowLatency], None], str]] = {
    "too many tokens": (
        lambda ll: wrong_dispatch(ll, lambda *args: tuple(a[:1].repeat(9, 1) for a in args)),
        "9 tokens: the low-latency object was made for 8",
    ),
    "another dtype": (
        lambda ll: wrong_dispatch(ll, lambda x, *args: (x.half(), *args)),
        "x is torch.float16",
    ),
    "out of turn": (
        lambda ll: wrong_combine(ll, 1, CASE.max_tokens, CASE.hidden, is_first=True),
        "combine of a low-latency object must come after dispatch",
    ),
    "scales": (
        lambda ll: wrong_dispatch(ll, lambda x, topk_idx, w: (x, topk_idx, w, w)),
        "scales given",
    ),
    "size of y": (lambda ll: wrong_combine(ll, 3, CASE.hidden), "y has shape"),
    "no expert": (no_expert, "4 experts|1000"),
}


def use_again(ll: LowLatency) -> None:
    """A single-rank group remains usable after any mistake."""
    with contextlib.suppress(InputError):  # unless a dispatch waits for its combine
        wrong_combine(ll, 1, CASE.max_tokens, CASE.hidden, is_first=True)
    x, topk_idx, weights = good(ll, 3)
    out = ll.combine(ll.dispatch(x, topk_idx, weights).rows)
    assert len(x) > 0
    expected = torch.where((topk_idx >= 0).any(dim=1, keepdim=True), x, 0)
    assert_same_bits(out, expected, "out after a mistake")


@HAS_MODE
@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_errors_for_people(ctx: RankContext, engine_name: str, name: str) -> None:
    engine = engine_of(ctx, engine_name, 4 * ctx.num_ranks)
    ll = object_for(engine, CASE)
    make, words = MISTAKES[name]
    with pytest.raises(InputError, match=words):
        make(ll)
    use_again(ll)
    ll.close()
    engine.close()


@HAS_MODE
@pytest.mark.needs_ranks(2)
@pytest.mark.ranks(2)
def test_wrong_sizes_are_refused_on_all_ranks(ctx: RankContext, engine_name: str) -> None:
    engine = engine_of(ctx, engine_name, 4 * ctx.num_ranks)
    for words, wrong in (
        ("max_tokens 0", {"max_tokens": 0}),
        ("max_tokens 1000000", {"max_tokens": 10**6}),
        ("top_k 0", {"top_k": 0}),
        ("dtype", {"dtype": torch.float64}),
        ("payload", {"payload": torch.float16}),
        ("num_scales -1", {"num_scales": -1}),
        ("hidden size differs", {"hidden": 64 * (1 + ctx.rank)}),
    ):
        sizes = {"max_tokens": 8, "hidden": 64, "top_k": 2, **wrong}
        with pytest.raises(InputError, match=words) as caught:
            create_low_latency(engine, **sizes)
        assert caught.type is InputError, words
    engine.close()


@pytest.mark.needs_caps(test=lambda caps: caps.low_latency_tokens == 0)
def test_an_engine_without_the_mode_says_so(ctx: RankContext, engine_name: str) -> None:
    with (
        closing(engine_of(ctx, engine_name, 4 * ctx.num_ranks)) as engine,
        pytest.raises(EngineUnavailableError, match="has no low-latency mode"),
    ):
        create_low_latency(engine, max_tokens=8, hidden=64, top_k=2)
