"""scripts/train.slurm under a real Slurm: its ranks start, get signals, save and resume."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version
from slurm_cluster import SlurmCluster, wait_until

from megatron_ncclep.cli import render

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RANKS = (0, 1)
pytestmark = pytest.mark.any_python("it runs a shell script")

MOCK_DATA = shlex.split("""
    --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --split 99,1,0 --num-workers 0
    --eval-iters 0 --log-interval 1 --lr-decay-style constant
""")


class Job:
    """One job of scripts/train.slurm with two tasks."""

    def __init__(self, cluster: SlurmCluster, folder: Path, script: Path, *arguments: str) -> None:
        """Submit it.

        Args:
            cluster: where.
            folder: for its configuration and its log.
            script: what its ranks run, with `arguments`; all but the stand-in train on the CPU.
        """
        self.cluster, self.log = cluster, folder / "log"
        # configs/cluster/slurm.yaml on this machine, whose Slurm counts no GPUs.
        sections: dict[str, dict[str, Any]] = render.read_cluster("slurm")
        sections["run"]["cpu"] = script.name != "signalled.py"
        sections["env"]["OMP_NUM_THREADS"] = 1
        exit_handler = {"exit-signal-handler": sections["megatron"]["exit-signal-handler"]}
        sections["megatron"] = render.read_cluster("local-cpu")["megatron"] | exit_handler
        (folder / "slurm.yaml").write_text(yaml.safe_dump(sections, sort_keys=False))
        self.number = cluster.ask(
            "sbatch", "--parsable", "--gpus-per-node=0", f"--output={self.log}",
            f"--export=ALL,PYTHONPATH={ROOT},SLURM_GPUS_ON_NODE={len(RANKS)}",
            str(ROOT / "scripts" / "train.slurm"), "--model", "tiny",
            "--cluster", str(folder / "slurm.yaml"), "--script", str(script), "--", *arguments,
        ).strip()  # fmt: skip
        assert self.number.isdecimal(), self.number

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def describe(self) -> str:
        return f"{self.cluster.facts(self.number)}\n{self.text()}\n{self.cluster.logs()}"

    def wait(self, is_so: Callable[[], object]) -> None:
        """Wait for it; a job that fails meanwhile fails the test at once."""

        def look() -> bool:
            if is_so():
                return True
            assert self.state() not in ("FAILED", "CANCELLED"), self.describe()
            return False

        wait_until(look, self.describe)

    def wait_for(self, *lines: str) -> None:
        self.wait(lambda: all(line in self.text().splitlines() for line in lines))

    def state(self) -> str:
        return self.cluster.facts(self.number).get("JobState", "unknown")

    def is_queued_again(self, times: int) -> bool:
        facts = self.cluster.facts(self.number)
        return facts["Restarts"] == str(times) and facts["JobState"] in ("PENDING", "RUNNING")


def of_both(run: int, what: str) -> list[str]:
    return [f"run {run}: rank {rank} ({rank}) of {len(RANKS)} {what}" for rank in RANKS]


def test_signals_reach_the_ranks(slurm: SlurmCluster, tmp_path: Path):
    """From the batch script before its time is up, from Slurm when it requeues, and from users.

    With torchrun between srun and the ranks, SIGUSR1 killed it and left its ranks alone.
    """
    job = Job(slurm, tmp_path, HERE / "signalled.py", "--save", "there", "--load", "there")
    job.wait_for(*of_both(0, "meets at localhost"))

    # What `#SBATCH --signal=B:USR1@300` sends, without waiting for a time limit of minutes.
    slurm.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for(*of_both(0, "got SIGTERM"), *of_both(0, "saved"))
    job.wait(lambda: job.is_queued_again(1))

    job.wait_for(*of_both(1, "meets at localhost"))
    slurm.ask("scontrol", "requeue", job.number)
    job.wait_for(*of_both(1, "got SIGTERM"), *of_both(1, "saved"))
    job.wait(lambda: job.is_queued_again(2))

    job.wait_for(*of_both(2, "meets at localhost"))
    slurm.ask("scancel", "--signal=USR2", job.number)
    job.wait_for(*of_both(2, "got SIGUSR2"), *of_both(2, "saved"))
    job.wait(lambda: job.state() == "COMPLETED")


def test_a_job_that_would_start_over_is_not_queued_again(slurm: SlurmCluster, tmp_path: Path):
    job = Job(slurm, tmp_path, HERE / "signalled.py", "--save", "there")
    job.wait_for(*of_both(0, "meets at localhost"))
    slurm.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.wait(lambda: job.state() == "COMPLETED")
    assert job.cluster.facts(job.number)["Restarts"] == "0"
    assert "not requeued: without --save and --load" in job.text()


def test_a_rank_that_fails_ends_the_job(slurm: SlurmCluster, tmp_path: Path):
    """The other rank is not left waiting, and the job is not queued again."""
    job = Job(
        slurm, tmp_path, HERE / "signalled.py",
        "--fail", str(tmp_path), "--save", "there", "--load", "there",
    )  # fmt: skip
    wait_until(lambda: job.state() == "FAILED", job.describe)
    assert slurm.facts(job.number)["ExitCode"] == "3:0"
    assert slurm.facts(job.number)["Restarts"] == "0"


def test_a_training_goes_on_where_it_was(slurm: SlurmCluster, tmp_path: Path):
    if Version(version("megatron-core")) < Version("0.17"):
        pytest.skip("wheels of Megatron-Core before 0.17 have no megatron.training")
    template = HERE.parent / "integration" / "install" / "pretrain_template.py"
    shutil.copy(template, tmp_path / "pretrain_gpt.py")
    shutil.copy(HERE / "interrupted_pretrain.py", tmp_path)
    there = str(tmp_path / "checkpoints")
    job = Job(
        slurm, tmp_path, tmp_path / "interrupted_pretrain.py", *MOCK_DATA,
        "--train-iters", "6", "--save", there, "--load", there, "--save-interval", "1000",
    )  # fmt: skip
    job.wait_for(*(f"rank {rank} waits" for rank in RANKS))
    slurm.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.wait(lambda: job.is_queued_again(1))
    trained = re.findall(r"iteration +(\d+)/ +6 ", job.text())
    assert trained == ["1", "2", "3", "4"]
    job.wait(lambda: job.state() == "COMPLETED")
    assert re.findall(r"iteration +(\d+)/ +6 ", job.text()) == [*trained, "5", "6"]
    assert "trained with ncclep" in job.text()
