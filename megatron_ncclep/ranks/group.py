"""EpGroup: the ranks that exchange tokens, and what belongs to them and not to one layer.

All layers of a model share the group's one EpGroup, and through it what its engines share.
"""

from __future__ import annotations

import hashlib
import socket
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_ncclep.config import EpConfig
from megatron_ncclep.logs import get_logger
from megatron_ncclep.ranks.hosts import Hosts, require_alive

_Thing = TypeVar("_Thing")

# The only association from a torch group to its EpGroup; it holds neither alive.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, EpGroup] = weakref.WeakKeyDictionary()


class EpGroup(Hosts):
    """The ranks of one process group: hosts that agree, and what their engines and layers share.

    Attributes:
        is_rehearsal: calls have made-up arguments: what they drop does not count.
    """

    def __init__(self, process_group: dist.ProcessGroup, whole: EpGroup | None = None) -> None:
        """Not collective; the arguments are those of `Hosts`."""
        super().__init__(process_group, whole)
        self.is_rehearsal = False
        self._is_first_step = True
        self._logged: set[str] = set()
        self._shared: dict[str, _Shared] = {}
        self._ranks_per_node: list[int] | None = None

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> EpGroup:
        """Return the EpGroup of `process_group`, made at the first call.  Not collective.

        Raises:
            GroupClosedError: the process group was destroyed.
        """
        if process_group not in _groups:
            _groups[process_group] = cls(process_group)
        require_alive(process_group)
        return _groups[process_group]

    def share(self, name: str, make: Callable[[], _Thing]) -> _Thing:
        """Return the group's thing called `name`, made by `make` when there is none yet.

        It belongs to the group: all engines and layers of the group share it, and its `close` is
        called when as many of them have released it.  If it has a method `check`, `EpGroup.check`
        calls it.  As collective as `make` is.
        """
        if name not in self._shared:
            self._shared[name] = _Shared(make())
        shared = self._shared[name]
        shared.num_users += 1
        thing: _Thing = shared.thing
        return thing

    def release(self, name: str, timeout_s: float) -> None:
        """Give back what `share` returned; the last user closes it.  Collective.

        When torch has destroyed the group there is nobody to agree with, and the thing stays until
        the process ends.
        """
        if not self.is_alive:
            return
        self.agree("close", {}, None, timeout_s)
        if name not in self._shared:  # the group was closed before its engines
            return
        shared = self._shared[name]
        shared.num_users -= 1
        if shared.num_users == 0:
            del self._shared[name]
            shared.thing.close()

    def close(self) -> None:
        """Close what engines share, the last made first.  Collective; they cannot be used any more.

        Without it, a communicator and its memory stay until the process ends.
        """
        while self._shared:
            _, shared = self._shared.popitem()
            shared.thing.close()
        self._link.close()

    def check(self) -> None:
        """Raise what went wrong on the device and no call has raised yet.  Not collective.

        Calls `check` of everything that engines share and that has one.  Each waits for the device
        as it says itself; with engines whose calls wait on the host there is nothing to ask.

        Raises:
            PeerError: a wait for another rank passed its deadline on the device: what engines have
                returned since is NaN.
            RowsDroppedError: see `Shortage.check`.
        """
        for shared in list(self._shared.values()):
            if check := getattr(shared.thing, "check", None):
                check()
        if self._is_used:  # otherwise another model's optimizer steps before this one's first call
            self._is_first_step = False

    def begin_first_step(self) -> None:
        """Let ranks be as late as in a first step: there is a new engine.  Not collective."""
        self._is_first_step, self._is_used = True, False

    def deadline_s(self, config: EpConfig) -> float:
        """Seconds for which an engine with these options waits now.  Not collective.

        `config.first_deadline_s` in the first step of the group's newest engine, which ends with
        the first `check` after a call: a rank that compiles is late, and not dead.
        `config.timeout_s` afterwards, and always for what a CUDA graph captures, because its
        kernels keep the deadline.  The ranks of a node follow the whole group.
        """
        if isinstance(self._whole, EpGroup):
            return self._whole.deadline_s(config)
        if not self._is_first_step:
            return config.timeout_s
        is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return config.timeout_s if is_captured else config.first_deadline_s

    def waited_ns(self) -> torch.Tensor:
        """For how long this rank has waited so far for others to come to the same call: int64 [1].

        Its host, in `exchange`, and its device, which what engines share here knows
        (`device_waited_ns`).  Not collective, and waits for nothing: it is on the group's device.
        """
        waited = torch.full((1,), self._waited_ns, dtype=torch.int64, device=self.device)
        for shared in self._shared.values():
            if on_device := getattr(shared.thing, "device_waited_ns", None):
                waited += on_device()
        return waited

    def log_once(self, level: int, subject: str, text: str) -> None:
        """Log `text` unless this rank has logged something with the same `subject` for the group.

        The layers of a model share the group, so that a line stands once and not once per layer.
        """
        if subject not in self._logged:
            self._logged.add(subject)
            get_logger().log(level, text)

    def ranks_per_node(self, timeout_s: float) -> list[int]:
        """How many ranks of the group each node has.  Collective the first time it is asked."""
        if self._ranks_per_node is None:
            name = hashlib.sha256(socket.gethostname().encode()).digest()
            mine = torch.tensor([int.from_bytes(name[:7], "big")])
            hosts = self.gather(mine, "open, exchanging the names of nodes", timeout_s)
            self._ranks_per_node = list(Counter(hosts.flatten().tolist()).values())
        return self._ranks_per_node


def check_all() -> None:
    """Call `EpGroup.check` of every group of this process.  Not collective.

    Raises:
        PeerError, RowsDroppedError: see `EpGroup.check`.
    """
    for group in list(_groups.values()):
        group.check()


def all_shared(name: str) -> list[Any]:
    """What groups of this process share as `name` (`EpGroup.share`).  Not collective."""
    return [group._shared[name].thing for group in _groups.values() if name in group._shared]


def lost_ranks() -> str:
    """Say which ranks of this process's groups have died or left, after an error of any kind.

    Not collective.  Empty if none is known: only ranks that share memory know of each other.
    """
    found = [(group, group.lost()) for group in list(_groups.values())]
    return "; ".join(
        f"rank {group.rank} of {group.size} of an expert-parallel group: {lost}"
        for group, lost in found
        if lost
    )


@dataclass
class _Shared:
    """Something that belongs to a group, and how many use it."""

    thing: Any
    num_users: int = 0
