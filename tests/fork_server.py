"""Processes that are the ranks of one job, forked from one that has imported what they need.

Starting a rank takes seconds, most of them to import: two and a half for torch, five more for
Megatron-Core.  A fork takes none, and goes through its own exit, destructors and all, like a
process of its own.  What imports do is tested in interpreters of their own.

python tests/fork_server.py PREPARE: reads jobs from stdin, one JSON object a line, and answers each
with its processes, and with their exit codes when all have ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from processes import DUMP_S, Ended, Store


class ForkServer:
    """The process that forks; it is started once, and ends with `close`.

    Args:
        prepare: "module", imported before the first fork, or "module:function", called before it.
            It must not use CUDA.
        folders: in front of this process's import path.
        environment: more variables.
    """

    def __init__(self, prepare: str, folders: Sequence[str] = (), **environment: str) -> None:
        path = os.pathsep.join([*folders, *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, prepare],
            # OMP_NUM_THREADS is read while torch is imported; the handler of faults lives on in
            # forks.
            env={
                **os.environ,
                "PYTHONPATH": path,
                "OMP_NUM_THREADS": "1",
                "PYTHONFAULTHANDLER": "1",
                **environment,
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def run(
        self,
        function: str,
        arguments: Sequence[Any],
        num_ranks: int,
        timeout: float,
        **environment: str,
    ) -> list[Ended]:
        """Run `function(*arguments)` as every rank of a job, and wait for all to end.

        Args:
            function: "module:function"; what it returns, if anything, is the exit status.
            arguments: anything that JSON knows.
            num_ranks: R.
            timeout: seconds for all of them together; then what is left is killed.
            environment: more variables.

        Raises:
            AssertionError: a rank has left a process behind.
        """
        store = Store()
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder, str(rank)) for rank in range(num_ranks)]
            job = {
                "function": function,
                "arguments": list(arguments),
                "outputs": [str(path) for path in outputs],
                "environment": {**store.variables(num_ranks), **environment},
            }
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            processes = self._receive(timeout)
            try:
                codes = self._receive(timeout)
            except (
                BaseException
            ):  # pytest is interrupted: ranks that hang would keep `close` waiting
                kill_sessions(processes, signal.SIGKILL)
                raise
            hung: list[int] = []
            for number in (signal.SIGABRT, signal.SIGKILL):  # the first has stacks written
                if codes is None:
                    hung = hung or sessions(processes)
                    kill_sessions(processes, number)
                    codes = self._receive(DUMP_S)
            give_up = time.monotonic() + DUMP_S  # for what was killed and is not yet gone
            while (left := sessions(processes)) and time.monotonic() < give_up:
                time.sleep(DUMP_S / 100)
            kill_sessions(processes, signal.SIGKILL)
            texts = [path.read_text() for path in outputs]
            assert not left or hung, f"processes {left} are left behind: {texts}"
            return [
                Ended(None if process in hung else code, text)
                for process, code, text in zip(processes, codes, texts, strict=True)
            ]

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _receive(self, timeout: float) -> Any:
        """The next answer, or None if none comes in time."""
        answers, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not answers:
            return None
        line = self._process.stdout.readline()
        assert line, "the fork server has died"
        return json.loads(line)


def sessions(leaders: list[int]) -> list[int]:
    """The processes of the sessions that `leaders` have opened, dead ones that wait included."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(ProcessLookupError):
            if name.isdigit() and os.getsid(int(name)) in leaders:
                found.append(int(name))
    return found


def kill_sessions(leaders: list[int], number: int) -> None:
    for process in sessions(leaders):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def named(function: str) -> Callable[..., Any]:
    """The function that "module:function" means; of "module", imported, one that does nothing."""
    module, _, name = function.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else lambda: None


def serve() -> dict[str, Any] | None:
    """Fork the ranks of one job after another; in a fork, return the job."""
    for line in sys.stdin:
        job = json.loads(line)
        children = []
        for rank, output in enumerate(job["outputs"]):
            child = os.fork()
            if child == 0:
                become(rank, output, job["environment"])
                return job
            children.append(child)
        print(json.dumps(children), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)
    return None


def become(rank: int, output: str, environment: dict[str, str]) -> None:
    """Be a rank of a job."""
    os.setsid()  # what it starts can be found
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for theirs, ours in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(theirs, ours)


if __name__ == "__main__":
    named(sys.argv[1])()
    gc.freeze()  # a fork that searched what imports have made would take a second longer to end
    job = serve()
    if job is not None:
        sys.exit(named(job["function"])(*job["arguments"]))
