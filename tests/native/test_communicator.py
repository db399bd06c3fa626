"""What keeps NCCL from making a communicator on one rank is what all ranks say, and say in time.

Ranks are threads; NCCL and the extension are a `Rank`, which each test breaks on one rank.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

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


class Rank(FakeExtension):
    """A rank's extension, and the answers whether it loads and where NCCL is."""

    def __init__(self) -> None:
        super().__init__(Communicator=self._make)
        self.communicators: list[Fake] = []
        self.methods |= {"load": [], "find_nccl": []}
        self.answers |= {"load": self, "find_nccl": Library(Path("libnccl.so.2"), None, "")}
        self.nccl.answers["unique_id"] = UNIQUE_ID

    def _make(self, *_: Any) -> Fake:
        self.communicators.append(Fake("Communicator"))
        return self.communicators[-1]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    """A rank finds its own by the device that is current in its thread."""
    fakes, here = [Rank() for _ in range(NUM_RANKS)], threading.local()

    def set_device(device: torch.device) -> None:
        here.fake = fakes[device.index]

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(extension, "load", lambda: here.fake.load())
    monkeypatch.setattr(communicator, "find_nccl", lambda: here.fake.find_nccl())
    return fakes


def create() -> list[Any]:
    def create_on(group: ThreadGroup) -> Any:
        torch.cuda.set_device(group.device)
        return communicator_of(group, DEADLINE_S)

    return on_threads(NUM_RANKS, create_on)


def test_all_ranks_get_rank_0s_unique_id(fakes: list[Rank]) -> None:
    assert create() == [fake.communicators[0] for fake in fakes]
    calls = [call for fake in fakes for call in fake.named("Communicator")]
    assert [call[1:] for call in calls] == [
        (UNIQUE_ID, NUM_RANKS, rank, rank, DEADLINE_S) for rank in range(NUM_RANKS)
    ]


@pytest.mark.parametrize(
    ("step", "rank", "failure", "kind", "text"),
    [
        ("unique_id", 0, LibraryError("no network"), LibraryError, "NCCL: rank 0: no network"),
        ("Nccl", 2, LibraryError("no x.so"), LibraryError, "opening NCCL: rank 2: no x.so"),
        ("load", 1, ImportError("no _C"), LibraryError, "opening NCCL: rank 1: ImportError: no _C"),
        ("find_nccl", 1, EpError("odd"), LibraryError, "opening NCCL: rank 1: odd"),
        ("find_nccl", 1, None, EngineUnavailableError, "rank 1: no libnccl.so.2 found: install"),
        ("Communicator", 2, LibraryError("why"), LibraryError, "communicator: rank 2: why"),
    ],
)
def test_a_failure_of_one_rank_is_told_by_all(
    step: str, rank: int, failure: Any, kind: type, text: str, fakes: list[Rank]
) -> None:
    """Rank 0 had no network interface for NCCL, and all ranks said that they were in different
    calls: its reason was raised between two exchanges.
    """
    broken = fakes[rank].nccl if step == "unique_id" else fakes[rank]
    with mock.patch.dict(broken.answers, {step: failure}):
        errors = create()
    assert [type(error) for error in errors] == [kind] * NUM_RANKS, errors
    assert len({str(error) for error in errors}) == 1
    assert text in str(errors[0])
    # No rank keeps a communicator that others lack, and all can try again.
    assert all(made.names == ["abort"] for fake in fakes for made in fake.communicators)
    assert create() == [fake.communicators[-1] for fake in fakes]


LATE = PeerError("no communicator over the 3 ranks")


@pytest.mark.parametrize(
    ("failures", "kind", "text"),
    [
        ({2: LATE}, PeerError, "rank 2: no communicator over the 3 ranks"),
        # Rank 1 fails at once, and NCCL would have rank 0 wait for it for ever.
        (
            {0: LATE, 1: LibraryError("ncclCommInitRank failed: why")},
            LibraryError,
            "rank 0: no communicator over the 3 ranks; rank 1: ncclCommInitRank failed: why",
        ),
    ],
    ids=["no reason", "another rank has failed"],
)
def test_a_rank_that_waits_in_vain_hears_why(
    failures: dict[int, Exception], kind: type, text: str, fakes: list[Rank]
) -> None:
    for rank, failure in failures.items():
        fakes[rank].answers["Communicator"] = failure
    errors = create()
    assert [type(error) for error in errors] == [kind] * NUM_RANKS, errors
    assert all(text in str(error) for error in errors)
    assert all(made.names == ["abort"] for fake in fakes for made in fake.communicators)
