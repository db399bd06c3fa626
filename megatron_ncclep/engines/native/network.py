"""Whether kernels of a group can put over the network between its NVLink domains: tried once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_ncclep.errors import EpError
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource

# For a word from each rail peer, once all ranks are there, in seconds.
PROBE_S = 10.0
WINDOW_BYTES = 1 << 20


def network_problem(group: EpGroup, communicator: Any, timeout_s: float) -> str:
    """Say why kernels cannot put to the group's other NVLink domains; empty if they can.

    NCCL may offer a network that brings nothing: with some network cards, puts of its backend GDAKI
    were never seen (NVIDIA/nccl issues 1957 and 2372).  So each rank puts a word to its rail peers.
    Collective; the same text on every rank, found once for each group.

    Raises:
        PeerError: a rank did not come in time.
    """
    name = "network between NVLink domains"
    return group.resources.share(name, lambda: _Tried(_try(group, communicator, timeout_s))).problem


@dataclass(frozen=True)
class _Tried(Resource):
    problem: str


def _try(group: EpGroup, communicator: Any, timeout_s: float) -> str:
    what = "open, looking for a network between NVLink domains"
    native: Any = extension.load()
    made: list[Any] = []

    def put() -> None:
        made.append(native.Window(communicator, WINDOW_BYTES, over_network=True))
        made.append(native.Rails(communicator, timeout_s))
        made[1].probe(made[0], min(PROBE_S, timeout_s))

    try:
        mine = group.hosts.on_all_ranks(what, communicator.network_problem, timeout_s)
        if problem := group.hosts.gather_problems(mine or None, what, timeout_s):
            return problem
        # A rank that waits for rails or for a word in vain has used up its deadline.
        group.hosts.on_all_ranks("putting a word to each rail peer", put, 3 * timeout_s)
    except EpError as error:
        return (
            f"NCCL's network for kernels (GIN) failed: {error}; NCCL_GIN_TYPE=2 chooses its proxy, "
            "and NCCL_GIN_ENABLE=0 no network"
        )
    for thing in reversed(made):  # all words have come, on all ranks
        thing.close()
    return ""
