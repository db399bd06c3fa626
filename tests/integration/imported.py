"""A Python that has imported Megatron-Core already, without our hooks, and runs code in forks.

An interpreter that imports torch and Megatron-Core takes six seconds of a core, a fork none.  What
imports do is tested in interpreters of their own; this is for what comes after them.

python tests/integration/imported.py: reads jobs from stdin, one JSON object a line, and answers
each with the exit status and the output of a fork that ran its code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import traceback

# Imported beforehand, where they are there: 0.16.1's wheel has no command line.
MODULES = ("pytest", "megatron.core.transformer.moe.moe_layer", "megatron.training.arguments")
TIMEOUT_S = 240


class ImportedMegatron:
    """The process that forks; it is started once, and ends with `close`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env={**os.environ, "NCCLEP_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, code: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `code` in a fork, with these arguments of its command line and more variables."""
        job = {"code": textwrap.dedent(code), "argv": arguments, "environment": environment}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has died"
        status, output, errors = json.loads(answer)
        return subprocess.CompletedProcess(code, status, output, errors)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def serve() -> None:
    """Fork for one job after another."""
    import importlib
    import importlib.util

    for name in MODULES:
        package = name.rpartition(".")[0]
        if not package or importlib.util.find_spec(package) is not None:
            importlib.import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if child == 0:
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                os._exit(run(job))
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = [(file.seek(0), file.read())[1] for file in (output, errors)]
        print(json.dumps([status, *texts]), flush=True)


def run(job: dict) -> int:
    """Run a job's code as the main module; return its exit status."""
    import signal

    signal.alarm(TIMEOUT_S)
    del os.environ["NCCLEP_AUTOLOAD"]
    os.environ.update(job["environment"])
    sys.argv = ["-c", *job["argv"]]
    status = 0
    try:
        exec(compile(job["code"], "<job>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    serve()
