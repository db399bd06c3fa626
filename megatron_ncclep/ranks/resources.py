"""What engines and layers of a group share, such as windows: made once, freed with the group."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from megatron_ncclep.errors import PeerError
from megatron_ncclep.logs import get_logger
from megatron_ncclep.ranks.hosts import Hosts
from megatron_ncclep.ranks.torch_group import TorchGroup

_Thing = TypeVar("_Thing")


class Resource:
    """Something that a group may hold; by default it has nothing to report and nothing to free."""

    def check(self) -> None:
        """Raise failures that no call has raised yet, and say how it waits for the device."""

    def raise_failure(self) -> None:
        """Raise failures that the device has reported by now.  Does not wait."""

    def device_waited_ns(self) -> torch.Tensor | int:
        """Nanoseconds that the device has waited for others to reach a call.  Does not wait."""
        return 0

    def memory_problem(self, graphs_are_dropped: bool) -> str | None:
        """Say why `release_memory` must not be called now, if so.  Not collective.

        `graphs_are_dropped`: no CUDA graph with calls of this process will be replayed any more.
        """
        return None

    def release_memory(self) -> None:
        """Give GPU memory back that the next call makes again.  Collective if making it was."""

    def close(self) -> None:
        """Free it.  Collective if making it was."""

    def abort(self) -> None:
        """Free it without the other ranks.  Not collective."""
        self.close()


class Resources:
    """The resources of one group, by name, the newest last; iteration gives the resources."""

    def __init__(self, torch_group: TorchGroup, hosts: Hosts) -> None:
        """Not collective."""
        self._torch, self._hosts = torch_group, hosts
        self._things: dict[str, Any] = {}
        self._num_users: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Resource]:
        return iter(list(self._things.values()))

    def share(self, name: str, make: Callable[[], _Thing]) -> _Thing:
        """Return the `Resource` called `name`, made by `make` if there is none yet.

        All engines and layers of the group share it, until all of them have released it or the
        group closes.  As collective as `make` is.
        """
        if name not in self._things:
            self._things[name] = make()
        self._num_users[name] += 1
        thing: _Thing = self._things[name]
        return thing

    def find(self, name: str) -> Any:
        """What `share` returned for `name`; None if there is none now."""
        return self._things.get(name)

    def release(self, name: str, timeout_s: float) -> None:
        """Release what `share` returned; the last user closes it.  Collective.

        Does nothing when the group is closed or has failed, or when torch has destroyed it: the
        ranks cannot agree then, and `EpGroup.close` frees it.
        """
        if not self._torch.is_alive or self._hosts.failure:
            return
        self._hosts.agree("close", {}, None, timeout_s)
        self._num_users[name] -= 1
        if self._num_users[name] == 0:
            self._things.pop(name).close()

    def memory_problem(self, graphs_are_dropped: bool) -> str | None:
        """The first problem of any resource: see `Resource.memory_problem`."""
        problems = (thing.memory_problem(graphs_are_dropped) for thing in self)
        return next(filter(None, problems), None)

    def release_memory(self) -> None:
        """Give GPU memory back, of the newest resource first.  Collective."""
        for thing in reversed(list(self)):
            thing.release_memory()

    def free(self, alone: bool) -> None:
        """Free everything, newest first.  May wait for the device, but only for it if `alone`."""
        while self._things:
            name, thing = self._things.popitem()
            try:
                thing.abort() if alone else thing.close()
            except Exception as error:  # the rest must still be freed
                self.log(logging.WARNING, f"{name} could not be freed: {error}")
                if isinstance(error, PeerError):  # kernels that have yet to run use what it used
                    break

    def log(self, level: int, text: str) -> None:
        """Log how the group's end went on this rank."""
        rank, size = self._torch.rank, self._torch.size
        get_logger().log(level, "rank %d of %d of an expert-parallel group: %s", rank, size, text)
