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

from patience import patient

# scripts/fetch_slurm.sh unpacks Debian's packages there.
TREE = Path(sys.prefix) / "slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue", "srun")
FOLDERS = [str(TREE / "usr" / "bin"), str(TREE / "usr" / "sbin"), "/usr/sbin"]
# Seconds; a busy machine needs more than Slurm's own second or two for a step.
PATIENCE_S = patient(300.0)

CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
CommunicationParameters=NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until the credentials of its former run have expired.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
{plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
# It looks for jobs to start every second, not every minute.
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=0
MpiDefault=none
ReturnToService=2
# Two tasks run on one core as well.
SlurmdParameters=config_overrides
KillWait=30
NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def find(program: str) -> str | None:
    """The path of one of Slurm's programs; Debian's daemons have a name of their own."""
    path = os.pathsep.join([*FOLDERS, os.environ["PATH"]])
    return shutil.which(program, path=path) or shutil.which(f"{program}-wlm", path=path)


def unavailable_reason() -> str | None:
    """Say which programs are missing and what brings them; None if all are there."""
    missing = [program for program in PROGRAMS if find(program) is None]
    if not missing:
        return None
    return (
        f"no {', '.join(missing)} here: scripts/fetch_slurm.sh {os.path.relpath(sys.prefix)} "
        "unpacks Debian's"
    )


def wait_until(is_so: Callable[[], object], what: Callable[[], str]) -> None:
    """Ask again and again; fails with `what` when the patience is at its end."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


class SlurmCluster:
    """The daemons, and commands that talk to them.

    Attributes:
        folder: configuration, state and logs; deleted by `close`.
    """

    def __init__(self) -> None:
        # Not pytest's: the path of a socket is short, and munged wants its folder open to others.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm"))
        self.folder.chmod(0o755)
        self._daemons: list[subprocess.Popen[bytes]] = []
        libraries = [*TREE.glob("usr/lib/*-linux-gnu"), *TREE.glob("usr/lib/*/slurm-wlm")]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        folders = [str(Path(sys.executable).parent), *FOLDERS, os.environ["PATH"]]
        self.environment = {
            **inherited,
            "PATH": os.pathsep.join(folders),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "LD_LIBRARY_PATH": os.pathsep.join(
                [*map(str, libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
            ),
        }
        plugins = [f"PluginDir={path}" for path in libraries if path.name == "slurm-wlm"]
        # Its name is where the ranks meet, so that it has to be one that is found.
        self._configure(node="localhost", plugins="\n".join(plugins))
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _configure(self, node: str, plugins: str) -> None:
        self.node = node
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o600)
        held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        ports = [end.getsockname()[1] for end in held]
        for end in held:
            end.close()
        conf = CONF.format(
            folder=self.folder, ports=ports, user=getpass.getuser(), node=node, plugins=plugins
        )
        (self.folder / "slurm.conf").write_text(conf)

    def _start(self) -> None:
        socket_path = self.folder / "munge.sock"
        self._daemon(
            "munged", "--foreground", "--force", f"--socket={socket_path}",
            f"--key-file={self.folder / 'munge.key'}", f"--log-file={self.folder / 'munged.log'}",
            f"--pid-file={self.folder / 'munged.pid'}", f"--seed-file={self.folder / 'seed'}",
        )  # fmt: skip
        wait_until(socket_path.exists, self.logs)
        self._daemon("slurmctld", "-D", "-i")
        stepd = find("slurmstepd")
        at = ["-d", stepd] if stepd and stepd.startswith(str(TREE)) else []
        self._daemon("slurmd", "-D", "-N", self.node, *at)
        wait_until(lambda: "State=IDLE" in self.ask("scontrol", "show", "node"), self.logs)

    def _daemon(self, program: str, *arguments: str) -> None:
        path = find(program)
        assert path is not None, unavailable_reason()
        with (self.folder / f"{program}.out").open("wb") as out:
            command = [path, *arguments]
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=out, stderr=out)
            )

    def logs(self) -> str:
        """What the daemons printed."""
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.out"))

    def ask(self, program: str, *arguments: str) -> str:
        """Run one of Slurm's commands; what it printed, errors included."""
        path = find(program)
        assert path is not None, unavailable_reason()
        done = subprocess.run(
            [path, *arguments], env=self.environment, text=True, timeout=PATIENCE_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return done.stdout

    def submit(self, *arguments: str) -> str:
        """Submit a job; its number."""
        printed = self.ask("sbatch", "--parsable", *arguments)
        assert re.fullmatch(r"\d+\n", printed), printed
        return printed.strip()

    def facts(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", job)))

    def close(self) -> None:
        """End all jobs and the daemons, and remove the folder."""
        try:
            if len(self._daemons) == 3:  # all were started
                # What is ended may be queued again, and must not start then.
                self.ask("scontrol", "update", "PartitionName=test", "State=DOWN")
                self.ask("scancel", "--user", getpass.getuser())
                wait_until(lambda: not self.ask("squeue", "--noheader"), self.logs)
        finally:
            for daemon in reversed(self._daemons):
                daemon.terminate()
                daemon.wait(PATIENCE_S)
            shutil.rmtree(self.folder)
