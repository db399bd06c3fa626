"""What `ncclep doctor` says of GPUs, their links and the driver, of NCCL, libnccl_ep and the
extension, on machines as they might be.
"""

from __future__ import annotations

import ctypes
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_ncclep.doctor import examine, gpus
from megatron_ncclep.doctor import libraries as native
from megatron_ncclep.doctor.report import Finding
from megatron_ncclep.libraries import nccl_ep as nccl_ep_library
from megatron_ncclep.libraries import search
from megatron_ncclep.libraries.nccl_ep import NcclEpLibrary
from megatron_ncclep.libraries.search import Library

UUIDS = [f"{digit * 8}-{letter * 4}-0000-0000-000000000000" for digit, letter in ("0a", "1b", "2c")]


def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees the second and the first GPU of UUIDS, in this order."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a != b)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, multi_processor_count=132,
            total_memory=140 * 2**30, uuid=UUIDS[1 - index],
        ),
    )  # fmt: skip


def section(title: str) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(title)}


# --- GPUs and their links -----------------------------------------------------------------------


class Nvml:
    """Stands for NVML on a machine with the GPUs of UUIDS: 18 links from GPU 0 to 1, by a switch or
    directly; GPU 2 is behind the other CPU.
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
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml()
    monkeypatch.setattr(gpus, "pynvml", library)
    return library


def test_gpus_and_their_links(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
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
    driver = gpus.ask_driver()
    assert driver is not None
    other = {pair for pair, link in driver.links.items() if link == "SYS"}
    assert other == {(0, 2), (1, 2), (2, 0), (2, 1)}


def test_without_visible_gpus(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs is no problem; a driver that fails or hangs is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, remedy in (
        (None, "torch that is built for CUDA"), ("14.0", "CUDA up to 13.1: update the driver"),
        ("13.3", "CUDA_VISIBLE_DEVICES"),
    ):  # fmt: skip
        monkeypatch.setattr(torch.version, "cuda", cuda)
        problem = str(section("torch and GPUs")["GPUs"].problem)
        assert "the driver sees 3" in problem
        assert remedy in problem
    nvml.count = 0
    found = section("torch and GPUs")
    assert found["driver"].value.endswith("0 GPUs in this machine")
    assert found["GPUs"].problem is None
    nvml.nvmlInit = mock.Mock(side_effect=nvml.NVMLError_LibraryNotFound("not found"))
    assert section("torch and GPUs")["driver"] == Finding("driver", "none")
    nvml.nvmlInit = mock.Mock(side_effect=nvml.NVMLError("Driver/library version mismatch"))
    problem = str(section("torch and GPUs")["driver"].problem)
    assert "NVML failed: Driver/library version mismatch" in problem
    assert gpus.RESTART_DRIVER in problem

    over = threading.Event()
    nvml.nvmlInit = over.wait
    monkeypatch.setattr(gpus, "DEADLINE_S", 0.5)
    problem = str(section("torch and GPUs")["driver"].problem)
    over.set()
    for thread in threading.enumerate():
        if thread.name == "NVML":
            thread.join()  # while the library is still ours
    assert "did not answer within 0.5 s" in problem
    monkeypatch.setattr(gpus, "pynvml", None)
    assert section("torch and GPUs")["driver"].value.startswith("not known")


# --- NCCL, libnccl_ep and the extension ---------------------------------------------------------


def nccl_of(version: tuple[int, int, int] | None, path: str = "/opt/libnccl.so.2") -> Library:
    return Library(Path(path), version, "found so")


EXTENSIONS = NcclEpLibrary(Path("/x/libnccl_ep.so"), (0, 2, 0), "so", "nccl-extensions", 2)
TRANSFORMER_ENGINE = NcclEpLibrary(
    Path("/te/libnccl_ep.so"), (0, 2, 0), "so", "transformer-engine", 3
)


@pytest.mark.parametrize(
    ("version", "value"),
    [((2, 28, 9), "2.28.9 (found so), new enough"), ((2, 9, 20), "2.9.20 (found so), too old"),
     (None, "version unknown (found so)")],
)  # fmt: skip
def test_nccl_for_native(version: tuple[int, int, int] | None, value: str) -> None:
    says, way_out = native.nccl_for_native(nccl_of(version))
    assert says.startswith(value)
    assert (way_out is None) == ("new enough" in value)
    says, way_out = native.nccl_for_native(None)
    assert (says, ">=2.28.9'" in str(way_out)) == ("none", True)


@pytest.mark.parametrize(
    ("library", "used", "installed", "value", "remedy"),
    [
        (EXTENSIONS, (2, 30, 7), [], "requires NCCL 2.30.7 exactly; 2.30.7 is in use", "None"),
        (EXTENSIONS, (2, 29, 7), [(2, 30, 7)], "2.29.7 is in use", "LD_PRELOAD=/opt/other"),
        (EXTENSIONS, None, [], "none is in use", "==2.30.7 in this environment"),
        (TRANSFORMER_ENGINE, (2, 30, 7), [(2, 33, 1)], "2.30.7", "LD_PRELOAD=/opt/other"),
        (
            replace(EXTENSIONS, version=(0, 9, 0)), (2, 30, 7), [],
            "it is not known which one libnccl_ep 0.9.0 requires",
            "a known one: 0.2.0 of interface 2 (pip install nccl-extensions==0.1.0), 0.2.0 of "
            "interface 3 (pip install transformer-engine==2.20.2)",
        ),
    ],
)  # fmt: skip
def test_nccl_for_libnccl_ep(
    library: NcclEpLibrary, used: Any, installed: list[Any], value: str, remedy: str
) -> None:
    others = [nccl_of(other, "/opt/other") for other in installed]
    says, way_out = native.nccl_for_nccl_ep(library, used and nccl_of(used), others)
    assert value in says
    assert remedy in str(way_out)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_nccl_that_does_not_fit_is_a_problem_only_with_gpus(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU it cannot be used here anyway."""
    if on_gpu:
        with_gpus(monkeypatch)
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    old = nccl_of((2, 27, 3))
    for module, name, answer in (
        (search, "loaded_nccl", old), (search, "packaged_nccl", None),
        (search, "system_nccl", None), (search, "find_nccl", old),
        (search, "find_nvcc", None), (nccl_ep_library, "find_nccl_ep", EXTENSIONS),
        (nccl_ep_library, "installed_nccl_eps", [EXTENSIONS, TRANSFORMER_ENGINE]),
        (nccl_ep_library, "jit_folders", {}),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *args, answer=answer: answer)
    monkeypatch.setenv("NCCL_EP_HT_EM_PULL_PUSH", "1")
    found = {**section("NCCL"), **section("NVIDIA's NCCL EP")}
    assert found["NCCL loaded"].value == "2.27.3, /opt/libnccl.so.2"
    assert found["libnccl_ep of transformer-engine"].value == (
        "0.2.0, interface 3, /te/libnccl_ep.so (so); it requires NCCL 2.32.3 or newer; "
        "NCCLEP_NCCL_EP_LIBRARY=transformer-engine chooses it"
    )
    problems = {subject: finding.problem for subject, finding in found.items() if finding.problem}
    if not on_gpu:
        assert not problems
        assert "nvidia-nccl-cu" in found["NCCL of libnccl_ep"].value
        return
    assert "nvidia-nccl-cu" in problems.pop("NCCL for engines")
    assert "nvidia-nccl-cu" in problems.pop("NCCL of libnccl_ep")
    assert "set CUDA_HOME" in problems.pop("compiler of libnccl_ep")
    assert "NCCL_EP_JIT_BUILD_INCLUDE_DIR" in problems.pop("headers of libnccl_ep")
    assert "PULL_PUSH is set" in problems.pop("modes of libnccl_ep")
    assert not problems


@pytest.mark.parametrize(
    ("architecture", "major", "minor", "runs"),
    [
        ("sm_90a", 9, 0, True), ("sm_90a", 10, 0, False), ("sm_80", 8, 6, True),
        ("sm_86", 8, 0, False), ("sm_80", 9, 0, False), ("sm_100f", 10, 3, True),
        ("compute_90", 12, 1, True), ("compute_100", 9, 0, False), ("compute_90a", 10, 0, False),
        ("compute_100f", 12, 0, False), ("lto_90", 9, 0, False),
    ],
)  # fmt: skip
def test_code_runs_on(architecture: str, major: int, minor: int, runs: bool) -> None:
    assert native.native_extension.runs_on(architecture, major, minor) == runs


@pytest.mark.parametrize(
    ("capability", "architectures", "driver", "problem"),
    [
        ((12, 0), ["sm_90", "compute_90"], (13, 1), "None"),
        ((8, 0), ["sm_90", "compute_90"], (12, 4), "None"),
        ((10, 0), ["sm_90a"], (13, 1), "built for sm_90a, which GPU 0 (compute capability 10.0) "
         "does not run: install the package again without NCCLEP_CUDA_ARCHITECTURES"),
        # Machine code runs with any driver of CUDA 13; PTX needs one of the toolkit's own version.
        ((9, 0), ["sm_90", "compute_90"], (13, 0), "None"),
        ((9, 0), ["sm_90", "compute_90"], (12, 8), "needs a driver for CUDA 13.0 (580.65) or "
         "newer, and this machine's supports CUDA up to 12.8: update the driver"),
        ((10, 3), ["sm_90", "compute_90"], (13, 0), "has only PTX for this GPU, which needs a "
         "driver for CUDA 13.1 or newer, and this machine's supports CUDA up to 13.0: update the "
         "driver, or install the package again"),
    ],
)  # fmt: skip
def test_the_extension_runs_on_the_gpus(
    capability: tuple[int, int], architectures: list[str], driver: tuple[int, int], problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    with_gpus(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    info = {"cuda": "13.1", "architectures": architectures}
    module = SimpleNamespace(__file__="/opt/_C.so", build_info=lambda: info)
    monkeypatch.setattr(native.native_extension, "unavailable_reason", lambda: None)
    monkeypatch.setattr(native.native_extension, "load", lambda: module)
    monkeypatch.setattr(native.native_extension, "driver_version", lambda: driver)
    (finding,) = examine("Extension")
    assert finding.value == (
        f"built for {', '.join(architectures)} with CUDA 13.1, for drivers from 580.65 on: "
        "/opt/_C.so"
    )
    assert problem in str(finding.problem)


@pytest.mark.parametrize(
    ("body", "version"),
    [("*version = 12040; return 0;", (12, 4)), ("return 3;", None), (None, None)],
    ids=["a driver", "one that fails", "none"],
)
def test_the_driver_says_which_cuda_it_serves(
    body: str | None, version: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a library in the place of the driver's."""
    if body is not None:
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")],
            input=f"int cuDriverGetVersion(int* version) {{ {body} }}", check=True, text=True,
        )  # fmt: skip
    open_library = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: open_library(str(tmp_path / name)))
    assert native.native_extension.driver_version() == version
