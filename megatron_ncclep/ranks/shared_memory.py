"""Unnamed memory that all ranks of a group map: it disappears however their processes end.

Rank 0 makes it (memfd_create) and sends its file descriptor to the others through sockets with
random addresses in the network namespace, which disappear with the sockets.  NCCL passes on the
memory of its windows in the same way, so ranks that cannot do this cannot use windows either.

    every rank          rank 0              the others
    says that it can                        have bound a socket
    ------------------- gather: token and addresses -----------------
                        makes the memory,
                        writes the token,
                        sends the descriptor
    ------------------- gather: sent ---------------------------------
                                            receive it, map the memory, find the token
    ------------------- gather: mapped -------------------------------

If a step failed on any rank, one more gather tells all ranks why.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from megatron_ncclep.errors import LibraryError
from megatron_ncclep.libraries import extension

if TYPE_CHECKING:
    from megatron_ncclep import _C

# Size of the token that identifies the group's memory, and of a random address.
NAME_BYTES = 16
# Size of a reason that is sent to the other ranks.
REASON_BYTES = 256


def open_together(
    rank: int, size: int, reason: str | None, gather: Callable[[bytes], bytes]
) -> tuple[Any, str | None]:
    """Return the `_C.HostExchange` between all ranks, or None on all ranks and why.  Collective.

    Args:
        reason: why this rank cannot try; None if it can.
        gather: returns every rank's bytes, as many as this rank's, in the order of ranks; nothing
            stays open after its errors.

    Returns:
        the memory's exchange and None; or None and each rank's reason, the same text on all ranks.
    """
    opening = _Opening(rank, size)

    def do(step: Callable[[], None]) -> bool:
        """Take a step on every rank; return whether all could."""
        nonlocal reason
        try:
            if reason is None:
                step()
        except (LibraryError, OSError) as error:
            reason = str(error)
        size = 1 + NAME_BYTES
        theirs = gather(bytes([reason is None]) + opening.names[rank])
        opening.names = [theirs[start + 1 : start + size] for start in range(0, len(theirs), size)]
        return all(theirs[::size])

    with opening.cleanup, opening.rollback:
        if do(opening.bind) and do(opening.send) and do(opening.receive):
            opening.rollback.pop_all()
            return opening.memory, None
    return None, _reasons(reason, gather)


def _reasons(reason: str | None, gather: Callable[[bytes], bytes]) -> str:
    """Each rank's reason; one that all ranks share appears once."""
    mine = (reason or "").encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
    theirs = gather(mine)
    texts = [
        theirs[start : start + REASON_BYTES].rstrip(b"\0").decode(errors="ignore")
        for start in range(0, len(theirs), REASON_BYTES)
    ]
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)


class _Opening:
    """One attempt.

    Attributes:
        names: by rank; rank 0's is the token, another rank's its address.
        memory: a `_C.HostExchange`, once this rank has it.
        cleanup: closes resources that are needed only during the attempt.
        rollback: closes resources that are kept if the attempt succeeds.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.names = [secrets.token_bytes(NAME_BYTES)] * size  # the others' are not known yet
        self.memory: _C.HostExchange | None = None
        self.cleanup, self.rollback = ExitStack(), ExitStack()

    def bind(self) -> None:
        """Bind a socket to an address, except on rank 0, which only sends."""
        self._socket = self.cleanup.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._socket.setblocking(False)
        if self.rank != 0:
            self._socket.bind(_address(self.names[self.rank]))

    def send(self) -> None:
        """Rank 0: make the memory and send it to the others."""
        if self.rank != 0:
            return
        file = os.memfd_create("ncclep")
        self.cleanup.callback(os.close, file)
        self._map(file)
        for rank, name in enumerate(self.names[1:], start=1):
            try:
                self._socket.connect(_address(name))
            except ConnectionRefusedError as error:
                raise OSError(
                    f"rank {rank} is on another node, or in its own network namespace: {error}"
                ) from error
            socket.send_fds(self._socket, [b"memory"], [file])

    def receive(self) -> None:
        """All but rank 0: receive the file, which must have arrived by now, and map it."""
        if self.rank == 0:
            return
        _, files, _, _ = socket.recv_fds(self._socket, len(b"memory"), 1)
        if not files:
            raise OSError("no file descriptor came with rank 0's message")
        self.cleanup.callback(os.close, files[0])
        self._map(files[0])

    def _map(self, file: int) -> None:
        self.memory = extension.load().HostExchange(file, self.names[0], self.size, self.rank)
        self.rollback.callback(self.memory.close)


def _address(name: bytes) -> bytes:
    """An abstract socket address, not a file: it begins with a zero byte."""
    return b"\0ncclep-" + name.hex().encode()
