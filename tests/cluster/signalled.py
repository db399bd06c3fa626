"""A stand-in for a training script: says what reaches its rank; a signal ends it, after a while."""

import os
import signal
import sys
import time
from pathlib import Path


def say(what):
    """Print a whole line at once: the other rank prints into the same file."""
    run = os.environ.get("SLURM_RESTART_COUNT", "0")
    rank, local_rank, size = (os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    os.write(1, f"run {run}: rank {rank} ({local_rank}) of {size} {what}\n".encode())


def save(number, frame):
    """As long as a checkpoint takes, or nearly so."""
    say(f"got {signal.Signals(number).name}")
    time.sleep(1)
    say("saved")
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR2, save)
say(f"meets at {os.environ['MASTER_ADDR']}")
if "--fail" in sys.argv:
    # Not before the other rank knows what to do when it is told to end.
    listens = Path(sys.argv[sys.argv.index("--fail") + 1], "rank-0-listens")
    if os.environ["RANK"] == "0":
        listens.touch()
    else:
        while not listens.exists():
            time.sleep(0.05)
        sys.exit(3)
time.sleep(600)
say("was not told to end")
