"""Stands in for a machine's GPUs, its NCCL and the extension, where ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_extension import Fake, FakeExtension
from fakes import ThreadGroup, on_threads

from megatron_ncclep import engines
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.native import availability as native_availability
from megatron_ncclep.errors import EngineUnavailableError, LibraryError, PeerError
from megatron_ncclep.libraries import extension, search
from megatron_ncclep.libraries.search import Library

NUM_RANKS = 3


@dataclass(frozen=True)
class Gpu:
    uuid: str
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    multi_processor_count: int = 132
    lacks: str = ""  # as the extension says


@dataclass
class Machine:
    """What torch, NCCL and the extension say; made to differ by the tests.

    Attributes:
        gpus: of the ranks; every rank sees all of them.
        no_access: (from, to) pairs of GPUs without peer-to-peer access.
        lsa_size, network_problem: what NCCL says.
        probe: puts a word over that network; an error: it does not come.
        made: ranks that made a communicator.
        closed: what of the network was closed, by any rank.
        current: its `device` is a rank's current GPU.
    """

    gpus: list[Gpu] = field(default_factory=lambda: [Gpu(f"uuid-{r}") for r in range(NUM_RANKS)])
    no_access: set[tuple[int, int]] = field(default_factory=set)
    lsa_size: int | LibraryError = NUM_RANKS
    network_problem: str = "no network"
    probe: PeerError | None = None
    made: list[int] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    current: Any = field(default_factory=threading.local)

    def extension(self) -> FakeExtension:
        def of(name: str, **answers: Any) -> Any:
            return lambda *_: Fake(name, close=lambda: self.closed.append(name), **answers)

        return FakeExtension(
            Window=of("Window"),
            Rails=of("Rails", probe=self.probe),
            native_device_problem=lambda: self.gpus[self.current.device].lacks,
        )

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.current.device = device.index
        yield

    def communicator_of(self, group: Any, timeout_s: float) -> Any:
        self.made.append(group.rank)
        if isinstance(self.lsa_size, LibraryError):
            raise self.lsa_size
        return SimpleNamespace(
            lsa_size=self.lsa_size,
            num_domains=group.size // self.lsa_size,
            network_problem=lambda: self.network_problem,
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(ThreadGroup, "_ranks_per_gpu", None)

    def index(device: torch.device | int) -> int:
        return device if isinstance(device, int) else device.index

    cuda = {
        "get_device_properties": lambda device: machine.gpus[index(device)],
        "get_device_capability": lambda device: machine.gpus[index(device)].capability,
        "get_device_name": lambda device: machine.gpus[index(device)].name,
        "device": machine.device,
        "device_count": lambda: len(machine.gpus),
        "can_device_access_peer": lambda device, other: (
            (index(device), other) not in machine.no_access
        ),
    }
    for name, answer in cuda.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(extension, "unavailable_reason", lambda: None)
    monkeypatch.setattr(extension, "architectures", lambda: ["sm_90a", "sm_100"])
    monkeypatch.setattr(extension, "cuda_version", lambda: (13, 0))
    monkeypatch.setattr(extension, "driver_version", lambda: (13, 0))
    monkeypatch.setattr(extension, "load", machine.extension)
    monkeypatch.setattr(search, "find_nccl", lambda: Library(Path("libnccl.so.2"), (2, 28, 9), ""))
    monkeypatch.setattr(native_availability, "communicator_of", machine.communicator_of)
    return machine


def choices(num_ranks: int, config: EpConfig, num_experts: int | None = None) -> list[Any]:
    """What `choose_engine` returns or raises, by rank."""
    return on_threads(num_ranks, lambda group: engines.choose_engine(group, config, num_experts))


def choice(num_ranks: int, num_experts: int | None = None, **options: Any) -> tuple[str, str]:
    """The engine that all ranks choose, and why."""
    found = choices(num_ranks, EpConfig(**options), num_experts)
    assert found == [found[0]] * num_ranks, found
    name, reason = found[0]
    return name, reason


def reasons(num_ranks: int = NUM_RANKS, num_experts: int | None = None, **options: Any) -> str:
    """Ask for the engine by name on every rank; return the text that all of them raise."""
    errors = choices(num_ranks, EpConfig(engine="native", **options), num_experts)
    assert [type(error) for error in errors] == [EngineUnavailableError] * num_ranks, errors
    texts = {str(error).removeprefix("engine 'native' cannot run here: ") for error in errors}
    assert len(texts) == 1
    return texts.pop()
