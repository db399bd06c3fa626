"""What `ncclep doctor` says of GPUs, of their links and of the driver."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from doctor_machine import LIST, section, with_gpus, without_gpus

from megatron_ncclep.doctor import gpus
from megatron_ncclep.doctor.report import Finding

# As nvidia-smi writes it, with cells between tabs and the header underlined.
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tSYS\t0-31\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""
TABLE = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.65.06              Driver Version: 580.65.06      CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
"""


def test_topology() -> None:
    links = gpus.parse_topology(TOPOLOGY)
    assert links == {
        (0, 1): "NV18", (0, 2): "SYS", (1, 0): "NV18", (1, 2): "SYS", (2, 0): "SYS", (2, 1): "SYS"
    }  # fmt: skip
    assert gpus.parse_topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == {}
    assert gpus.parse_topology("") == {}


def test_list_of_gpus_and_cuda_version() -> None:
    found = gpus.parse_gpus(LIST)
    assert [gpu.index for gpu in found] == [0, 1, 2]
    assert found[1].uuid == "11111111-bbbb-0000-0000-000000000000"
    assert found[1].driver_version == "580.65.06"
    assert gpus.parse_gpus("No devices were found\n") == ()
    assert gpus.parse_cuda_version(TABLE) == (13, 0)
    assert gpus.parse_cuda_version("| CUDA UMD Version: 13.1 |") == (13, 1)
    assert gpus.parse_cuda_version("CUDA Version: N/A") is None


def test_how_a_gpu_reaches_the_others() -> None:
    assert gpus.peers({}) == "the only one"
    assert gpus.peers({1: ("NV18", True), 2: ("NV18", True), 3: ("SYS", False)}) == (
        "reads GPU 1..2 (NV18), cannot read GPU 3 (SYS)"
    )
    assert gpus.peers({0: (None, True)}) == "reads GPU 0"


def test_gpus_that_torch_does_not_see() -> None:
    smi = gpus.Smi(gpus.parse_gpus(LIST), (12, 4), {})
    assert gpus.why_not_visible(gpus.Smi((), None, {}), "13.0") is None
    assert "torch that is built for CUDA" in str(gpus.why_not_visible(smi, None))
    assert "serves CUDA up to 12.4: update the driver" in str(gpus.why_not_visible(smi, "13.0"))
    assert "CUDA_VISIBLE_DEVICES" in str(gpus.why_not_visible(smi, "12.8"))


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that answers as nvidia-smi does, in a PATH that has only it and the system's."""
    program = tmp_path / "nvidia-smi"
    for name, text in (("list", LIST), ("topology", TOPOLOGY), ("table", TABLE)):
        (tmp_path / name).write_text(text)
    program.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")"\n'
        "case $1 in --query-gpu*) cat list;; topo) cat topology;; *) cat table;; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


@pytest.mark.usefixtures("nvidia_smi")
def test_gpus_and_their_links(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch)
    found = section("torch and GPUs")
    assert found["driver"].value == "580.65.06, serves CUDA up to 13.0; 3 GPUs in this machine"
    assert found["GPUs"].value == "2"
    assert found["GPU 0"].value == "NVIDIA H200, sm_90, 132 SMs, 140 GiB; reads GPU 1 (NV18)"
    assert not any(finding.problem for finding in found.values())


def test_links_are_those_of_the_gpu_that_torch_counts(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch)
    text = TOPOLOGY.replace("GPU0\t X \tNV18", "GPU0\t X \tPIX")
    (nvidia_smi.parent / "topology").write_text(text)
    found = section("torch and GPUs")
    assert found["GPU 0"].value.endswith("reads GPU 1 (NV18)")
    assert found["GPU 1"].value.endswith("reads GPU 0 (PIX)")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("echo NVIDIA-SMI has failed; exit 9", "exit status 9 (NVIDIA-SMI has failed)"),
        ("exec sleep 60", "did not answer within 0.5 s"),
    ],
)
def test_a_driver_that_does_not_answer_is_a_problem(
    script: str, problem: str, nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpus(monkeypatch)
    nvidia_smi.write_text(f"#!/bin/sh\n{script}\n")
    monkeypatch.setattr(gpus, "DEADLINE_S", 0.5)
    start = time.monotonic()
    found = section("torch and GPUs")
    assert time.monotonic() - start < 5
    assert problem in str(found["driver"].problem)
    assert gpus.RESTART_DRIVER in str(found["driver"].problem)


def test_a_machine_without_gpus_is_no_problem(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpus(monkeypatch)
    nvidia_smi.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    found = section("torch and GPUs")
    assert found["driver"] == Finding("driver", "nvidia-smi finds no GPU")
    assert found["GPUs"].problem is None


@pytest.mark.usefixtures("nvidia_smi")
def test_gpus_that_only_the_driver_sees_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    assert "nvidia-smi sees 3" in str(section("torch and GPUs")["GPUs"].problem)
