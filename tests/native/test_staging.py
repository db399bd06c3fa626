"""NCCL EP's staging memory: what is outgrown is freed in time, and it grows on all ranks or none.

Ranks are threads, each with a stand-in for NVIDIA's libraries of its own, which writes down what
the extension calls.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Recorder, ThreadGroup, compile_fake, on_threads

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.nccl_ep import staging as nccl_ep_staging
from megatron_ncclep.engines.nccl_ep.engine import NcclEpEngine
from megatron_ncclep.engines.nccl_ep.staging import NcclEpPlan, Route, Staging
from megatron_ncclep.errors import LibraryError, RowsDroppedError
from megatron_ncclep.libraries import extension
from megatron_ncclep.libraries import nccl_ep as nccl_ep_library
from megatron_ncclep.libraries.nccl_ep import FIXED_ORDER, PULL_PUSH, NcclEpLibrary

if extension.unavailable_reason() is not None:
    # tests/test_packaging.py sees to it that there is one wherever there is a CUDA toolkit.
    pytest.skip(f"nothing to call: {extension.unavailable_reason()}", allow_module_level=True)

NUM_RANKS, NUM_EXPERTS, TOP_K = 2, 8, 2
CONFIG = EpConfig(engine="nccl_ep", timeout_s=30.0)


class Rank(Recorder):
    """One rank: its staging memory, and what its libraries get to hear."""

    def __init__(self, group: ThreadGroup, library: Path) -> None:
        self.group = group
        self.rank = group.rank
        super().__init__(library)
        self.num_exchanges = 0
        self._exchange = group.exchange
        group.exchange = self._count  # type: ignore[method-assign]
        self.staging = Staging(group, NUM_EXPERTS, CONFIG)

    def calls(self, *names: str) -> list[str]:
        """The functions of `names` that the library got since the last time, in order."""
        return [name for name in (line.split()[0] for line in self.lines()) if name in names]

    def lines(self, name: str = "") -> list[str]:
        """The calls since the last time, with their arguments: of the function `name`, or all."""
        return [line for line in super().lines() if line.startswith(f"{name} " if name else "")]

    def bind(self, plan: NcclEpPlan) -> Any:
        return self.staging.bind(plan, row_bytes=64, alignment=1)

    def _count(self, *arguments: Any) -> bytes:
        self.num_exchanges += 1
        return self._exchange(*arguments)


@pytest.fixture
def interface() -> int:
    """Of the library."""
    return 2


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interface: int
) -> Callable[..., list[Any]]:
    """Calls a function of a `Rank` as every rank; returns what it returns or raises."""
    native, here = extension.load(), threading.local()
    original = compile_fake(tmp_path / "fake.so")
    # Loaded from files of their own, they do not share what they remember.
    paths = [Path(shutil.copy(original, tmp_path / f"fake{r}.so")) for r in range(NUM_RANKS)]

    def communicator_of(group: ThreadGroup, timeout_s: float) -> Any:
        return native.Communicator(
            native.Nccl(str(here.path)),
            bytes(128),
            NUM_RANKS,
            group.rank,
            device=-1,
            timeout_s=60.0,
        )

    monkeypatch.setattr(nccl_ep_staging, "communicator_of", communicator_of)
    monkeypatch.setattr(
        nccl_ep_library,
        "find_nccl_ep",
        lambda: NcclEpLibrary(here.path, (0, 2, 0), "", interface=interface),
    )
    monkeypatch.setattr(nccl_ep_library, "jit_folders", lambda library: {})
    monkeypatch.setattr(extension, "current_stream", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def on_rank(group: ThreadGroup, function: Callable[[Rank], Any]) -> Any:
        here.path, group.device = paths[group.rank], torch.device("cpu")
        return function(Rank(group, here.path))

    return lambda function: on_threads(NUM_RANKS, lambda group: on_rank(group, function))


def plan(num_tokens: int) -> NcclEpPlan:
    """A plan that is not bound to anything yet."""
    num_local = NUM_EXPERTS // NUM_RANKS
    counts = torch.zeros(num_local, dtype=torch.int64)
    return NcclEpPlan(
        plan_id=1,
        num_tokens=num_tokens,
        top_k=TOP_K,
        num_experts=NUM_EXPERTS,
        num_rows=0,
        counts=torch.zeros(2 * num_local + 1, dtype=torch.int64),
        topk_idx=torch.zeros(num_tokens, TOP_K, dtype=torch.int64),
        order=None,
        host_counts=counts,
        num_used=0,
        num_staged_tokens=num_tokens,
        route=Route(),
    )


LIFE = ("CreateGroup", "InitHandle", "HandleDestroy", "GroupDestroy")


def outgrow(rank: Rank) -> None:
    """Two plans are alive while the staging memory grows; rank 1 keeps one of them."""
    staging = rank.staging
    first, second = plan(100), plan(100)
    rank.bind(first)
    rank.bind(second)
    larger = plan(300)
    rank.bind(larger)
    assert rank.calls(*LIFE) == [
        "CreateGroup", "InitHandle", "InitHandle", "CreateGroup", "InitHandle",
    ]  # fmt: skip
    staging.free_unused()
    assert rank.calls(*LIFE) == []  # both are in use
    del first
    if rank.rank == 0:
        del second
    staging.free_unused()
    # In use on rank 1, so nothing is freed anywhere: that would be collective.
    assert rank.calls(*LIFE) == ["HandleDestroy"] * (2 - rank.rank)
    if rank.rank == 1:
        rank.bind(second)  # moves rows again, and goes over to the new memory
    staging.free_unused()
    assert rank.calls(*LIFE) == [*["InitHandle", "HandleDestroy"][: 2 * rank.rank], "GroupDestroy"]

    before = rank.num_exchanges
    staging.free_unused()
    assert rank.num_exchanges == before  # nothing is outgrown, and nothing is asked
    rank.bind(larger)
    staging.close()
    assert rank.calls(*LIFE) == ["GroupDestroy"]


def test_outgrown_memory_is_freed_when_nobody_uses_it(run: Callable) -> None:
    """A job whose batches grew kept every size of staging memory that it had ever had.

    Memory that plans were bound to when it was outgrown was freed by the group's close only.  No
    test had a plan alive while it grew.
    """
    assert run(outgrow) == [None] * NUM_RANKS


def step_of_training(rank: Rank) -> None:
    engine = NcclEpEngine(rank.group, NUM_EXPERTS, CONFIG)

    def step(num_tokens: int) -> NcclEpPlan:
        made = engine.plan(torch.tensor([[0, 5]]).repeat(num_tokens, 1))
        engine.dispatch(made, torch.ones(num_tokens, 16))
        return made

    small, large = step(100), step(300)
    rank.calls()
    del small
    assert rank.calls(*LIFE) == ["HandleDestroy"]
    step(100)
    assert rank.calls(*LIFE)[0] == "GroupDestroy"  # before the new plan is bound
    assert large.num_staged_tokens == 300


def test_the_next_plan_frees_it(run: Callable) -> None:
    assert run(step_of_training) == [None] * NUM_RANKS


def outgrow_unused(rank: Rank) -> None:
    rank.bind(plan(100))
    rank.bind(plan(300))
    assert rank.calls(*LIFE) == [
        "CreateGroup", "InitHandle", "HandleDestroy", "GroupDestroy",
        "CreateGroup", "InitHandle", "HandleDestroy",
    ]  # fmt: skip


def test_memory_without_plans_is_freed_before_the_next_is_made(run: Callable) -> None:
    assert run(outgrow_unused) == [None] * NUM_RANKS


def fail_to_grow(rank: Rank) -> str:
    old = plan(100)
    rank.bind(old)
    rank.calls()
    if rank.rank == 1:
        rank.fail_next(3)
    with pytest.raises(LibraryError) as caught:
        rank.bind(plan(300))
    rank.calls()
    # It can be tried again, on all ranks; the old plan goes over to what is made then.
    rank.bind(old)
    assert rank.calls(*LIFE) == ["CreateGroup", "InitHandle", "HandleDestroy"]
    rank.staging.free_unused()
    assert rank.calls(*LIFE) == ["GroupDestroy"]
    return str(caught.value)


def test_growing_that_fails_on_one_rank_fails_on_all(run: Callable) -> None:
    """The rank without memory raised alone, and the others waited for it in the next kernel."""
    texts = run(fail_to_grow)
    assert texts[0] == texts[1]
    assert "nccl_ep: making staging memory for 512 tokens of 64 bytes: rank 1: " in texts[0]
    assert "ncclEpCreateGroup failed: internal error" in texts[0]


def fail_to_rebind(rank: Rank) -> None:
    old = plan(100)
    handle = rank.bind(old)
    rank.bind(plan(300))
    rank.fail_next(3)
    with pytest.raises(LibraryError, match="ncclEpHandleMemSize"):
        rank.bind(old)
    rank.calls()
    assert rank.bind(old) is not handle
    assert rank.calls(*LIFE) == ["InitHandle"]


def test_a_plan_that_could_not_be_bound_is_bound_the_next_time(run: Callable) -> None:
    """It counted as bound to the new memory, with the handle that it had in the old one."""
    assert run(fail_to_rebind) == [None] * NUM_RANKS


def dispatch_with_a_limit_in_words(rank: Rank) -> list[tuple[int, int, int]]:
    """By plan: rows of the dispatched tensor, those that the library's group was made for, and
    those that it was given to fill.
    """
    config = EpConfig(engine="nccl_ep", timeout_s=30.0, alignment=16, max_recv_rows="worst")
    engine = NcclEpEngine(rank.group, NUM_EXPERTS, config)
    rank.lines()
    sizes, made_for, filled = [], 0, 0
    for num_tokens in (100, 300, 200):
        plan = engine.plan(torch.tensor([[0, 5]]).repeat(num_tokens, 1))
        rows, _ = engine.dispatch(plan, torch.ones(num_tokens, 16))
        assert int(plan.num_dropped) == 0
        for name, *words in (line.split() for line in rank.lines()):
            if name == "CreateGroup":
                made_for = int(dict(word.split("=") for word in words)["recv"])
            if name == "Dispatch":
                filled = int(re.findall(r"rows=\d+\[(\d+)", " ".join(words))[0])
        sizes.append((len(rows), made_for, filled))
    return sizes


def test_limits_in_words_follow_the_batch(run: Callable) -> None:
    """The library has room for what a full staging memory of tokens needs at worst: two assignments
    of every token of both ranks, in 4 experts, of which each wastes at most 15 rows.  It insists on
    as many rows as it has room for, whatever the plan.
    """

    def rows(num_tokens: int) -> int:
        return (4 + (NUM_RANKS * num_tokens * TOP_K - 4) // 16) * 16

    expected = [
        (rows(100), rows(128), rows(128)),
        (rows(300), rows(512), rows(512)),
        (rows(200), rows(512), rows(512)),
    ]
    assert run(dispatch_with_a_limit_in_words) == [expected] * NUM_RANKS


def lack_rows(rank: Rank) -> str:
    """Rank 0 gets 200 rows for its expert 0 and has 100; what the next check raises."""
    config = EpConfig(engine="nccl_ep", timeout_s=30.0, max_recv_rows=100, on_overflow="raise")
    engine = NcclEpEngine(rank.group, NUM_EXPERTS, config)
    for num_tokens in (50, 100, 50):
        engine.plan(torch.tensor([[0]]).repeat(num_tokens, 1))
    with pytest.raises(RowsDroppedError) as caught:
        rank.group.check()
    rank.group.check()
    return str(caught.value)


def test_what_one_rank_lacks_is_raised_by_all(run: Callable) -> None:
    texts = run(lack_rows)
    assert texts[0] == texts[1]
    assert "rank 0 needed 200 rows and had 100 (each rank" in texts[0]
    assert "rank 1 needed" not in texts[0]


def modes(rank: Rank) -> list[str]:
    rank.bind(plan(100))
    (line,) = rank.lines("CreateGroup")
    return line.partition("topk=2")[2].split()


@pytest.mark.parametrize(
    ("interface", "pull_push", "expected"),
    [
        (2, None, []),
        (3, None, ["fixed_order"]),
        (3, "0", ["fixed_order"]),
        (3, "1", ["pull_push", "fixed_order"]),
    ],
)
def test_modes_of_the_library(
    run: Callable, pull_push: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one puts an expert's rows in an order of the moment, unless it is told otherwise.

    Its variables are as they were afterwards: others in the process may use it too.
    """
    monkeypatch.delenv(FIXED_ORDER, raising=False)
    monkeypatch.delenv(PULL_PUSH, raising=False)
    if pull_push is not None:
        monkeypatch.setenv(PULL_PUSH, pull_push)
    assert run(modes) == [expected] * NUM_RANKS
    assert FIXED_ORDER not in os.environ


def pull_and_push(rank: Rank) -> tuple[list[str], list[str], list[list[float]]]:
    rank.show_values()
    engine = NcclEpEngine(rank.group, NUM_EXPERTS, CONFIG)
    made = engine.plan(torch.tensor([[7, 1], [2, 5], [-1, 3]]))
    w = torch.tensor([[0.25, 0.5], [0.75, 1.0], [1.25, 1.5]])
    engine.dispatch(made, torch.zeros(3, 16, dtype=torch.bfloat16), w)
    (update,) = rank.lines("UpdateHandle")
    engine.dispatch(made, torch.zeros(3, 16, dtype=torch.bfloat16), w)
    (dispatch,) = rank.lines("Dispatch")
    assignments = update.partition("topk=4[3,2]")[2].partition(" counters")[0]
    weights = dispatch.partition("w=7[3,2]")[2].partition(" rows")[0]
    rows = torch.zeros(made.num_rows, 16, dtype=torch.bfloat16)
    _, topk_w = engine.combine(made, rows, torch.zeros(made.num_rows))
    assert topk_w is not None
    return assignments.split(), weights.split(), topk_w.tolist()


@pytest.mark.parametrize("interface", [3])
@pytest.mark.parametrize("pull_push", [False, True])
def test_assignments_are_in_the_order_of_additions(
    run: Callable, pull_push: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its push combine adds the ranks' parts in the order of top-k slots, the contract in ranks'.

    With two ranks the sums are the same, and Megatron's routing maps name experts in order: only
    other callers on more ranks would have got other bits.
    """
    monkeypatch.setenv(PULL_PUSH, str(int(pull_push)))
    assignments, weights = (
        ["1", "7", "2", "5", "-1", "3"],
        ["0.5", "0.25", "0.75", "1", "1.25", "1.5"],
    )
    topk_w = [[1.0, 0.0], [2.0, 3.0], [4.0, 5.0]]  # of assignments as the caller named them
    if not pull_push:
        assignments[:2], weights[:2], topk_w[0] = ["7", "1"], ["0.25", "0.5"], [0.0, 1.0]
    assert run(pull_and_push) == [(assignments, weights, topk_w)] * NUM_RANKS
