"""Whether the native engine can run for a group, decided before anything is allocated.

Each rank checks itself first; the ranks then exchange which GPU each has and check the group;
finally NCCL reports, for a communicator that the engine uses afterwards, which ranks reach each
other's memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.native.network import network_problem
from megatron_ncclep.errors import EngineUnavailableError, LibraryError
from megatron_ncclep.libraries import extension, search
from megatron_ncclep.ranks import topology
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup

MIN_COMPUTE_CAPABILITY = (9, 0)
# Of GPUs with NVLink domains of more than 32, for which there are kernels of their own.
WIDE_COMPUTE_CAPABILITY = (10, 0)
DEFAULT_NUM_SMS = 32
# Of one or two ranks: half of the rows and more stay on their GPU, and SMs bound dispatch.  On two
# H200s plan and passes took 0.83 to 0.99 times as long as with 32, and with 64 hardly less
# (benchmarks/results/2026-11-28-more-sms.txt); with those, two groups would not fit beside NCCL.
NUM_SMS_OF_TWO_RANKS = 48
# SMs left to NCCL's kernels of other groups, which by default have up to this many CTAs. One of our
# CTAs takes nearly all the shared memory of its SM, so none of NCCL's fits next to it.
SMS_FOR_NCCL = 32
# Size of a rank's message about its GPU, the same on every rank: room for the UUIDs of 90 GPUs.
PLACE_BYTES = 4096


def unavailable_reason(group: EpGroup, config: EpConfig, num_experts: int | None) -> str | None:
    """Say why the engine cannot run for `group`; None if it can.  Collective.

    A problem that only this rank finds is returned only here: all ranks still stop together, and
    `choose_engine` joins their texts.
    """

    def look() -> tuple[str | None, _Place]:
        problem = _own_problem(group, config, num_experts, ranks_per_gpu)
        return problem, _Place() if problem else _own_place(group.device)

    what = "open, looking for what keeps the engine 'native' from running"
    timeout_s = group.deadline_s(config)
    ranks_per_gpu = group.ranks_per_gpu(timeout_s)
    problem, mine = group.hosts.on_all_ranks(what, look, timeout_s)
    message = json.dumps(asdict(mine)).encode()
    what = "open, exchanging which GPUs the ranks have"
    theirs = group.hosts.exchange_padded(message, PLACE_BYTES, what, timeout_s)
    places = [_Place(**json.loads(each)) for each in theirs]
    if any(each.gpu == "" for each in places):
        return problem
    return _group_problem(places) or _lsa_problem(group, places, timeout_s)


# --- one rank ------------------------------------------------------------------------------------


def _own_problem(
    group: EpGroup, config: EpConfig, num_experts: int | None, ranks_per_gpu: int
) -> str | None:
    """Say what keeps the engine from running on this rank.  Not collective."""
    if group.device.type != "cuda":
        return "it needs GPUs and a process group with the nccl backend"
    if problem := extension.unavailable_reason():
        return problem
    gpu = torch.cuda.get_device_properties(group.device)
    capability = torch.cuda.get_device_capability(group.device)
    if capability < MIN_COMPUTE_CAPABILITY:
        return f"{gpu.name} is older than Hopper (sm_90)"
    if problem := extension.gpu_problem(gpu.name, *capability):
        return problem
    nccl, oldest = search.find_nccl(), search.version_text(search.OLDEST_NCCL)
    if nccl is None or (nccl.version or (0, 0, 0)) < search.OLDEST_NCCL:
        return (
            f"it needs NCCL {oldest} or newer, found {nccl or 'none'}: "
            f"pip install '{search.nccl_package()}>={oldest}'"
        )
    native = extension.load()
    with torch.cuda.device(group.device):
        if problem := native.native_device_problem():
            return f"{gpu.name} (compute capability {capability[0]}.{capability[1]}): {problem}"
    if group.size > native.MAX_RANKS:
        return f"it takes at most {native.MAX_RANKS} ranks, the group has {group.size}"
    if num_experts is not None and num_experts > group.size * native.MAX_LOCAL_EXPERTS:
        return (
            f"it takes at most {native.MAX_LOCAL_EXPERTS} experts on a rank: {group.size} ranks "
            f"have {num_experts}"
        )
    if num_experts is not None and num_experts > native.MAX_EXPERTS:
        return (
            f"it takes at most {native.MAX_EXPERTS} experts in total: there are {num_experts}, "
            "each slice of an expert counted (expert tensor parallelism)"
        )
    num_sms = config.num_sms or default_num_sms(group, ranks_per_gpu)
    return _sms_problem(group.size, num_sms, gpu, ranks_per_gpu)


def most_sms(sms_of_gpu: int, ranks_per_gpu: int = 1) -> int:
    """The most SMs that the kernels of one rank may use.

    They stay on their SMs while they wait for other ranks.  If they took all SMs of a GPU, NCCL's
    kernel of another group could not start there, and ours could not start where that one came
    first: the two groups would deadlock.  The kernels of ranks that share a GPU must fit on it
    together.
    """
    return max(0, sms_of_gpu - SMS_FOR_NCCL) // ranks_per_gpu


def default_num_sms(group: EpGroup, ranks_per_gpu: int) -> int:
    """The number of SMs that the kernels of one rank use unless `num_sms` is set."""
    requested = max(DEFAULT_NUM_SMS, extension.load().native_min_sms(group.size))
    if ranks_per_gpu == 1 and group.size > 2:
        return requested
    gpu = torch.cuda.get_device_properties(group.device)
    most = most_sms(gpu.multi_processor_count, ranks_per_gpu)
    if ranks_per_gpu > 1:
        return min(requested, most)
    return max(requested, min(NUM_SMS_OF_TWO_RANKS, most))


def _sms_problem(num_ranks: int, num_sms: int, gpu: Any, ranks_per_gpu: int) -> str | None:
    """Say what is wrong with the number of SMs, if anything is."""
    least: int = extension.load().native_min_sms(num_ranks)
    most = most_sms(gpu.multi_processor_count, ranks_per_gpu)
    if num_sms < least:
        return f"num_sms {num_sms}: its kernels need at least {least} for {num_ranks} ranks"
    if num_sms > most:
        shared = f" for each of {ranks_per_gpu} ranks" if ranks_per_gpu > 1 else ""
        return (
            f"num_sms {num_sms}: at most {most}{shared} on {gpu.name} with "
            f"{gpu.multi_processor_count} SMs: {SMS_FOR_NCCL} are left to NCCL's kernels, "
            "otherwise two groups can deadlock"
        )
    return None


# --- the group -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a rank runs, as sent to the others.

    Attributes:
        host: name of the node.
        gpu: UUID, unique worldwide; "": this rank has found a problem.
        name: the GPU's model.
        may_share: NCCL would run another rank on it.
        capability: its compute capability.
        unreachable: UUIDs of the GPUs visible to this process whose memory its own GPU cannot
            access.
    """

    host: str = ""
    gpu: str = ""
    name: str = ""
    may_share: bool = False
    capability: Sequence[int] = ()
    unreachable: Sequence[str] = ()


def _own_place(device: torch.device) -> _Place:
    """Return where this rank runs.  Creates no context on other GPUs."""
    own = torch.cuda.get_device_properties(device)
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    return _Place(
        host=topology.host_name()[:64],
        gpu=str(own.uuid),
        name=own.name,
        may_share=topology.may_share_gpu(),
        capability=torch.cuda.get_device_capability(device),
        unreachable=[
            str(torch.cuda.get_device_properties(other).uuid)
            for other in others
            if not torch.cuda.can_device_access_peer(device, other)
        ],
    )


def _group_problem(places: Sequence[_Place]) -> str | None:
    """Say what is wrong with the ranks' GPUs taken together; the same on every rank."""
    rank_of: dict[str, int] = {}
    may_share = all(each.may_share for each in places)
    for rank, each in enumerate(places):
        if each.gpu in rank_of and not may_share:
            return (
                f"ranks {rank_of[each.gpu]} and {rank} share one GPU ({each.name}, UUID "
                f"{each.gpu}): give every rank its own, with torch.cuda.set_device(LOCAL_RANK) "
                f"before the process group is made; {topology.HOW_TO_SHARE} on every rank"
            )
        rank_of[each.gpu] = rank
    models = [f"{p.name} (sm_{''.join(map(str, p.capability))})" for p in places]
    for rank, model in enumerate(models):
        if model != models[0]:
            return (
                f"the ranks have different GPUs, rank 0 {models[0]} and rank {rank} {model}: it "
                "needs the same on all"
            )
    for rank, each in enumerate(places):
        for gpu in each.unreachable:
            if gpu in rank_of:
                return (
                    f"the GPU of rank {rank} cannot access the memory of rank {rank_of[gpu]}'s by "
                    "CUDA peer-to-peer (`ncclep doctor` prints the links, `nvidia-smi topo -p2p r` "
                    "why not)"
                )
    return None


def _lsa_problem(group: EpGroup, places: Sequence[_Place], timeout_s: float) -> str | None:
    """Say which ranks NCCL finds in one NVLink domain, and why kernels cannot reach the others.

    Collective.  None where all ranks are in one domain, and where kernels have a network between
    the domains (docs/network.md).  Makes the communicator, which belongs to the group, so
    that every layer finds it ready.
    """
    try:
        communicator = communicator_of(group, timeout_s)
    except (EngineUnavailableError, LibraryError) as error:  # on all ranks
        return f"NCCL made no communicator: {error}"
    native = extension.load()
    is_wide = tuple(places[0].capability) >= WIDE_COMPUTE_CAPABILITY
    most = native.MAX_LOCAL_RANKS if is_wide else native.NARROW_LOCAL_RANKS
    if communicator.lsa_size > most:
        return f"{communicator.lsa_size} ranks are in one NVLink domain: it takes at most {most}"
    if (domains := communicator.num_domains) > (most := native.MAX_DOMAINS):
        return f"the ranks are in {domains} NVLink domains: it takes at most {most}"
    if communicator.lsa_size == group.size:
        return None
    if not (problem := network_problem(group, communicator, timeout_s)):
        return None
    num_hosts = len({each.host for each in places})
    reason = (
        f"only {communicator.lsa_size} of {group.size} ranks, on {num_hosts} host(s), are in one "
        f"NVLink domain (NCCL's LSA team), and between domains {problem}"
    )
    if num_hosts > 1:
        return f"{reason}; or use the engine 'hierarchical'"
    return (
        f"{reason}; or make sure that all have NVLink and CUDA peer-to-peer and that "
        "NCCL_CUMEM_ENABLE is not 0"
    )
