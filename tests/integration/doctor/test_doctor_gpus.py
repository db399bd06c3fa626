"""What `ncclep doctor` says of GPUs, of their links and of the driver."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_machine import UUIDS, section, with_gpus, without_gpus

from megatron_ncclep.doctor import gpus
from megatron_ncclep.doctor.report import Finding


def test_how_a_gpu_reaches_the_others() -> None:
    assert gpus.peers({}) == "the only one"
    assert gpus.peers({1: ("NV18", True), 2: ("NV18", True), 3: ("SYS", False)}) == (
        "reads GPU 1..2 (NV18), cannot read GPU 3 (SYS)"
    )
    assert gpus.peers({0: (None, True)}) == "reads GPU 0"


def test_gpus_that_torch_does_not_see() -> None:
    driver = gpus.Driver("550.1", (12, 4), tuple(UUIDS), {})
    assert gpus.why_not_visible(gpus.Driver("550.1", (12, 4), (), {}), "13.0") is None
    assert "torch that is built for CUDA" in str(gpus.why_not_visible(driver, None))
    assert "CUDA up to 12.4: update the driver" in str(gpus.why_not_visible(driver, "13.0"))
    assert "CUDA_VISIBLE_DEVICES" in str(gpus.why_not_visible(driver, "12.8"))


class Library:
    """NVML of a machine with the GPUs of UUIDS: 18 links from GPU 0 to 1, by a switch or directly.

    GPU 2 is behind the other CPU.
    """

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_NVLINK_MAX_LINKS = 20

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818
        pass

    def __init__(self) -> None:
        self.count = len(UUIDS)
        self.behind = "switch"
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.nvmlSystemGetDriverVersion = lambda: "580.65.06"
        self.nvmlSystemGetCudaDriverVersion_v2 = lambda: 13010
        self.nvmlDeviceGetCount = lambda: self.count
        self.nvmlDeviceGetHandleByIndex = int
        self.nvmlDeviceGetUUID = lambda gpu: f"GPU-{UUIDS[gpu].upper()}"
        self.nvmlDeviceGetPciInfo = lambda gpu: SimpleNamespace(busId=f"bus {gpu}")
        self.nvmlDeviceGetP2PStatus = lambda one, other, what: 4 if 2 in (one, other) else 0
        self.nvmlDeviceGetTopologyCommonAncestor = lambda one, other: 50

    def nvmlDeviceGetNvLinkState(self, gpu: int, link: int) -> int:  # noqa: N802
        if link == 19:
            raise self.NVMLError("Invalid Argument")
        return int(link != 3)  # one is down

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: int, link: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=self.behind if link < 12 else "bus 7")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(gpus, "pynvml", library)
    return library


def test_gpus_and_their_links(nvml: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch counts them: its GPU 0 is the driver's GPU 1."""
    with_gpus(monkeypatch)
    found = section("torch and GPUs")
    assert found["driver"].value == "580.65.06, supports CUDA up to 13.1; 3 GPUs in this machine"
    assert found["GPUs"].value == "2"
    assert found["GPU 0"].value == "NVIDIA H200, sm_90, 132 SMs, 140 GiB; reads GPU 1 (NV18)"
    assert not any(finding.problem for finding in found.values())
    nvml.behind = "bus 0"  # 11 links lead to the driver's GPU 0, and none to its GPU 1
    found = section("torch and GPUs")
    assert found["GPU 0"].value.endswith("reads GPU 1 (NV11)")
    assert found["GPU 1"].value.endswith("reads GPU 0 (NV18)")


def test_links_that_are_no_nvlink(nvml: Library) -> None:
    driver = gpus.ask_driver()
    assert driver is not None
    assert {pair for pair, link in driver.links.items() if link == "SYS"} == {
        (0, 2), (1, 2), (2, 0), (2, 1)
    }  # fmt: skip


def test_a_driver_that_fails_is_a_problem(nvml: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)

    def fail() -> None:
        raise nvml.NVMLError("Driver/library version mismatch")

    nvml.nvmlInit = fail
    problem = str(section("torch and GPUs")["driver"].problem)
    assert "NVML failed: Driver/library version mismatch" in problem
    assert gpus.RESTART_DRIVER in problem


def test_a_driver_that_hangs_is_a_problem(nvml: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    over = threading.Event()
    nvml.nvmlInit = over.wait
    monkeypatch.setattr(gpus, "DEADLINE_S", 0.5)
    problem = str(section("torch and GPUs")["driver"].problem)
    over.set()
    for thread in threading.enumerate():
        if thread.name == "NVML":
            thread.join()  # while the library is still ours
    assert "did not answer within 0.5 s" in problem


def test_a_machine_without_gpus_is_no_problem(
    nvml: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpus(monkeypatch)
    nvml.count = 0
    found = section("torch and GPUs")
    assert found["driver"].value.endswith("0 GPUs in this machine")
    assert found["GPUs"].problem is None

    def fail() -> None:
        raise nvml.NVMLError_LibraryNotFound("NVML Shared Library Not Found")

    nvml.nvmlInit = fail
    assert section("torch and GPUs")["driver"] == Finding("driver", "none")
    monkeypatch.setattr(gpus, "pynvml", None)
    assert section("torch and GPUs")["driver"].value.startswith("not known")


def test_gpus_that_only_the_driver_sees_are_a_problem(
    nvml: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpus(monkeypatch)
    assert "the driver sees 3" in str(section("torch and GPUs")["GPUs"].problem)
