"""HostLink: small messages between the hosts of a group, through shared memory where there is some.

The ranks of a group agree several times a layer.  Over NCCL even the smallest message costs a few
hundred microseconds; through memory that the processes of one machine share it costs a few.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from megatron_ncclep import envs
from megatron_ncclep.engines import extension
from megatron_ncclep.errors import LibraryError
from megatron_ncclep.logs import get_logger

NAME_BYTES = 16


class HostLink:
    """How this rank exchanges messages with the others of its group; chosen at the first exchange.

    All ranks use shared memory or none does: they use it when the extension loads on every rank, no
    rank's environment turns it off, and every rank can open the memory that rank 0 makes.  The last
    also tells ranks of several machines apart, and containers with a /dev/shm of their own.

    Attributes:
        rank, size: of this process in the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._is_chosen = False
        self._memory: Any = None  # a _C.HostExchange, if that is the choice

    def exchange(
        self,
        mine: bytes,
        what: str,
        timeout_s: float,
        by_torch: Callable[[bytes, str, float], bytes],
    ) -> bytes:
        """Send `mine` to all ranks; return every rank's, in the order of ranks.  Collective.

        Args:
            mine: at least one byte; as many on every rank.
            what: names the call in errors.
            timeout_s: seconds to wait for the other ranks.
            by_torch: does the same, with the same arguments, over the process group.

        Raises:
            PeerError: a rank did not come in time, died, or sent another number of bytes.
        """
        if self.size == 1:
            return mine
        if not self._is_chosen:
            self._memory = self._open(lambda part: by_torch(part, what, timeout_s))
            self._is_chosen = True
        if self._memory is None:
            return by_torch(mine, what, timeout_s)
        theirs: bytes = self._memory.exchange(mine, what, timeout_s)
        return theirs

    def close(self) -> None:
        """Give the memory back; the next exchange chooses anew.  As collective as that is."""
        if self._memory is not None:
            self._memory.close()
        self._memory, self._is_chosen = None, False

    def _open(self, gather: Callable[[bytes], bytes]) -> Any:
        """Return the `_C.HostExchange` between all ranks, or None on all.  Collective.

        Raises:
            what `gather` raises; nothing stays open then.
        """
        obstacle = _obstacle()
        name = secrets.token_bytes(NAME_BYTES) if self.rank == 0 else bytes(NAME_BYTES)
        memory = None
        with ExitStack() as undo:
            if self.rank == 0 and obstacle is None:
                memory, obstacle = self._open_memory(name, undo)
            theirs = gather(bytes([obstacle is None]) + name)
            if all(theirs[:: 1 + NAME_BYTES]):
                if self.rank != 0:
                    memory, obstacle = self._open_memory(theirs[1 : 1 + NAME_BYTES], undo)
                if all(gather(bytes([obstacle is None]))):
                    undo.pop_all()
                    return memory
        get_logger().debug(
            "rank %d: hosts agree over the process group: %s",
            self.rank,
            obstacle or "another rank cannot share memory",
        )
        return None

    def _open_memory(self, name: bytes, undo: ExitStack) -> tuple[Any, str | None]:
        """Open the memory (rank 0: make it); return it, or None and what is in the way."""
        try:
            memory = extension.load().HostExchange(f"/ncclep-{name.hex()}", self.size, self.rank)
        except LibraryError as error:
            return None, str(error)
        undo.callback(memory.close)
        return memory, None


def _obstacle() -> str | None:
    """Say what keeps this rank from sharing memory, before it tries."""
    if not envs.get("NCCLEP_HOST_EXCHANGE"):
        return "NCCLEP_HOST_EXCHANGE turns it off"
    return extension.obstacle()
