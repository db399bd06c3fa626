"""Bad input: the same clear error on every rank at once, with the value and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from contract_cases import OF_A_REFUSAL, caps_of, deadline_s, local_ranks
from rank_pool import RankContext, RankPool
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import megatron_ncclep
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.checks import device_problem
from megatron_ncclep.engines.engine import Engine
from megatron_ncclep.engines.reference import engine as reference
from megatron_ncclep.errors import InputError
from megatron_ncclep.ops.routing import routes_and_weights

pytestmark = pytest.mark.needs_ranks(2)

# Two ranks with four experts each: shapes that an engine has compiled for other tests too.
NUM_EXPERTS, HIDDEN = 8, 64
# A device other than the group's.
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


def twice_on(ctx: RankContext) -> torch.Tensor:
    return torch.tensor([[0, 1], [3, 3]], device=ctx.device)


def with_another(ctx: RankContext, engine: Engine, num_experts: int, **options: Any) -> Any:
    """Another engine of the same kind, closed in the end."""
    return closing(create_engine(ctx.group, num_experts, config(engine.caps.name, **options)))


def create(ctx: RankContext, engine: Engine, num: Any = NUM_EXPERTS, /, **options: Any) -> None:
    """Another engine of the same kind, or `engine` among the options."""
    create_engine(ctx.group, num, config(options.pop("engine", engine.caps.name), **options))


def dispatch(ctx: RankContext, engine: Engine, x: torch.Tensor, *w: torch.Tensor | None) -> None:
    """With a plan that is right; rank 0 always has its own rows."""
    engine.dispatch(engine.plan(topk(ctx)), x if ctx.rank else rows(ctx), *w)


def combine(ctx: RankContext, engine: Engine, change: Callable[[torch.Tensor], Any]) -> None:
    """With a plan that is right, and rows that rank 1 changes."""
    plan = engine.plan(topk(ctx))
    y = rows(ctx, plan.num_rows)
    engine.combine(plan, change(y) if ctx.rank else y)


def map_names_too_many(ctx: RankContext, engine: Engine) -> None:
    routing_map = torch.zeros(3, NUM_EXPERTS, dtype=torch.bool, device=ctx.device)
    routing_map[1, : 2 + ctx.rank] = True
    engine.plan(routes_and_weights(routing_map, routing_map.float(), 2)[0].topk_idx)


def plans_swapped(ctx: RankContext, engine: Engine) -> None:
    plans = [engine.plan(topk(ctx)), engine.plan(topk(ctx))]
    engine.dispatch(plans[ctx.rank], rows(ctx))


def plan_of_another(
    ctx: RankContext, engine: Engine, num_experts: int = NUM_EXPERTS, **options: Any
) -> None:
    with with_another(ctx, engine, num_experts, **options) as other:
        plans = [engine.plan(topk(ctx)), other.plan(topk(ctx))]
        engine.dispatch(plans[ctx.rank], rows(ctx))


def plan_of_another_group(ctx: RankContext, engine: Engine) -> None:
    plan = engine.plan(topk(ctx))
    if ctx.rank:
        plan.made_by = cast(Engine, SimpleNamespace(group=None))
    engine.dispatch(plan, rows(ctx))


def with_gradients(ctx: RankContext, engine: Engine, x: Any, w: Any) -> None:
    """The differentiable dispatch, with a plan and weights that are right on rank 0."""
    wrong = ctx.rank == 1
    args = (x, w) if wrong else (rows(ctx), weights(ctx))
    megatron_ncclep.dispatch(engine, engine.plan(topk(ctx)), *args)


def into_shape(ctx: RankContext, engine: Engine, size: Any = 8) -> None:
    plan = engine.plan(topk(ctx))
    shape: Any = (3, size if ctx.rank else HIDDEN)
    megatron_ncclep.combine(engine, plan, rows(ctx, plan.num_rows), shape)


def distributed(ctx: RankContext, local: torch.Tensor) -> torch.Tensor:
    mesh = DeviceMesh.from_group(ctx.group, ctx.device)
    return DTensor.from_local(local, mesh, run_check=False)


def no_plan(ctx: RankContext, engine: Engine) -> None:
    plan = engine.plan(topk(ctx))
    engine.combine([plan, None][ctx.rank], rows(ctx, plan.num_rows))


def alignment_of_another_engine(ctx: RankContext, engine: Engine) -> None:
    with with_another(ctx, engine, NUM_EXPERTS, alignment=16) as other:
        [engine, other][ctx.rank].plan(topk(ctx))


def number_of_tokens_differs(ctx: RankContext, engine: Engine) -> None:
    with with_another(ctx, engine, NUM_EXPERTS, max_recv_rows="worst") as other:
        other.plan(topk(ctx)[: 3 - ctx.rank])


def in_environment(ctx: RankContext, variable: str, value: str, **everywhere: str) -> None:
    """Create an engine where rank 1 has a variable, and all have others."""
    with pytest.MonkeyPatch.context() as patch:
        for name, same in everywhere.items():
            patch.setenv(name, same)
        if ctx.rank == 1:
            patch.setenv(variable, value)
        create_engine(ctx.group, NUM_EXPERTS)


# What rank 1 does wrong, while rank 0 does everything right, and the message's pattern: {engine}
# and {dtypes} are the engine's, {device} is what the group moves and {wrong} what WRONG_DEVICE says
# of it.
MISTAKES: dict[str, tuple[Callable[[RankContext, Engine], object], str]] = {
    # plan
    "index too large": (
        lambda c, e: e.plan(topk(c) + 4 * c.rank),
        "rank 1: expert index 8 of token 0, top-k slot 1, is out of range: there are 8",
    ),
    "index too small": (
        lambda c, e: e.plan(topk(c) - 5 * c.rank),
        "rank 1: expert index -5 of token 0, top-k slot 0, is out of range",
    ),
    "expert named twice": (
        lambda c, e: e.plan(twice_on(c) if c.rank else topk(c)),
        "rank 1: token 1 names expert 3 twice",
    ),
    "float index": (
        lambda c, e: e.plan(topk(c).float() if c.rank else topk(c)),
        "rank 1: topk_idx is torch.float32: it must be int32 or int64",
    ),
    "flat index": (
        lambda c, e: e.plan(topk(c).reshape(-1) if c.rank else topk(c)),
        r"rank 1: topk_idx has shape \[6\]: it must be \[num_tokens, top_k\]",
    ),
    "index on another device": (
        lambda c, e: e.plan(topk(c).to(WRONG_DEVICE[c.device]) if c.rank else topk(c)),
        r"rank 1: topk_idx is on {wrong}.*\.to\('{device}'\)",
    ),
    "top-k differs": (
        lambda c, e: e.plan(topk(c)[:, : 2 - c.rank]),
        "top_k differs.*rank 0 has 2, rank 1 has 1",
    ),
    "map names too many": (
        map_names_too_many,
        "rank 1: the routing map names more than top_k=2 experts for token 1",
    ),
    "alignment of another engine": (
        alignment_of_another_engine,
        "plan: alignment differs.*rank 0 has 1, rank 1 has 16",
    ),
    # Where the limit depends on it: ranks with other limits would drop other assignments.  Devices
    # compare what follows from it.
    "number of tokens differs": (
        number_of_tokens_differs,
        r"plan: (number of tokens \(max_recv_rows='worst' depends.*rank 0 has 3, rank 1 has 2|"
        "max_recv_rows differs.*rank 0 has 12, rank 1 has 8)",
    ),
    # dispatch and combine
    "integer payload": (
        lambda c, e: dispatch(c, e, rows(c).int()),
        "rank 1: x is torch.int32: engine '{engine}' moves {dtypes}",
    ),
    "list for a routing": (
        lambda c, e: e.plan(topk(c).tolist() if c.rank else topk(c)),
        "rank 1: topk_idx is a list: it must be a torch.Tensor",
    ),
    "dtype differs": (lambda c, e: dispatch(c, e, rows(c).half()), "dtype differs"),
    "bytes on one rank, numbers on the other": (
        lambda c, e: dispatch(c, e, rows(c).view(torch.uint8)),
        "(dtype|hidden size) differs",
    ),
    "bytes to combine": (
        lambda c, e: combine(c, e, lambda y: y.view(torch.uint8)),
        "rank 1: y is torch.uint8: combine cannot add up rows of bytes",
    ),
    "hidden size differs": (
        lambda c, e: dispatch(c, e, rows(c, hidden=2 * HIDDEN)),
        "hidden size differs.*rank 0 has 64, rank 1 has 128",
    ),
    "wrong number of tokens": (
        lambda c, e: dispatch(c, e, rows(c, 4)),
        r"rank 1: x has shape \[4, 64\]: the plan expects \[3, hidden\]",
    ),
    "payload on another device": (
        lambda c, e: dispatch(c, e, rows(c).to(WRONG_DEVICE[c.device])),
        r"rank 1: x is on {wrong}.*\.to\('{device}'\)",
    ),
    "wrong shape of weights": (
        lambda c, e: dispatch(c, e, rows(c), weights(c, 2 + c.rank)),
        r"rank 1: w has shape \[3, 3\]: the plan expects \[3, 2\]",
    ),
    "wrong dtype of weights": (
        lambda c, e: dispatch(c, e, rows(c), weights(c).half() if c.rank else weights(c)),
        "rank 1: w is torch.float16: with torch.float32 rows it must be",
    ),
    "weights on one rank only": (
        lambda c, e: dispatch(c, e, rows(c), None if c.rank else weights(c)),
        "presence of weights differs",
    ),
    "wrong number of rows": (
        lambda c, e: combine(c, e, lambda y: rows(c, len(y) + 1)),
        r"rank 1: y has shape \[\d+, 64\]: the plan expects",
    ),
    "plans swapped": (plans_swapped, r"plan differs.*rank 0 has \d+, rank 1 has \d+"),
    "plan of another engine": (
        lambda c, e: plan_of_another(c, e, 64),
        "rank 1: the plan is for num_experts 64, the engine for 8",
    ),
    "plan with another alignment": (
        lambda c, e: plan_of_another(c, e, alignment=16),
        "rank 1: the plan is for alignment 16, the engine for 1: use the engine that made it",
    ),
    "plan with a fixed number of rows": (
        lambda c, e: plan_of_another(c, e, max_recv_rows=64),
        "rank 1: the plan is for max_recv_rows 64, the engine for None",
    ),
    "plan of another group": (
        plan_of_another_group,
        "rank 1: the plan is for another process group: use the engine that made it",
    ),
    "weights of integers": (
        lambda c, e: with_gradients(c, e, rows(c), weights(c).long()),
        "rank 1: w is torch.int64: weights must be of a floating dtype",
    ),
    # An AttributeError, after all rows had moved.
    "no weights": (
        lambda c, e: with_gradients(c, e, rows(c), None),
        "rank 1: w is a NoneType: it must be a torch.Tensor",
    ),
    "rows of all ranks": (
        lambda c, e: with_gradients(c, e, distributed(c, rows(c)), weights(c)),
        r"rank 1: x is a DTensor: give this rank's part of it, x\.to_local\(\)",
    ),
    "routing of all ranks": (
        lambda c, e: e.plan(distributed(c, topk(c)) if c.rank else topk(c)),
        r"rank 1: topk_idx is a DTensor: give this rank's part of it, topk_idx\.to_local\(\)",
    ),
    "shape of another size": (
        into_shape,
        r"rank 1: shape is \[3, 8\]: the result has 3 tokens of 64, so it must be \[\.\.\., 64\]",
    ),
    "shape of floats": (
        lambda c, e: into_shape(c, e, 2.0),
        r"rank 1: shape is \(3, 2\.0\): give the sizes of the result",
    ),
    # An IndexError on this rank, and the others said that it had died.
    "sparse": (
        lambda c, e: with_gradients(c, e, rows(c).to_sparse() if c.rank else rows(c), weights(c)),
        "rank 1: x is a sparse tensor: give a dense one",
    ),
    "no plan": (no_plan, "rank 1: the plan is a NoneType: use the engine that made it"),
    # create_engine
    "number of experts differs": (
        lambda c, e: create(c, e, NUM_EXPERTS + 2 * c.rank),
        "num_experts differs.*rank 0 has 8, rank 1 has 10",
    ),
    "number of experts is a float": (
        lambda c, e: create(c, e, 8.0 if c.rank else 8),
        r"rank 1: num_experts is 8\.0, a float: it must be a whole number",
    ),
    # Found before the engine is looked for, which need not be able to run.
    "num_sms differs": (
        lambda c, e: create(c, e, engine="native", num_sms=24 + c.rank),
        "open: num_sms differs.*rank 0 has 24, rank 1 has 25",
    ),
    "factor differs": (
        lambda c, e: create(c, e, max_recv_rows=("worst", "1.25x")[c.rank]),
        r"open: max_recv_rows differs.*rank 0 has worst, rank 1 has 1\.25x",
    ),
    # Limits of "worst" would differ, and with them what is dropped.
    "config is a number": (
        lambda c, e: create_engine(c.group, NUM_EXPERTS, 7 if c.rank else None),  # type: ignore[arg-type]
        r"rank 1: config is 7: give it a megatron_ncclep\.EpConfig\(\.\.\.\)",
    ),
    "less than a balanced load": (
        lambda c, e: create(c, e, max_recv_rows="0.5x"),
        "max_recv_rows is '0.5x' and on_overflow 'drop': even of a balanced load rows are dropped",
    ),
    "slices differ": (
        lambda c, e: create_engine(c.group, NUM_EXPERTS, config(e.caps.name), 1 + c.rank),
        "open: ranks_per_expert differs.*rank 0 has 1, rank 1 has 2",
    ),
    "no slices": (
        lambda c, e: create_engine(c.group, NUM_EXPERTS, config(e.caps.name), 0),
        "ranks_per_expert is 0: it must be a whole number from 1 to the 2 ranks of the group",
    ),
    # That node's hosts once waited for others, which waited for it on the device.
    "environment differs": (
        lambda c, e: in_environment(c, "NCCLEP_CHECK_CALLS", "1", NCCLEP_ENGINE=e.caps.name),
        "open: check_calls differs.*rank 0 has False, rank 1 has True. Give every rank the same",
    ),
    "environment is wrong": (
        lambda c, e: in_environment(c, "NCCLEP_TIMEOUT_S", "inf"),
        "rank 1: timeout_s inf: must be a number of seconds from 0.001 to 1e",
    ),
    "unknown engine": (
        lambda c, e: create(c, e, engine="deepep" if c.rank else e.caps.name),
        r"rank 1: engine 'deepep' is unknown: this version has 'auto' and \[.*'refer",
    ),
    "option that would be ignored": (
        lambda c, e: create(c, e, engine="reference", num_sms=24),
        "engine 'reference' would ignore num_sms",
    ),
}


COMPARES_ON_DEVICE = pytest.mark.needs_caps(test=lambda caps: caps.name == "native")


def until_checked(call: Callable[[], object]) -> None:
    """Call it, and ask for errors that have not come yet: the other rank's, in calls of this one
    that waited for no host.
    """
    call()
    megatron_ncclep.check()


def make_mistake(
    ctx: RankContext, name: str, engine_name: str, check_calls: bool, has_windows: bool
) -> str:
    mistake, _ = MISTAKES[name]
    options = config(engine_name, check_calls=check_calls)
    with closing(create_engine(ctx.group, NUM_EXPERTS, options)) as engine:
        if has_windows:  # otherwise hosts agree on what they grow for, whatever the option
            engine.dispatch(engine.plan(topk(ctx)), rows(ctx, hidden=4 * HIDDEN))
        with pytest.raises(InputError) as caught:
            until_checked(lambda: mistake(ctx, engine))
    # The group still works: no rank is left inside a collective.
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
@pytest.mark.parametrize("name", MISTAKES)
def test_every_rank_raises_the_same_error(
    pool: RankPool, engine_name: str, backend: str, name: str, check_calls: bool, has_windows: bool
) -> None:
    texts = pool.run(make_mistake, name, engine_name, check_calls, has_windows, ranks=2)
    if local_ranks() == 1:
        texts = [text for text in texts if not OF_A_REFUSAL.fullmatch(text)]
    assert len(set(texts)) == 1
    device = "cpu" if backend == "gloo" else "cuda"
    dtypes = ", ".join(str(d).removeprefix("torch.") for d in caps_of(engine_name).payload_dtypes)
    pattern = MISTAKES[name][1].format_map(
        {"engine": engine_name, "dtypes": dtypes, "device": device, "wrong": WRONG_DEVICE[device]}
    )
    assert re.search(pattern, texts[0], re.DOTALL), texts[0]


@pytest.mark.ranks(2)
def test_more_rows_than_numbers_for_them(ctx: RankContext) -> None:
    created = create_engine(ctx.group, NUM_EXPERTS, config())
    text = r"rank 1 would receive up to 6 rows, more than the 4 .*micro-batches"
    # 2^31 rows do not fit into a test.
    with mock.patch.object(reference, "MAX_ROWS", 4), pytest.raises(InputError, match=text):
        created.plan(topk(ctx))


@pytest.mark.ranks(2)
def test_nan_weights_pass_through_to_their_token_only(ctx: RankContext, engine_name: str) -> None:
    with closing(create_engine(ctx.group, NUM_EXPERTS, config(engine_name))) as engine:
        plan = engine.plan(topk(ctx))
        w = weights(ctx)
        w[0, ctx.rank] = float("nan")
        received, row_w = engine.dispatch(plan, rows(ctx), w)
        out, topk_w = engine.combine(plan, received * row_w[:, None], row_w)
        assert out.isnan().any(dim=1).tolist() == [True, False, False]
        assert topk_w.isnan().nonzero().tolist() == [[0, ctx.rank]]


@pytest.mark.ranks(2)
def test_options_may_be_a_mapping(ctx: RankContext, engine_name: str) -> None:
    """A dict, as from a file, was an AttributeError."""
    options: dict[str, Any] = {"engine": engine_name, "alignment": 16}
    with closing(create_engine(ctx.group, NUM_EXPERTS, options)) as engine:
        assert engine.config == EpConfig(**options)


def test_what_is_no_process_group_is_named(ctx: RankContext) -> None:
    for group in (None, 0):
        with pytest.raises(InputError, match=f"process_group is {group}: .*distributed.group.WORL"):
            create_engine(group, NUM_EXPERTS, config())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "group", "problem"),
    [
        ("cpu", "cpu", None),
        ("cuda:1", "cuda:1", None),
        ("cuda:1", "cuda", None),  # a group that does not say which
        ("cuda:1", "cuda:0", "x is on cuda:1, but the group is on cuda:0, "),
        ("cuda:0", "cuda:3", r"x is on cuda:0, .* \.to\('cuda:3'\), or call torch\.cuda\.set_"),
        ("cpu", "cuda:0", r"x is on cpu, .* moves cuda tensors: move it with \.to\('cuda'\)"),
        ("cuda:0", "cpu", "x is on cuda:0, but the process group moves cpu tensors"),
        ("meta", "cuda:0", "x is on meta"),
    ],
)
def test_devices(tensor: str, group: str, problem: str | None) -> None:
    """With real tensors two GPUs in one process would be needed, and ranks have one."""
    found = device_problem("x", SimpleNamespace(device=torch.device(tensor)), torch.device(group))
    assert (found is None) == (problem is None)
    assert re.search(problem or "", found or "")
