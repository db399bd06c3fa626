"""What NVIDIA's library can lack, so that `auto` takes another engine and a name is an error."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import on_threads

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.nccl_ep import availability as nccl_ep_availability
from megatron_ncclep.libraries import extension, search
from megatron_ncclep.libraries import nccl_ep as nccl_ep_library
from megatron_ncclep.libraries.nccl_ep import FIXED_ORDER, PULL_PUSH, NcclEpLibrary
from megatron_ncclep.libraries.search import Library, Version

NUM_RANKS = 2
NCCL = Path("/opt/libnccl.so.2")
EXTENSIONS = NcclEpLibrary(Path("/opt/libnccl_ep.so"), (0, 2, 0), "", "nccl-extensions", 2)
TRANSFORMER_ENGINE = NcclEpLibrary(
    Path("/te/libnccl_ep.so"), (0, 2, 0), "", "transformer-engine", 3
)
NCCL_OF = {EXTENSIONS: (2, 30, 7), TRANSFORMER_ENGINE: (2, 32, 3)}


class Gpu:
    multi_processor_count = 132


class Machine:
    """GPUs, and what is installed for them; a rank is a thread and has `num_sms` SMs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: NcclEpLibrary | None) -> None:
        self.library = library
        self.nccl: Version | None = NCCL_OF.get(library, (2, 30, 7))
        self.ours = NCCL
        self.has_nvcc = True
        self.nodes = [NUM_RANKS]
        self.num_communicators = 0
        for name in (PULL_PUSH, FIXED_ORDER):
            monkeypatch.delenv(name, raising=False)
        headers = {nccl_ep_library.SOURCES: Path("/x"), nccl_ep_library.NCCL_HEADERS: Path("/y")}
        for module, name, answer in (
            (nccl_ep_library, "find_nccl_ep", lambda: self.library),
            (nccl_ep_library, "installed_nccl_eps", list),
            (nccl_ep_library, "jit_folders", lambda library: headers),
            (search, "loaded_nccl", lambda: Library(NCCL, self.nccl, "loaded")),
            (search, "find_nccl", lambda: Library(self.ours, self.nccl, "")),
            (search, "find_nvcc", lambda: Path("/opt/nvcc") if self.has_nvcc else None),
            (extension, "unavailable_reason", lambda: None),
            (nccl_ep_availability, "communicator_of", self._communicator_of),
            (torch.cuda, "get_device_capability", lambda device: (9, 0)),
            (torch.cuda, "get_device_properties", lambda device: Gpu),
        ):
            monkeypatch.setattr(module, name, answer)

    def unavailable_reasons(self, num_sms: int | None = None) -> list[str | None]:
        """What each rank says is in the way."""
        config = EpConfig(engine="nccl_ep", num_sms=num_sms, timeout_s=30)

        def ask(group: Any) -> str | None:
            group._ranks_per_node = self.nodes
            return nccl_ep_availability.unavailable_reason(group, config, 8)

        answers = on_threads(NUM_RANKS, ask)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def unavailable_reason(self, num_sms: int | None = None) -> str | None:
        """What is in the way, the same on all ranks."""
        (text,) = set(self.unavailable_reasons(num_sms))
        assert (text is None) == (self.num_communicators > 0)
        return text

    def _communicator_of(self, group: Any, timeout_s: float) -> None:
        self.num_communicators += 1


def test_a_machine_that_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that does not say its version says it when it is opened."""
    for library in (*NCCL_OF, NcclEpLibrary(Path("/opt/libnccl_ep.so"), None, "")):
        assert Machine(monkeypatch, library).unavailable_reason() is None


@pytest.mark.parametrize(
    ("library", "lack", "message"),
    [
        (None, {}, "pip install nccl-extensions, .* or transformer-engine"),
        (
            replace(EXTENSIONS, version=(0, 3, 0)),
            {},
            "libnccl_ep.so is version 0.3.0: .* the interface of 0.2 only",
        ),
        (
            EXTENSIONS,
            {"nccl": (2, 28, 9)},
            "of nccl-extensions requires NCCL 2.30.7 exactly, and this process has NCCL 2.28.9: "
            ".*nvidia-nccl-cu[0-9]+==2.30.7",
        ),
        (EXTENSIONS, {"has_nvcc": False}, "there is no nvcc"),
        (
            EXTENSIONS,
            {"ours": Path("/mine/libnccl.so.2")},
            "NCCLEP_NCCL_LIBRARY=/mine/libnccl.so.2, but libnccl_ep gets .* /opt/libnccl.so.2",
        ),
    ],
)
def test_what_it_lacks(
    library: NcclEpLibrary | None,
    lack: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, library)
    for name, value in lack.items():
        assert hasattr(machine, name)
        setattr(machine, name, value)
    text = machine.unavailable_reason()
    assert text is not None
    assert re.search(message, text), text


@pytest.mark.parametrize(
    ("library", "nodes", "num_sms", "most"),
    [
        (EXTENSIONS, [2], 34, None),
        (EXTENSIONS, [2], 35, 34),
        (EXTENSIONS, [1, 1], 17, 16),
        (TRANSFORMER_ENGINE, [2], 133, 132),
    ],
)
def test_sms_that_are_safe(
    library: NcclEpLibrary,
    nodes: list[int],
    num_sms: int,
    most: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, library)
    machine.nodes = nodes
    text = machine.unavailable_reason(num_sms)
    assert (text is None) if most is None else (f"at most {most} are safe" in str(text))


def test_pull_push(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, EXTENSIONS)
    monkeypatch.setenv(PULL_PUSH, "1")
    assert "which libnccl_ep of nccl-extensions would ignore" in str(machine.unavailable_reason())
    machine.library, machine.nccl = TRANSFORMER_ENGINE, (2, 32, 3)
    machine.nodes = [1, 1]
    assert "needs all ranks in one node" in str(machine.unavailable_reason())
    machine.nodes = [2]
    assert machine.unavailable_reason() is None


def test_ranks_with_libraries_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fits the NCCL of its own machine, and their kernels would wait for each other."""
    machine = Machine(monkeypatch, EXTENSIONS)
    interfaces = iter([2, 3])  # of one rank after the other
    monkeypatch.setattr(
        nccl_ep_availability, "_identity", lambda: [0, 2, 0, 2, 30, 7, i := next(interfaces), i - 2]
    )
    differ = (
        "rank {} has libnccl_ep 0.2.0 of interface 2, NCCL 2.30.7",
        f"rank {{}} has libnccl_ep 0.2.0 of interface 3, NCCL 2.30.7 and {PULL_PUSH}",
    )
    text = machine.unavailable_reason()
    assert text in [
        f"it must be the same on all ranks: {a.format(0)}, {b.format(1)}"
        for a, b in (differ, differ[::-1])
    ]
