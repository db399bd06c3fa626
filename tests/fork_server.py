"""Processes that are forks of one that has imported what they need.

Starting a rank takes seconds, most of them to import: two and a half for torch, five more for
Megatron-Core.  A fork takes none, and goes through its own exit, destructors and all, like a
process of its own.  What imports do is tested in interpreters of their own.

python tests/fork_server.py DESCRIPTOR: takes what to prepare and then requests from that pipe.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from processes import Ended, variables_of_job

from megatron_ncclep.ranks.launch import RankError, loopback_store

IMPORT_S = 600.0  # for what is imported, on a slow and busy machine


class ForkServer:
    """The process that forks; it starts with the first forks, and ends with `close`.

    Args:
        prepare: called before the first fork; "module:function", or "module": only imported.  It
            must not use CUDA.
        folders: in front of this process's import path.
        environment: more variables.
    """

    def __init__(
        self,
        prepare: Callable[[], object] | str | None = None,
        folders: Sequence[str] = (),
        **environment: str,
    ) -> None:
        self._arguments = prepare, folders, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Any = None

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
            arguments: anything that can be pickled.
            num_ranks: R.
            timeout: seconds for all of them together; then what is left is killed.
            environment: more variables.

        Raises:
            RankError: there is no process to fork ranks.
            AssertionError: a rank has left a process behind.
        """
        from timeouts import patient  # it imports pools, and they this module

        dump_s = patient(5.0)  # what a process that hangs gets to write down where
        # The store is here, as it is in torchrun, and outlives any rank.
        store = loopback_store()
        variables = {**variables_of_job(num_ranks, store.port), **environment}
        with tempfile.TemporaryDirectory() as folder:
            outputs = [str(Path(folder, str(rank))) for rank in range(num_ranks)]
            processes = self.fork(function, arguments, outputs, **variables)
            self._control.send(processes)
            try:
                codes = self._receive(timeout)
            except BaseException:  # pytest is interrupted: ranks that hang would stay
                kill_sessions(processes, signal.SIGKILL)
                self._receive(IMPORT_S)
                raise
            hung: list[int] = []
            for number in (signal.SIGABRT, signal.SIGKILL):  # the first has stacks written
                if codes is None:
                    hung = hung or sessions(processes)
                    kill_sessions(processes, number)
                    codes = self._receive(dump_s)
            give_up = time.monotonic() + dump_s  # for what was killed and is not yet gone
            while (left := sessions(processes)) and time.monotonic() < give_up:
                time.sleep(dump_s / 100)
            kill_sessions(processes, signal.SIGKILL)
            texts = [Path(path).read_text() for path in outputs]
            assert not left or hung, f"processes {left} are left behind: {texts}"
            return [
                Ended(None if process in hung else code, text)
                for process, code, text in zip(processes, codes, texts, strict=True)
            ]

    def fork(
        self,
        function: str,
        arguments: Sequence[Any],
        outputs: Sequence[str | None],
        pipes: Sequence[Connection] = (),
        **environment: str,
    ) -> list[int]:
        """Have processes run `function(*arguments)`; return their numbers.

        Args:
            function, arguments: as for `run`.
            outputs: for each rank the file of both its streams; None: this process's streams.
            pipes: for each rank an end of a pipe, which is its first argument.
            environment: more variables.

        Raises:
            RankError: with what kept the process that forks from importing.
        """
        if self._process is None:
            self._start()
        try:
            self._control.send((function, arguments, outputs, len(pipes), environment))
            for pipe in pipes:
                send_handle(self._control, pipe.fileno(), None)
            forked = self._receive(IMPORT_S)
        except (ConnectionError, EOFError):  # it has died
            forked = None
        if isinstance(forked, list):
            return forked
        self.close()
        nothing = f"what ranks import ended the process or took longer than {IMPORT_S:g} s"
        raise RankError(forked or nothing)

    def end(self, processes: list[int]) -> None:
        """Kill forks and what they have started, and wait for their end."""
        kill_sessions(processes, signal.SIGKILL)
        if self._process is not None:
            try:
                self._control.send(processes)
                self._receive(IMPORT_S)
            except (ConnectionError, EOFError):
                self.close()

    def close(self) -> None:
        """End the process; it has no forks any more."""
        if self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()
        self._process = self._control = None

    def _start(self) -> None:
        prepare, folders, environment = self._arguments
        self._control, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, str(theirs.fileno())],
                # OMP_NUM_THREADS is read while torch is imported; the handler of faults lives on
                # in forks.
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([*folders, *filter(None, sys.path)]),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONFAULTHANDLER": "1",
                    **environment,
                },
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for pytest
            )
        self._control.send(prepare)

    def _receive(self, timeout: float) -> Any:
        """The next answer, or None if none comes in time."""
        return self._control.recv() if self._control.poll(timeout) else None


def sessions(leaders: Collection[int]) -> list[int]:
    """The processes of the sessions that `leaders` have opened, dead ones that wait included."""
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(ProcessLookupError):
            if name.isdigit() and os.getsid(int(name)) in leaders:
                found.append(int(name))
    return found


def kill_sessions(leaders: Collection[int], number: int) -> None:
    for process in sessions(leaders):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def named(function: str) -> Callable[..., Any]:
    """The function that "module:function" means; of "module", imported, one that does nothing."""
    module, _, name = function.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else lambda: None


def serve(control: Connection) -> Callable[[], Any] | None:
    """Fork processes, or wait for their end, as asked; in a fork, return what it is to run."""
    failure, children = None, set[int]()
    try:
        prepare = control.recv()
        if prepare is not None:
            (named(prepare) if isinstance(prepare, str) else prepare)()
    except Exception:
        failure = traceback.format_exc()
    gc.freeze()  # a fork that searched what imports have made would take a second longer to end
    while True:
        try:
            request = control.recv()
        except EOFError:  # nobody asks any more
            kill_sessions(children, signal.SIGKILL)
            return None
        if isinstance(request, list):
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in request]
            children.difference_update(request)
            control.send(codes)
            continue
        function, arguments, outputs, num_pipes, environment = request
        pipes = [Connection(recv_handle(control)) for _ in range(num_pipes)]
        forked: list[int] = []
        for rank, output in enumerate([] if failure else outputs):
            forked.append(os.fork())
            if forked[rank] == 0:
                control.close()
                mine = pipes[rank : rank + 1]
                for pipe in pipes:
                    if pipe not in mine:
                        pipe.close()  # so that a rank's end is the end of its pipe
                become(rank, output, environment)
                return partial(named(function), *mine, *arguments)
        for pipe in pipes:
            pipe.close()
        children.update(forked)
        control.send(failure or forked)


def become(rank: int, output: str | None, environment: dict[str, str]) -> None:
    """Be a rank of a job."""
    os.setsid()  # what it starts can be found
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for ours in (1, 2):
            os.dup2(file, ours)


if __name__ == "__main__":
    run = serve(Connection(int(sys.argv[1])))
    sys.exit(run and run())
