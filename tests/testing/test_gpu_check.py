"""scripts/gpu_check.sh with a stand-in for Python: what fails or cannot run is never a pass."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gpu_check.sh"

pytestmark = pytest.mark.any_python("it runs a shell script")

# Prints its words; what its folder holds says which engines there are and what fails.
PYTHON = r"""#!/bin/bash
here=$(dirname "$0")
echo "python $*" >>"$here/calls"
case "$*" in
*engines_here.py*) cat "$here/engines" ;;
*pytest*)
    [ ! -f "$here/skip" ] || echo "SKIPPED [1] a.py:1: no library"
    [ ! -f "$here/left out" ] || echo "LEFT OUT a.py::test: one process"
    ;;
esac
while read -r words; do
    [[ "$*" == *"$words"* ]] && echo "boom" && exit 3
done <"$here/failing"
echo "all is well"
"""


class Machine:
    """A machine with GPUs and engines of its own, on which the script runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "python").write_text(PYTHON)
        (folder / "python").chmod(0o755)
        (folder / "failing").touch()

    def has(self, gpus: int, **engines: str) -> None:
        """Engine -> the reason why it cannot run, empty if it can."""
        lines = [f"{name}\t{reason}" for name, reason in engines.items()]
        (self.folder / "engines").write_text("\n".join([*lines, f"gpus\t{gpus}"]) + "\n")

    def fails(self, *commands: str) -> None:
        """What the commands that contain these words do."""
        (self.folder / "failing").write_text("".join(f"{words}\n" for words in commands))

    def check(self, *engines: str, **environment: str) -> tuple[int, dict[str, list[str]]]:
        """Run the script; its exit status, and the summary: step -> [result, seconds, remark]."""
        results = self.folder / "results"
        done = subprocess.run(
            [str(SCRIPT), str(results), *engines],
            env={**os.environ, "PYTHON": str(self.folder / "python"), **environment},
            text=True,
            capture_output=True,
            timeout=60,
        )
        lines = (results / "summary.txt").read_text().splitlines()[2:]
        assert "".join(f"{line}\n" for line in lines) in done.stdout
        return done.returncode, {
            line[:28].strip(): [line[29:37].strip(), line[38:45].strip(), line[47:].strip()]
            for line in lines
        }

    def calls(self, words: str) -> list[str]:
        return [c for c in (self.folder / "calls").read_text().splitlines() if words in c]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def results(rows: dict[str, list[str]]) -> dict[str, str]:
    return {step: result for step, (result, _, _) in rows.items()}


def test_four_gpus(machine: Machine) -> None:
    machine.has(4, nccl_ep="", reference="")
    status, rows = machine.check()
    assert status == 0
    names = ["versions", "engines"]
    steps = ("contract", "random", "faults", "gpu", "train")
    names += [f"{step}-{engine}" for engine in ("nccl_ep", "reference") for step in steps]
    assert results(rows) == dict.fromkeys([*names, "doctor", "bench"], "pass")
    contract = machine.calls("tests/contract")
    assert contract[0].endswith("--backend nccl --engine nccl_ep --ranks 2 --ranks 4")
    assert contract[2].endswith("--engine reference --ranks 1 --ranks 2 --ranks 3 --ranks 4")
    assert "--ranks 2 --ranks 4 --iterations 1000 --seed " in contract[1]
    assert machine.calls("tests/faults")[0].endswith("--engine nccl_ep --ranks 4")
    assert all("--ranks 4" in call for call in machine.calls("train --ranks"))
    assert len(machine.calls("check_losses.py")) == 2


def test_two_gpus_leave_out_what_needs_four_and_list_it(machine: Machine) -> None:
    machine.has(2, reference="")
    status, rows = machine.check(STEPS="contract gpu")
    assert status == 0
    assert results(rows) == {
        "versions": "pass",
        "engines": "pass",
        "contract-reference": "pass",
        "contract-reference, 4 ranks": "NOT RUN",
        "gpu-reference": "pass",
    }
    assert machine.calls("tests/contract")[0].endswith("--ranks 1 --ranks 2")


@pytest.mark.parametrize("gpus", [0, 1])
def test_too_few_gpus_are_no_pass(machine: Machine, gpus: int) -> None:
    machine.has(gpus, reference="" if gpus else "there is no GPU")
    status, rows = machine.check()
    assert status == 1
    assert rows["groups of ranks"] == ["NOT RUN", "-", f"two GPUs are needed, {gpus} found"]
    assert results(rows)["doctor"] == "pass"


def test_one_gpu_has_virtual_ranks(machine: Machine) -> None:
    machine.has(1, native="", reference="")
    status, rows = machine.check(STEPS="contract random faults gpu sanitizer")
    assert status == 0
    assert {step: result for step, result in results(rows).items() if "reference" not in step} == {
        "versions": "pass",
        "engines": "pass",
        "groups of GPUs": "NOT RUN",
        "virtual ranks": "note",
        **dict.fromkeys((f"{s}-virtual" for s in ("contract", "random", "faults", "gpu")), "pass"),
        **dict.fromkeys((f"{s}check-virtual" for s in ("mem", "race", "sync")), "pass"),
        "memcheck-native": "NOT RUN",
        "racecheck-native": "NOT RUN",
    }
    assert rows["faults-reference"] == ["NOT RUN", "-", "two GPUs are needed, 1 found"]
    assert "no links" in rows["virtual ranks"][2]
    calls = machine.calls("--backend virtual --engine native --ranks")
    assert len(calls) == 4
    assert calls[0].endswith("--ranks 2 --ranks 3 --ranks 4 --ranks 8")
    assert "--iterations 1000 --seed " in calls[1]
    assert "tests/faults tests/gpu/test_failures.py --backend virtual" in calls[2]
    assert not machine.calls("--backend nccl --engine native")  # needs two
    assert len(machine.calls("native --virtual")) == 3


def test_several_gpus_have_virtual_ranks_too(machine: Machine) -> None:
    machine.has(4, native="", reference="")
    status, rows = machine.check(STEPS="contract")
    assert status == 0
    assert {"contract-native", "contract-reference", "contract-virtual"} < set(rows)
    assert "groups of GPUs" not in rows


def test_an_engine_that_cannot_run_is_listed(machine: Machine) -> None:
    machine.has(2, nccl_ep="no libnccl_ep.so", reference="")
    status, rows = machine.check(STEPS="gpu")
    assert status == 0
    assert rows["engine nccl_ep"] == ["NOT RUN", "-", "no libnccl_ep.so"]
    assert "gpu-nccl_ep" not in rows


def test_an_engine_asked_for_by_name_must_run(machine: Machine) -> None:
    machine.has(2, nccl_ep="no libnccl_ep.so")
    status, rows = machine.check("nccl_ep", STEPS="gpu")
    assert status == 1
    assert results(rows)["engine nccl_ep"] == "NOT RUN"
    assert machine.calls("engines_here.py")[0].endswith("engines_here.py nccl_ep")


@pytest.mark.parametrize(
    ("failing", "step"),
    [
        ("tests/contract --backend", "contract-reference"),
        ("tests/contract/test_random.py --backend", "random-reference"),
        ("test_random.py --backend virtual", "random-virtual"),
        ("tests/faults tests/gpu/test_failures.py --backend", "faults-reference"),
        ("tests/gpu --ignore tests/gpu/test_failures.py --backend", "gpu-reference"),
        ("train --ranks", "train-reference"),
        ("check_losses.py", "train-reference"),
        ("doctor", "doctor"),
        ("bench", "bench"),
    ],
)
def test_a_failure_is_recorded_and_the_rest_runs(machine: Machine, failing: str, step: str) -> None:
    machine.has(4, reference="", **({"native": ""} if "virtual" in step else {}))
    machine.fails(failing)
    status, rows = machine.check()
    assert status == 1
    bad = {name for name, result in results(rows).items() if result not in ("pass", "note")}
    assert bad == {step}
    assert results(rows)[step] == "FAIL"
    assert "exit status 3" in rows[step][2]
    assert "boom" in (machine.folder / "results" / f"{step}.log").read_text()


def test_low_latency_mode_is_measured_where_there_is_native(machine: Machine) -> None:
    machine.has(2, native="")
    _, rows = machine.check(STEPS="bench")
    assert results(rows)["bench-low-latency"] == "pass"
    assert "bench --mode ll --out" in machine.calls("--mode")[0]
    machine.has(2, reference="")
    _, rows = machine.check(STEPS="bench")
    assert "bench-low-latency" not in rows


def test_sanitizer_runs_when_asked_for(machine: Machine) -> None:
    machine.has(2, native="", reference="")
    status, rows = machine.check(STEPS="sanitizer")
    assert status == 0
    assert set(rows) == {
        *("versions", "engines", "virtual ranks", "memcheck-native", "racecheck-native"),
        *("memcheck-virtual", "racecheck-virtual", "synccheck-virtual"),
    }
    racecheck = [call.partition("racecheck ")[2] for call in machine.calls("racecheck")]
    assert racecheck == ["native --virtual", "native"]


def test_without_a_sanitizer_it_is_listed(machine: Machine) -> None:
    machine.has(2, native="")
    machine.fails("sanitize.py --find")
    _, rows = machine.check(STEPS="sanitizer")
    assert rows["sanitizer"][0] == "NOT RUN"
    assert "no compute-sanitizer" in rows["sanitizer"][2]
    machine.has(2, native="it needs Hopper", reference="")
    _, rows = machine.check(STEPS="sanitizer")
    assert rows["sanitizer"] == ["NOT RUN", "-", "it needs a GPU and the engine native"]


def test_convergence_runs_when_asked_for(machine: Machine) -> None:
    machine.has(2, reference="")
    status, rows = machine.check(STEPS="convergence", STEP_TIMEOUT="500")
    assert (status, results(rows)["convergence"]) == (0, "pass")
    assert machine.calls("gpu_protocol.py run")[0].endswith("results/convergence --seconds 450")
    machine.has(0, reference="")
    _, rows = machine.check(STEPS="convergence")
    assert rows["convergence"] == ["NOT RUN", "-", "a GPU is needed, none found"]


def test_without_knowing_the_engines_nothing_counts(machine: Machine) -> None:
    machine.has(4, reference="")
    machine.fails("engines_here.py")
    status, rows = machine.check()
    assert status == 1
    assert results(rows)["contract, gpu, train"] == "NOT RUN"


def test_a_step_that_hangs_is_ended(machine: Machine) -> None:
    machine.has(2, reference="")
    text = (machine.folder / "python").read_text()
    (machine.folder / "python").write_text(text.replace("*pytest*)", "*pytest*) sleep 60;"))
    status, rows = machine.check(STEPS="gpu", STEP_TIMEOUT="2")
    assert status == 1
    assert rows["gpu-reference"][0] == "FAIL"
    assert rows["gpu-reference"][2].startswith("stopped after 2 s")


@pytest.mark.parametrize(
    ("marker", "listed"),
    [("skip", "SKIPPED [1] a.py:1: no library"), ("left out", "LEFT OUT a.py::test: one process")],
)
def test_what_pytest_leaves_out_is_listed(machine: Machine, marker: str, listed: str) -> None:
    machine.has(1, native="")
    (machine.folder / marker).touch()
    machine.check(STEPS="contract")
    summary = (machine.folder / "results" / "summary.txt").read_text()
    assert re.search(rf"contract-virtual +NOT RUN +-  {re.escape(listed)}", summary)


def test_an_unknown_step_is_refused() -> None:
    done = subprocess.run(
        [str(SCRIPT)], env={**os.environ, "STEPS": "contrast"}, text=True, capture_output=True
    )
    assert done.returncode == 2
    assert "there is no step 'contrast'" in done.stderr
