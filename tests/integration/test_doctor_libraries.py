"""What `ncclep doctor` says of NCCL, libnccl_ep and the extension."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doctor_machine import section, with_gpus, without_gpus

from megatron_ncclep.doctor import examine, native
from megatron_ncclep.doctor.report import Finding
from megatron_ncclep.engines import libraries
from megatron_ncclep.engines.libraries import Library


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


@pytest.mark.parametrize(
    ("version", "used", "installed", "value", "remedy"),
    [
        ((0, 2, 0), (2, 30, 7), [], "exactly 2.30.7, which is in use", None),
        ((0, 2, 0), (2, 29, 7), [], "in use is 2.29.7", "==2.30.7 in this environment"),
        ((0, 2, 0), (2, 29, 7), [(2, 30, 7)], "in use is 2.29.7", "LD_PRELOAD=/opt/other"),
        ((0, 2, 0), (2, 29, 7), [(2, 31, 1)], "in use is 2.29.7", "==2.30.7 in this environment"),
        ((0, 2, 0), (2, 32, 3), [], "in use is 2.32.3", "==2.30.7 in this environment"),
        ((0, 2, 0), None, [], "in use is none", "==2.30.7 in this environment"),
        ((0, 9, 0), (2, 30, 7), [], "libnccl_ep 0.9.0 demands is not known", "it is: 0.2.0 ("),
        (None, (2, 30, 7), [], "version unknown demands is not known", "it is: 0.2.0 ("),
    ],
)
def test_nccl_for_libnccl_ep(
    version: Any, used: Any, installed: list[Any], value: str, remedy: str | None
) -> None:
    others = [nccl_of(other, "/opt/other") for other in installed]
    says, way_out = native.nccl_for_nccl_ep(version, used and nccl_of(used), others)
    assert value in says
    assert (way_out is None) if remedy is None else (remedy in str(way_out))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_nccl_that_does_not_fit_is_a_problem_only_with_gpus(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one nobody can use it here."""
    (with_gpus if on_gpu else without_gpus)(monkeypatch)
    old = nccl_of((2, 27, 3))
    library = Library(Path("/opt/x/libnccl_ep.so"), (0, 2, 0), "found so")
    for name, answer in (
        ("loaded_nccl", old), ("packaged_nccl", None), ("system_nccl", None), ("find_nccl", old),
        ("find_nccl_ep", library), ("find_nvcc", None), ("jit_folders", {}),
    ):  # fmt: skip
        monkeypatch.setattr(libraries, name, lambda *args, answer=answer: answer)
    found = {**section("NCCL"), **section("NVIDIA's NCCL EP")}
    assert found["NCCL loaded"].value == "2.27.3, /opt/libnccl.so.2"
    problems = {subject: finding.problem for subject, finding in found.items() if finding.problem}
    if not on_gpu:
        assert not problems
        assert "nvidia-nccl-cu" in found["NCCL of libnccl_ep"].value
        return
    assert "nvidia-nccl-cu" in problems.pop("NCCL for engines")
    assert "nvidia-nccl-cu" in problems.pop("NCCL of libnccl_ep")
    assert "set CUDA_HOME" in problems.pop("compiler of libnccl_ep")
    assert "NCCL_EP_JIT_BUILD_INCLUDE_DIR" in problems.pop("headers of libnccl_ep")
    assert not problems


@pytest.mark.parametrize(
    ("architecture", "major", "minor", "runs"),
    [
        ("sm_90a", 9, 0, True), ("sm_90a", 10, 0, False), ("sm_90", 9, 0, True),
        ("sm_80", 8, 6, True), ("sm_86", 8, 0, False), ("sm_80", 9, 0, False),
        ("sm_100a", 10, 0, True), ("sm_100a", 10, 3, False), ("sm_100f", 10, 3, True),
    ],
)  # fmt: skip
def test_machine_code_runs_on(architecture: str, major: int, minor: int, runs: bool) -> None:
    assert native.native_extension.runs_on(architecture, major, minor) == runs


@pytest.mark.parametrize(
    ("architectures", "problem"),
    [(["sm_90a"], None), (["sm_80", "sm_100a"], "NCCLEP_CUDA_ARCHITECTURES='100a 80 90a'")],
)
def test_the_extension_has_code_for_the_gpus(
    architectures: list[str], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch)
    module = ModuleType("_C")
    module.__file__ = "/opt/_C.so"
    monkeypatch.setattr(
        module, "build_info", lambda: {"cuda": "13.0", "architectures": architectures}, False
    )
    monkeypatch.setattr(native.native_extension, "obstacle", lambda: None)
    monkeypatch.setattr(native.native_extension, "load", lambda: module)
    (finding,) = examine("Extension")
    assert finding.value == f"built for {', '.join(architectures)} with CUDA 13.0: /opt/_C.so"
    assert (finding.problem is None) if problem is None else (problem in str(finding.problem))


def test_a_package_without_extension_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.native_extension, "obstacle", lambda: "there is none: build it")
    assert examine("Extension") == [Finding("extension", "none: there is none: build it")]
