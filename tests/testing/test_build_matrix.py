"""scripts/build_matrix.sh with stand-ins for Python and nvcc: what did not compile is no pass."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "build_matrix.sh"

pytestmark = pytest.mark.any_python("it runs a shell script")

NVCC = """#!/bin/bash
echo "Cuda compilation tools, release {version}, V{version}.1"
"""

# `python setup.py` compiles and `python -` loads; they fail with the toolkits that are listed in
# `failing` and `unloadable`.  What was compiled has the toolkit's version, or that in `taken`.
# pip "fetches" `served` as nvcc, and fails without it.
PYTHON = r"""#!/bin/bash
here=$(dirname "$0")
echo "$* [$CUDA_HOME] [$NCCLEP_CUDA_ARCHITECTURES]" >>"$here/calls"
while [ $# -gt 0 ]; do
    case $1 in
    -m) pip=1 ;;
    -) while read -r home; do
            [[ $LD_LIBRARY_PATH == "$home"/* ]] && exit 1
        done <"$here/unloadable"
        echo "loaded: CUDA $(cat "$here/version") sm_90a" && exit ;;
    --target | --build-lib) folder=$2 ;;
    esac
    shift
done
if [ -n "$pip" ]; then
    [ -f "$here/served" ] || { echo "no network" >&2 && exit 1; }
    mkdir -p "$folder/nvidia/cu13/bin" && cp "$here/served" "$folder/nvidia/cu13/bin/nvcc"
    exit
fi
grep -qx "$CUDA_HOME" "$here/failing" && echo "boom" && exit 1
{ cat "$here/taken" || "$CUDA_HOME/bin/nvcc" | sed 's/.*, V//; s/\.1$//'; } >"$here/version" 2>&-
mkdir -p "$folder/megatron_ncclep" && touch "$folder/megatron_ncclep/_C.so"
"""

# A machine whose apt-get has no sources.
APT_GET = "#!/bin/bash\n"


class Machine:
    """A machine with toolkits of its own, on which the script runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("failing", "unloadable", "calls"):
            (folder / name).touch()
        self.program(folder / "python", PYTHON)
        self.program(folder / "bin" / "apt-get", APT_GET)

    def program(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def toolkit(self, version: str, trouble: str = "") -> str:
        """The folder of a toolkit that has `trouble`: "failing", "unloadable" or none."""
        home = self.folder / f"cuda-{version}"
        self.program(home / "bin" / "nvcc", NVCC.format(version=version))
        if trouble:
            with (self.folder / trouble).open("a") as file:
                file.write(f"{home}\n")
        return str(home)

    def pip_serves(self, version: str) -> None:
        self.program(self.folder / "served", NVCC.format(version=version))

    def build(self, *wanted: str, **environment: str) -> tuple[int, list[list[str]], str]:
        """Run the script; its exit status, the rows of the table, and all that it printed."""
        done = subprocess.run(
            [str(SCRIPT), *wanted],
            env={
                **os.environ,
                "PYTHON": str(self.folder / "python"),
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                **environment,
            },
            text=True, capture_output=True, timeout=60,
        )  # fmt: skip
        table = done.stdout.partition("\ntoolkit ")[2].splitlines()[1:]
        rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table]
        return done.returncode, rows, done.stdout + done.stderr

    def compiled(self) -> list[str]:
        """CUDA_HOME and architectures of what was compiled."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line.partition(" [")[2] for line in lines if "build_ext" in line]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_folder(machine: Machine):
    home = machine.toolkit("13.0")
    status, rows, _ = machine.build(f"{home}:90a,100a")
    assert status == 0
    assert [row[1:3] for row in rows] == [["sm_90a", "pass"]], "what the extension says it has"
    assert machine.compiled() == [f"{home}] [90a 100a]"]


@pytest.mark.parametrize("trouble", ["failing", "unloadable"])
def test_one_fails_and_the_others_are_compiled(machine: Machine, trouble: str):
    good, bad, last = (
        machine.toolkit("13.0"), machine.toolkit("13.1", trouble), machine.toolkit("13.2"),
    )  # fmt: skip
    status, rows, printed = machine.build(good, bad, last)
    assert status == 1
    assert [row[2] for row in rows] == ["pass", "FAIL", "pass"]
    assert ("boom" in printed) == (trouble == "failing")


def test_another_toolkit_than_the_one_asked_for_is_no_pass(machine: Machine):
    """setup.py passes by a folder without headers."""
    (machine.folder / "taken").write_text("13.0\n")
    status, rows, _ = machine.build(machine.toolkit("12.4"))
    assert status == 1
    assert rows[0][2] == "FAIL"
    assert "another toolkit" in rows[0][-1]


def test_this_machines_toolkit_comes_first(machine: Machine):
    home = machine.toolkit("13.99")
    status, rows, _ = machine.build("13.99", CUDA_HOME=home)
    assert status == 0
    assert rows[0][-1] == "this machine's"
    assert machine.compiled() == [f"{home}] []"]


def test_pip_brings_a_toolkit(machine: Machine):
    machine.pip_serves("13.99")
    status, rows, _ = machine.build("13.99:90a")
    assert status == 0
    assert "from pip, fetched in" in rows[0][-1]
    assert len(machine.compiled()) == 1


@pytest.mark.parametrize("served", ["", "13.1"])
def test_what_pip_does_not_bring_is_no_pass(machine: Machine, served: str):
    if served:
        machine.pip_serves(served)
    good = machine.toolkit("13.0")
    status, rows, _ = machine.build("13.99:90a", good)
    assert status == 3
    assert rows[0][:3] == ["13.99", "90a", "NOT RUN"]
    assert "not to be fetched" in rows[0][-1]
    assert rows[1][2] == "pass"
    assert len(machine.compiled()) == 1


def test_what_cannot_be_had_is_no_pass(machine: Machine):
    machine.pip_serves("13.0")
    (machine.folder / "empty").mkdir()
    # No wheel has the nvcc of CUDA 12; without Debian's packages there is none.
    status, rows, printed = machine.build("12.4", "12.99", str(machine.folder / "empty"))
    assert status == 3
    assert [row[2] for row in rows] == ["NOT RUN"] * 3
    assert "apt-get knows no source" in printed
    assert "name its folder" in rows[1][-1]
    assert "no bin/nvcc" in rows[2][-1]
    assert machine.compiled() == []


def test_usage():
    done = subprocess.run([str(SCRIPT), "--help"], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0
    assert "NOT RUN" in done.stdout
    assert subprocess.run([str(SCRIPT), "--no"], capture_output=True, timeout=60).returncode == 2
