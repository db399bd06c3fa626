"""`pytest --ran=FOLDER` writes with which versions the tests of a run have passed.

scripts/versions.py makes the table of docs/versions.md of such files and of the results on GPUs.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ncclep.doctor.machine import machine, versions


class Recorder:
    """A plugin; of several processes, the one that prints writes."""

    def __init__(self, folder: Path, release: str) -> None:
        self.folder, self.release = folder, release

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, exitstatus: int
    ) -> None:
        if exitstatus == pytest.ExitCode.OK:
            write(self.folder, self.release, len(terminalreporter.getreports("passed")))


def write(folder: Path, release: str, passed: int) -> None:
    """Write one file for these versions, in place of an earlier one."""
    found: dict[str, Any] = {**versions("cpu"), "megatron-core": release}
    folder.mkdir(parents=True, exist_ok=True)
    name = "-".join(("python", found["python"], "torch", found["torch"], "megatron", release))
    record = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": machine("cpu", 1),
        "versions": {key: value for key, value in found.items() if value},
        "passed": passed,
    }
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
