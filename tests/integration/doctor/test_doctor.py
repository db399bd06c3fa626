"""`ncclep doctor`: true on this machine, and each problem comes with a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankError
from timeouts import patient

from megatron_ncclep import cli
from megatron_ncclep.doctor import SECTIONS, choice, examine
from megatron_ncclep.doctor.report import Finding, by_num_ranks, ranges, render
from megatron_ncclep.engines import ENGINES
from megatron_ncclep.libraries.tested import NEWEST_TORCH, OLDEST_TORCH

Report = dict[str, dict[str, str | None]]


def doctor(code: str = "", **environment: str) -> Report:
    """What it finds in an interpreter of its own, which imports what it looks at, after some code;
    by subject.
    """
    program = f"import sys\n{code}\nfrom megatron_ncclep.cli import main\nsys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, "doctor", "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=patient(600),
    )  # fmt: skip
    if not code:  # Megatron's remarks on packages that it would like to have are no findings
        assert "not installed" not in done.stderr
    printed = json.loads(done.stdout)
    assert {finding["section"] for finding in printed} == set(SECTIONS)
    report = {finding["subject"]: finding for finding in printed}
    assert len(report) == len(printed), "a subject stands twice"
    assert done.returncode == any(finding["problem"] for finding in report.values())
    return report


def test_it_says_what_is_here() -> None:
    report = doctor()
    assert report["torch"]["value"].startswith(torch.__version__)
    assert report["Megatron-Core"]["value"].startswith(version("megatron-core"))
    assert report["autoload"]["value"].startswith("on")
    assert report["megatron.core.transformer.moe.moe_layer"]["value"] == "as expected"
    assert {f"engine {name}" for name in ENGINES} <= set(report)
    assert report["engine reference"]["value"].endswith("can run over gloo")
    assert report["engine auto"]["value"] == "1..2 ranks: takes reference"
    assert report["nodes"]["value"] == "1 x 2 (nodes x ranks)"
    assert not any(finding["problem"] for finding in report.values())


def test_what_is_wrong_is_a_problem_and_the_rest_is_examined() -> None:
    """Variables, a changed Megatron, and one that is not tested."""
    found = doctor(
        "import megatron.core.transformer.moe.moe_layer as layer\n"
        "layer.MoETokenDispatcher.token_combine = lambda self, rows, more: None\n"
        "import megatron.core; megatron.core.__version__ = '0.99.0'\n"
        "from megatron_ncclep.doctor import choice\n"
        # One rank, which does not import Megatron-Core: each takes seconds to start.
        "choice.CPU_RANKS, choice.use_cpu = 1, dict",
        NCCLEP_NUM_SMS="many", NCCLEP_NCCL_LIBRARY="/gone.so", NCCLEP_LOG="warning",
        NCCLEP_ENGINE="nativ", NCCLEP_AUTOLOD="0", NCCLEP_AUTOLOAD="0",
    )  # fmt: skip
    for problem in ("NCCLEP_ENGINE='nativ': not one of", "NCCLEP_AUTOLOD is not a variable"):
        assert problem in str(found["environment"]["problem"])
    assert "NCCLEP_NUM_SMS='many'" in str(found["environment"]["problem"])
    assert "NCCLEP_LOG=WARNING" in str(found["environment"]["value"])
    assert "NCCLEP_NCCL_LIBRARY=/gone.so" in str(found["NCCL, the rest"]["problem"])
    assert found["engine auto"]["value"] == "takes reference"
    problem = "MoETokenDispatcher.token_combine is not a method of 1 argument:"
    assert problem in str(found["megatron.core.transformer.moe.moe_layer"]["problem"])
    assert found["autoload"]["value"].startswith("off (NCCLEP_AUTOLOAD=0)")
    assert "0.16.1 to 0.20.0 are tested" in str(found["Megatron-Core"]["problem"])


def test_without_megatron_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (finding,) = examine("Megatron-Core")
    assert finding.value == "not installed"
    assert "pip install 'megatron-ncclep[train]'" in str(finding.problem)


def test_table_is_aligned_and_wrapped() -> None:
    found = [
        Finding("short", "1 rank: takes a\n2 ranks: takes b"),
        Finding("a longer one", "a value of several words that does not fit", "one, and a remedy"),
    ]
    assert render("Title", found, 50) == (
        "Title\n"
        "  short         1 rank: takes a\n"
        "                2 ranks: takes b\n"
        "  a longer one  a value of several words that does not\n"
        "                fit\n"
        "                PROBLEM: one, and a remedy"
    )


def test_equal_texts_for_several_numbers_of_ranks_are_one() -> None:
    assert ranges([1, 2, 3, 5, 7, 8]) == "1..3, 5, 7..8"
    assert by_num_ranks({1: "a"}) == "a"
    assert by_num_ranks({1: "a", 2: "a"}) == "1..2 ranks: a"
    assert by_num_ranks({1: "a", 2: "b", 3: "b", 4: "a"}) == "1, 4 ranks: a\n2..3 ranks: b"
    assert by_num_ranks({1: "a", 2: "b"}) == "1 rank: a\n2 ranks: b"


# --- engines -------------------------------------------------------------------------------------


def test_ranks_that_fail_are_a_problem() -> None:
    """Smaller numbers of ranks keep their answers; larger ones are not asked."""
    asked = []

    def receive() -> list[choice.Answer | None]:
        asked.append(number := len(asked) + 1)
        if number == 3:
            raise RankError("--- rank 2 ---\nTraceback\nPeerError: rank 2 is late")
        answer = {"engine auto": "takes reference"}
        return [answer] * number + [None] * (4 - number)

    *found, failure = choice.answers_of_ranks(4, "nccl", receive)
    assert asked == [1, 2, 3]
    assert found[-1] == Finding("engine auto", "1..2 ranks: takes reference")
    assert failure.subject == "engines for 3 ranks"
    assert "PeerError: rank 2 is late" in str(failure.problem)
    assert "NCCL_DEBUG=INFO" in str(failure.problem)


def test_the_lsa_domain() -> None:
    def fail() -> list[Any]:
        raise RankError("LibraryError: ncclCommInitRank: no")

    told = [(2, ""), (2, ""), (2, ""), (2, "NCCL offers its kernels no network")]
    finding, network = choice.lsa_domain(4, lambda: told)
    assert finding.value.startswith("2 of 4 GPUs reach each other's memory")
    assert network.value.endswith("NCCL offers its kernels no network")
    _, network = choice.lsa_domain(4, lambda: told[:3])
    assert network.value == "NCCL offers one (GIN)"
    (finding,) = choice.lsa_domain(4, fail)
    assert "ncclCommInitRank: no" in str(finding.problem)


def break_gloo() -> None:
    def init(*args: object, **kwargs: object) -> None:
        raise TypeError("__init__() got an unexpected keyword argument\nand more")

    dist.ProcessGroupGloo.__init__ = init  # type: ignore[method-assign]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_ranks_that_cannot_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With torch 2.14 no command could make a gloo group, and the doctor found 0 problems: it had
    made its own without what `ncclep train` replaces in torch.
    """
    monkeypatch.setattr(choice, "use_cpu", break_gloo)
    monkeypatch.setattr(choice, "CPU_RANKS", 1)  # each one takes seconds to start
    (finding,) = examine("Engines")
    assert finding.subject == "engines for 1 ranks"
    problem = str(finding.problem)
    assert "failed: TypeError: __init__() got an unexpected keyword argument; " in problem
    assert f"torch {OLDEST_TORCH} to {NEWEST_TORCH} are tested, install one of these" in problem
    (finding,) = examine("Engines", 4)
    assert "--ranks 4: 0 GPU(s) are visible; for tests, NCCL 2.30.0 or newer" in str(
        finding.problem
    )
    # With GPUs the engines were left out, and there were "0 problems".
    assert cli.main(["doctor", "--ranks", "0"]) == 2
    assert "--ranks 0: must be at least 1" in capsys.readouterr().err
