"""`ncclep doctor`: true on this machine, and each problem comes with a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ncclep.doctor import SECTIONS, choice, examine, gpus, native
from megatron_ncclep.doctor.report import Finding, by_num_ranks, ranges, render
from megatron_ncclep.engines import ENGINES, libraries
from megatron_ncclep.engines.libraries import Library
from megatron_ncclep.testing.launcher import RankError, RankPool


def doctor(*arguments: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter, after `code`."""
    run = f"{code}\nimport sys\nfrom megatron_ncclep.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", run, "doctor", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def findings(*arguments: str, **options: str) -> dict[str, dict[str, str | None]]:
    done = doctor("--json", *arguments, **options)
    assert done.returncode in (0, 1), done.stderr
    printed = json.loads(done.stdout)
    assert {finding["section"] for finding in printed} == set(SECTIONS)
    report = {finding["subject"]: finding for finding in printed}
    assert len(report) == len(printed), "a subject stands twice"
    assert done.returncode == any(finding["problem"] for finding in report.values())
    return report


def test_it_says_what_is_here() -> None:
    report = findings()
    assert report["torch"]["value"].startswith(torch.__version__)
    assert report["Megatron-Core"]["value"].startswith(version("megatron-core"))
    assert report["autoload"]["value"].startswith("on")
    assert report["megatron.core.transformer.moe.moe_layer"]["value"] == "as expected"
    assert {f"engine {name}" for name in ENGINES} <= set(report)
    assert report["engine reference"]["value"].endswith("can run over gloo")
    assert report["engine auto"]["value"] == "takes reference"
    assert not any(finding["problem"] for finding in report.values())


def test_plain_text_names_the_same_subjects() -> None:
    done = doctor()
    assert done.returncode == 0, done.stderr
    assert "engine auto" in done.stdout
    assert [line for line in done.stdout.splitlines() if line in SECTIONS] == list(SECTIONS)
    assert done.stdout.rstrip().endswith("0 problems")


def test_variables_that_are_wrong_are_problems_and_the_rest_is_examined() -> None:
    found = findings(NCCLEP_NUM_SMS="many", NCCLEP_NCCL_LIBRARY="/gone.so", NCCLEP_LOG="warning")
    assert "NCCLEP_NUM_SMS='many'" in str(found["environment"]["problem"])
    assert "NCCLEP_LOG=WARNING" in str(found["environment"]["value"])
    assert "NCCLEP_NCCL_LIBRARY=/gone.so" in str(found["NCCL, the rest"]["problem"])
    assert found["engine auto"]["value"] == "takes reference"


def test_a_changed_hook_point_is_a_problem() -> None:
    code = (
        "import megatron.core.transformer.moe.moe_layer as layer\n"
        "layer.MoELayer.__init__ = lambda self: None"
    )
    found = findings(code=code, NCCLEP_AUTOLOAD="0")
    assert "MoELayer.__init__ is not a function" in str(
        found["megatron.core.transformer.moe.moe_layer"]["problem"]
    )
    assert found["autoload"]["value"].startswith("off (NCCLEP_AUTOLOAD=0)")


def test_an_untested_megatron_is_a_problem() -> None:
    code = "import megatron.core; megatron.core.__version__ = '0.99.0'"
    assert "tested are 0.16.1 to 0.19.2" in str(findings(code=code)["Megatron-Core"]["problem"])


def test_without_megatron_it_says_how_to_get_it() -> None:
    """A look-up that knows of no `megatron` plays a bare environment."""
    code = (
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name.startswith('megatron.') or name == 'megatron'"
        " else real(name, *a)"
    )
    found = findings(code=code)
    assert found["Megatron-Core"]["value"] == "not installed"
    assert "pip install 'megatron-ncclep[train]'" in str(found["Megatron-Core"]["problem"])


# --- the table -----------------------------------------------------------------------------------


def test_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([4]) == "4"
    assert ranges([1, 2, 3, 5, 7, 8]) == "1..3, 5, 7..8"


def test_equal_texts_for_several_numbers_of_ranks_are_one() -> None:
    assert by_num_ranks({1: "a"}) == "a"
    assert by_num_ranks({1: "a", 2: "a"}) == "1..2 ranks: a"
    assert by_num_ranks({1: "a", 2: "b", 3: "b", 4: "a"}) == "1, 4 ranks: a\n2..3 ranks: b"
    assert by_num_ranks({1: "a", 2: "b"}) == "1 rank: a\n2 ranks: b"


def test_table_is_aligned_and_wrapped() -> None:
    found = [
        Finding("short", "1 rank: takes a\n2 ranks: takes b"),
        Finding("a longer one", "a value of several words that does not fit", "one, and a remedy"),
        Finding("path", "/a/path/longer/than/the/column/that/stays/whole/anyway"),
    ]
    assert render("Title", found, 50) == (
        "Title\n"
        "  short         1 rank: takes a\n"
        "                2 ranks: takes b\n"
        "  a longer one  a value of several words that does not\n"
        "                fit\n"
        "                PROBLEM: one, and a remedy\n"
        "  path          /a/path/longer/than/the/column/that/stays/whole/anyway"
    )


# --- GPUs ----------------------------------------------------------------------------------------

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
LIST = """\
0, GPU-00000000-aaaa-0000-0000-000000000000, 580.65.06
1, GPU-11111111-bbbb-0000-0000-000000000000, 580.65.06
2, GPU-22222222-cccc-0000-0000-000000000000, 580.65.06
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


def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees the second and the first GPU of LIST, in this order; its UUIDs have no prefix."""
    uuids = [line.split(", ")[1].removeprefix("GPU-") for line in LIST.splitlines()]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a != b)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, multi_processor_count=132,
            total_memory=140 * 2**30, uuid=uuids[1 - index],
        ),
    )  # fmt: skip


def section(title: str) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(title)}


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


# --- NCCL, libnccl_ep, extension -----------------------------------------------------------------


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


# --- engines -------------------------------------------------------------------------------------


def test_the_answers_of_ranks(pool: RankPool) -> None:
    """Over the pool of the other tests; with GPUs `ncclep doctor` makes one of its own."""
    found = {finding.subject: finding for finding in choice.answers_of_ranks(pool)}
    assert list(found) == [*(f"engine {name}" for name in ENGINES), "engine auto"]
    can = f"can run over {pool.backend}"
    everywhere = by_num_ranks(dict.fromkeys(range(1, pool.size + 1), can))
    assert found["engine reference"].value == everywhere
    assert not any(finding.problem for finding in found.values())


def test_ranks_that_fail_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of ranks before them keep their answers; nobody asks the ones after them."""
    asked = []

    class Pool:
        size, backend = 4, "nccl"

        def run(self, function: object, *, ranks: int, timeout: float) -> list[choice.Answer]:
            asked.append(ranks)
            if ranks == 3:
                raise RankError("--- rank 2 ---\nTraceback\nPeerError: rank 2 is late")
            return [choice.Answer("reference", dict.fromkeys(ENGINES, None))] * ranks

    *found, failure = choice.answers_of_ranks(Pool())  # type: ignore[arg-type]
    assert asked == [1, 2, 3]
    assert found[-1] == Finding("engine auto", "1..2 ranks: takes reference")
    assert failure.subject == "engines for 3 ranks"
    assert "PeerError: rank 2 is late" in str(failure.problem)
    assert "NCCL_DEBUG=INFO" in str(failure.problem)


def test_the_lsa_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        size = 4

        def run(self, function: object, *, timeout: float) -> list[int]:
            if self.size == 3:
                raise RankError("LibraryError: ncclCommInitRank: no")
            return [2] * self.size

    pool = Pool()
    monkeypatch.setattr(choice.extension, "obstacle", lambda: None)
    (finding,) = choice.lsa_domain(pool)  # type: ignore[arg-type]
    assert finding.value.startswith("2 of 4 GPUs reach each other's memory")
    pool.size = 3
    (finding,) = choice.lsa_domain(pool)  # type: ignore[arg-type]
    assert "ncclCommInitRank: no" in str(finding.problem)
    pool.size = 1
    assert not [*choice.lsa_domain(pool)]  # type: ignore[arg-type]
    pool.size = 4
    monkeypatch.setattr(choice.extension, "obstacle", lambda: "there is none")
    assert not [*choice.lsa_domain(pool)]  # type: ignore[arg-type]


def test_ranks_that_see_different_obstacles() -> None:
    def answer(first: str | None, second: str | None) -> choice.Answer:
        return choice.Answer("reference", {"first": first, "second": second})

    merged = choice.merge([answer("no GPU", None), answer("no GPU", "no library")])
    assert merged == answer("no GPU", "rank 1: no library")
