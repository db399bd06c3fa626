"""Whether NVIDIA's NCCL EP can run for a group, and if not, why."""

from __future__ import annotations

import torch

from megatron_ncclep import envs
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import EngineUnavailableError, LibraryError
from megatron_ncclep.libraries import extension, search
from megatron_ncclep.libraries import nccl_ep as nccl_ep_library
from megatron_ncclep.libraries.nccl_ep import NcclEpLibrary
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup

# The version of libnccl_ep that csrc/nccl_ep/api.h declares; the extension checks it once more.
VERSION = (0, 2)
MAX_RANKS_PER_NODE = 8
MAX_NODES = 8
# With more SMs it works over NVLink only.
MAX_SMS_BETWEEN_NODES = 16
MIN_COMPUTE_CAPABILITY = (9, 0)


def unavailable_reason(group: EpGroup, config: EpConfig, num_experts: int | None) -> str | None:
    """Say why the engine cannot run for `group`; None if it can.  Collective.

    Limits on `num_experts` are in `CAPS`.  A problem that only this rank finds is returned only
    here.
    """
    timeout_s = group.deadline_s(config)
    nodes = group.ranks_per_node(timeout_s)
    what = "open, looking for what keeps the engine 'nccl_ep' from running"
    problem = group.hosts.on_all_ranks(what, lambda: _own_problem(group, config, nodes), timeout_s)
    if group.hosts.gather_problems(problem, what, timeout_s):
        return problem
    if unequal := _unequal(group, timeout_s):
        return unequal
    try:
        communicator_of(group, timeout_s)
    except (EngineUnavailableError, LibraryError) as error:  # on all ranks
        return f"NCCL made no communicator: {error}"
    return None


def _own_problem(group: EpGroup, config: EpConfig, nodes: list[int]) -> str | None:
    """Say what is wrong on this rank; `nodes`: ranks of each node.  Not collective."""
    if group.device.type != "cuda":
        return "it needs GPUs and a process group with the nccl backend"
    if problem := extension.unavailable_reason() or extension.driver_problem():
        return problem
    if torch.cuda.get_device_capability(group.device) < MIN_COMPUTE_CAPABILITY:
        return f"{torch.cuda.get_device_name(group.device)} is older than Hopper (sm_90)"
    if len(nodes) > MAX_NODES or max(nodes) > MAX_RANKS_PER_NODE:
        return (
            f"the group has {len(nodes)} nodes with up to {max(nodes)} ranks: the library supports "
            f"{MAX_NODES} nodes of {MAX_RANKS_PER_NODE}"
        )
    library = nccl_ep_library.find_nccl_ep()
    if library is None:
        return nccl_ep_library.NO_LIBRARY
    return _library_problem(library) or _mode_problem(library, group, config, len(nodes))


def _library_problem(library: NcclEpLibrary) -> str | None:
    """Say why the library cannot be used in this process, if it cannot."""
    if library.version is not None and library.version[:2] != VERSION:
        return (
            f"{library.path} is version {search.version_text(library.version)}: this engine "
            f"knows the interface of {VERSION[0]}.{VERSION[1]} only"
        )
    nccl = nccl_ep_library.nccl_in_use()
    if problem := nccl_ep_library.nccl_problem(library, nccl):
        return problem
    ours = search.find_nccl()
    if nccl is not None and ours is not None and ours.path.resolve() != nccl.path.resolve():
        return (
            f"NCCLEP_NCCL_LIBRARY={ours.path}, but libnccl_ep gets the NCCL that this process has "
            f"loaded, {nccl.path}: unset the variable, or load that library first (LD_PRELOAD)"
        )
    if search.find_nvcc() is None:
        return (
            "it compiles its kernels at first use and there is no nvcc: set CUDA_HOME to a CUDA "
            "toolkit, or NCCL_EP_JIT_NVCC to its nvcc"
        )
    return nccl_ep_library.jit_problem(library, nccl_ep_library.jit_folders(library), nccl)


def _mode_problem(
    library: NcclEpLibrary, group: EpGroup, config: EpConfig, num_nodes: int
) -> str | None:
    """Say why the library cannot work with these options over this many nodes."""
    if problem := nccl_ep_library.mode_problem(library):
        return problem
    if num_nodes > 1 and envs.get(nccl_ep_library.PULL_PUSH):
        return f"{nccl_ep_library.PULL_PUSH} is set, which needs all ranks in one node: unset it"
    most = torch.cuda.get_device_properties(group.device).multi_processor_count
    if library.build is not None and library.build.max_sms is not None:
        most = library.build.max_sms
    if num_nodes > 1:
        most = MAX_SMS_BETWEEN_NODES
    if config.num_sms is not None and config.num_sms > most:
        return (
            f"num_sms {config.num_sms}: with {library.name} at most {most} are safe on "
            f"{num_nodes} node(s)"
        )
    return None


def _unequal(group: EpGroup, timeout_s: float) -> str | None:
    """Say how the libraries of the ranks differ, if they do.  Collective; no rank lacks one.

    Kernels of different libraries or modes would deadlock.
    """
    every = group.hosts.gather(_identity(), "open, comparing libnccl_ep", timeout_s).tolist()
    for rank, theirs in enumerate(every):
        if theirs != every[0]:
            return f"it must be the same on all ranks: {_text(0, every[0])}, {_text(rank, theirs)}"
    return None


def _identity() -> list[int]:
    """This rank's versions of libnccl_ep and NCCL, the interface, and whether it pulls."""
    library, nccl = nccl_ep_library.find_nccl_ep(), nccl_ep_library.nccl_in_use()
    assert library is not None  # `_own_problem` found one
    versions = [library.version, nccl.version if nccl else None]
    numbers = [n for version in versions for n in version or (-1, -1, -1)]
    return [*numbers, library.interface or -1, int(envs.get(nccl_ep_library.PULL_PUSH))]


def _text(rank: int, numbers: list[int]) -> str:
    """Format the values that `_unequal` compares."""
    library, nccl = (".".join(map(str, numbers[i : i + 3])) for i in (0, 3))
    mode = f" and {nccl_ep_library.PULL_PUSH}" if numbers[7] else ""
    return f"rank {rank} has libnccl_ep {library} of interface {numbers[6]}, NCCL {nccl}{mode}"
