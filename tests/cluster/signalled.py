"""A stand-in for a training script: says what reaches its rank; a signal ends it, after a while."""

import os
import signal
import sys
import time

RUN = os.environ.get("SLURM_RESTART_COUNT", "0")
WHO = f"run {RUN}: rank {os.environ['RANK']} ({os.environ['LOCAL_RANK']}) of"
WHO = f"{WHO} {os.environ['WORLD_SIZE']}"


def say(what):
    """Print a whole line at once: the other rank prints into the same file."""
    os.write(1, f"{WHO} {what}\n".encode())


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
    listens = os.path.join(sys.argv[sys.argv.index("--fail") + 1], "rank-0-listens")
    if os.environ["RANK"] == "0":
        open(listens, "w").close()
    else:
        while not os.path.exists(listens):
            time.sleep(0.05)
        sys.exit(3)
time.sleep(600)
say("was not told to end")
