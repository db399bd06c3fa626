"""How a script ends when something goes wrong on a rank.

Users see one line naming the rank; under torchrun it also appears in torchrun's summary, in place
of "error_file: <N/A>".  The `ncclep` command always does this; scripts that are run without it do
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
from pathlib import Path
from types import TracebackType

from megatron_ncclep import envs
from megatron_ncclep.errors import EpError


def run_reporting(command: str, call: Callable[[], int]) -> int:
    """Return the result of `call`, or 2, with a line on stderr, if it raises an EpError.

    The same happens, after the traceback, when one of the script's own collectives fails because a
    rank has died: that error says that a connection ended, but not whose.  A stdout on a full disk
    is reported too; if stdout's reader has gone, the command ends silently, as SIGPIPE would end
    it.  Every other exception goes to the caller.
    """
    try:
        return call()
    except OSError as error:
        if not _is_of_stdout(error):
            raise
        # The rest of the buffer has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        _report(command, f"{type(error).__name__}: {error}", f"writing to stdout: {error.strerror}")
        return 2
    except EpError as error:
        if envs.get("NCCLEP_LOG") == "DEBUG":
            traceback.print_exc()
        _report(command, f"{type(error).__name__}: {error}", str(error))
        if "RANK" in os.environ:
            _keep_for_good(error)
        return 2
    except Exception as error:
        if isinstance(error, RuntimeError) and (lost := _lost_ranks()):
            traceback.print_exc()
            text = f"{lost}; look at the other ranks' output. {error}"
            _report(command, f"{type(error).__name__}: {text}", text)
            _keep_for_good(error)
            return 2
        _report_to_torchrun(traceback.format_exc())
        raise


def _is_of_stdout(error: OSError) -> bool:
    """Whether the error is about stdout: its reader has gone, or its disk is full.

    Errors about other files have a file name.
    """
    if isinstance(error, BrokenPipeError):
        poll = select.poll()
        poll.register(1, 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    return error.errno == errno.ENOSPC and error.filename is None


@functools.cache
def install_excepthook() -> None:
    """Report errors as `run_reporting` does, for scripts that are run without it.

    The report is in torchrun's summary, and in the last line of a rank whose own collective failed
    because another rank has died.  Traceback and exit status do not change.
    """
    usual = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        usual(kind, error, trace)
        if isinstance(error, EpError):
            _report_to_torchrun(f"{kind.__name__}: {error}")
        elif isinstance(error, RuntimeError) and (lost := _lost_ranks()):
            text = f"{lost}; look at the other ranks' output. {error}"
            _report("ncclep", f"{kind.__name__}: {text}", text)
            _keep_for_good(error)

    sys.excepthook = report


def _lost_ranks() -> str:
    """The ranks of our groups known to have died or left; empty if there are none."""
    groups = sys.modules.get("megatron_ncclep.ranks.group")
    return "" if groups is None else groups.lost_ranks()


def _keep_for_good(error: BaseException) -> None:
    """Never free a rank's error, nor the tensors and the work of collectives in its frames.

    Gloo's thread drops its reference to such work at some later time.  If that reference were
    the last one, the thread would need the interpreter to free the tensors; if the interpreter is
    already ending, torch aborts the process ("terminate called without an active exception"), and
    the exit status says nothing about the cause.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))


def _report(command: str, summary: str, text: str) -> None:
    """Report the error to torchrun and in one line on stderr."""
    _report_to_torchrun(summary)
    rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    # One write: the lines of several ranks must not run together.
    sys.stderr.write(f"{command}: {rank}error: {text}\n")


def first_report(folder: Path) -> str | None:
    """What the first rank to report an error to torchrun said, in a line; None if none did."""
    reports = folder.rglob("error.json")
    first = min(reports, key=lambda path: path.stat().st_mtime_ns, default=None)
    if first is None:
        return None
    lines = json.loads(first.read_text(encoding="utf-8"))["message"]["message"].splitlines()
    text = lines[-1] if lines[0].startswith("Traceback") else " ".join(lines)
    return f"rank {first.parent.name}: {text}"


def _report_to_torchrun(text: str) -> None:
    """Write the text that torchrun shows for this rank if it is the first to fail."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)
