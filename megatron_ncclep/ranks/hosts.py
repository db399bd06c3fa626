"""How the hosts of a group's ranks exchange messages, count their calls, and agree on them.

Ranks that move rows must be in the same call with matching arguments.  So each rank sends a message
to all others, through shared memory where they have some (`exchange.py`), and otherwise over torch.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.errors import (
    EpError,
    GroupClosedError,
    InputError,
    PeerError,
    RefusedError,
    UnsupportedError,
)
from megatron_ncclep.ranks.exchange import DYING_S, HostLink

PHASES = ("open", "plan", "dispatch", "combine", "close")
# Phase, call, whether there is a problem, payload; length and hash of the values' text.  The same
# size for every call, so that ranks in different calls can still read each other's messages.
HASH_BYTES = 8
MESSAGE = struct.Struct(f"<5q{HASH_BYTES}s")
TEXT_BYTES = 1024
# A wait for the device polls without pause for this long, and then with pauses of this length.
BUSY_WAIT_S = 1e-3
# Seconds for NCCL to abort a communicator.
ABORT_S = 5.0


@dataclass(frozen=True)
class Agreement:
    """The result of `Hosts.agree`.

    Attributes:
        call: the number of the call, the same on every rank.
        gathered: every rank's `payload`, by rank.
    """

    call: int
    gathered: list[int]


class Hosts:
    """The hosts of one process group's ranks, in rank order.  `EpGroup` is one.

    Attributes:
        process_group: the torch.distributed group.
        rank, size: of this process in the group.
        device: the device of the tensors that the group's backend moves.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        whole: Hosts | None = None,
        called: str = "the expert-parallel group",
    ) -> None:
        """Not collective.

        Args:
            process_group: torch's group; referenced weakly.
            whole: the whole group, if this is a part of it that torch does not list; the part lives
                as long as the whole group.
            called: the group's name in errors of `wait`.
        """
        self._called = called
        self._process_group = weakref.ref(process_group)
        self._whole = whole
        if whole is None:
            require_alive(process_group)
        self.rank, self.size = process_group.rank(), process_group.size()
        if whole is None:
            on_gpu = "nccl" in dist.get_backend_config(process_group) and torch.cuda.is_available()
            self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else _CPU
        else:
            on_gpu, self.device = whole.device.type == "cuda", whole.device
        self._num_calls = 0
        self._is_used = False  # whether any call but opening and closing was made
        self._since = 0  # refusals of earlier calls do not affect the current one
        self._waited_ns = 0  # for other ranks, in `exchange`
        self._link = HostLink(self.rank, self.size)
        # Agreement must not wait for the model's queued work.
        self._stream = torch.cuda.Stream() if on_gpu else None

    @property
    def is_alive(self) -> bool:
        """Whether torch still knows the process group."""
        if self._whole is not None:
            return self._whole.is_alive
        group = self._process_group()
        return group is not None and _is_alive(group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The torch group; raises GroupClosedError once it is destroyed."""
        group = self._process_group()
        if group is None or not self.is_alive:
            raise GroupClosedError(_DESTROYED)
        return group

    # --- calls ------------------------------------------------------------------------------------

    def enter(self, skips_exchange: bool = True, is_fresh: bool = False) -> int:
        """Count a call in which the hosts need not agree; `agree` counts its own.

        Not collective, but every rank counts the same calls.

        Args:
            skips_exchange: this rank exchanges nothing in it; ranks that do exchange raise.
            is_fresh: ranks that have refused an earlier call take part too.

        Returns:
            the number of the call, the same on every rank.

        Raises:
            GroupClosedError: the process group was destroyed.
        """
        _ = self.process_group  # raises when torch no longer knows it
        self._num_calls += 1
        self._is_used |= not is_fresh
        self._since = self._num_calls if is_fresh else 0
        self._link.enter(self._num_calls, skips_exchange, self._since)
        return self._num_calls

    def refuse(self, reason: str) -> None:
        """Count a call, and tell the other ranks why this one refuses it.

        Not collective, and does not wait.  Ranks that wait for this one in `exchange` raise; the
        engine has to notify ranks that wait on the device, which then ask `refusal`.
        """
        self.enter()
        self._link.refuse(reason)

    def forget_refusal(self) -> None:
        """Withdraw a refusal when the engine that it ended is created again.  Not collective."""
        self._link.refuse("")

    def refusal(self, rank: int) -> str:
        """Why `rank` last refused a call; empty if it did not, or without shared memory."""
        return self._link.refusal(rank)

    def rank_ahead(self) -> int | None:
        """A rank that skips this call's exchange, or is in a later call.

        None if there is none, if all ranks have exchanged something in this call, or if the ranks
        share no memory.
        """
        return self._link.rank_ahead()

    def lost(self, wait_s: float = DYING_S) -> str:
        """Say which ranks have died or left; empty if none is known.  See `HostLink.lost`."""
        return self._link.lost(wait_s)

    def agree(
        self,
        phase: str,
        values: dict[str, int | str | None],
        problem: str | None,
        timeout_s: float,
        error: type[EpError] = InputError,
        payload: int = 0,
    ) -> Agreement:
        """Make sure that every rank is in the same call with matching arguments.  Collective.

        Waits on the host for the other ranks' hosts, but not for what is queued on any device.
        The ranks compare a hash of the values, and exchange the values only if it differs.

        Args:
            phase: one of `PHASES`.
            values: what must be equal on all ranks, by the names that errors give them.
            problem: what is wrong on this rank, if anything is.
            timeout_s: seconds to wait for the other ranks.
            error: what to raise for a problem.
            payload: a number that may differ between ranks and is passed on to all of them.

        Raises:
            InputError: on every rank, when values differ or (unless `error` says otherwise) when
                any rank has a problem.
            PeerError: a rank did not come in time, died, or is in a different call.
        """
        # A rank that has refused a call still takes part in closing engines and opening new ones.
        call = self.enter(skips_exchange=False, is_fresh=phase in ("open", "close"))
        head = (PHASES.index(phase), call)
        text = repr(values).encode()  # takes a third of JSON's time
        text_hash = hashlib.blake2b(text, digest_size=HASH_BYTES).digest()
        mine = MESSAGE.pack(*head, problem is not None, payload, len(text), text_hash)
        everything = self.exchange(mine, f"{phase}, call {call}", timeout_s)
        if problem is None and everything == mine * self.size:  # the usual case: nothing more to do
            return Agreement(call, [payload] * self.size)
        theirs = list(MESSAGE.iter_unpack(everything))

        if any(row[:2] != head for row in theirs):
            where = [
                f"rank {r} is in {PHASES[row[0]]}, call {row[1]}" for r, row in enumerate(theirs)
            ]
            raise PeerError(different_calls("; ".join(where)))
        if any(row[2] for row in theirs):
            raise error(f"{phase}: {self.gather_problems(problem, phase, timeout_s)}")
        if len({row[4:] for row in theirs}) > 1:
            most_bytes = max(row[4] for row in theirs)
            raise InputError(self._what_differs(text, most_bytes, phase, timeout_s))
        return Agreement(call, [row[3] for row in theirs])

    def _what_differs(self, text: bytes, most_bytes: int, phase: str, timeout_s: float) -> str:
        """Exchange the values' texts; list all ranks' values of the first one that differs.

        Collective.  `most_bytes`: bytes of the longest text of any rank.
        """
        what = f"{phase}, exchanging what differs"
        texts = self.exchange_padded(text, most_bytes, what, timeout_s)
        theirs = [ast.literal_eval(text.decode()) for text in texts]
        names = dict.fromkeys(name for values in theirs for name in values)
        seen = {name: [str(values.get(name)) for values in theirs] for name in names}
        first = next(name for name in names if len(set(seen[name])) > 1)
        each = ", ".join(f"rank {r} has {value}" for r, value in enumerate(seen[first]))
        return difference(phase, first, each)

    # --- messages ---------------------------------------------------------------------------------

    def exchange(self, mine: bytes, what: str, timeout_s: float) -> bytes:
        """Send `mine` to all ranks; return every rank's, in the order of ranks.  Collective.

        Through shared memory where all ranks can share some, and otherwise over the process group
        (see `HostLink`).  Does not wait for what is queued on any device.

        Args:
            mine: at least one byte; as many on every rank.
            what: names the call in errors.
            timeout_s: seconds to wait for the other ranks.

        Raises:
            GroupClosedError: the process group was destroyed.
            RefusedError: a rank has refused a call, and will not come.
            PeerError: a rank did not come in time, died, went on to a later call, or sent a
                different number of bytes; names this rank and `what`.
        """
        _ = self.process_group  # raises when torch no longer knows it
        begin = time.monotonic_ns()
        try:
            theirs = self._link.exchange(mine, what, timeout_s)
            if theirs is None:
                theirs = self._exchange_without_memory(mine, what, timeout_s)
            self._waited_ns += time.monotonic_ns() - begin
            return theirs
        except PeerError:
            for rank in range(self.size):
                if refusal := self._link.refusal(rank, self._since):
                    raise RefusedError(refusal) from None
            raise

    def _exchange_without_memory(self, mine: bytes, what: str, timeout_s: float) -> bytes:
        """`exchange` where no memory is shared, or not yet: on the first exchange."""
        if not self._link.is_open:
            self._link.open(lambda part: self._exchange_by_torch(part, what, timeout_s))
            theirs = self._link.exchange(mine, what, timeout_s)
            if theirs is not None:
                return theirs
        return self._exchange_by_torch(mine, what, timeout_s)

    def _exchange_by_torch(self, mine: bytes, what: str, timeout_s: float) -> bytes:
        """`exchange` by a collective of the process group.

        Raises:
            UnsupportedError: a CUDA graph is being captured, which would record the collective and
                not run it.
        """
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{what}: the ranks cannot agree while a CUDA graph is captured, because not all "
                "of them share memory: set max_recv_rows and run the same calls once before the "
                "capture, or put the ranks on one node and in one network namespace, with "
                "NCCLEP_HOST_EXCHANGE on"
            )
        with torch.cuda.stream(self._stream):  # no effect on a CPU
            sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
            received = sent.new_empty(self.size, len(mine))

            def start(group: dist.ProcessGroup) -> Any:
                if self._stream is None:  # gloo: half of the time of its all-gather
                    to_all = sent.expand(self.size, -1).contiguous()
                    return dist.all_to_all_single(received, to_all, group=group, async_op=True)
                return dist.all_gather(list(received.unbind()), sent, group=group, async_op=True)

            self.wait(start, what, timeout_s)
            return _bytes_of(received)

    def exchange_padded(
        self, mine: bytes, most_bytes: int, what: str, timeout_s: float
    ) -> list[bytes]:
        """Exchange messages of up to `most_bytes` bytes that do not end in a zero; by rank.

        Collective, with the same `most_bytes`; raises the same errors as `exchange`.
        """
        assert len(mine) <= most_bytes, f"{what}: {len(mine)} bytes, at most {most_bytes}"
        theirs = self.exchange(mine.ljust(most_bytes, b"\0"), what, timeout_s)
        return [
            theirs[start : start + most_bytes].rstrip(b"\0")
            for start in range(0, len(theirs), most_bytes)
        ]

    def gather(self, mine: torch.Tensor, what: str, timeout_s: float) -> torch.Tensor:
        """Gather a 1-D tensor of one length, not 0, from every rank: [size, length] on the CPU.

        Collective; raises the same errors as `exchange`.
        """
        theirs = bytearray(self.exchange(_bytes_of(mine), what, timeout_s))
        return torch.frombuffer(theirs, dtype=mine.dtype).view(self.size, -1)

    def gather_problems(self, problem: str | None, phase: str, timeout_s: float) -> str:
        """Exchange the ranks' problems.  Collective.

        Returns:
            one text, the same on every rank; empty when no rank has a problem.  A problem that all
            ranks have appears once.
        """
        mine = (problem or "").encode()[:TEXT_BYTES]
        what = f"{phase}, exchanging error messages"
        theirs = self.exchange_padded(mine, TEXT_BYTES, what, timeout_s)
        texts = [text.decode(errors="ignore") for text in theirs]
        if self.size > 1 and len(set(texts)) == 1:
            return texts[0]
        return "; ".join(f"rank {r}: {text}" for r, text in enumerate(texts) if text)

    def wait(self, start: Callable[[dist.ProcessGroup], Any], what: str, timeout_s: float) -> None:
        """Start a collective on the torch group and wait for it, at most `timeout_s` seconds.

        Raises:
            GroupClosedError: the process group was destroyed.
            PeerError: the backend gave up or the deadline passed; names this rank and `what`.
        """
        group = self.process_group
        try:
            work = start(group)
            if self._stream is None:
                work.wait(timedelta(seconds=timeout_s))
            else:
                self._wait_for_device(work, timeout_s)
        except RuntimeError as error:  # what every backend raises for a dead peer or a timeout
            named = self
            if self._whole is not None:
                named, what = self._whole, f"{what} on this node"
                self._abort()
            # The backend's own text rarely names the rank, and may only describe a consequence.
            lost = self.lost() or "a rank died, is late, or made a different sequence of calls"
            raise PeerError(
                f"rank {named.rank} of {named.size}: no answer from the other ranks of "
                f"{self._called} in {what} (deadline {timeout_s:g} s): {lost}; look at the "
                f"other ranks' output. {error}"
            ) from error

    def _abort(self) -> None:
        """End the collectives of a group that torch does not list.  Not collective.

        At the end of the process torch aborts the groups that it lists, and NCCL frees their memory
        only when the device is idle: a kernel of this group that waits for a dead rank would keep
        the process from ending (pytorch issue 119797).  Waits at most ABORT_S: a process that ends
        meanwhile is ended by SIGABRT.
        """
        group = self._process_group()
        if group is None or self.device.type != "cuda":
            return
        backend: Any = group._get_backend(self.device)
        # NCCL tells its kernels at once, but then waits for those of other groups.
        thread = threading.Thread(target=backend.abort, name="ncclep-abort", daemon=True)
        thread.start()
        thread.join(ABORT_S)

    def _wait_for_device(self, work: Any, timeout_s: float) -> None:
        """Wait until the collective `work` is done on the device.

        NCCL's own wait with a deadline sleeps a millisecond at a time, longer than a whole layer
        takes; so this polls an event.
        """
        work.wait()  # the current stream, not the host
        done = torch.cuda.Event()
        done.record()
        start = time.monotonic()
        while not done.query():
            waited = time.monotonic() - start
            if waited > timeout_s:
                raise RuntimeError("the collective did not finish")
            if waited > BUSY_WAIT_S:
                time.sleep(BUSY_WAIT_S)


def different_calls(where: str) -> str:
    """Error text for ranks in different calls; `where` lists rank and call."""
    return (
        f"the ranks of the expert-parallel group are in different calls: {where}. "
        "Every rank must run the same layers in the same order, backward included"
    )


def difference(phase: str, name: str, each: str) -> str:
    """Error text for a value that differs between ranks; `each` lists rank and value."""
    return (
        f"{phase}: {name} differs between the ranks of the expert-parallel group: {each}. "
        f"Give every rank the same {name}"
    )


_CPU = torch.device("cpu")
_DESTROYED = (
    "the expert-parallel process group was destroyed: create the engine (or the model) again after "
    "torch.distributed is initialised again"
)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """A copy of a tensor's bytes; torch itself needs numpy for that."""
    tensor = tensor.cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _is_alive(process_group: dist.ProcessGroup) -> bool:
    """Whether torch still knows the group.

    Every call of an engine asks this; it uses the fastest of torch's functions that fail for an
    unknown group.
    """
    try:
        dist.get_process_group_ranks(process_group)
    except KeyError:
        return False
    return True


def require_alive(process_group: dist.ProcessGroup) -> None:
    """Raise GroupClosedError when torch no longer knows the group."""
    if not _is_alive(process_group):
        raise GroupClosedError(_DESTROYED)
