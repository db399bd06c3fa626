"""Where a rank runs: its host and its GPU, which ranks may share.

NCCL 2.30 and newer can run several ranks on one GPU, with `NCCL_MULTI_RANK_GPU_ENABLE=1`, and treat
ranks whose `NCCL_HOSTID` differs as on different hosts.  Both are for tests: ranks that share a GPU
take turns on it, so their timings are meaningless.
"""

from __future__ import annotations

import hashlib
import os
import socket

import torch

from megatron_ncclep.errors import InputError
from megatron_ncclep.libraries import search

ENABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
HOST_ID = "NCCL_HOSTID"
OLDEST_NCCL = (2, 30, 0)
# For error messages.
HOW_TO_SHARE = (
    f"for tests, NCCL {search.version_text(OLDEST_NCCL)} or newer lets ranks share a GPU with "
    f"{ENABLE}=1"
)
# Further defaults for ranks on one GPU, which the environment overrides: no multicast, few CTAs for
# NCCL, and a network between their "hosts".  All have to fit on the GPU: with 4 CTAs, two of NCCL's
# groups of 8 ranks need more SMs than our kernels leave.
DEFAULTS = {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2", "NCCL_SOCKET_IFNAME": "lo"}


def host_name() -> str:
    """Name of the host that this process is on, as NCCL sees it."""
    return os.environ.get("NCCL_HOSTID") or socket.gethostname()


def host_id() -> bytes:
    """32 bytes that differ where `NCCL_HOSTID` does."""
    return hashlib.sha256(os.environ.get("NCCL_HOSTID", "").encode()).digest()


def may_share_gpu() -> bool:
    """Whether NCCL runs several ranks of this process's groups on one GPU."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1" or torch.cuda.device_count() == 0:
        return False
    nccl = search.find_nccl()
    return nccl is not None and (nccl.version or (0, 0, 0)) >= OLDEST_NCCL


def require_gpus(num_ranks: int) -> None:
    """Check that this machine has a GPU for each of the ranks to start, or lets them share.

    Raises:
        InputError: it does not.
    """
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise InputError("--device cuda: no GPU is visible; leave it out to run on the CPU")
    if num_ranks > num_gpus and not may_share_gpu():
        raise InputError(
            f"--ranks {num_ranks}: each needs its own GPU, and {num_gpus} are visible; "
            f"{HOW_TO_SHARE}"
        )


def use_gpu(local_rank: int) -> int:
    """Select a GPU of this machine for a rank, before it uses CUDA or NCCL.

    Ranks beyond the number of GPUs share them round-robin, where NCCL allows it.

    Returns:
        the GPU's index.

    Raises:
        InputError: there is no GPU for it.
    """
    num_gpus = torch.cuda.device_count()
    shares = most_ranks_per_gpu() > 1 or local_rank >= num_gpus > 0
    if shares and may_share_gpu():
        os.environ.update({**DEFAULTS, **os.environ})
    elif local_rank >= num_gpus:
        raise InputError(
            f"rank {local_rank} of this machine has no GPU: {num_gpus} are visible; start fewer "
            f"ranks, or run on the CPU with --device cpu; {HOW_TO_SHARE}"
        )
    torch.cuda.set_device(local_rank % num_gpus)
    return local_rank % num_gpus


def most_ranks_per_gpu(num_ranks: int = 1) -> int:
    """The most ranks that share a GPU of this machine.

    Args:
        num_ranks: ranks on this machine, used where no launcher has set LOCAL_WORLD_SIZE.
    """
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    return -(-num_ranks // max(1, torch.cuda.device_count())) if may_share_gpu() else 1
