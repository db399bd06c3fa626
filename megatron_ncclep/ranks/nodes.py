"""The grid of an expert-parallel group over several nodes: its layout, and how it is found.

A node is an NVLink domain (possibly several hosts), or a single host without NVLink.  With L ranks
on each, node m has the ranks m * L to m * L + L - 1, so experts in rank order are in node order
too.  Ranks with the same local index are a *rail*: rows cross the network only between them.

Example: 2 nodes with 3 ranks each

                    local index 0   1   2
    node 0              rank 0   1   2
    node 1              rank 3   4   5

has the rails 0 3, 1 4 and 2 5.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from megatron_ncclep import envs
from megatron_ncclep.errors import EngineUnavailableError, PeerError
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks import topology
from megatron_ncclep.ranks.all_to_all import PendingTransfers
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource

NAME_BYTES = 64
NONCE_BYTES = 16
# The most nodes that an error lists.
MOST_NAMED = 8


@dataclass(frozen=True)
class Nodes:
    """The shape of the grid.

    Attributes:
        count: M, nodes.
        ranks_on_each: L.
    """

    count: int
    ranks_on_each: int

    def node_of(self, rank: int) -> int:
        """The node on which `rank` is."""
        return rank // self.ranks_on_each

    def local_index(self, rank: int) -> int:
        """The index of `rank` among its node's ranks."""
        return rank % self.ranks_on_each

    def ranks_of(self, node: int) -> list[int]:
        """The ranks on `node`."""
        return list(range(node * self.ranks_on_each, (node + 1) * self.ranks_on_each))

    def rail_of(self, rank: int) -> list[int]:
        """The ranks with the local index of `rank`, by node."""
        return list(range(self.local_index(rank), self.size, self.ranks_on_each))

    @property
    def size(self) -> int:
        """R, ranks of the group."""
        return self.count * self.ranks_on_each

    def __str__(self) -> str:
        return f"{self.count} x {self.ranks_on_each} (nodes x ranks)"


def nodes_from(names: list[str]) -> Nodes | str:
    """Derive the grid from each rank's node name; return the reason if it is not a grid."""
    runs = [(name, len(list(ranks))) for name, ranks in groupby(names)]
    first, parts = 0, []
    for name, length in runs[:MOST_NAMED]:
        last = first + length - 1
        parts.append(f"{name} has rank{f's {first} to {last}' if length > 1 else f' {first}'}")
        first += length
    layout = ", ".join(parts) + (", and so on" if len(runs) > MOST_NAMED else "")
    if len({name for name, _ in runs}) < len(runs):
        return (
            f"the ranks of a node must be consecutive: {layout}; start the processes node "
            "by node, and make the expert-parallel group of neighbouring ranks"
        )
    if len({length for _, length in runs}) > 1:
        return (
            f"every node must have the same number of ranks: {layout}; choose an "
            "expert-parallel size that is a multiple of the ranks on a node, or a divisor of it"
        )
    return Nodes(len(runs), runs[0][1])


class Grid(Resource):
    """The nodes of a group, and the group of this node's ranks.

    Attributes:
        nodes: the shape.
        local: this node's ranks, by local index; the whole group where there is one node.
        pending_transfers: network transfers that no host has waited for.
    """

    def __init__(self, group: EpGroup, nodes: Nodes, timeout_s: float) -> None:
        """Collective; see `grid_of`."""
        self.nodes = nodes
        self._made: dist.ProcessGroup | None = None
        self.local = group
        self.pending_transfers = PendingTransfers(group)
        if nodes.count > 1:
            self._made = _group_of_node(group, nodes, timeout_s)
            self.local = EpGroup(self._made, group)

    def check(self) -> None:
        """See `EpGroup.check`: network transfers, and what this node's ranks share."""
        # First, because it has a deadline: transfers inside the node wait for those between nodes.
        self.pending_transfers.check()
        if self._made is not None:
            self.local.check()

    def memory_problem(self, graphs_are_dropped: bool) -> str | None:
        """See `Resource.memory_problem`: of what this node's ranks share."""
        if self._made is None:
            return None
        return self.local.resources.memory_problem(graphs_are_dropped)

    def release_memory(self) -> None:
        """See `Resource.release_memory`."""
        if self._made is not None:
            self.local.resources.release_memory()

    def close(self) -> None:
        """Close what this node's ranks share, and their group.  Collective."""
        if self._made is not None:
            self.local.close()
            self._made = None


def grid_of(group: EpGroup, timeout_s: float) -> Grid:
    """Return the group's grid, found and made on the first call.  Collective.

    Raises:
        EngineUnavailableError: on every rank: the ranks do not form a grid; says where they are.
        InputError: on every rank: NCCLEP_LOCAL_RANKS is wrong on one.
        PeerError: a rank did not come in time.
    """

    def make() -> Grid:
        nodes = find_nodes(group, timeout_s)
        if isinstance(nodes, str):
            raise EngineUnavailableError(nodes)
        return Grid(group, nodes, timeout_s)

    return group.resources.share("grid", make)


def find_nodes(group: EpGroup, timeout_s: float) -> Nodes | str:
    """Find out which ranks are on which node, or why they do not form a grid.  Collective."""
    what = "open, looking for the nodes of the ranks"
    name, can_ask_nccl = group.hosts.on_all_ranks(what, lambda: _own_node(group), timeout_s)
    theirs = group.hosts.exchange_padded(name.encode()[:NAME_BYTES], NAME_BYTES, what, timeout_s)
    names = [each.decode(errors="replace") for each in theirs]
    can_ask = group.hosts.gather([can_ask_nccl], what, timeout_s)
    if bool(can_ask.all()):
        size: int = communicator_of(group, timeout_s).lsa_size
        sizes = group.hosts.gather([size], what, timeout_s).flatten().tolist()
        # Ranks without NVLink are each their own domain: then their host names tell more.
        if min(sizes) > 1:
            names = [f"NVLink domain {rank // most}" for rank, most in enumerate(sizes)]
    return nodes_from(names)


def _own_node(group: EpGroup) -> tuple[str, bool]:
    """This rank's name for its node, and whether NCCL can give a better answer."""
    ranks_on_each = envs.get("NCCLEP_LOCAL_RANKS")
    if ranks_on_each is not None:
        return f"node {group.rank // ranks_on_each}", False
    on_gpu = group.device.type == "cuda"
    return topology.host_name(), on_gpu and extension.unavailable_reason() is None


def _group_of_node(group: EpGroup, nodes: Nodes, timeout_s: float) -> dist.ProcessGroup:
    """Make a process group of this node's ranks.  Collective over `group` only.

    Not by torch's new_group, which all ranks of the job must call, although some may have no MoE
    layer.  Where new_group needs only the members, it names the group by the number of groups that
    this process is in, which may differ between members, or repeat the name of a destroyed group.
    """
    what = "open, making the group of a node's ranks"
    words = group.hosts.exchange(os.urandom(NONCE_BYTES), what, timeout_s)[:NONCE_BYTES].hex()
    name = f"ncclep/{words}/{nodes.node_of(group.rank)}/"
    place = (nodes.local_index(group.rank), nodes.ranks_on_each)
    made: list[dist.ProcessGroup | Exception] = []

    def make() -> None:
        try:
            made.append(_make_group(group.device.type, name, *place))
        except Exception as error:
            made.append(error)

    def wait() -> dist.ProcessGroup:
        # torch waits for the others for the timeout of the group's collectives, half an hour.
        thread = threading.Thread(target=make, name="ncclep-node-group", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if not made:
            raise PeerError(f"not within {timeout_s:g} s: look at the other ranks' output")
        if isinstance(made[0], Exception):
            raise PeerError(str(made[0])) from made[0]
        return made[0]

    return group.hosts.on_all_ranks(what, wait, 2 * timeout_s)


def _make_group(device: str, name: str, rank: int, size: int) -> dist.ProcessGroup:
    """Make a group as torch does, but without adding it to torch's list of groups.  Collective."""
    store = PrefixStore(name, dist.distributed_c10d._get_default_store())
    group = dist.ProcessGroup(store, rank, size)
    backend: Any
    if device == "cuda":
        kind = dist.ProcessGroup.BackendType.NCCL
        backend = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    else:
        kind = dist.ProcessGroup.BackendType.GLOO
        timeout = dist.distributed_c10d.default_pg_timeout
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    group._set_default_backend(kind)
    backend._set_sequence_number_for_group()
    group._register_backend(torch.device(device), kind, backend)
    return group
