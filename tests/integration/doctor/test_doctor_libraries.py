"""What `ncclep doctor` says of NCCL, libnccl_ep and the extension."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from doctor_machine import section, with_gpus, without_gpus

from megatron_ncclep.doctor import examine
from megatron_ncclep.doctor import libraries as native
from megatron_ncclep.doctor.report import Finding
from megatron_ncclep.libraries import nccl_ep as nccl_ep_library
from megatron_ncclep.libraries import search
from megatron_ncclep.libraries.nccl_ep import NcclEpLibrary
from megatron_ncclep.libraries.search import Library


def nccl_of(version: tuple[int, int, int] | None, path: str = "/opt/libnccl.so.2") -> Library:
    return Library(Path(path), version, "found so")


@pytest.mark.parametrize(
    ("used", "value", "remedy"),
    [
        (nccl_of((2, 28, 9)), "2.28.9 (found so), new enough", None),
        (nccl_of((2, 28, 8)), "2.28.8 (found so), too old", ">=2.28.9'"),
        (nccl_of((2, 9, 20)), "2.9.20 (found so), too old", ">=2.28.9'"),
        (nccl_of(None), "version unknown (found so)", ">=2.28.9'"),
        (None, "none", ">=2.28.9'"),
    ],
)
def test_nccl_for_native(used: Library | None, value: str, remedy: str | None) -> None:
    says, way_out = native.nccl_for_native(used)
    assert says.startswith(value)
    assert (way_out is None) if remedy is None else (remedy in str(way_out))


EXTENSIONS = NcclEpLibrary(Path("/x/libnccl_ep.so"), (0, 2, 0), "so", "nccl-extensions", 2)
TRANSFORMER_ENGINE = NcclEpLibrary(
    Path("/te/libnccl_ep.so"), (0, 2, 0), "so", "transformer-engine", 3
)
PRELOAD = "LD_PRELOAD=/opt/other"


@pytest.mark.parametrize(
    ("library", "used", "installed", "value", "remedy"),
    [
        (EXTENSIONS, (2, 30, 7), [], "requires NCCL 2.30.7 exactly; 2.30.7 is in use", None),
        (EXTENSIONS, (2, 29, 7), [], "2.29.7 is in use", "==2.30.7 in this environment"),
        (EXTENSIONS, (2, 29, 7), [(2, 30, 7)], "2.29.7 is in use", PRELOAD),
        (EXTENSIONS, None, [], "none is in use", "==2.30.7 in this environment"),
        (TRANSFORMER_ENGINE, (2, 32, 3), [], "2.32.3 or newer; 2.32.3 is in use", None),
        (TRANSFORMER_ENGINE, (2, 30, 7), [(2, 31, 2), (2, 33, 1)], "2.30.7", PRELOAD),
        (
            replace(EXTENSIONS, version=(0, 9, 0)),
            (2, 30, 7),
            [],
            "it is not known which one libnccl_ep 0.9.0 requires",
            "a known one: 0.2.0 of interface 2 (pip install nccl-extensions==0.1.0), 0.2.0 of "
            "interface 3 (pip install transformer-engine==2.20.2)",
        ),
    ],
)
def test_nccl_for_libnccl_ep(
    library: NcclEpLibrary, used: Any, installed: list[Any], value: str, remedy: str | None
) -> None:
    others = [nccl_of(other, "/opt/other") for other in installed]
    says, way_out = native.nccl_for_nccl_ep(library, used and nccl_of(used), others)
    assert value in says
    assert (way_out is None) if remedy is None else (remedy in str(way_out))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_nccl_that_does_not_fit_is_a_problem_only_with_gpus(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one nobody can use it here."""
    (with_gpus if on_gpu else without_gpus)(monkeypatch)
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
    assert (
        found["libnccl_ep"].value
        == "0.2.0, interface 2, /x/libnccl_ep.so (so); it requires NCCL 2.30.7 exactly"
    )
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
        ("sm_90a", 9, 0, True), ("sm_90a", 10, 0, False), ("sm_90", 9, 0, True),
        ("sm_80", 8, 6, True), ("sm_86", 8, 0, False), ("sm_80", 9, 0, False),
        ("sm_100a", 10, 0, True), ("sm_100a", 10, 3, False), ("sm_100f", 10, 3, True),
        ("compute_90", 9, 0, True), ("compute_90", 12, 1, True), ("compute_100", 9, 0, False),
        ("compute_90a", 9, 0, True), ("compute_90a", 10, 0, False), ("compute_100f", 10, 3, True),
        ("compute_100f", 12, 0, False), ("lto_90", 9, 0, False),
    ],
)  # fmt: skip
def test_code_runs_on(architecture: str, major: int, minor: int, runs: bool) -> None:
    assert native.native_extension.runs_on(architecture, major, minor) == runs


@pytest.mark.parametrize(
    ("capability", "architectures", "driver", "problem"),
    [
        ((12, 0), "sm_90 compute_90", (13, 1), None),
        ((9, 0), "sm_90 compute_90", None, None),
        ((8, 0), "sm_90 compute_90", (12, 4), None),
        (
            (10, 0),
            "sm_90a",
            (13, 1),
            "built for sm_90a, which GPU 0 (compute capability 10.0) does not run: install the "
            "package again without NCCLEP_CUDA_ARCHITECTURES",
        ),
        # Machine code runs with any driver of CUDA 13; PTX needs one of the toolkit's own version.
        ((9, 0), "sm_90 compute_90", (13, 0), None),
        (
            (9, 0),
            "sm_90 compute_90",
            (12, 8),
            "built with CUDA 13.1, which needs a driver for CUDA 13.0 (580.65) or newer, and this "
            "machine's supports CUDA up to 12.8: update the driver",
        ),
        (
            (10, 3),
            "sm_90 compute_90",
            (13, 0),
            "built with CUDA 13.1 and has only PTX for this GPU, which needs a driver for CUDA "
            "13.1 or newer, and this machine's supports CUDA up to 13.0: update the driver, or "
            "install the package again with CUDA_HOME naming a toolkit of CUDA 13.0 or older",
        ),
    ],
)
def test_the_extension_runs_on_the_gpus(
    capability: tuple[int, int],
    architectures: str,
    driver: tuple[int, int] | None,
    problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    module = ModuleType("_C")
    module.__file__ = "/opt/_C.so"
    names = architectures.split()
    info = {"cuda": "13.1", "architectures": names}
    monkeypatch.setattr(module, "build_info", lambda: info, False)
    monkeypatch.setattr(native.native_extension, "unavailable_reason", lambda: None)
    monkeypatch.setattr(native.native_extension, "load", lambda: module)
    monkeypatch.setattr(native.native_extension, "driver_version", lambda: driver)
    (finding,) = examine("Extension")
    assert finding.value == (
        f"built for {', '.join(names)} with CUDA 13.1, for drivers from 580.65 on: /opt/_C.so"
    )
    assert (finding.problem is None) if problem is None else (problem in str(finding.problem))


@pytest.mark.parametrize(
    ("body", "version"),
    [
        ("*version = 13010; return 0;", (13, 1)),
        ("*version = 12040; return 0;", (12, 4)),
        ("return 3;", None),
        (None, None),  # no driver
    ],
)
def test_the_driver_says_which_cuda_it_serves(
    body: str | None,
    version: tuple[int, int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library in the place of the driver's."""
    if body is not None:
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libcuda.so.1")],
            input=f"int cuDriverGetVersion(int* version) {{ {body} }}", check=True, text=True,
        )  # fmt: skip
    open_library = ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: open_library(str(tmp_path / name)))
    assert native.native_extension.driver_version() == version


def test_a_package_without_extension_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        native.native_extension, "unavailable_reason", lambda: "there is none: build it"
    )
    assert examine("Extension") == [Finding("extension", "none: there is none: build it")]
