"""Stands in for a machine's GPUs, its NCCL and libnccl_ep, where ranks are threads."""

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
from megatron_ncclep.engines.nccl_ep import availability as nccl_ep_availability
from megatron_ncclep.errors import EngineUnavailableError, LibraryError, PeerError
from megatron_ncclep.libraries import extension, search
from megatron_ncclep.libraries import nccl_ep as nccl_ep_library
from megatron_ncclep.libraries.nccl_ep import NcclEpLibrary
from megatron_ncclep.libraries.search import Library

NUM_RANKS = 3


@dataclass(frozen=True)
class Gpu:
    uuid: str
    name: str = "NVIDIA H200"
    capability: tuple[int, int] = (9, 0)
    multi_processor_count: int = 132
    lacks: str = ""  # as the extension says


def nccl(*version: int, path: str = "libnccl.so.2") -> Library:
    return Library(Path(path), version, "")


@dataclass
class Machine:
    """What torch, NCCL and the extension say; made to differ by the tests.

    Attributes:
        gpus: of the ranks; every rank sees all of them.
        no_access: (from, to) pairs of GPUs without peer-to-peer access.
        nodes: the number of ranks of each, where it is not the engine that finds out.
        lsa_size, network_problem: what NCCL says.
        probe: puts a word over that network; an error: it does not come.
        nccl, loaded: the NCCL that is found, and another one that the process has loaded.
        library: NVIDIA's libnccl_ep.
        has_nvcc: whether there is a compiler for it.
        architectures: of the extension.
        made: ranks that made a communicator.
        closed: what of the network was closed, by any rank.
        current: its `device` is a rank's current GPU.
    """

    gpus: list[Gpu] = field(default_factory=lambda: [Gpu(f"uuid-{r}") for r in range(NUM_RANKS)])
    no_access: set[tuple[int, int]] = field(default_factory=set)
    nodes: list[int] | None = None
    lsa_size: int | LibraryError = NUM_RANKS
    network_problem: str = "no network"
    probe: PeerError | None = None
    nccl: Library | None = field(default_factory=lambda: nccl(2, 28, 9))
    loaded: Library | None = None
    library: NcclEpLibrary | None = None
    has_nvcc: bool = True
    architectures: list[str] = field(default_factory=lambda: ["sm_90a", "sm_100"])
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

    def gpu(self, device: torch.device | int) -> Gpu:
        return self.gpus[device if isinstance(device, int) else device.index]

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

    def choices(self, num_ranks: int, config: EpConfig, num_experts: int | None = None) -> Any:
        """What `choose_engine` returns or raises, by rank."""

        def choose(group: ThreadGroup) -> Any:
            group._ranks_per_node = self.nodes or [num_ranks]
            return engines.choose_engine(group, config, num_experts)

        return on_threads(num_ranks, choose)

    def choose(
        self, num_ranks: int = NUM_RANKS, experts: int | None = None, **options: Any
    ) -> tuple[str, str]:
        """The engine that all ranks choose, and why; or "", and why they cannot have one."""
        found = self.choices(num_ranks, EpConfig(**options), experts)
        if isinstance(found[0], EngineUnavailableError):
            assert len({(type(error), str(error)) for error in found}) == 1
            start = f"engine '{options['engine']}' cannot run here: "
            assert str(found[0]).startswith(start)
            return "", str(found[0]).removeprefix(start)
        assert found == [found[0]] * num_ranks, found
        name, reason = found[0]
        return name, reason


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One on which the native engine can run; `auto` has every engine but `hierarchical`."""
    machine = Machine()
    for name in (nccl_ep_library.PULL_PUSH, nccl_ep_library.FIXED_ORDER):
        monkeypatch.delenv(name, raising=False)
    of_jit = {nccl_ep_library.SOURCES: Path("/x"), nccl_ep_library.NCCL_HEADERS: Path("/y")}
    flat = {name: each for name, each in engines.ENGINES.items() if name != "hierarchical"}
    for module, name, answer in (
        (ThreadGroup, "_ranks_per_gpu", None),
        (engines, "ENGINES", flat),
        (torch.cuda, "get_device_properties", machine.gpu),
        (torch.cuda, "get_device_capability", lambda device: machine.gpu(device).capability),
        (torch.cuda, "get_device_name", lambda device: machine.gpu(device).name),
        (torch.cuda, "device", machine.device),
        (torch.cuda, "device_count", lambda: len(machine.gpus)),
        (
            torch.cuda,
            "can_device_access_peer",
            lambda device, other: (device.index, other) not in machine.no_access,
        ),
        (extension, "unavailable_reason", lambda: None),
        (extension, "architectures", lambda: machine.architectures),
        (extension, "cuda_version", lambda: (13, 0)),
        (extension, "driver_version", lambda: (13, 0)),
        (extension, "load", machine.extension),
        (search, "find_nccl", lambda: machine.nccl),
        (search, "loaded_nccl", lambda: machine.loaded),
        (search, "find_nvcc", lambda: Path("/opt/nvcc") if machine.has_nvcc else None),
        (nccl_ep_library, "find_nccl_ep", lambda: machine.library),
        (nccl_ep_library, "installed_nccl_eps", list),
        (nccl_ep_library, "jit_folders", lambda library: of_jit),
        (native_availability, "communicator_of", machine.communicator_of),
        (nccl_ep_availability, "communicator_of", machine.communicator_of),
    ):
        monkeypatch.setattr(module, name, answer)
    return machine
