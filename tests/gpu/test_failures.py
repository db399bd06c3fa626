"""A rank whose device is late, or that leaves something out: NaN where nothing came, and an error.

Without the NaN, outputs of a kernel whose wait passed its deadline would hold the numbers of some
earlier tensor, and no later call of the group may come that could raise: none before an optimizer's
step, and none in a replayed graph.

Each fault happens in a group of its own, which is of no use afterwards; the pool lives on.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import assert_same_bits
from contract_cases import config_of
from rank_pool import RankContext, RankPool
from run_case import Tables
from test_graphs import CASE, RESULTS, Layer, captured

import megatron_ncclep
from megatron_ncclep.benchmark.contents import rows_of, weights_of
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.errors import PeerError

pytestmark = [
    pytest.mark.needs_ranks(2),
    pytest.mark.needs_caps(test=lambda caps: caps.name == "native"),
]

# For making windows, and for what is late afterwards.
LONG_S, DEADLINE_S = 60.0, 2.0
# More than one deadline and less than two, at a clock of 1.5 to 2.2 GHz.
LATE_CYCLES = 5_500_000_000
NUM_TOKENS, HIDDEN, EXPERTS_OF_A_RANK = 150, 256, 4
STEPS = ("plan", "dispatch", "combine")
RIGHT, NAN = "right", "NaN"


@dataclass
class Story:
    """What one rank saw.

    Attributes:
        results: name of a tensor -> RIGHT, NAN, or the first difference from the oracle.
        raised: call -> text of its PeerError.
    """

    results: dict[str, str] = field(default_factory=dict)
    raised: dict[str, str] = field(default_factory=dict)

    def see(self, name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        if bool((actual.contiguous().view(torch.uint8) == 0xFF).all()):
            self.results[name] = NAN
            return
        try:
            assert_same_bits(actual, expected, name)
        except AssertionError as error:
            self.results[name] = str(error)
        else:
            self.results[name] = RIGHT

    def call(self, name: str, function: Callable[[], object]) -> object:
        """What it returns; None when it raises, and when an earlier call has."""
        if self.raised:
            return None
        try:
            return function()
        except PeerError as error:
            self.raised[name] = str(error)
            return None

    def check(self) -> None:
        """What `megatron_ncclep.check` says."""
        try:
            megatron_ncclep.check()
        except PeerError as error:
            self.raised["check"] = str(error)

    def next(self, function: Callable[[], object]) -> None:
        """What the call after the failure says."""
        try:
            function()
        except PeerError as error:
            self.raised["next"] = str(error)


def in_a_group_of_its_own(ctx: RankContext, function: Callable[..., Any], *args: object) -> Any:
    """Call `function` with a context that has a new group of the same ranks."""
    group = dist.new_group(list(range(ctx.num_ranks)))
    try:
        return function(dataclasses.replace(ctx, group=group), *args)
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group(group)


class Job:
    """One layer in which every token has experts on every rank.

    Attributes:
        engine: with the short deadline.
        is_culprit: whether this rank, the last one, is the one that goes wrong.
    """

    def __init__(self, ctx: RankContext, engine_name: str, is_static: bool) -> None:
        self.ctx, self.is_culprit = ctx, ctx.rank == ctx.num_ranks - 1
        ranks, device = range(ctx.num_ranks), ctx.device
        num_experts = EXPERTS_OF_A_RANK * ctx.num_ranks
        token = torch.arange(NUM_TOKENS, device=device)[:, None]
        first = EXPERTS_OF_A_RANK * torch.arange(ctx.num_ranks, device=device)
        self.topk_idx = [first + (token + r) % EXPERTS_OF_A_RANK for r in ranks]
        limit = NUM_TOKENS * ctx.num_ranks if is_static else None
        config = EpConfig(engine=engine_name, max_recv_rows=limit, timeout_s=LONG_S)
        tables = Tables(engine_name, self.topk_idx, num_experts, 1, limit)
        x = [rows_of(r, NUM_TOKENS, HIDDEN, torch.float32, 1, device) for r in ranks]
        w = [weights_of(r, (NUM_TOKENS, ctx.num_ranks), 1, device) for r in ranks]
        y = [rows_of(r, tables.num_rows[r], HIDDEN, torch.float32, 2, device) for r in ranks]
        v = [weights_of(r, (tables.num_rows[r],), 2, device) for r in ranks]
        self.x, self.w, self.y, self.v = (each[ctx.rank] for each in (x, w, y, v))
        self.expected = {
            "dispatch": tables.dispatch(ctx.rank, x, w),
            "combine": tables.combine(ctx.rank, y, v),
        }
        # The first engine makes what takes long; both have the same windows.
        patient = create_engine(ctx.group, num_experts, config)
        self.engine = create_engine(
            ctx.group, num_experts, dataclasses.replace(config, timeout_s=DEADLINE_S)
        )
        for engine in (patient, self.engine):
            plan = engine.plan(self.topk_idx[ctx.rank])
            engine.dispatch(plan, self.x, self.w)
            engine.combine(plan, self.y, self.v)
            torch.cuda.synchronize()

    def plan(self) -> RoutePlan:
        return self.engine.plan(self.topk_idx[self.ctx.rank])

    def be_late(self) -> None:
        if self.is_culprit:
            torch.cuda._sleep(LATE_CYCLES)


def late_on_rank(ctx: RankContext, engine_name: str, late: str, is_static: bool) -> Story:
    """All steps are queued at once; before one of them the last rank's device sleeps."""
    job, story = Job(ctx, engine_name, is_static), Story()
    engine = job.engine

    def step(name: str, function: Callable[[], object]) -> object:
        if name == late:
            job.be_late()
        return story.call(name, function)

    plan = step("plan", job.plan)
    received = step("dispatch", lambda: engine.dispatch(plan, job.x, job.w))
    returned = step("combine", lambda: engine.combine(plan, job.y, job.v))
    torch.cuda.synchronize()
    for name, tensors in (("dispatch", received), ("combine", returned)):
        if tensors is not None:
            for what, actual, expected in zip(
                ("rows", "weights"), tensors, job.expected[name], strict=True
            ):
                story.see(f"{name}: {what}", actual, expected)
    story.check()
    story.next(job.plan)
    return story


def assert_nothing_wrong(stories: list[Story]) -> None:
    """Whatever a rank has is right or NaN, and where it is NaN, it was told."""
    for rank, story in enumerate(stories):
        wrong = {name: what for name, what in story.results.items() if what not in (RIGHT, NAN)}
        assert not wrong, f"rank {rank}: {wrong}"
        if NAN in story.results.values():
            assert "check" in story.raised, f"rank {rank}: {story}"


@pytest.mark.parametrize("is_static", [False, True], ids=["exact", "static"])
@pytest.mark.parametrize("late", STEPS)
def test_a_late_device_is_nan_and_an_error(
    pool: RankPool, engine_name: str, late: str, is_static: bool
) -> None:
    stories = pool.run(in_a_group_of_its_own, late_on_rank, engine_name, late, is_static)
    assert_nothing_wrong(stories)
    *others, culprit = stories
    for call in ("check", "next"):
        # A rank may hear first that another one has given up; that one names the culprit.
        texts = [story.raised.get(call, "") for story in others]
        assert all(re.search(rf"rank \d did not come in {late}", text) for text in texts), texts
        assert any(f"rank {len(others)} did not come in {late}" in text for text in texts), texts
    for rank, story in enumerate(others):
        what = f"rank {rank}: {story}"
        # What came before is there; what failed and all after it are not.
        before = STEPS[: STEPS.index(late)]
        for name, result in story.results.items():
            assert result == (RIGHT if name.partition(":")[0] in before else NAN), what
        if "plan" in story.raised:  # the host waits for the device's plan in exact mode
            assert (late, is_static) == ("plan", False), what
        else:
            assert len(story.results) == 4, what
    # The rank that was late has all that the others sent before they gave up.
    assert "next" in culprit.raised, culprit
    if late == "dispatch":
        assert culprit.results["dispatch: rows"] == RIGHT, culprit
        assert culprit.results["dispatch: weights"] == RIGHT, culprit


# --- CUDA graphs ---------------------------------------------------------------------------------


def replays_on_rank(ctx: RankContext, engine_name: str, leaves_out: bool) -> list[Story]:
    """Replay a step three times; at the second the last rank is late, or leaves out the rest."""
    is_culprit = ctx.rank == ctx.num_ranks - 1
    tokens = (200, 131, 64, 77, 128, 1, 90, 30)[: ctx.num_ranks]
    case = dataclasses.replace(CASE, tokens=tokens, num_experts=4 * ctx.num_ranks, dropped=0.0)
    case = case.on(ctx.device)
    config = dataclasses.replace(config_of(case, engine_name), timeout_s=LONG_S)
    Layer(ctx, case, create_engine(ctx.group, case.num_experts, config)).step()
    config = dataclasses.replace(config, timeout_s=DEADLINE_S)
    layer = Layer(ctx, case, create_engine(ctx.group, case.num_experts, config))
    layer.step()
    torch.cuda.synchronize()
    replay, (_, results) = captured(layer)
    stories, number = [], 1
    for turn in range(3):
        is_left_out = leaves_out and is_culprit and turn > 0
        if not is_left_out:
            number = turn + 1
            layer.fill(number)
            if is_culprit and turn == 1:
                torch.cuda._sleep(LATE_CYCLES)
            replay()
        torch.cuda.synchronize()
        story = Story()
        _, expected = layer.expected(number)
        for name, actual, wanted in zip(RESULTS, results, expected, strict=True):
            if actual is not None and wanted is not None:
                story.see(name, actual, wanted)
        story.check()
        stories.append(story)
    return stories


@pytest.mark.needs_caps(test=lambda caps: caps.captures_static)
@pytest.mark.parametrize("leaves_out", [False, True], ids=["late", "leaves-out"])
def test_a_replayed_graph_is_nan_and_an_error(
    pool: RankPool, engine_name: str, leaves_out: bool
) -> None:
    ranks = pool.run(in_a_group_of_its_own, replays_on_rank, engine_name, leaves_out)
    for turn in range(3):
        assert_nothing_wrong([stories[turn] for stories in ranks])
    for rank, (first, *failed) in enumerate(ranks):
        is_culprit = rank == len(ranks) - 1
        assert set(first.results.values()) == {RIGHT}, f"rank {rank}: {first}"
        assert first.raised == {}
        for story in failed:
            what = f"rank {rank}: {story}"
            if not is_culprit:
                assert set(story.results.values()) == {NAN}, what
                assert f"rank {len(ranks) - 1} did not come in" in story.raised["check"], what
            elif leaves_out:  # it has what it had
                assert set(story.results.values()) == {RIGHT}, what
                assert story.raised == {}, what


# --- hosts ---------------------------------------------------------------------------------------


def leave_out_on_rank(ctx: RankContext, engine_name: str, fault: str) -> Story:
    """After a dispatch the last rank makes no call, or another one than the others' combine.

    A combine waits for no host, so that the call itself says nothing; a plan does.
    """
    job, story = Job(ctx, engine_name, False), Story()
    engine: Engine = job.engine
    plan = job.plan()
    received = engine.dispatch(plan, job.x, job.w)
    if not job.is_culprit:
        story.call("combine", lambda: engine.combine(plan, job.y, job.v))
    elif fault == "comes never":
        time.sleep(2 * DEADLINE_S)
    else:
        other: dict[str, Callable[[], object]] = {
            "plans": job.plan,
            "dispatches": lambda: engine.dispatch(plan, job.x, job.w),
        }
        story.call(fault, other[fault])
    torch.cuda.synchronize()
    for what, actual, expected in zip(
        ("rows", "weights"), received, job.expected["dispatch"], strict=True
    ):
        story.see(what, actual, expected)
    if not story.raised:
        story.check()
    return story


@pytest.mark.parametrize("fault", ["comes never", "plans", "dispatches"])
def test_hosts_that_part_spoil_nothing(pool: RankPool, engine_name: str, fault: str) -> None:
    stories = pool.run(in_a_group_of_its_own, leave_out_on_rank, engine_name, fault)
    last = len(stories) - 1
    for rank, story in enumerate(stories):
        what = f"rank {rank}: {story}"
        assert set(story.results.values()) == {RIGHT}, what
        if rank == last and fault == "comes never":
            assert story.raised == {}, what
            continue
        ((call, text),) = story.raised.items()
        if fault == "dispatches":
            assert call == "check", what
            place = rf"rank {last} is in dispatch" if rank != last else r"rank \d is in combine"
            assert re.search(place, text), what
        elif rank != last:
            assert call == "check", what
            assert re.search(r"rank \d did not come in combine", text), what
        else:  # it waits on the host for ranks that have gone on
            assert call == "plans", what
            assert re.search(r"rank 0 has gone on to call", text), what
    if fault != "dispatches":
        # A rank may hear first that another one has given up; that one names the culprit.
        named = f"rank {last} did not come in combine"
        assert any(named in text for story in stories for text in story.raised.values()), stories
