"""How a script ends when something goes wrong on a rank.

Users see one line naming the rank; under torchrun it also appears in torchrun's summary, in place
of "error_file: <N/A>".  The `ncclep` command does this always; scripts that are run without it do
so where possible.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from megatron_ncclep import envs
from megatron_ncclep.errors import EpError


def run_told(command: str, call: Callable[[], int]) -> int:
    """Return what `call` returns; 2, with a line on stderr, when it raises an EpError.

    So it does when a collective of the script's own fails because a rank has died: its error says
    that a connection ended, not whose.  The traceback comes first then.  A stdout that is full is
    told too; one that nobody reads any more ends the command as SIGPIPE would, without a word.
    Every other exception goes on to the caller.

    Args:
        command: what failed, for the line.
        call: what the command does.
    """
    try:
        return call()
    except OSError as error:
        if not _is_of_stdout(error):
            raise
        # What is still in the buffer has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        _tell(command, f"{type(error).__name__}: {error}", f"writing to stdout: {error.strerror}")
        return 2
    except EpError as error:
        if envs.get("NCCLEP_LOG") == "DEBUG":
            traceback.print_exc()
        _tell(command, f"{type(error).__name__}: {error}", str(error))
        return 2
    except Exception as error:
        if isinstance(error, RuntimeError) and (lost := _lost_ranks()):
            traceback.print_exc()
            text = f"{lost}; look at the other ranks' output. {error}"
            _tell(command, f"{type(error).__name__}: {text}", text)
            _keep_for_good(error)
            return 2
        _tell_torchrun(traceback.format_exc())
        raise


def _is_of_stdout(error: OSError) -> bool:
    """Whether stdout's reader has gone, or its disk is full; other files have names."""
    if isinstance(error, BrokenPipeError):
        poll = select.poll()
        poll.register(1, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return error.errno == errno.ENOSPC and error.filename is None


@functools.cache
def install_excepthook() -> None:
    """Report errors as `run_told` does, for scripts that are run without it.

    That is in torchrun's summary, and in the last line of a rank whose own collective failed
    because another rank has died.  Traceback and exit status do not change.
    """
    usual = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        usual(kind, error, trace)
        if isinstance(error, EpError):
            _tell_torchrun(f"{kind.__name__}: {error}")
        elif isinstance(error, RuntimeError) and (lost := _lost_ranks()):
            text = f"{lost}; look at the other ranks' output. {error}"
            _tell("ncclep", f"{kind.__name__}: {text}", text)
            _keep_for_good(error)

    sys.excepthook = told


def _lost_ranks() -> str:
    """Which ranks of our groups have died or left; empty if there is no group, or none is known."""
    groups = sys.modules.get("megatron_ncclep.ranks.group")
    return "" if groups is None else groups.lost_ranks()


def _keep_for_good(error: BaseException) -> None:
    """Never free a collective's error, nor the tensors and the work in its frames.

    Gloo's thread lets go of the failed work at some time of its own.  Were its reference the last
    one, that thread would need the interpreter to free the tensors; where the interpreter is ending
    by then, torch aborts the process ("terminate called without an active exception"), and the exit
    status says nothing of what went wrong.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))


def _tell(command: str, summary: str, text: str) -> None:
    """Say what is wrong, to torchrun and in one line."""
    _tell_torchrun(summary)
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    # One write: the lines of several ranks must not run together.
    sys.stderr.write(f"{command}: {rank}error: {text}\n")


def _tell_torchrun(text: str) -> None:
    """Write down what torchrun shows of this rank if this rank is the first to fail."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)
