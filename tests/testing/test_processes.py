"""run_ranks: how processes end is told as it is, and none is left behind."""

from __future__ import annotations

import sys

from processes import Ended, run_ranks

RANK = """
import os, sys, time
rank = os.environ["RANK"]
print("rank", rank, "of", os.environ["WORLD_SIZE"], flush=True)
if rank == "0":
    sys.exit(3)
if rank == "1":
    os._exit(0)
time.sleep(60)
"""


def test_exit_codes_output_and_what_hangs() -> None:
    first, second, third = run_ranks([sys.executable, "-c", RANK], 3, timeout=5)
    assert first == Ended(3, "rank 0 of 3\n")
    assert second == Ended(0, "rank 1 of 3\n")
    assert third.exit_code is None
    assert "rank 2 of 3" in third.output
    assert 'File "<string>", line 9 in <module>' in third.output  # where it hung
