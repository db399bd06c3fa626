"""How the `ncclep` command ends when something goes wrong on a rank.

What a user is to read is one line that names the rank, and under torchrun it stands in torchrun's
summary too, in place of "error_file: <N/A>".
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable

from megatron_ncclep import envs
from megatron_ncclep.errors import EpError


def run_told(command: str, call: Callable[[], int]) -> int:
    """Return what `call` returns; 2, with a line on stderr, when it raises an EpError.

    Every other exception goes on to the caller.

    Args:
        command: what failed, for the line.
        call: what the command does.
    """
    try:
        return call()
    except EpError as error:
        if envs.get("NCCLEP_LOG") == "DEBUG":
            traceback.print_exc()
        _tell_torchrun(f"{type(error).__name__}: {error}")
        rank = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        # One write: the lines of several ranks must not run together.
        sys.stderr.write(f"{command}: {rank}error: {error}\n")
        return 2
    except Exception:
        _tell_torchrun(traceback.format_exc())
        raise


def _tell_torchrun(text: str) -> None:
    """Write down what torchrun shows of this rank if this rank is the first to fail."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)
