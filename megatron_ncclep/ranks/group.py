"""EpGroup: the ranks that exchange tokens, and the objects that they share across layers.

All layers of a model share the group's one EpGroup, and through it the engines' shared objects.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import EpError, InputError
from megatron_ncclep.logs import get_logger
from megatron_ncclep.ranks import topology
from megatron_ncclep.ranks.hosts import Hosts
from megatron_ncclep.ranks.resources import Resources
from megatron_ncclep.ranks.torch_group import TorchGroup, require_alive
from megatron_ncclep.ranks.uncopied import Uncopied

# The open groups of this process, in the order in which they were made, which is the same on all
# ranks that share several.  The list does not keep the torch groups alive.
_groups: list[EpGroup] = []
# Seconds left for freeing when waiting for the other ranks has used up the deadline.
FREE_TIMEOUT_S = 5.0


class EpGroup(Uncopied):
    """The ranks of one process group.

    Attributes:
        torch: torch's process group of these ranks; `rank`, `size` and `device` are its own.
        hosts: how they agree and exchange messages.
        resources: what engines and layers share.
        is_warmup: calls have made-up arguments, and the rows that they drop do not count.
        timeout_s: seconds that `close` waits; taken from the newest engine.
        num_low_latency: low-latency objects whose kernels hold SMs while they wait.
    """

    def __init__(self, process_group: dist.ProcessGroup, whole: EpGroup | None = None) -> None:
        """Not collective; `whole`: the whole group, if this is a part that torch does not list."""
        self.torch: TorchGroup = TorchGroup(process_group, None if whole is None else whole.torch)
        self.rank, self.size = self.torch.rank, self.torch.size
        self.device = self.torch.device
        self.hosts = Hosts(self.torch)
        self.resources = Resources(self.torch, self.hosts)
        self.is_warmup = False
        self.timeout_s = EpConfig.timeout_s
        self.num_low_latency = 0
        self._whole = whole
        self._left_alone = False  # closed without the other ranks
        self._is_first_step = True
        self._logged: set[str] = set()
        self._ranks_per_node: list[int] | None = None
        self._ranks_per_gpu: int | None = None

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> EpGroup:
        """Return the open EpGroup of `process_group`, made if there is none.  Not collective.

        When it makes one, it also frees the groups that torch has destroyed since.  Raises
        GroupClosedError if this one was.
        """
        require_alive(process_group)
        if found := _find(process_group):
            return found
        for group in [group for group in _groups if not group.torch.is_alive]:
            group.close()
        _groups.append(cls(process_group))
        return _groups[-1]

    def close(self, alone: bool = False) -> None:
        """See `megatron_ncclep.close`; `alone`: do not wait for the other ranks.

        The memory of a window stays as long as any rank maps it, so a kernel that still runs
        elsewhere loses nothing.
        """
        if self.torch.is_closed:
            return
        give_up = time.monotonic() + self.timeout_s
        # A part closes with the whole group, whose ranks have agreed.
        if self._whole is not None:
            self._left_alone = self._whole._left_alone
        else:
            self._left_alone = alone or not self._agree_to_close()
        # From here on, closing never waits for another rank.
        self.torch.is_closed = True
        if self in _groups:
            _groups.remove(self)
        # Freeing waits for the device, which may itself wait for a rank that is gone.
        thread = threading.Thread(target=self._free, name="ncclep-close", daemon=True)
        thread.start()
        thread.join(max(give_up - time.monotonic(), FREE_TIMEOUT_S))
        if thread.is_alive():
            text = "the device is still busy; the group's memory is freed when it is idle"
            self.resources.log(logging.WARNING, text)

    def _agree_to_close(self) -> bool:
        """Whether all ranks are closing the group now.  Collective."""
        if not self.torch.is_alive:
            text = "closed after torch has destroyed the process group"
            self.resources.log(logging.DEBUG, text)
            return False
        try:
            self.hosts.agree("close", {}, None, self.timeout_s)
        except EpError as error:
            self.resources.log(logging.WARNING, f"closed without the other ranks: {error}")
            return False
        return True

    def _free(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own current device
        self.resources.free(self._left_alone)
        self.hosts.link.close()

    def check(self) -> None:
        """See `megatron_ncclep.check`; every resource says how it waits for the device."""
        for resource in self.resources:
            resource.check()
        if self.hosts.is_used:  # otherwise it is another model's step, before the first call here
            self._is_first_step = False

    def release_memory(self, graphs_are_dropped: bool) -> None:
        """See `megatron_ncclep.release_memory`.  Collective."""
        self.check()
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            problem: str | None = "a CUDA graph is being captured: call it before or after"
        else:
            problem = self.resources.memory_problem(graphs_are_dropped)
        values: dict[str, int | str | None] = {"graphs_are_dropped": graphs_are_dropped}
        is_used = self.hosts.is_used
        self.hosts.agree("release_memory", values, problem, self.timeout_s)
        self.hosts.is_used = is_used  # the first step may still lie ahead
        self.resources.release_memory()

    def raise_failure(self) -> None:
        """Raise failures that the device has reported by now.  Does not wait; not collective."""
        for resource in self.resources:
            resource.raise_failure()

    def begin_first_step(self) -> None:
        """Use the first step's longer deadline again, for a new engine.  Not collective."""
        self._is_first_step, self.hosts.is_used = True, False

    def deadline_s(self, config: EpConfig) -> float:
        """Seconds for which an engine with these options waits now.  Not collective.

        `config.first_deadline_s` in the first step of the group's newest engine, which ends with
        the first `check` after a call: a rank that compiles is late, not dead.  `config.timeout_s`
        afterwards, and always during CUDA graph capture, because the captured kernels keep their
        deadline.  The group of a node's ranks follows the whole group.
        """
        if self._whole is not None:
            return self._whole.deadline_s(config)
        if not self._is_first_step:
            return config.timeout_s
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return config.timeout_s if is_captured else config.first_deadline_s

    def waited_ns(self) -> torch.Tensor:
        """Nanoseconds that this rank has waited so far for others to reach a call: int64 [1].

        The sum of the host's waits, in `Hosts.exchange`, and the device's, which resources report.
        On the group's device.  Not collective, and does not wait.
        """
        waited = torch.full((1,), self.hosts.waited_ns, dtype=torch.int64, device=self.device)
        for resource in self.resources:
            waited += resource.device_waited_ns()
        return waited

    def log_once(self, level: int, subject: str, text: str) -> None:
        """Log `text` unless this rank has logged something with the same `subject` for the group.

        The layers of a model share the group, so a line is logged once and not once per layer.
        """
        if subject not in self._logged:
            self._logged.add(subject)
            get_logger().log(level, text)

    def announce(self, text: str, level: int = logging.INFO) -> None:
        """Log `text` on the first rank only, once for the group."""
        if self.rank == 0:
            self.log_once(level, text, text)

    def ranks_per_node(self, timeout_s: float) -> list[int]:
        """The number of the group's ranks on each node.  Collective on the first call."""
        if self._ranks_per_node is None:
            mine, what = _number_of(topology.host_name()), "open, exchanging the names of nodes"
            hosts = self.hosts.gather([mine], what, timeout_s)
            self._ranks_per_node = list(Counter(hosts.flatten().tolist()).values())
        return self._ranks_per_node

    def ranks_per_gpu(self, timeout_s: float) -> int:
        """The most ranks that share a GPU, including those of other groups; usually 1.

        Collective on the first call.
        """
        if self._ranks_per_gpu is None:
            if self.device.type != "cuda":
                self._ranks_per_gpu = 1
                return 1
            gpu = _number_of(str(torch.cuda.get_device_properties(self.device).uuid))
            mine = [gpu, topology.most_ranks_per_gpu()]
            what = "open, exchanging which GPUs the ranks have"
            theirs = self.hosts.gather(mine, what, timeout_s)
            inside = max(Counter(theirs[:, 0].tolist()).values())
            self._ranks_per_gpu = max(inside, int(theirs[:, 1].max()))
        return self._ranks_per_gpu


def _find(process_group: dist.ProcessGroup) -> EpGroup | None:
    """The open group of `process_group`, if there is one."""
    return next((group for group in _groups if group.torch.is_of(process_group)), None)


def _chosen(process_group: dist.ProcessGroup | None) -> list[EpGroup]:
    """The open groups of this process; with `process_group`, only its own, if there is one."""
    if process_group is None:
        return list(_groups)
    # The other one is what torch gives ranks outside of a group.
    if not isinstance(process_group, dist.ProcessGroup) and (
        process_group != dist.GroupMember.NON_GROUP_MEMBER
    ):
        raise InputError(
            f"process_group {process_group!r}: must be a process group of torch.distributed, or "
            "left out, for all groups of this process"
        )
    return [found] if (found := _find(process_group)) else []


def close_groups(process_group: dist.ProcessGroup | None, alone: bool = False) -> None:
    """See `megatron_ncclep.close`, and `EpGroup.close`."""
    for group in _chosen(process_group):
        group.close(alone)


def release_memory(process_group: dist.ProcessGroup | None, graphs_are_dropped: bool) -> None:
    """See `megatron_ncclep.release_memory`."""
    for group in _chosen(process_group):
        # torch has destroyed the others: making an engine over a new group closes them.
        if group.torch.is_alive:
            group.release_memory(graphs_are_dropped)


def check_all() -> None:
    """See `megatron_ncclep.check`."""
    for group in list(_groups):
        group.check()


def raise_failures() -> None:
    """Raise what devices have reported by now, as `megatron_ncclep.check`, but without waiting.

    After work has reached the host, this finds what has gone wrong in it.  Not collective.
    """
    for group in list(_groups):
        group.raise_failure()


def all_shared(name: str) -> list[Any]:
    """The resources of this process's groups that are called `name`.  Not collective."""
    return [thing for group in _groups if (thing := group.resources.find(name)) is not None]


def groups_with_low_latency() -> int:
    """The groups of this process whose low-latency objects share the SMs; at least 1."""
    return max(1, sum(group.num_low_latency > 0 for group in _groups))


def lost_ranks() -> str:
    """Say which ranks of this process's groups have died or left, after an error of any kind.

    Not collective.  Empty if none is known: only ranks that share memory can tell.
    """
    found = [(group, group.torch.lost()) for group in list(_groups)]
    return "; ".join(
        f"rank {group.rank} of {group.size} of an expert-parallel group: {lost}"
        for group, lost in found
        if lost
    )


def _number_of(name: str) -> int:
    """A number that identifies a name (56 bits of its SHA-256)."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
