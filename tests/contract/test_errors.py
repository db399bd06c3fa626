"""Bad input: the same clear error on every rank, soon, with the value and the remedy; no hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_ncclep import engines
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import EngineCaps
from megatron_ncclep.errors import (
    EngineUnavailableError,
    GroupClosedError,
    InputError,
    PeerError,
)
from megatron_ncclep.route_plan import topk_from_routing_map
from megatron_ncclep.testing.launcher import RankContext, RankError, RankPool

CONFIG = EpConfig(engine="reference", timeout_s=120.0)
TOPK = torch.tensor([[0, 1], [2, 3], [1, -1]])


def good_plan(ctx: RankContext, engine):
    return engine.plan(TOPK)


# Each mistake is made on rank 1 only; rank 0 does everything right.
def index_too_large(ctx, engine):
    engine.plan(TOPK + 2 * (ctx.rank == 1))


def index_too_small(ctx, engine):
    engine.plan(TOPK - 5 * (ctx.rank == 1))


def expert_named_twice(ctx, engine):
    engine.plan(TOPK if ctx.rank == 0 else torch.tensor([[0, 1], [3, 3]]))


def float_index(ctx, engine):
    engine.plan(TOPK if ctx.rank == 0 else TOPK.float())


def flat_index(ctx, engine):
    engine.plan(TOPK if ctx.rank == 0 else TOPK.reshape(-1))


def index_on_another_device(ctx, engine):
    engine.plan(TOPK if ctx.rank == 0 else TOPK.to("meta"))


def no_columns(ctx, engine):
    engine.plan(TOPK[:, :0])


def top_k_differs(ctx, engine):
    engine.plan(TOPK if ctx.rank == 0 else TOPK[:, :1])


def map_names_too_many(ctx, engine):
    routing_map = torch.zeros(3, 4, dtype=torch.bool)
    routing_map[1, : 2 + ctx.rank] = True
    engine.plan(topk_from_routing_map(routing_map, 2))


def integer_payload(ctx, engine):
    x = torch.ones(3, 8)
    engine.dispatch(good_plan(ctx, engine), x if ctx.rank == 0 else x.int())


def dtype_differs(ctx, engine):
    x = torch.ones(3, 8)
    engine.dispatch(good_plan(ctx, engine), x if ctx.rank == 0 else x.half())


def hidden_differs(ctx, engine):
    engine.dispatch(good_plan(ctx, engine), torch.ones(3, 8 + ctx.rank))


def no_hidden(ctx, engine):
    engine.dispatch(good_plan(ctx, engine), torch.ones(3, 0))


def wrong_number_of_tokens(ctx, engine):
    engine.dispatch(good_plan(ctx, engine), torch.ones(3 + ctx.rank, 8))


def payload_on_another_device(ctx, engine):
    x = torch.ones(3, 8)
    engine.dispatch(good_plan(ctx, engine), x if ctx.rank == 0 else x.to("meta"))


def wrong_weights_shape(ctx, engine):
    engine.dispatch(good_plan(ctx, engine), torch.ones(3, 8), torch.ones(3, 2 + ctx.rank))


def wrong_weights_dtype(ctx, engine):
    w = torch.ones(3, 2)
    engine.dispatch(good_plan(ctx, engine), torch.ones(3, 8), w if ctx.rank == 0 else w.half())


def weights_on_one_rank_only(ctx, engine):
    engine.dispatch(
        good_plan(ctx, engine), torch.ones(3, 8), torch.ones(3, 2) if ctx.rank == 0 else None
    )


def wrong_number_of_rows(ctx, engine):
    plan = good_plan(ctx, engine)
    engine.combine(plan, torch.ones(plan.num_rows + ctx.rank, 8))


def plans_swapped(ctx, engine):
    plans = [good_plan(ctx, engine), good_plan(ctx, engine)]
    engine.dispatch(plans[ctx.rank], torch.ones(3, 8))


def plan_of_another_engine(ctx, engine):
    other = create_engine(ctx.group, 8, CONFIG)
    plans = [good_plan(ctx, engine), good_plan(ctx, other)]
    engine.dispatch(plans[ctx.rank], torch.ones(3, 8))


def experts_not_divisible(ctx, engine):
    create_engine(ctx.group, 5, CONFIG)


def number_of_experts_differs(ctx, engine):
    create_engine(ctx.group, 4 + 2 * ctx.rank, CONFIG)


def alignment_differs(ctx, engine):
    config = EpConfig(engine="reference", alignment=16 if ctx.rank else 1, timeout_s=120.0)
    create_engine(ctx.group, 4, config).plan(TOPK)


def unknown_engine(ctx, engine):
    create_engine(ctx.group, 4, EpConfig(engine="deepep" if ctx.rank else "reference"))


def option_that_would_be_ignored(ctx, engine):
    create_engine(ctx.group, 4, EpConfig(engine="reference", num_sms=24))


def too_many_rows(ctx, engine):
    engine.caps = EngineCaps(
        "reference", "", engine.caps.payload_dtypes, 1, frozenset(), max_rows=4
    )
    engine.plan(TOPK)


MISTAKES = [
    (index_too_large, "rank 1: expert index 4 of token 1, pick 0, is out of range: there are 4"),
    (index_too_small, "rank 1: expert index -5 of token 0, pick 0, is out of range"),
    (expert_named_twice, "rank 1: token 1 names expert 3 twice"),
    (float_index, "rank 1: topk_idx is torch.float32: it must be int32 or int64"),
    (flat_index, r"rank 1: topk_idx has shape \[6\]: it must be \[num_tokens, top_k\]"),
    (index_on_another_device, r"rank 1: topk_idx is on meta.*\.to\('cpu'\)"),
    (no_columns, "top_k 0"),
    (top_k_differs, "top_k differs.*rank 0 has 2, rank 1 has 1"),
    (map_names_too_many, "rank 1: the routing map names more than top_k=2 experts for token 1"),
    (integer_payload, "rank 1: x is torch.int32: engine 'reference' moves bfloat16, float16"),
    (dtype_differs, "dtype differs"),
    (hidden_differs, "hidden size differs.*rank 0 has 8, rank 1 has 9"),
    (no_hidden, "a row of x has 0 bytes"),
    (wrong_number_of_tokens, r"rank 1: x has shape \[4, 8\]: the plan expects \[3, hidden\]"),
    (payload_on_another_device, r"rank 1: x is on meta.*\.to\('cpu'\)"),
    (wrong_weights_shape, r"rank 1: w has shape \[3, 3\]: the plan expects \[3, 2\]"),
    (wrong_weights_dtype, "rank 1: w is torch.float16: beside torch.float32 rows it must be"),
    (weights_on_one_rank_only, "presence of weights differs"),
    (wrong_number_of_rows, r"rank 1: y has shape \[\d+, 8\]: the plan expects"),
    (plans_swapped, r"plan differs.*rank 0 has \d+, rank 1 has \d+"),
    (plan_of_another_engine, "rank 1: the plan is for 8 experts, the engine for 4"),
    (experts_not_divisible, "5 experts cannot be divided over 2 ranks"),
    (number_of_experts_differs, "num_experts differs.*rank 0 has 4, rank 1 has 6"),
    (alignment_differs, "alignment differs.*rank 0 has 1, rank 1 has 16"),
    (unknown_engine, r"rank 1: engine 'deepep' is unknown: this version has 'auto' and \['refer"),
    (option_that_would_be_ignored, "engine 'reference' would ignore num_sms"),
    (too_many_rows, r"rank 0 would receive up to \d+ rows, more than the 4 .*micro-batches"),
]


def make_mistake(ctx: RankContext, mistake: Callable) -> str:
    engine = create_engine(ctx.group, 4, CONFIG)
    with pytest.raises(InputError) as caught:
        mistake(ctx, engine)
    # The group still works: nobody is left inside a collective.
    create_engine(ctx.group, 4, CONFIG).plan(TOPK)
    return str(caught.value)


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=lambda v: getattr(v, "__name__", ""))
def test_every_rank_raises_the_same_error(pool: RankPool, mistake: Callable, message: str) -> None:
    texts = pool.run(make_mistake, mistake, ranks=2)
    assert texts[0] == texts[1]
    with pytest.raises(InputError, match=f"(?s){message}"):
        raise InputError(texts[0])


def unavailable_on_rank(ctx: RankContext) -> str:
    entry = engines.ENGINES["reference"]
    engines.ENGINES["broken"] = engines.EngineEntry(
        entry.caps, entry.build, lambda group: "no such GPU: buy one" if group.rank else None
    )
    try:
        with pytest.raises(EngineUnavailableError) as caught:
            create_engine(ctx.group, 4, EpConfig(engine="broken"))
        return str(caught.value)
    finally:
        del engines.ENGINES["broken"]


def test_an_engine_that_cannot_run_is_never_replaced_silently(pool: RankPool) -> None:
    for text in pool.run(unavailable_on_rank, ranks=2):
        assert "rank 1: engine 'broken' cannot run here: no such GPU: buy one" in text


def auto_on_rank(ctx: RankContext) -> str:
    entry = engines.ENGINES["reference"]
    replaced = dict(engines.ENGINES)
    engines.ENGINES.clear()
    engines.ENGINES["broken"] = engines.EngineEntry(entry.caps, entry.build, lambda g: "no GPU")
    engines.ENGINES.update(replaced)
    try:
        group = engines.EpGroup.of(ctx.group)
        assert engines.choose_engine(group, EpConfig()) == (
            "reference",
            "not broken: no GPU; reference can run",
        )
        return create_engine(ctx.group, 4, EpConfig()).caps.name
    finally:
        del engines.ENGINES["broken"]


def test_auto_takes_the_first_that_can_run_and_says_why(pool: RankPool) -> None:
    assert pool.run(auto_on_rank, ranks=2) == ["reference"] * 2


def closed_on_rank(ctx: RankContext) -> None:
    engine = create_engine(ctx.group, 4, CONFIG)
    plan = engine.plan(TOPK)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.plan(TOPK),
        lambda: engine.dispatch(plan, torch.ones(3, 8)),
        lambda: engine.combine(plan, torch.ones(plan.num_rows, 8)),
    ):
        with pytest.raises(GroupClosedError, match="create a new one"):
            call()


def test_a_closed_engine_says_so(pool: RankPool) -> None:
    pool.run(closed_on_rank, ranks=2)


def destroyed_on_rank(ctx: RankContext) -> None:
    group = dist.new_group([0, 1, 2, 3])
    engine = create_engine(group, 4, CONFIG)
    plan = engine.plan(TOPK)
    dist.destroy_process_group(group)
    for call in (
        lambda: engine.plan(TOPK),
        lambda: engine.dispatch(plan, torch.ones(3, 8)),
        lambda: create_engine(group, 4, CONFIG),
    ):
        with pytest.raises(GroupClosedError, match="destroyed"):
            call()


def test_a_destroyed_process_group_says_so(pool: RankPool) -> None:
    pool.run(destroyed_on_rank)


def not_a_member(ctx: RankContext) -> str:
    group = dist.new_group([0, 1])
    if ctx.rank < 2:
        return create_engine(group, 4, CONFIG).caps.name
    with pytest.raises(InputError) as caught:
        create_engine(group, 4, CONFIG)
    return str(caught.value)


def test_a_rank_outside_the_group_says_so(pool: RankPool) -> None:
    results = pool.run(not_a_member)
    assert results[:2] == ["reference"] * 2
    assert all("not a member" in text for text in results[2:])


def nan_on_rank(ctx: RankContext) -> list[torch.Tensor]:
    engine = create_engine(ctx.group, 4, CONFIG)
    plan = engine.plan(TOPK)
    w = torch.ones(3, 2)
    w[0, ctx.rank] = float("nan")
    rows, row_w = engine.dispatch(plan, torch.ones(3, 8), w)
    out, home = engine.combine(plan, rows * row_w[:, None], row_w)
    return [out.isnan().any(dim=1), home.isnan()]


def test_nan_weights_pass_through_to_their_token_only(pool: RankPool) -> None:
    for rank, (tokens, picks) in enumerate(pool.run(nan_on_rank, ranks=2)):
        assert tokens.tolist() == [True, False, False]
        assert picks.nonzero().tolist() == [[0, rank]]


def diverge_on_rank(ctx: RankContext) -> str:
    engine = create_engine(ctx.group, 4, CONFIG)
    plan = engine.plan(TOPK)
    call = (
        partial(engine.combine, plan, torch.ones(plan.num_rows, 8))
        if ctx.rank == 0
        else partial(engine.dispatch, plan, torch.ones(3, 8))
    )
    with pytest.raises(PeerError) as caught:
        call()
    return str(caught.value)


def test_ranks_in_different_calls_are_told(pool: RankPool) -> None:
    for text in pool.run(diverge_on_rank, ranks=2):
        assert "rank 0 is in combine" in text
        assert "rank 1 is in dispatch" in text


def missing_call_on_rank(ctx: RankContext) -> float:
    engine = create_engine(ctx.group, 4, CONFIG)
    engine.config = EpConfig(engine="reference", timeout_s=1.0)
    start = time.monotonic()
    if ctx.rank == 0:
        with pytest.raises(PeerError, match=r"rank 0 of 2: no answer .* in plan.*deadline 1 s"):
            engine.plan(TOPK)
    return time.monotonic() - start


def test_a_rank_that_never_calls_is_reported_within_the_deadline() -> None:
    pool = RankPool(2)
    try:
        waited = pool.run(missing_call_on_rank, timeout=120)[0]
        # The deadline is what is tested: far below the 120 s that the group's own would take.
        assert waited < 60
    finally:
        pool.close()


def dying_on_rank(ctx: RankContext) -> None:
    engine = create_engine(ctx.group, 4, CONFIG)
    plan = engine.plan(TOPK)
    if ctx.rank == 1:
        os._exit(1)
    with pytest.raises(PeerError, match="rank 0 of 2: no answer from the other ranks"):
        engine.dispatch(plan, torch.ones(3, 8))
    raise RuntimeError("rank 0 saw its peer die")


def test_a_rank_that_dies_is_reported() -> None:
    pool = RankPool(2)
    try:
        with pytest.raises(RankError, match="rank 1 died"):
            pool.run(dying_on_rank, timeout=120)
    finally:
        pool.close()
