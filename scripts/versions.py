"""The table of docs/versions.md: which versions are needed, and which the tests have run with.

    make versions                              # writes it, with the newest runs of this machine
    python scripts/versions.py [FILE...]       # says whether it is up to date

FILE is what `pytest --ran=FOLDER` has written (tests/ran.py); `--write` adds it to
benchmarks/results/cpu-runs.json.  What has run on GPUs is in the other files there: results, and
summaries of `make gpu`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from generated import update  # noqa: E402
from results import RESULTS, table  # noqa: E402

from megatron_ncclep.integration.releases import MEGATRON  # noqa: E402
from megatron_ncclep.libraries import extension, search  # noqa: E402

RUNS = RESULTS / "cpu-runs.json"
Facts = dict[str, str]


def requirements() -> dict[str, str]:
    """What pyproject.toml requires, by the package's name, such as `2.6` or `exactly 0.6.5`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = {"python": project["requires-python"].removeprefix(">=")}
    for text in (*project["dependencies"], *extras["te"], *extras["experts"]):
        required = Requirement(text)
        limits = {limit.operator: limit.version for limit in required.specifier}
        newest = f" to {limits['<=']}" if "<=" in limits else ""
        exact = f"exactly {limits['==']}" if "==" in limits else limits[">="]
        found[required.name] = exact + newest
    return found


def facts(machine: dict[str, Any], versions: dict[str, Any]) -> Facts:
    """The versions of one run, and the names of its machine, without what it lacked."""
    given = {**machine, **versions}
    glibc = re.search(r"(x86_64|aarch64)-with-glibc([\d.]+)", given.get("platform", ""))
    if glibc:
        given |= {"glibc": glibc[2], "processor": glibc[1]}
    return {name: re.sub(r"\+\w+$", "", str(value)) for name, value in given.items() if value}


def on_gpus() -> Iterator[Facts]:
    """The runs on GPUs that benchmarks/results has."""
    for path in sorted(RESULTS.glob("*/*.json")):
        result = json.loads(path.read_text())
        if isinstance(result, dict) and result.get("machine", {}).get("device") == "cuda":
            yield facts(result["machine"], result["versions"])
    for path in sorted(RESULTS.glob("*.txt")):
        lines = dict(re.findall(r"^([\w-]+): ([\w.+() -]+)$", path.read_text(), re.MULTILINE))
        if lines.get("device") == "cuda":
            yield facts({}, {name: value.split(" (")[0] for name, value in lines.items()})


def on_cpus() -> Iterator[Facts]:
    """The runs of `make test` and scripts/torch_range.sh."""
    for run in json.loads(RUNS.read_text()):
        yield {**facts(run["machine"], run["versions"]), "cuda": ""}


def listed(runs: list[Facts], name: str) -> str:
    """The values of a name in some runs, in order."""

    def order(value: str) -> tuple[bool, Any]:
        try:
            return False, Version(value)
        except InvalidVersion:
            return True, value

    values = {re.sub(r" \(.*", "", run[name]) for run in runs if run.get(name)}
    if name == "python":
        values = {value.rpartition(".")[0] for value in values}
    return ", ".join(sorted(values, key=order))


def rows() -> str:
    """The table."""
    needed, gpus, cpus = requirements(), list(on_gpus()), list(on_cpus())
    drivers = (f"{driver} for CUDA {cuda}" for cuda, driver in extension.OLDEST_DRIVER.items())
    of = {
        "GPU": ("gpu", "Hopper or newer; grouped experts: Hopper"),
        "driver": ("driver", ", ".join(drivers)),
        "CUDA, as torch has it": ("cuda", "12 or 13"),
        "torch": ("torch", f"{needed['torch']}; grouped experts 2.10"),
        "NCCL": ("nccl", search.version_text(search.OLDEST_NCCL)),
        "Megatron-Core": ("megatron-core", f"{MEGATRON.oldest} to {MEGATRON.newest}"),
        "TransformerEngine, optional": ("transformer-engine", needed["transformer-engine"]),
        "quack-kernels, optional": ("quack-kernels", needed["quack-kernels"]),
        "nvidia-cutlass-dsl, with it": ("nvidia-cutlass-dsl", needed["nvidia-cutlass-dsl"]),
        "Python": ("python", f"{needed['python']}; 3.12 for Megatron-Core 0.17 and newer"),
        "Linux on": ("processor", "x86_64 or aarch64"),
        "glibc": ("glibc", "2.28 for wheels of a release"),
    }
    return table(
        ["", "needed", "run on GPUs", "run on CPUs"],
        [
            [what, wanted, listed(gpus, name), listed(cpus, name)]
            for what, (name, wanted) in of.items()
        ],
    )


def merged(files: list[Path]) -> str:
    """The runs on CPUs and in some files, which replace earlier ones of the same versions."""
    runs = json.loads(RUNS.read_text()) if RUNS.exists() else []
    runs += [json.loads(path.read_text()) for path in files]

    def key(run: dict[str, Any]) -> list[str]:
        return [run["versions"][name] for name in ("python", "torch", "megatron-core")]

    newest = {tuple(key(run)): run for run in runs}
    return json.dumps([newest[each] for each in sorted(newest)], indent=1) + "\n"


def main() -> int:
    """Compare, or write with --write; return 1 if the page is out of date and not written."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    args = parser.parse_args()
    if args.write:
        RUNS.write_text(merged(args.files))
    return update("make versions", {"versions": rows()}, args.write)


if __name__ == "__main__":
    sys.exit(main())
