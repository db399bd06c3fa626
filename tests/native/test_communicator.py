"""What keeps NCCL from making a communicator on one rank is what all ranks say, and say in time.

Ranks are threads; NCCL and the extension are `Fake`, which each test breaks on one rank.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import ThreadGroup, on_threads

from megatron_ncclep.errors import EngineUnavailableError, EpError, LibraryError, PeerError
from megatron_ncclep.libraries import extension
from megatron_ncclep.libraries.search import Library
from megatron_ncclep.ranks import communicator
from megatron_ncclep.ranks.agreement import on_all_ranks
from megatron_ncclep.ranks.communicator import communicator_of

NUM_RANKS = 3
# Far more than anything here takes: a rank that waits for it makes the test fail by its error.
DEADLINE_S = 30.0
UNIQUE_ID = bytes(range(128))


class Communicator:
    """A `_C.Communicator`."""

    def __init__(self, unique_id: bytes) -> None:
        self.unique_id = unique_id
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


class Fake:
    """The extension, and NCCL, of one rank.

    Attributes:
        failures: step -> what it raises here; a step of which there is none goes well.
        made: the communicators of this rank.
    """

    def __init__(self) -> None:
        self.failures: dict[str, Exception] = {}
        self.made: list[Communicator] = []
        self.never = threading.Event()  # what a step waits for that does not end

    def fail(self, step: str) -> None:
        if step in self.failures:
            raise self.failures[step]

    def Nccl(self, path: str) -> Fake:  # noqa: N802
        self.fail("open")
        return self

    def unique_id(self) -> bytes:
        self.fail("unique_id")
        return UNIQUE_ID

    def Communicator(  # noqa: N802
        self, nccl: Any, unique_id: bytes, num_ranks: int, rank: int
    ) -> Communicator:
        if "hang" in self.failures:
            self.never.wait()
        self.fail("init")
        self.made.append(Communicator(unique_id))
        return self.made[-1]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Fake]:
    """One for each rank, which is found by the device that is current in a thread."""
    fakes, here = [Fake() for _ in range(NUM_RANKS)], threading.local()

    def fake() -> Fake:
        return fakes[here.rank]

    def load() -> Fake:
        fake().fail("load")
        return fake()

    def find_nccl() -> Library | None:
        fake().fail("find")
        return None if "absent" in fake().failures else Library(Path("libnccl.so.2"), None, "")

    def set_rank(device: torch.device) -> None:
        here.rank = device.index

    monkeypatch.setattr(extension, "load", load)
    monkeypatch.setattr(communicator, "find_nccl", find_nccl)
    monkeypatch.setattr(torch.cuda, "set_device", set_rank)
    return fakes


def create(timeouts: list[float] | None = None) -> list[Any]:
    def create_on(group: ThreadGroup) -> Any:
        torch.cuda.set_device(group.device)
        timeout_s = DEADLINE_S if timeouts is None else timeouts[group.rank]
        return communicator_of(group, timeout_s)

    return on_threads(NUM_RANKS, create_on)


def test_all_ranks_get_rank_0s_unique_id(fakes: list[Fake]) -> None:
    assert create() == [fake.made[0] for fake in fakes]
    assert [fake.made[0].unique_id for fake in fakes] == [UNIQUE_ID] * NUM_RANKS


@pytest.mark.parametrize(
    ("step", "rank", "failure", "kind", "text"),
    [
        (
            "unique_id",
            0,
            LibraryError("ncclGetUniqueId failed: no interface"),
            LibraryError,
            "opening NCCL: rank 0: ncclGetUniqueId failed: no interface",
        ),
        ("open", 2, LibraryError("no x.so"), LibraryError, "opening NCCL: rank 2: no x.so"),
        ("load", 1, ImportError("no _C"), LibraryError, "opening NCCL: rank 1: ImportError: no _C"),
        ("find", 1, EpError("odd"), LibraryError, "opening NCCL: rank 1: odd"),
        ("absent", 1, EpError(), EngineUnavailableError, "rank 1: no libnccl.so.2 found: install"),
        (
            "init",
            2,
            LibraryError("ncclCommInitRank failed: why"),
            LibraryError,
            "making an NCCL communicator: rank 2: ncclCommInitRank failed: why",
        ),
    ],
)
def test_a_failure_of_one_rank_is_told_by_all(
    step: str, rank: int, failure: Exception, kind: type, text: str, fakes: list[Fake]
) -> None:
    """Rank 0 had no network interface for NCCL, and no rank said so.

    Its reason was raised between two exchanges: both ranks said that they were in different calls,
    because the next two that came were of different sizes.  No test had NCCL fail on one rank.
    """
    fakes[rank].failures[step] = failure
    errors = create()
    assert [type(error) for error in errors] == [kind] * NUM_RANKS, errors
    assert len({str(error) for error in errors}) == 1
    assert text in str(errors[0])
    # Nobody keeps a communicator that not all have, and all can try again.
    assert all(made.is_aborted for fake in fakes for made in fake.made)
    del fakes[rank].failures[step]
    assert create() == [fake.made[-1] for fake in fakes]


def test_a_rank_that_waits_in_nccl_gives_up_and_hears_why(fakes: list[Fake]) -> None:
    """Rank 1 fails at once; for rank 0, NCCL would wait for it for ever."""
    fakes[0].failures["hang"] = EpError()
    fakes[1].failures["init"] = LibraryError("ncclCommInitRank failed: why")
    errors = create([0.2, DEADLINE_S, DEADLINE_S])
    assert [type(error) for error in errors] == [LibraryError] * NUM_RANKS, errors
    for error in errors:
        assert (
            "rank 0: no communicator over the 3 ranks of the expert-parallel group within 0.2 s"
            in str(error)
        )
        assert "rank 1: ncclCommInitRank failed: why" in str(error)
    fakes[0].never.set()


def test_a_rank_that_is_late_without_a_reason(fakes: list[Fake]) -> None:
    fakes[2].failures["hang"] = EpError()
    errors = create([DEADLINE_S, DEADLINE_S, 0.2])
    assert [type(error) for error in errors] == [PeerError] * NUM_RANKS, errors
    assert all("rank 2: no communicator over the 3 ranks" in str(error) for error in errors)
    assert fakes[0].made[0].is_aborted
    fakes[2].never.set()


def test_an_error_without_words_is_one_all_the_same() -> None:
    """An empty text is what a rank says with which nothing is wrong."""

    def step(group: ThreadGroup) -> int:
        if group.rank == 1:
            raise LibraryError()
        return group.rank

    errors = on_threads(2, lambda group: on_all_ranks(group, "x", lambda: step(group), DEADLINE_S))
    assert [type(error) for error in errors] == [LibraryError] * 2, errors
    assert "x: rank 1: LibraryError" in str(errors[0])
