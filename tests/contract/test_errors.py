"""Bad input: the same clear error on every rank, soon, with the value and the remedy; no hang."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract_cases import deadline_s
from run_case import caps_of

import megatron_ncclep
from megatron_ncclep import engines
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine
from megatron_ncclep.errors import (
    EngineUnavailableError,
    GroupClosedError,
    InputError,
    PeerError,
)
from megatron_ncclep.ops.routing import routes_and_weights
from megatron_ncclep.ranks.pool import RankContext, RankPool

pytestmark = pytest.mark.needs_ranks(2)

# Two ranks with four experts each: shapes that an engine has compiled for other tests too.
NUM_EXPERTS, HIDDEN = 8, 64
# What is no tensor of the group's device.
WRONG_DEVICE = {"cpu": "meta", "cuda": "cpu"}


def config(engine_name: str = "reference", **options: Any) -> EpConfig:
    device = "cpu" if dist.get_backend() == "gloo" else "cuda"
    return EpConfig(engine=engine_name, timeout_s=deadline_s(engine_name, device), **options)


def topk(ctx: RankContext) -> torch.Tensor:
    return torch.tensor([[0, 4], [5, 7], [1, -1]], device=ctx.device)


def rows(ctx: RankContext, num_rows: int = 3, hidden: int = HIDDEN) -> torch.Tensor:
    return torch.ones(num_rows, hidden, device=ctx.device)


def weights(ctx: RankContext, top_k: int = 2) -> torch.Tensor:
    return torch.ones(3, top_k, device=ctx.device)


# Each mistake is made on rank 1 only; rank 0 does everything right.
def index_too_large(ctx: RankContext, engine: Engine) -> None:
    engine.plan(topk(ctx) + 4 * (ctx.rank == 1))


def index_too_small(ctx: RankContext, engine: Engine) -> None:
    engine.plan(topk(ctx) - 5 * (ctx.rank == 1))


def expert_named_twice(ctx: RankContext, engine: Engine) -> None:
    twice = torch.tensor([[0, 1], [3, 3]], device=ctx.device)
    engine.plan(topk(ctx) if ctx.rank == 0 else twice)


def float_index(ctx: RankContext, engine: Engine) -> None:
    engine.plan(topk(ctx) if ctx.rank == 0 else topk(ctx).float())


def flat_index(ctx: RankContext, engine: Engine) -> None:
    engine.plan(topk(ctx) if ctx.rank == 0 else topk(ctx).reshape(-1))


def index_on_another_device(ctx: RankContext, engine: Engine) -> None:
    engine.plan(topk(ctx) if ctx.rank == 0 else topk(ctx).to(WRONG_DEVICE[ctx.device]))


def no_columns(ctx: RankContext, engine: Engine) -> None:
    engine.plan(topk(ctx)[:, :0])


def top_k_differs(ctx: RankContext, engine: Engine) -> None:
    engine.plan(topk(ctx) if ctx.rank == 0 else topk(ctx)[:, :1])


def map_names_too_many(ctx: RankContext, engine: Engine) -> None:
    routing_map = torch.zeros(3, NUM_EXPERTS, dtype=torch.bool, device=ctx.device)
    routing_map[1, : 2 + ctx.rank] = True
    engine.plan(routes_and_weights(routing_map, routing_map.float(), 2)[0].topk_idx)


def integer_payload(ctx: RankContext, engine: Engine) -> None:
    engine.dispatch(engine.plan(topk(ctx)), rows(ctx) if ctx.rank == 0 else rows(ctx).int())


def dtype_differs(ctx: RankContext, engine: Engine) -> None:
    engine.dispatch(engine.plan(topk(ctx)), rows(ctx) if ctx.rank == 0 else rows(ctx).half())


def bytes_beside_numbers(ctx: RankContext, engine: Engine) -> None:
    x = rows(ctx) if ctx.rank == 0 else rows(ctx).view(torch.uint8)
    engine.dispatch(engine.plan(topk(ctx)), x)


def bytes_to_combine(ctx: RankContext, engine: Engine) -> None:
    plan = engine.plan(topk(ctx))
    y = rows(ctx, plan.num_rows)
    engine.combine(plan, y if ctx.rank == 0 else y.view(torch.uint8))


def hidden_differs(ctx: RankContext, engine: Engine) -> None:
    engine.dispatch(engine.plan(topk(ctx)), rows(ctx, hidden=HIDDEN * (1 + ctx.rank)))


def no_hidden(ctx: RankContext, engine: Engine) -> None:
    engine.dispatch(engine.plan(topk(ctx)), rows(ctx, hidden=0))


def wrong_number_of_tokens(ctx: RankContext, engine: Engine) -> None:
    engine.dispatch(engine.plan(topk(ctx)), rows(ctx, 3 + ctx.rank))


def payload_on_another_device(ctx: RankContext, engine: Engine) -> None:
    x = rows(ctx) if ctx.rank == 0 else rows(ctx).to(WRONG_DEVICE[ctx.device])
    engine.dispatch(engine.plan(topk(ctx)), x)


def wrong_weights_shape(ctx: RankContext, engine: Engine) -> None:
    engine.dispatch(engine.plan(topk(ctx)), rows(ctx), weights(ctx, 2 + ctx.rank))


def wrong_weights_dtype(ctx: RankContext, engine: Engine) -> None:
    w = weights(ctx)
    engine.dispatch(engine.plan(topk(ctx)), rows(ctx), w if ctx.rank == 0 else w.half())


def weights_on_one_rank_only(ctx: RankContext, engine: Engine) -> None:
    engine.dispatch(engine.plan(topk(ctx)), rows(ctx), weights(ctx) if ctx.rank == 0 else None)


def wrong_number_of_rows(ctx: RankContext, engine: Engine) -> None:
    plan = engine.plan(topk(ctx))
    engine.combine(plan, rows(ctx, plan.num_rows + ctx.rank))


def plans_swapped(ctx: RankContext, engine: Engine) -> None:
    plans = [engine.plan(topk(ctx)), engine.plan(topk(ctx))]
    engine.dispatch(plans[ctx.rank], rows(ctx))


def plan_of_another_engine(ctx: RankContext, engine: Engine) -> None:
    with closing(create_engine(ctx.group, 64, config(engine.caps.name))) as other:
        plans = [engine.plan(topk(ctx)), other.plan(topk(ctx))]
        engine.dispatch(plans[ctx.rank], rows(ctx))


def no_plan(ctx: RankContext, engine: Engine) -> None:
    plan = engine.plan(topk(ctx))
    given = [plan, None][ctx.rank]
    engine.combine(given, rows(ctx, plan.num_rows))  # type: ignore[arg-type]


def experts_not_divisible(ctx: RankContext, engine: Engine) -> None:
    create_engine(ctx.group, 5, config(engine.caps.name))


def number_of_experts_differs(ctx: RankContext, engine: Engine) -> None:
    create_engine(ctx.group, NUM_EXPERTS + 2 * ctx.rank, config(engine.caps.name))


def number_of_experts_is_a_float(ctx: RankContext, engine: Engine) -> None:
    create_engine(ctx.group, 8.0 if ctx.rank else 8, config(engine.caps.name))  # type: ignore[arg-type]


def alignment_differs(ctx: RankContext, engine: Engine) -> None:
    create_engine(ctx.group, NUM_EXPERTS, config(engine.caps.name, alignment=1 + 15 * ctx.rank))


def experts_differ(ctx: RankContext, engine: Engine) -> None:
    """The ranks would number experts differently: tokens would reach the wrong ones."""
    names = ("megatron", "grouped")
    options = config(engine.caps.name, alignment=16, experts=names[ctx.rank])
    create_engine(ctx.group, NUM_EXPERTS, options)


def alignment_of_another_engine(ctx: RankContext, engine: Engine) -> None:
    options = config(engine.caps.name, alignment=16)
    with closing(create_engine(ctx.group, NUM_EXPERTS, options)) as other:
        [engine, other][ctx.rank].plan(topk(ctx))


def max_recv_rows_differs(ctx: RankContext, engine: Engine) -> None:
    options = [config(engine.caps.name), config(engine.caps.name, max_recv_rows=64)]
    create_engine(ctx.group, NUM_EXPERTS, options[ctx.rank])


def factor_differs(ctx: RankContext, engine: Engine) -> None:
    rows = "1.25x" if ctx.rank else "worst"
    create_engine(ctx.group, NUM_EXPERTS, config(engine.caps.name, max_recv_rows=rows))


def on_overflow_differs(ctx: RankContext, engine: Engine) -> None:
    """Found before anything else is: only `reference` need have the option."""
    on_overflow = "raise" if ctx.rank else "drop"
    options = config(max_recv_rows=64, on_overflow=on_overflow)
    create_engine(ctx.group, NUM_EXPERTS, options)


def number_of_tokens_differs(ctx: RankContext, engine: Engine) -> None:
    """Where the limit depends on it: ranks with other limits would drop other assignments."""
    options = config(engine.caps.name, max_recv_rows="worst")
    with closing(create_engine(ctx.group, NUM_EXPERTS, options)) as other:
        other.plan(topk(ctx)[: 3 - ctx.rank])


def num_sms_differs(ctx: RankContext, engine: Engine) -> None:
    """Found before anything else is: `native` need not be able to run."""
    create_engine(ctx.group, NUM_EXPERTS, config("native", num_sms=24 + ctx.rank))


def metrics_interval_differs(ctx: RankContext, engine: Engine) -> None:
    create_engine(ctx.group, NUM_EXPERTS, config(engine.caps.name, metrics_interval=ctx.rank))


def slices_differ(ctx: RankContext, engine: Engine) -> None:
    """Limits of "worst" would differ, and with them what is dropped."""
    create_engine(ctx.group, NUM_EXPERTS, config(engine.caps.name), 1 + ctx.rank)


def environment_differs(ctx: RankContext, engine: Engine) -> None:
    """NCCLEP_CHECK_CALLS on one node opened an engine without a word.

    In its first call that node's hosts waited for others that agree on nothing, and with `native`
    those waited for it on the device until their deadline.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCLEP_ENGINE", engine.caps.name)
        if ctx.rank == 1:
            patch.setenv("NCCLEP_CHECK_CALLS", "1")
        create_engine(ctx.group, NUM_EXPERTS)


def environment_is_wrong(ctx: RankContext, engine: Engine) -> None:
    """One node of a job had another environment, and its error was nobody else's for 60 s."""
    with pytest.MonkeyPatch.context() as patch:
        if ctx.rank == 1:
            patch.setenv("NCCLEP_TIMEOUT_S", "inf")
        create_engine(ctx.group, NUM_EXPERTS)


def unknown_engine(ctx: RankContext, engine: Engine) -> None:
    create_engine(ctx.group, NUM_EXPERTS, config("deepep" if ctx.rank else engine.caps.name))


def option_that_would_be_ignored(ctx: RankContext, engine: Engine) -> None:
    create_engine(ctx.group, NUM_EXPERTS, config(num_sms=24))


# The message's pattern; {engine} and {dtypes} are the engine's, {device} is what the group moves
# and {wrong} what WRONG_DEVICE says of it.
MISTAKES = [
    (
        index_too_large,
        "rank 1: expert index 8 of token 0, top-k slot 1, is out of range: there are 8",
    ),
    (index_too_small, "rank 1: expert index -5 of token 0, top-k slot 0, is out of range"),
    (expert_named_twice, "rank 1: token 1 names expert 3 twice"),
    (float_index, "rank 1: topk_idx is torch.float32: it must be int32 or int64"),
    (flat_index, r"rank 1: topk_idx has shape \[6\]: it must be \[num_tokens, top_k\]"),
    (index_on_another_device, r"rank 1: topk_idx is on {wrong}.*\.to\('{device}'\)"),
    (no_columns, "top_k 0"),
    (top_k_differs, "top_k differs.*rank 0 has 2, rank 1 has 1"),
    (map_names_too_many, "rank 1: the routing map names more than top_k=2 experts for token 1"),
    (integer_payload, "rank 1: x is torch.int32: engine '{engine}' moves {dtypes}"),
    (dtype_differs, "dtype differs"),
    (bytes_beside_numbers, "(dtype|hidden size) differs"),
    (bytes_to_combine, "rank 1: y is torch.uint8: combine cannot add up rows of bytes"),
    (hidden_differs, "hidden size differs.*rank 0 has 64, rank 1 has 128"),
    (no_hidden, "a row of x has 0 bytes"),
    (wrong_number_of_tokens, r"rank 1: x has shape \[4, 64\]: the plan expects \[3, hidden\]"),
    (payload_on_another_device, r"rank 1: x is on {wrong}.*\.to\('{device}'\)"),
    (wrong_weights_shape, r"rank 1: w has shape \[3, 3\]: the plan expects \[3, 2\]"),
    (wrong_weights_dtype, "rank 1: w is torch.float16: with torch.float32 rows it must be"),
    (weights_on_one_rank_only, "presence of weights differs"),
    (wrong_number_of_rows, r"rank 1: y has shape \[\d+, 64\]: the plan expects"),
    (plans_swapped, r"plan differs.*rank 0 has \d+, rank 1 has \d+"),
    (plan_of_another_engine, "rank 1: the plan is for 64 experts, the engine for 8"),
    (no_plan, "rank 1: the plan is a NoneType: use the engine that made it"),
    (experts_not_divisible, "5 experts cannot be divided over 2 ranks"),
    (number_of_experts_differs, "num_experts differs.*rank 0 has 8, rank 1 has 10"),
    (number_of_experts_is_a_float, r"rank 1: 8\.0 experts cannot be divided over 2 ranks"),
    (alignment_differs, "open: alignment differs.*rank 0 has 1, rank 1 has 16"),
    (experts_differ, "open: experts differs.*rank 0 has megatron, rank 1 has grouped"),
    (alignment_of_another_engine, "plan: alignment differs.*rank 0 has 1, rank 1 has 16"),
    (max_recv_rows_differs, "open: max_recv_rows differs.*rank 0 has None, rank 1 has 64"),
    (factor_differs, r"open: max_recv_rows differs.*rank 0 has worst, rank 1 has 1\.25x"),
    (on_overflow_differs, "open: on_overflow differs.*rank 0 has drop, rank 1 has raise"),
    (slices_differ, "open: ranks_per_expert differs.*rank 0 has 1, rank 1 has 2"),
    (
        number_of_tokens_differs,
        # Devices compare what follows from it.
        r"plan: (number of tokens \(max_recv_rows='worst' depends.*rank 0 has 3, rank 1 has 2|"
        "max_recv_rows differs.*rank 0 has 12, rank 1 has 8)",
    ),
    (num_sms_differs, "open: num_sms differs.*rank 0 has 24, rank 1 has 25"),
    (metrics_interval_differs, "open: metrics_interval differs.*rank 0 has 0, rank 1 has 1"),
    (
        environment_differs,
        "open: check_calls differs.*rank 0 has False, rank 1 has True. Give every rank the same",
    ),
    (environment_is_wrong, "rank 1: timeout_s inf: must be a number of seconds from 0.001 to 1e"),
    (unknown_engine, r"rank 1: engine 'deepep' is unknown: this version has 'auto' and \[.*'refer"),
    (option_that_would_be_ignored, "engine 'reference' would ignore num_sms"),
]
# Calls that are wrong on both ranks.
BOTH_ARE_WRONG = (no_hidden,)


COMPARES_ON_DEVICE = pytest.mark.needs_caps(test=lambda caps: caps.compares_on_device)


def until_checked(call: Callable[[], object]) -> None:
    """Call it, and ask for errors that have not come yet: the other rank's, in calls of this one
    that waited for no host.
    """
    call()
    megatron_ncclep.check()


def make_mistake(
    ctx: RankContext, mistake: Callable, engine_name: str, check_calls: bool, has_windows: bool
) -> str:
    options = config(engine_name, check_calls=check_calls)
    with closing(create_engine(ctx.group, NUM_EXPERTS, options)) as engine:
        if has_windows:  # otherwise hosts agree on what they grow for, whatever the option
            engine.dispatch(engine.plan(topk(ctx)), rows(ctx, hidden=4 * HIDDEN))
        with pytest.raises(InputError) as caught:
            until_checked(lambda: mistake(ctx, engine))
    # The group still works: nobody is left inside a collective.
    with closing(create_engine(ctx.group, NUM_EXPERTS, config(engine_name))) as engine:
        engine.plan(topk(ctx))
    return str(caught.value)


@pytest.mark.parametrize(
    ("check_calls", "has_windows"),
    [
        pytest.param(True, False, id="hosts agree"),
        pytest.param(False, False, id="windows grow", marks=COMPARES_ON_DEVICE),
        pytest.param(False, True, id="device compares", marks=COMPARES_ON_DEVICE),
    ],
)
@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=lambda v: getattr(v, "__name__", ""))
def test_every_rank_raises_the_same_error(
    pool: RankPool,
    engine_name: str,
    backend: str,
    mistake: Callable,
    message: str,
    check_calls: bool,
    has_windows: bool,
) -> None:
    texts = pool.run(make_mistake, mistake, engine_name, check_calls, has_windows, ranks=2)
    if mistake in BOTH_ARE_WRONG and not check_calls:  # each says so of itself
        texts[1] = texts[1].replace("rank 1:", "rank 0:")
    assert texts[0] == texts[1]
    device = "cpu" if backend == "gloo" else "cuda"
    dtypes = ", ".join(str(d).removeprefix("torch.") for d in caps_of(engine_name).payload_dtypes)
    pattern = message.format_map(
        {"engine": engine_name, "dtypes": dtypes, "device": device, "wrong": WRONG_DEVICE[device]}
    )
    with pytest.raises(InputError, match=f"(?s){pattern}"):
        raise InputError(texts[0])


def patient_rank(ctx: RankContext, engine_name: str) -> int:
    options = dataclasses.replace(config(engine_name), timeout_s=1e9 if ctx.rank else 60.0)
    with closing(create_engine(ctx.group, NUM_EXPERTS, options)) as engine:
        plan = engine.plan(topk(ctx))
        engine.dispatch(plan, rows(ctx))
        return plan.num_rows


def test_ranks_may_differ_in_patience(pool: RankPool, engine_name: str) -> None:
    """No message and no size depends on how long a rank waits; one of them waits long here."""
    assert sum(pool.run(patient_rank, engine_name, ranks=2)) == 10


def too_many_rows(ctx: RankContext) -> str:
    engine = create_engine(ctx.group, NUM_EXPERTS, config())
    # 2^31 rows do not fit into a test.
    engine.caps = dataclasses.replace(engine.caps, max_rows=4)
    with pytest.raises(InputError) as caught:
        engine.plan(topk(ctx))
    return str(caught.value)


def test_more_rows_than_numbers_for_them(pool: RankPool) -> None:
    texts = pool.run(too_many_rows, ranks=2)
    assert texts[0] == texts[1]
    assert "rank 1 would receive up to 6 rows, more than the 4 " in texts[0]
    assert "micro-batches" in texts[0]


def unavailable_on_rank(ctx: RankContext) -> str:
    entry = engines.ENGINES["reference"]
    engines.ENGINES["broken"] = engines.EngineEntry(
        entry.caps,
        entry.build,
        lambda group, config, num_experts: "no such GPU: buy one" if group.rank else None,
    )
    try:
        with pytest.raises(EngineUnavailableError) as caught:
            create_engine(ctx.group, NUM_EXPERTS, config("broken"))
        return str(caught.value)
    finally:
        del engines.ENGINES["broken"]


def test_an_engine_that_cannot_run_is_never_replaced_silently(pool: RankPool) -> None:
    for text in pool.run(unavailable_on_rank, ranks=2):
        assert "engine 'broken' cannot run here: rank 1: no such GPU: buy one" in text


def auto_on_rank(ctx: RankContext) -> str:
    entry = engines.ENGINES["reference"]
    before = dict(engines.ENGINES)
    engines.ENGINES.clear()
    engines.ENGINES["broken"] = engines.EngineEntry(
        entry.caps, entry.build, lambda group, config, num_experts: "no GPU"
    )
    engines.ENGINES["reference"] = entry
    try:
        group = engines.EpGroup.of(ctx.group)
        assert engines.choose_engine(group, EpConfig()) == (
            "reference",
            "not broken: no GPU; reference can run",
        )
        return create_engine(ctx.group, NUM_EXPERTS, EpConfig()).caps.name
    finally:
        engines.ENGINES.clear()
        engines.ENGINES.update(before)


def test_auto_takes_the_first_that_can_run_and_says_why(pool: RankPool) -> None:
    assert pool.run(auto_on_rank, ranks=2) == ["reference"] * 2


def closed_on_rank(ctx: RankContext, engine_name: str) -> None:
    engine = create_engine(ctx.group, NUM_EXPERTS, config(engine_name))
    plan = engine.plan(topk(ctx))
    engine.close()
    engine.close()
    for call in (
        lambda: engine.plan(topk(ctx)),
        lambda: engine.dispatch(plan, rows(ctx)),
        lambda: engine.combine(plan, rows(ctx, plan.num_rows)),
    ):
        with pytest.raises(GroupClosedError, match="create a new one"):
            call()


def test_a_closed_engine_says_so(pool: RankPool, engine_name: str) -> None:
    pool.run(closed_on_rank, engine_name, ranks=2)


def destroyed_on_rank(ctx: RankContext, engine_name: str) -> None:
    group = dist.new_group(list(range(ctx.num_ranks)))
    num_experts = 4 * ctx.num_ranks
    engine = create_engine(group, num_experts, config(engine_name))
    plan = engine.plan(topk(ctx))
    dispatched, _ = engine.dispatch(plan, rows(ctx))  # whatever it needs is there from now on
    dist.destroy_process_group(group)
    for call in (
        lambda: engine.plan(topk(ctx)),
        lambda: engine.dispatch(plan, rows(ctx)),
        lambda: engine.combine(plan, dispatched),
        lambda: create_engine(group, num_experts, config(engine_name)),
    ):
        with pytest.raises(GroupClosedError, match="destroyed"):
            call()


def test_a_destroyed_process_group_says_so(pool: RankPool, engine_name: str) -> None:
    pool.run(destroyed_on_rank, engine_name)


def not_a_member(ctx: RankContext) -> str:
    num_members = ctx.num_ranks - 1
    group = dist.new_group(list(range(num_members)))
    if ctx.rank < num_members:
        return create_engine(group, 4 * num_members, config()).caps.name
    with pytest.raises(InputError) as caught:
        create_engine(group, 4 * num_members, config())
    return str(caught.value)


def test_a_rank_outside_the_group_says_so(pool: RankPool) -> None:
    """Whatever the engine: it is found before one is chosen."""
    *members, outsider = pool.run(not_a_member)
    assert members == ["reference"] * (pool.size - 1)
    assert "not a member" in outsider


def nan_on_rank(ctx: RankContext, engine_name: str) -> list[torch.Tensor]:
    with closing(create_engine(ctx.group, NUM_EXPERTS, config(engine_name))) as engine:
        plan = engine.plan(topk(ctx))
        w = weights(ctx)
        w[0, ctx.rank] = float("nan")
        received, row_w = engine.dispatch(plan, rows(ctx), w)
        out, topk_w = engine.combine(plan, received * row_w[:, None], row_w)
        return [out.isnan().any(dim=1), topk_w.isnan()]


def test_nan_weights_pass_through_to_their_token_only(pool: RankPool, engine_name: str) -> None:
    for rank, (tokens, assignments) in enumerate(pool.run(nan_on_rank, engine_name, ranks=2)):
        assert tokens.tolist() == [True, False, False]
        assert assignments.nonzero().tolist() == [[0, rank]]


def diverge_on_rank(ctx: RankContext, engine_name: str) -> str:
    with closing(create_engine(ctx.group, NUM_EXPERTS, config(engine_name))) as engine:
        plan = engine.plan(topk(ctx))
        call, num_rows = (engine.combine, plan.num_rows) if ctx.rank == 0 else (engine.dispatch, 3)
        with pytest.raises(PeerError) as caught:
            until_checked(lambda: call(plan, rows(ctx, num_rows)))
    return str(caught.value)


def test_ranks_in_different_calls_are_told(pool: RankPool, engine_name: str) -> None:
    for text in pool.run(diverge_on_rank, engine_name, ranks=2):
        assert "rank 0 is in combine" in text
        assert "rank 1 is in dispatch" in text
