"""Fresh processes that are the ranks of one job, without a supervisor: how each of them ends.

`RankPool` keeps its processes alive; here each one goes through its own exit, destructors and all,
as under torchrun, but the others are not ended when one has failed.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass

import torch.distributed as dist
from patience import patient
from torch._C._distributed_c10d import TCPStore

from megatron_ncclep.ranks import place
from megatron_ncclep.ranks.pool import RankContext

# How many ranks are on each of the hosts that --hosts makes up: for processes of their own, and for
# the oracle, while engines have to find out.
LOCAL_RANKS = "TESTED_LOCAL_RANKS"
# What a process that did not end in time gets to write down where it hangs.
DUMP_S = patient(5.0)
# How the command `timeout` ends when the time was up.
TIMED_OUT = 124


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    Attributes:
        exit_code: as of subprocess; None: it did not end in time and was killed.
        output: of both streams; where it hung, when it was killed.
    """

    exit_code: int | None
    output: str


class Store:
    """What the ranks of a job meet in; it is here, as it is in torchrun, and outlives any rank."""

    def __init__(self) -> None:
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def variables(self, num_ranks: int) -> dict[str, str]:
        """Torchrun's variables, except for a rank's own."""
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


def run_ranks(
    command: list[str], num_ranks: int, timeout: float, **environment: str
) -> list[Ended]:
    """Start `command` as every rank of a job, with torchrun's variables, and wait for all to end.

    Args:
        command: of one rank, which calls `join`.
        num_ranks: R.
        timeout: seconds for each of them, on an idle machine; then it is killed.
        environment: more variables.
    """
    store = Store()
    variables = {
        **os.environ,
        **store.variables(num_ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # writes the stacks when a rank is aborted
        **environment,
    }
    limit = ["timeout", "--signal=ABRT", f"--kill-after={DUMP_S}", str(patient(timeout))]
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(num_ranks)]
        processes = [
            subprocess.Popen(
                [*limit, *command],
                env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
            for rank, output in enumerate(outputs)
        ]
        for process in processes:
            stack.callback(process.terminate)  # of an interrupted test
        codes = [process.wait() for process in processes]
        for output in outputs:
            output.seek(0)
        return [
            Ended(None if code == TIMED_OUT else code, output.read())
            for code, output in zip(codes, outputs, strict=True)
        ]


def join(backend: str) -> RankContext:
    """Be a rank of the job that `run_ranks` started this process for.  Collective.

    Args:
        backend: "gloo", or "nccl": ranks share GPUs where there are fewer.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = "cuda" if backend == "nccl" else "cpu"
    if device == "cuda":
        if ranks_on_each := os.environ.get(LOCAL_RANKS):
            place.pretend_host(rank, int(ranks_on_each))
        place.use_gpu(rank)
    dist.init_process_group(backend)
    assert dist.group.WORLD is not None  # just made
    return RankContext(rank, size, dist.group.WORLD, device)
