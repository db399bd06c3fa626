"""A Python that has imported Megatron-Core already, without our hooks, and runs code in forks.

What imports do is tested in interpreters of their own; this is for what comes after them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import textwrap

from fork_server import ForkServer
from patience import patient

# Imported beforehand, where they are there: 0.16.1's wheel has no command line.
MODULES = ("pytest", "megatron.core.transformer.moe.moe_layer", "megatron.training.arguments")
TIMEOUT_S = patient(240)
# What ranks of a job have in their environment; nobody has started this code as one.
AS_RANK = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"
)  # fmt: skip


class ImportedMegatron:
    """The process that forks; it is started once, and ends with `close`."""

    def __init__(self) -> None:
        self._server = ForkServer("imported:prepare", NCCLEP_AUTOLOAD="0")

    def run(
        self, code: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `code` in a fork, with these arguments of its command line and more variables."""
        with tempfile.NamedTemporaryFile("r") as errors:
            (ended,) = self._server.run(
                "imported:run_code",
                [textwrap.dedent(code), errors.name, *arguments],
                1,
                TIMEOUT_S,
                **environment,
            )
            assert ended.exit_code is not None, ended.output + errors.read()
            return subprocess.CompletedProcess(code, ended.exit_code, ended.output, errors.read())

    def close(self) -> None:
        """End the process."""
        self._server.close()


def prepare() -> None:
    """Import what there is of `MODULES`."""
    for name in MODULES:
        package = name.rpartition(".")[0]
        if not package or importlib.util.find_spec(package) is not None:
            importlib.import_module(name)
    del os.environ["NCCLEP_AUTOLOAD"]


def run_code(code: str, errors: str, *arguments: str) -> None:
    """Run code as the main module, as `python -c` does, with standard error in a file."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    for name in AS_RANK:
        del os.environ[name]
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<job>", "exec"), {"__name__": "__main__"})
