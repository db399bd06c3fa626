"""What keeps the native engine from running for a group, found before anything is allocated.

First each rank looks at itself; the ranks exchange what GPU each has and look at the group; at last
NCCL says, of a communicator that the engine uses afterwards, who reaches whose memory.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import EngineUnavailableError, LibraryError
from megatron_ncclep.libraries import extension, search
from megatron_ncclep.ranks.agreement import on_all_ranks
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup

MIN_COMPUTE_CAPABILITY = (9, 0)
DEFAULT_NUM_SMS = 32
# SMs that are left to NCCL's kernels of other groups: by default they have up to so many CTAs.  One
# of ours takes nearly all shared memory of its SM, so that no CTA of theirs fits beside it.
SMS_FOR_NCCL = 32
# Of what a rank says of its GPU; as many on every rank, with room for the UUIDs of 90 GPUs.
PLACE_BYTES = 4096


def obstacle(group: EpGroup, config: EpConfig, num_experts: int | None) -> str | None:
    """Say why the engine cannot run for `group`; None if it can.  Collective.

    What this rank alone finds, only this rank says: the ranks stop together all the same, and
    `choose_engine` makes one text of theirs.
    """

    def look() -> tuple[str | None, _Place]:
        problem = _own_obstacle(group, config, num_experts)
        return problem, _Place() if problem else _own_place(group.device)

    what = "open, looking for what keeps the engine 'native' from running"
    problem, mine = on_all_ranks(group, what, look, group.deadline_s(config))
    places = _exchange(group, mine, group.deadline_s(config))
    if any(place.gpu == "" for place in places):
        return problem
    return _group_obstacle(places) or _lsa_obstacle(group, places, group.deadline_s(config))


# --- one rank ------------------------------------------------------------------------------------


def _own_obstacle(group: EpGroup, config: EpConfig, num_experts: int | None) -> str | None:
    """Say what is in the way on this rank.  Not collective."""
    if group.device.type != "cuda":
        return "it needs GPUs and a process group with the nccl backend"
    if problem := extension.obstacle():
        return problem
    gpu = torch.cuda.get_device_properties(group.device)
    capability = torch.cuda.get_device_capability(group.device)
    if capability < MIN_COMPUTE_CAPABILITY:
        return f"{gpu.name} is older than Hopper (sm_90)"
    if problem := extension.gpu_obstacle(gpu.name, *capability):
        return problem
    nccl, oldest = search.find_nccl(), search.version_text(search.OLDEST_NCCL)
    if nccl is None or (nccl.version or (0, 0, 0)) < search.OLDEST_NCCL:
        return (
            f"it needs NCCL {oldest} or newer, here is {nccl or 'none'}: "
            f"pip install '{search.nccl_package()}>={oldest}'"
        )
    native = extension.load()
    if group.size > native.MAX_RANKS:
        return f"it takes at most {native.MAX_RANKS} ranks, the group has {group.size}"
    if num_experts is not None and num_experts > native.MAX_EXPERTS:
        return (
            f"it takes at most {native.MAX_EXPERTS} experts in all: there are {num_experts}, each "
            "slice of an expert counted (expert tensor parallelism)"
        )
    return _sms_obstacle(group.size, config.num_sms or DEFAULT_NUM_SMS, gpu)


def _sms_obstacle(num_ranks: int, num_sms: int, gpu: Any) -> str | None:
    """Say what is wrong with the number of SMs, if anything is.

    Our kernels stay on their SMs while they wait for other ranks.  Were they all of a GPU's, NCCL's
    kernel of another group could not start there, nor ours where that one was first: two groups
    would wait for each other in a ring.

    Args:
        num_ranks: of the group.
        num_sms: that the kernels are to use.
        gpu: properties of the device, as torch gives them.
    """
    least: int = extension.load().native_min_sms(num_ranks)
    most = gpu.multi_processor_count - SMS_FOR_NCCL
    if num_sms < least:
        return f"num_sms {num_sms}: its kernels need at least {least} for {num_ranks} ranks"
    if num_sms > most:
        return (
            f"num_sms {num_sms}: at most {max(most, 0)} on {gpu.name} with "
            f"{gpu.multi_processor_count} SMs: {SMS_FOR_NCCL} are left to NCCL's kernels, without "
            "which two groups can wait for each other for ever"
        )
    return None


# --- the group -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a rank runs, as it tells the others.

    Attributes:
        host: name of the node.
        gpu: UUID, which no other GPU in the world has; "": something is in the way on this rank.
        name: the GPU's model.
        capability: its compute capability.
        unreachable: UUIDs of those GPUs visible to this process whose memory its own cannot access.
    """

    host: str = ""
    gpu: str = ""
    name: str = ""
    capability: Sequence[int] = ()
    unreachable: Sequence[str] = ()


def _own_place(device: torch.device) -> _Place:
    """Say where this rank runs.  Makes no context on other GPUs."""
    own = torch.cuda.get_device_properties(device)
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    return _Place(
        host=socket.gethostname()[:64],
        gpu=str(own.uuid),
        name=own.name,
        capability=torch.cuda.get_device_capability(device),
        unreachable=[
            str(torch.cuda.get_device_properties(other).uuid)
            for other in others
            if not torch.cuda.can_device_access_peer(device, other)
        ],
    )


def _exchange(group: EpGroup, mine: _Place, timeout_s: float) -> list[_Place]:
    """Return what every rank says of its place, by rank.  Collective."""
    message = json.dumps(asdict(mine)).encode()
    theirs = group.exchange_padded(
        message, PLACE_BYTES, "open, exchanging which GPUs the ranks have", timeout_s
    )
    return [_Place(**json.loads(place)) for place in theirs]


def _group_obstacle(places: Sequence[_Place]) -> str | None:
    """Say what of the ranks' GPUs together is in the way; the same on every rank."""
    rank_of: dict[str, int] = {}
    for rank, place in enumerate(places):
        if place.gpu in rank_of:
            return (
                f"ranks {rank_of[place.gpu]} and {rank} share one GPU ({place.name}, UUID "
                f"{place.gpu}): give every rank its own, with torch.cuda.set_device(LOCAL_RANK) "
                "before the process group is made"
            )
        rank_of[place.gpu] = rank
    models = [f"{p.name} (sm_{''.join(map(str, p.capability))})" for p in places]
    for rank, model in enumerate(models):
        if model != models[0]:
            return (
                f"the ranks have different GPUs, rank 0 {models[0]} and rank {rank} {model}: it "
                "needs the same on all"
            )
    for rank, place in enumerate(places):
        for gpu in place.unreachable:
            if gpu in rank_of:
                return (
                    f"the GPU of rank {rank} cannot access the memory of rank {rank_of[gpu]}'s by "
                    "CUDA peer-to-peer (`ncclep doctor` prints the links, `nvidia-smi topo -p2p r` "
                    "why not)"
                )
    return None


def _lsa_obstacle(group: EpGroup, places: Sequence[_Place], timeout_s: float) -> str | None:
    """Say which ranks NCCL finds in one NVLink domain, unless it is all of them.  Collective.

    The communicator is made here; it is the group's, so that every layer finds it made.
    """
    try:
        communicator = communicator_of(group, timeout_s)
    except (EngineUnavailableError, LibraryError) as error:  # on all ranks
        return f"NCCL made no communicator: {error}"
    if communicator.lsa_size == group.size:
        return None
    num_hosts = len({place.host for place in places})
    return (
        f"only {communicator.lsa_size} of {group.size} ranks, on {num_hosts} host(s), are in one "
        "NVLink domain (NCCL's LSA team): make the expert-parallel group smaller, or see that "
        "all have NVLink and CUDA peer-to-peer and that NCCL_CUMEM_ENABLE is not 0"
    )
