"""NCCL EP's staging memory: what is outgrown is freed in time, and it grows on all ranks or none.

Ranks are threads, each with a stand-in for NVIDIA's libraries of its own, which writes down what
the extension calls.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fakes import Recorder, ThreadGroup, compile_fake, needs_extension, on_threads

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.nccl_ep import staging as nccl_ep_staging
from megatron_ncclep.engines.nccl_ep.engine import NcclEpEngine
from megatron_ncclep.engines.nccl_ep.staging import NcclEpPlan, Route, Staging
from megatron_ncclep.errors import LibraryError
from megatron_ncclep.libraries import extension
from megatron_ncclep.libraries import nccl_ep as nccl_ep_library
from megatron_ncclep.libraries.nccl_ep import FIXED_ORDER, PULL_PUSH, NcclEpLibrary

pytestmark = needs_extension

NUM_RANKS, NUM_EXPERTS, TOP_K = 2, 8, 2
CONFIG = EpConfig(engine="nccl_ep", timeout_s=30.0)


class Rank(Recorder):
    """One rank: its staging memory, and what its libraries are asked for."""

    def __init__(self, group: ThreadGroup, library: Path) -> None:
        super().__init__(library)
        self.group, self.rank, self.exchanged = group, group.rank, group.exchanged
        self.staging = Staging(group, NUM_EXPERTS, CONFIG)

    def calls(self, *names: str) -> list[str]:
        """The functions of `names` that the library got since the last time, in order."""
        return [name for name in (line.split()[0] for line in self.lines()) if name in names]

    def bind(self, plan: NcclEpPlan) -> Any:
        return self.staging.bind(plan, row_bytes=64, alignment=1)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Calls a function of a `Rank` as every rank; returns what it returns or raises."""
    native, here = extension.load(), threading.local()
    original = compile_fake(tmp_path / "fake.so")
    # Loaded from files of their own, they do not share what they remember.
    paths = [Path(shutil.copy(original, tmp_path / f"fake{r}.so")) for r in range(NUM_RANKS)]
    # The environment is that of the process: ranks that are its threads take turns.
    environment, turn = nccl_ep_library.environment, threading.Lock()

    @contextmanager
    def environment_in_turn(variables: dict[str, str]) -> Iterator[None]:
        with turn, environment(variables):
            yield

    def communicator_of(group: ThreadGroup, timeout_s: float) -> Any:
        nccl = native.Nccl(str(here.path))
        return native.Communicator(nccl, bytes(128), NUM_RANKS, group.rank, -1, timeout_s=60.0)

    def find_nccl_ep() -> NcclEpLibrary:
        return NcclEpLibrary(here.path, (0, 2, 0), "", interface=here.interface)

    for module, name, value in (
        (nccl_ep_staging, "communicator_of", communicator_of),
        (nccl_ep_library, "find_nccl_ep", find_nccl_ep),
        (nccl_ep_library, "jit_folders", lambda library: {}),
        (nccl_ep_library, "environment", environment_in_turn),
        (extension, "current_stream", lambda: 0),
        (torch.cuda, "synchronize", lambda device: None),
    ):
        monkeypatch.setattr(module, name, value)

    def run(function: Callable[[Rank], Any], interface: int = 2) -> list[Any]:
        def on_rank(group: ThreadGroup) -> Any:
            here.path, here.interface = paths[group.rank], interface
            group.device = torch.device("cpu")
            return function(Rank(group, here.path))

        return on_threads(NUM_RANKS, on_rank)

    return run


def plan(num_tokens: int) -> NcclEpPlan:
    """A plan that is not bound to anything yet."""
    num_local = NUM_EXPERTS // NUM_RANKS
    return NcclEpPlan(
        plan_id=1, num_tokens=num_tokens, top_k=TOP_K, made_by=cast(Any, None), num_rows=0,
        counts=torch.zeros(2 * num_local + 1, dtype=torch.int64),
        topk_idx=torch.zeros(num_tokens, TOP_K, dtype=torch.int64), order=None,
        host_counts=torch.zeros(num_local, dtype=torch.int64), num_used=0,
        num_staged_tokens=num_tokens, route=Route(),
    )  # fmt: skip


LIFE = ("CreateGroup", "InitHandle", "HandleDestroy", "GroupDestroy")


def test_outgrown_memory_is_freed_when_no_plan_uses_it(run: Callable[..., list[Any]]) -> None:
    """A job whose batches grew kept every size of staging memory that a plan was bound to.

    Two plans are alive while the staging memory grows; rank 1 keeps one of them.
    """

    def outgrow(rank: Rank) -> None:
        staging = rank.staging
        first, second, larger = plan(100), plan(100), plan(300)
        for each in (first, second, larger):
            rank.bind(each)
        made = ["CreateGroup", "InitHandle", "InitHandle", "CreateGroup", "InitHandle"]
        assert rank.calls(*LIFE) == made
        staging.free_unused()
        assert rank.calls(*LIFE) == []  # both are in use
        del each, first
        if rank.rank == 0:
            del second
        staging.free_unused()
        # In use on rank 1, so nothing is freed anywhere: that would be collective.
        assert rank.calls(*LIFE) == ["HandleDestroy"] * (2 - rank.rank)
        if rank.rank == 1:
            rank.bind(second)  # moves rows again, and goes over to the new memory
        staging.free_unused()
        moved = ["InitHandle", "HandleDestroy"][: 2 * rank.rank]
        assert rank.calls(*LIFE) == [*moved, "GroupDestroy"]

        rank.exchanged.clear()
        staging.free_unused()
        assert rank.exchanged == []  # nothing is outgrown, and nothing is asked
        rank.bind(larger)
        staging.close()
        assert rank.calls(*LIFE) == ["GroupDestroy"]

    assert run(outgrow) == [None] * NUM_RANKS


def test_released_memory_comes_back_as_large_as_it_was(run: Callable[..., list[Any]]) -> None:
    """For a plan that was made before, too."""

    def release(rank: Rank) -> None:
        old = plan(300)
        rank.bind(old)
        rank.calls()
        for _ in range(2):
            rank.staging.release_memory()
            assert rank.calls(*LIFE) == ["GroupDestroy"]
            rank.staging.release_memory()
            assert rank.calls(*LIFE) == []
            small = plan(3)
            rank.bind(small)
            assert rank.staging._limits == (512, 64, TOP_K)
            rank.bind(old)
            assert rank.calls(*LIFE) == ["CreateGroup", "InitHandle", "InitHandle"]

    assert run(release) == [None] * NUM_RANKS


def test_growing_that_fails_on_one_rank_fails_on_all(run: Callable[..., list[Any]]) -> None:
    """The rank without memory raised alone, and the others waited for it in the next kernel."""
    text = (
        "^nccl_ep: making staging memory for 512 tokens of 64 bytes: rank 1: "
        "ncclEpCreateGroup failed: internal error"
    )

    def fail_to_grow(rank: Rank) -> None:
        old = plan(100)
        rank.bind(old)
        rank.calls()
        if rank.rank == 1:
            rank.fail_next(3)
        with pytest.raises(LibraryError, match=text):
            rank.bind(plan(300))
        rank.calls()
        # It can be tried again, on all ranks; the old plan goes over to what is made then.
        rank.bind(old)
        assert rank.calls(*LIFE) == ["CreateGroup", "InitHandle", "HandleDestroy"]
        rank.staging.free_unused()
        assert rank.calls(*LIFE) == ["GroupDestroy"]

    assert run(fail_to_grow) == [None] * NUM_RANKS


@pytest.mark.parametrize(
    ("interface", "pull_push", "expected"),
    [(2, None, []), (3, "0", ["fixed_order"]), (3, "1", ["pull_push", "fixed_order"])],
)
def test_modes_of_the_library(
    run: Callable[..., list[Any]], interface: int, pull_push: str | None, expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The newer one puts an expert's rows in an order of the moment, unless it is told otherwise,
    and in one mode it adds up in the order of top-k slots, while the contract's is that of ranks.

    Its variables are as they were afterwards: others in the process may use it too.
    """
    monkeypatch.delenv(FIXED_ORDER, raising=False)
    monkeypatch.delenv(PULL_PUSH, raising=False)
    if pull_push is not None:
        monkeypatch.setenv(PULL_PUSH, pull_push)

    def modes(rank: Rank) -> None:
        engine = NcclEpEngine(rank.group, NUM_EXPERTS, CONFIG)
        made = engine.plan(torch.tensor([[7, 1], [2, 5], [-1, 3]]))
        engine.dispatch(made, torch.zeros(3, 16))
        (line,) = (line for line in rank.lines() if line.startswith("CreateGroup"))
        assert line.split()[1:] == expected
        first = [1, 7] if pull_push == "1" else [7, 1]
        assert made.topk_idx.tolist() == [first, [2, 5], [-1, 3]]

    assert run(modes, interface) == [None] * NUM_RANKS
    assert FIXED_ORDER not in os.environ
