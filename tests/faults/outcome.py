"""What came of a job in which the last rank goes wrong, and what each rank said of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rank import DEADLINE_S, DEATH, FAULTS

from megatron_ncclep.testing.processes import Ended, run_ranks

# What never has to do with a rank that does not come.
CRASHES = ("CUDA error", "terminate called", "Segmentation fault", "illegal memory", "LibraryError")
# Seconds for a whole job: mostly for the start of its processes, which share a CPU with others.
JOB_S = 90.0
# Far above the deadline, far below LONG_S and torch's own ten minutes.
SOON_S = 6 * DEADLINE_S


def outcome(backend: str, engine: str, fault: str, num_ranks: int, **environment: str) -> list[str]:
    """Run a job; return the error's text of each rank, empty for a rank without one.

    Asserted for every rank: it ended by itself, soon after the fault, as an uncaught PeerError ends
    a program or without any error, and nothing else went wrong.  Only the last rank may die.
    """
    assert fault in FAULTS
    script = Path(__file__).with_name("rank.py")
    command = [sys.executable, str(script), backend, engine, fault]
    everyone = run_ranks(command, num_ranks, JOB_S, **environment)
    story = "\n".join(
        f"--- rank {rank}: exit code {ended.exit_code} ---\n{ended.output}"
        for rank, ended in enumerate(everyone)
    )
    texts = []
    for rank, ended in enumerate(everyone):
        crashes = [word for word in CRASHES if word in ended.output]
        assert not crashes, f"rank {rank}: {crashes}\n{story}"
        text = error_text(ended)
        may_die = rank == num_ranks - 1 and fault.startswith("dies")
        expected = DEATH if may_die else 1 if text else 0
        assert ended.exit_code == expected, f"rank {rank}, not {expected}\n{story}"
        if not may_die:
            took = re.search(r"over after ([\d.]+) s", ended.output)
            assert took, f"rank {rank}\n{story}"
            assert float(took[1]) < SOON_S, f"rank {rank}\n{story}"
        texts.append(text)
    return texts


def error_text(ended: Ended) -> str:
    """The text of the PeerError that ended a rank."""
    found = re.search(
        r"^(?:\[rank\d+\]: )?megatron_ncclep\.errors\.PeerError: (.*)", ended.output, re.MULTILINE
    )
    return found[1] if found else ""
