"""What keeps NCCL from making a communicator on one rank is what all ranks say, and say in time.

Ranks are threads, in which a test lets a step fail.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_extension import Fake, FakeExtension
from fakes import ThreadGroup, on_threads

from megatron_ncclep.errors import EngineUnavailableError, EpError, LibraryError, PeerError
from megatron_ncclep.libraries import extension
from megatron_ncclep.libraries.search import Library
from megatron_ncclep.ranks import communicator
from megatron_ncclep.ranks.communicator import communicator_of

NUM_RANKS = 3
# Far more than anything here takes: a rank that waits for it makes the test fail by its error.
DEADLINE_S = 30.0
UNIQUE_ID = bytes(range(128))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`fails`: (rank, step) -> what that step raises, or returns instead; `made`: arguments and
    communicator of each one that was made.
    """
    ranks, here = SimpleNamespace(fails={}, made=[]), threading.local()

    def do(step: str, right: Any) -> Any:
        answer = ranks.fails.get((here.rank, step), right)
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    def make(*arguments: Any) -> Any:
        ranks.made.append((arguments[1:], Fake("Communicator")))
        return ranks.made[-1][1]

    def load() -> FakeExtension:
        nccl = Fake("Nccl", unique_id=lambda: do("unique_id", UNIQUE_ID))
        return FakeExtension(
            Nccl=lambda path: do("Nccl", nccl),
            Communicator=lambda *arguments: do("Communicator", lambda: make(*arguments)),
        )

    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(here, "rank", gpu.index))
    monkeypatch.setattr(extension, "load", lambda: do("load", load))
    found = Library(Path("libnccl.so.2"), None, "")
    monkeypatch.setattr(communicator, "find_nccl", lambda: do("find_nccl", found))
    return ranks


def create() -> list[Any]:
    def create_on(group: ThreadGroup) -> Any:
        torch.cuda.set_device(group.device)
        return communicator_of(group, DEADLINE_S)

    return on_threads(NUM_RANKS, create_on)


def test_all_ranks_get_rank_0s_unique_id(ranks: Any) -> None:
    created = create()
    expected = [(UNIQUE_ID, NUM_RANKS, rank, rank, DEADLINE_S) for rank in range(NUM_RANKS)]
    assert sorted(arguments for arguments, _ in ranks.made) == expected
    assert all(created[arguments[2]] is made for arguments, made in ranks.made)


LATE = PeerError("no communicator over the 3 ranks")


@pytest.mark.parametrize(
    ("fails", "kind", "text"),
    [
        # Rank 0 had no network interface for NCCL, and all ranks said that they were in different
        # calls: its reason was raised between two exchanges.
        ({(0, "unique_id"): LibraryError("no net")}, LibraryError, "NCCL: rank 0: no net"),
        ({(2, "Nccl"): LibraryError("no x.so")}, LibraryError, "opening NCCL: rank 2: no x.so"),
        ({(1, "load"): ImportError("no _C")}, LibraryError, "NCCL: rank 1: ImportError: no _C"),
        ({(1, "find_nccl"): EpError("odd")}, LibraryError, "opening NCCL: rank 1: odd"),
        ({(1, "find_nccl"): None}, EngineUnavailableError, "1: no libnccl.so.2 found: install"),
        ({(2, "Communicator"): LibraryError("why")}, LibraryError, "communicator: rank 2: why"),
        # Those who wait in vain hear why, if there is a reason.
        ({(2, "Communicator"): LATE}, PeerError, f"rank 2: {LATE}"),
        # Rank 1 fails at once, and NCCL would have rank 0 wait for it for ever.
        (
            {(0, "Communicator"): LATE, (1, "Communicator"): LibraryError("why")},
            LibraryError,
            f"rank 0: {LATE}; rank 1: why",
        ),
    ],
    ids=str,
)
def test_a_failure_of_one_rank_is_told_by_all(
    fails: dict[tuple[int, str], Any], kind: type, text: str, ranks: Any
) -> None:
    ranks.fails = fails
    errors = create()
    assert [type(error) for error in errors] == [kind] * NUM_RANKS, errors
    assert len({str(error) for error in errors}) == 1
    assert text in str(errors[0])
    # No rank keeps a communicator that others lack, and all can try again.
    assert all(made.names == ["abort"] for _, made in ranks.made)
    ranks.fails = {}
    assert all(isinstance(each, Fake) for each in create())
