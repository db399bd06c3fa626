"""HostLink: small messages between a group's hosts, through shared memory where they have some.

The ranks of a group agree several times per layer.  Over NCCL even the smallest message costs a few
hundred microseconds; through memory that the processes of one node share it costs a few.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron_ncclep import envs
from megatron_ncclep.errors import GroupClosedError, InputError
from megatron_ncclep.libraries import extension
from megatron_ncclep.logs import get_logger
from megatron_ncclep.ranks import topology
from megatron_ncclep.ranks.shared_memory import open_together

if TYPE_CHECKING:
    from megatron_ncclep import _C

# A process whose connections are closed may not be dead yet; seconds to wait until it is.
DYING_TIMEOUT_S = 10.0
ASK_AGAIN_S = 0.005


class HostLink:
    """The shared memory through which the ranks exchange messages, if they can share any.

    All ranks use shared memory or none does: they use it when the extension loads on every rank, no
    rank's environment turns it off, and rank 0 can send every other rank the memory that it makes
    (`shared_memory.open_together`).  The last condition also excludes ranks on different nodes, and
    in containers with their own network namespace.

    Attributes:
        is_open: whether `open` has decided if they share memory.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._process = os.getpid()
        self.is_open = False
        self._memory: _C.HostExchange | None = None  # if the ranks share memory

    def exchange(self, mine: bytes, what: str, timeout_s: float) -> bytes | None:
        """See `Hosts.exchange`; raises GroupClosedError if this process was forked from the rank's.

        Returns:
            None if the link is not open, or if the ranks share no memory; nothing was sent then.
        """
        if self.size == 1:
            return mine
        self._require_own_process(what)
        if self._memory is None:
            return None
        theirs: bytes = self._memory.exchange(mine, what, timeout_s)
        return theirs

    def open(self, gather: Callable[[bytes], bytes]) -> None:
        """Find out whether the ranks can share memory, and share some.  Collective.

        If they cannot, rank 0 logs why.  After an error of `gather`, which returns every rank's
        bytes in the order of ranks, the link is not open.
        """
        # Ranks that NCCL treats as on different hosts must not share memory either.
        host_ids = gather(topology.host_id())
        try:
            is_wanted = envs.get("NCCLEP_HOST_EXCHANGE")
            reason = extension.unavailable_reason()
            if not is_wanted:
                reason = "NCCLEP_HOST_EXCHANGE turns it off"
        except InputError as error:  # create_engine reports it, over torch
            reason = str(error)
        if host_ids != topology.host_id() * self.size:
            reason = f"{topology.HOST_ID} puts them on different hosts"
        self._memory, reason = open_together(self.rank, self.size, reason, gather)
        self.is_open = True
        if self._memory is None and self.rank == 0:
            get_logger().info(
                "hosts agree over the process group, a few hundred microseconds per call, because "
                "the ranks share no memory: %s",
                reason,
            )

    def enter(self, call: int, skips_exchange: bool, since: int = 0) -> None:
        """Tell ranks that wait in this or an earlier call that this rank is here (`Hosts.enter`).

        Without shared memory the others learn neither this nor the reason given to `refuse`.

        Args:
            call: number of the call; numbers increase.
            since: ranks that refused calls before this one are still expected to come.
        """
        if self._memory is not None:
            self._require_own_process(f"call {call}")
            self._memory.enter(call, skips_exchange, since)

    def refuse(self, reason: str) -> None:
        """Publish why this rank has refused its current call; an empty text withdraws it."""
        if self._memory is not None:
            self._memory.refuse(reason.encode())

    def refusal(self, rank: int, since: int = 0) -> str:
        """Why `rank` last refused call `since` or a later one; empty if unknown or never."""
        return "" if self._memory is None else str(self._memory.refusal(rank, since))

    def rank_ahead(self) -> int | None:
        """A rank that skips the exchange that this one is in; None if none is known."""
        rank = -1 if self._memory is None else self._memory.gone_on()
        return None if rank < 0 else rank

    def _require_own_process(self, what: str) -> None:
        """Raise GroupClosedError in a process that was forked from the rank's."""
        if os.getpid() != self._process:
            raise GroupClosedError(
                f"{what}: this process was forked from process {self._process}, which is rank "
                f"{self.rank} of {self.size}, and is not a rank itself: call the engine there"
            )

    def close(self) -> None:
        """Release the memory; the link can be opened again.  As collective as
        `HostExchange.close`."""
        if self._memory is not None:
            self._memory.close()
        self._memory, self.is_open = None, False

    def lost(self, wait_s: float = DYING_TIMEOUT_S) -> str:
        """Say which ranks have died or left, as far as shared memory shows; empty if none has.

        For use after a connection broke: it waits up to `wait_s` seconds for the process behind it
        to be dead.  Not collective.
        """
        if self._memory is None:
            return ""
        give_up = time.monotonic() + wait_s
        while not (text := str(self._memory.lost())) and time.monotonic() < give_up:
            time.sleep(ASK_AGAIN_S)
        return text
