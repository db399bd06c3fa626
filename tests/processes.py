"""Processes that are the ranks of one job, without a supervisor: where they meet, how each ends.

`RankPool` keeps its processes alive; those of `ForkServer.run` each go through their own exit,
destructors and all, as under torchrun, but the others are not ended when one has failed.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from megatron_ncclep.ranks import launch, topology
from megatron_ncclep.ranks.launch import RankContext, variables

# How many ranks are on each of the hosts that --hosts makes up: for processes of their own, and for
# the oracle, while engines have to find out.
LOCAL_RANKS = "TESTED_LOCAL_RANKS"


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        exit_code: None: it did not end in time and was killed; negative: the signal's number.
        output: of both streams; where it hung, when it was killed.
    """

    exit_code: int | None
    output: str


def variables_of_job(num_ranks: int, port: int) -> dict[str, str]:
    """Torchrun's variables, except for a rank's own; `port`: of the store in which ranks meet."""
    made = variables(0, num_ranks, port)
    return {name: made[name] for name in made if "RANK" not in name}


def forked_ranks() -> AbstractContextManager[Any]:
    """Within it, the ranks that a command starts are forks of this process, with its imports."""
    forks = multiprocessing.get_context("fork")
    return mock.patch.object(multiprocessing, "get_context", return_value=forks)


def pretend_host(rank: int, ranks_on_each: int) -> None:
    """Make this rank's process appear on one of several hosts; call before it uses NCCL."""
    os.environ[topology.HOST_ID] = f"host{rank // ranks_on_each}"


def join(backend: str) -> RankContext:
    """Be a rank of the job that this process was started for, on one of --hosts.  Collective."""
    if backend == "nccl" and (ranks_on_each := os.environ.get(LOCAL_RANKS)):
        pretend_host(int(os.environ["RANK"]), int(ranks_on_each))
    return launch.join(backend)
