"""A Slurm of one node on this machine's loopback: munged, slurmctld and slurmd, for tests."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from timeouts import patient

TREE = Path(sys.prefix) / "slurm"  # where scripts/fetch_slurm.sh unpacks Debian's packages
LIBRARIES = [*TREE.glob("usr/lib/*-linux-gnu"), *TREE.glob("usr/lib/*/slurm-wlm")]
PATH = os.pathsep.join(
    [*(str(TREE / "usr" / name) for name in ("bin", "sbin")), "/usr/sbin", os.environ["PATH"]]
)
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue", "srun")
# Seconds; a busy machine needs more than Slurm's own second or two for a step.
PATIENCE_S = patient(300.0)
# A requeued job waits until the credentials of its former run have expired.  The scheduler looks
# for jobs every second, not every minute, and two tasks run on one core as well.
CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoInAddrAny
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
{plugins}
ProctrackType=proctrack/linuxproc
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def find(program: str) -> str | None:
    """The path of one of Slurm's programs; Debian's daemons have other names."""
    return shutil.which(program, path=PATH) or shutil.which(f"{program}-wlm", path=PATH)


def unavailable_reason() -> str | None:
    """Say which programs are missing and what brings them; None if all are there."""
    missing = ", ".join(program for program in PROGRAMS if find(program) is None)
    fetch = f"scripts/fetch_slurm.sh {os.path.relpath(sys.prefix)} unpacks Debian's"
    return f"no {missing} here: {fetch}" if missing else None


def wait_until(is_so: Callable[[], object], what: Callable[[], str]) -> None:
    """Poll `is_so`; fails with `what` after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


class SlurmCluster:
    """The daemons, and commands that talk to them."""

    def __init__(self) -> None:
        # Not pytest's: the path of a socket is short, and munged wants its folder open to others.
        self._folder = folder = Path(tempfile.mkdtemp(prefix="slurm"))
        folder.chmod(0o755)
        self._daemons: list[subprocess.Popen[bytes]] = []
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        libraries = [*map(str, LIBRARIES), *filter(None, [inherited.get("LD_LIBRARY_PATH")])]
        self._environment = inherited | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), PATH]),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        }
        key, plugins = folder / "munge.key", f"PluginDir={LIBRARIES[-1]}" if LIBRARIES else ""
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [end.getsockname()[1] for end in held]
        for end in held:
            end.close()
        conf = CONF.format(folder=folder, ports=ports, user=getpass.getuser(), plugins=plugins)
        (folder / "slurm.conf").write_text(conf)
        try:
            munge = ("log-file", "pid-file", "seed-file")
            self._daemon(
                "munged", "--foreground", "--force", f"--socket={folder / 'munge.sock'}",
                f"--key-file={key}", *(f"--{name}={folder / name}" for name in munge),
            )  # fmt: skip
            wait_until((folder / "munge.sock").exists, self.logs)
            self._daemon("slurmctld", "-D", "-i")
            stepd = find("slurmstepd")
            at = ["-d", stepd] if stepd and stepd.startswith(str(TREE)) else []
            self._daemon("slurmd", "-D", "-N", "localhost", *at)
            wait_until(lambda: "State=IDLE" in self.ask("scontrol", "show", "node"), self.logs)
        except BaseException:
            self.close()
            raise

    def _daemon(self, program: str, *arguments: str) -> None:
        with (self._folder / f"{program}.out").open("wb") as out:
            command = [str(find(program)), *arguments]
            started = subprocess.Popen(command, env=self._environment, stdout=out, stderr=out)
            self._daemons.append(started)

    def logs(self) -> str:
        """What the daemons printed."""
        return "\n".join(path.read_text()[-2000:] for path in self._folder.glob("*.out"))

    def ask(self, program: str, *arguments: str) -> str:
        """Run one of Slurm's commands; what it printed, errors included."""
        return subprocess.run(
            [str(find(program)), *arguments], env=self._environment, text=True,
            timeout=PATIENCE_S, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ).stdout  # fmt: skip

    def facts(self, job: str) -> dict[str, str]:
        """The fields that `scontrol show job` prints."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", job)))

    def close(self) -> None:
        """End all jobs and the daemons, and remove the folder."""
        try:
            if len(self._daemons) == 3:  # all were started
                # A cancelled job may be queued again, and must not start then.
                self.ask("scontrol", "update", "PartitionName=test", "State=DOWN")
                self.ask("scancel", "--user", getpass.getuser())
                wait_until(lambda: not self.ask("squeue", "--noheader"), self.logs)
        finally:
            for daemon in reversed(self._daemons):
                daemon.terminate()
                daemon.wait(PATIENCE_S)
            shutil.rmtree(self._folder)
