"""EpGroup: the ranks that exchange tokens, and how they agree before they do.

Whatever belongs to a group and not to one layer lives here: its size, the device its backend moves,
the count of its calls.  All layers of a model share the group's one EpGroup.
"""

from __future__ import annotations

import ctypes
import hashlib
import socket
import struct
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_ncclep.engines.exchange import HostLink
from megatron_ncclep.errors import (
    EpError,
    GroupClosedError,
    InputError,
    PeerError,
    RefusedError,
    UnsupportedError,
)
from megatron_ncclep.logs import get_logger

_Thing = TypeVar("_Thing")

PHASES = ("open", "plan", "dispatch", "combine", "close")
# Values that one call compares across ranks; the message has a fixed size, whatever the call is,
# so that ranks in different calls can still read each other's.
MAX_VALUES = 8
HEADER = 4  # phase, call, whether there is a problem, what is told
# Values are numbers on the wire; this one says "not given".
NONE_VALUE = -1
MESSAGE = struct.Struct(f"<{HEADER + MAX_VALUES}q")
TEXT_BYTES = 1024
# A wait for the device asks without pause for this long, and then with pauses of this length.
BUSY_WAIT_S = 1e-3

# The only association from a torch group to its EpGroup; it holds neither alive.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, EpGroup] = weakref.WeakKeyDictionary()


class EpGroup:
    """The ranks of one process group, in rank order.

    Attributes:
        process_group: the torch.distributed group.
        rank, size: of this process in the group.
        device: where tensors live that the group's backend moves.
        is_rehearsal: calls have made-up arguments: what they drop does not count.
    """

    def __init__(self, process_group: dist.ProcessGroup, whole: EpGroup | None = None) -> None:
        """Not collective.

        Args:
            process_group: of torch's; held weakly.
            whole: the group of which it is a part that torch does not list; lives as long.
        """
        self._process_group = weakref.ref(process_group)
        self._whole = whole
        if whole is None:
            _require_alive(process_group)
        self.rank, self.size = process_group.rank(), process_group.size()
        if whole is None:
            on_gpu = "nccl" in dist.get_backend_config(process_group) and torch.cuda.is_available()
            self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else _CPU
        else:
            on_gpu, self.device = whole.device.type == "cuda", whole.device
        self.is_rehearsal = False
        self._logged: set[str] = set()
        self._num_calls = 0
        self._since = 0  # what was refused in earlier calls has no part in the present one
        self._shared: dict[str, _Shared] = {}
        self._ranks_per_node: list[int] | None = None
        self._link = HostLink(self.rank, self.size)
        # Agreement must not wait for what the model has queued on the device.
        self._stream = torch.cuda.Stream() if on_gpu else None

    @classmethod
    def of(cls, process_group: dist.ProcessGroup) -> EpGroup:
        """Return the EpGroup of `process_group`, made at the first call.  Not collective.

        Raises:
            GroupClosedError: the process group was destroyed.
        """
        if process_group not in _groups:
            _groups[process_group] = cls(process_group)
        _require_alive(process_group)
        return _groups[process_group]

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

    def log_once(self, level: int, subject: str, text: str) -> None:
        """Log `text` unless this rank has logged something with the same `subject` for the group.

        The layers of a model share the group, so that a line stands once and not once per layer.
        """
        if subject not in self._logged:
            self._logged.add(subject)
            get_logger().log(level, text)

    def enter(self, goes_on: bool = True, is_fresh: bool = False) -> int:
        """Count a call in which the hosts need not agree; `agree` counts its own.

        Not collective, but every rank counts the same calls.

        Args:
            goes_on: this rank exchanges nothing in it.  Ranks that do raise, and are told.
            is_fresh: ranks come to it that have refused an earlier call.

        Returns:
            the number of the call, the same on every rank.

        Raises:
            GroupClosedError: the process group was destroyed.
        """
        _ = self.process_group  # raises when torch no longer knows it
        self._num_calls += 1
        self._since = self._num_calls if is_fresh else 0
        self._link.enter(self._num_calls, goes_on, self._since)
        return self._num_calls

    def refuse(self, reason: str) -> None:
        """Count a call, and tell the other ranks why this one refuses it.

        Not collective, and waits for nobody.  Ranks that wait in `exchange` for this one raise;
        who waits on the device is up to the engine to tell, and then asks `refusal`.
        """
        self.enter()
        self._link.refuse(reason)

    def forget_refusal(self) -> None:
        """Take back what `refuse` said, when what it ended is made anew.  Not collective."""
        self._link.refuse("")

    def refusal(self, rank: int) -> str:
        """What `rank` refused last; empty if nothing, or if the ranks share no memory."""
        return self._link.refusal(rank)

    def gone_on(self) -> int | None:
        """A rank that exchanges nothing in the call in which this one does, or is in a later one.

        None if there is none, or if the ranks share no memory.
        """
        return self._link.gone_on()

    def agree(
        self,
        phase: str,
        values: Mapping[str, int | None],
        problem: str | None,
        timeout_s: float,
        error: type[EpError] = InputError,
        told: int = 0,
    ) -> Agreement:
        """Make sure that every rank is in the same call with matching arguments.  Collective.

        Waits on the host for the other ranks' hosts, but not for what is queued on any device.

        Args:
            phase: one of `PHASES`.
            values: what must be equal on all ranks, at most `MAX_VALUES` of them.
            problem: what is wrong on this rank, if anything is.
            timeout_s: seconds to wait for the other ranks.
            error: what to raise for a problem.
            told: a number that may differ between ranks and is passed on to all of them.

        Raises:
            InputError: on every rank, when values differ or (unless `error` says otherwise) when
                any rank has a problem.
            PeerError: a rank did not come in time, died, or is in another call.
        """
        # A rank that has refused a call comes to the end of an engine and to the next one's start.
        call = self.enter(goes_on=False, is_fresh=phase in ("open", "close"))
        head = (PHASES.index(phase), call)
        given = [NONE_VALUE if v is None else v for v in values.values()]
        given += [0] * (MAX_VALUES - len(given))
        mine = MESSAGE.pack(*head, problem is not None, told, *given)
        everything = self.exchange(mine, f"{phase}, call {call}", timeout_s)
        if problem is None and everything == mine * self.size:  # as it should be: no more to do
            return Agreement(call, [told] * self.size)
        theirs = list(MESSAGE.iter_unpack(everything))

        if any(row[:2] != head for row in theirs):
            where = [
                f"rank {r} is in {PHASES[row[0]]}, call {row[1]}" for r, row in enumerate(theirs)
            ]
            raise PeerError(different_calls("; ".join(where)))
        if any(row[2] for row in theirs):
            raise error(f"{phase}: {self.gather_problems(problem, phase, timeout_s)}")
        for i, name in enumerate(values):
            seen = [row[HEADER + i] for row in theirs]
            if len(set(seen)) > 1:
                each = ", ".join(
                    f"rank {r} has {None if v == NONE_VALUE else v}" for r, v in enumerate(seen)
                )
                raise InputError(difference(phase, name, each))
        return Agreement(call, [row[3] for row in theirs])

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
            PeerError: a rank did not come in time, died, went on to a later call, or sent another
                number of bytes; names this rank and `what`.
        """
        _ = self.process_group  # raises when torch no longer knows it
        try:
            return self._link.exchange(mine, what, timeout_s, self._exchange_by_torch)
        except PeerError:
            for rank in range(self.size):
                if refusal := self._link.refusal(rank, self._since):
                    raise RefusedError(refusal) from None
            raise

    def _exchange_by_torch(self, mine: bytes, what: str, timeout_s: float) -> bytes:
        """Do what `exchange` does, with an all-gather of the process group.

        Raises:
            UnsupportedError: a CUDA graph is being captured, which would hold the all-gather and
                not run it.
        """
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{what}: the ranks cannot agree while a CUDA graph is captured, because not all "
                "of them share memory: put them on one machine and in one network namespace, and "
                "leave NCCLEP_HOST_EXCHANGE on"
            )
        with torch.cuda.stream(self._stream):  # no effect on a CPU
            sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
            received = sent.new_empty(self.size, len(mine))
            self.wait(
                lambda group: dist.all_gather(
                    list(received.unbind()), sent, group=group, async_op=True
                ),
                what,
                timeout_s,
            )
            return _bytes_of(received)

    def exchange_padded(
        self, mine: bytes, most_bytes: int, what: str, timeout_s: float
    ) -> list[bytes]:
        """Exchange messages of up to `most_bytes` bytes that do not end in a zero; by rank.

        Collective, with the same `most_bytes`; raises what `exchange` does.
        """
        assert len(mine) <= most_bytes, f"{what}: {len(mine)} bytes, at most {most_bytes}"
        theirs = self.exchange(mine.ljust(most_bytes, b"\0"), what, timeout_s)
        return [
            theirs[start : start + most_bytes].rstrip(b"\0")
            for start in range(0, len(theirs), most_bytes)
        ]

    def gather(self, mine: torch.Tensor, what: str, timeout_s: float) -> torch.Tensor:
        """Gather a 1-D tensor of one length, not 0, from every rank: [size, length] on the CPU.

        Collective; raises what `exchange` does.
        """
        theirs = bytearray(self.exchange(_bytes_of(mine), what, timeout_s))
        return torch.frombuffer(theirs, dtype=mine.dtype).view(self.size, -1)

    def gather_problems(self, problem: str | None, phase: str, timeout_s: float) -> str:
        """Exchange what is wrong on which rank.  Collective.

        Returns:
            one text, the same on every rank; empty when nothing is wrong on any.  A problem that
            all ranks have is said once.
        """
        mine = (problem or "").encode()[:TEXT_BYTES]
        what = f"{phase}, exchanging error messages"
        theirs = self.exchange_padded(mine, TEXT_BYTES, what, timeout_s)
        texts = [text.decode(errors="ignore") for text in theirs]
        if self.size > 1 and len(set(texts)) == 1:
            return texts[0]
        return "; ".join(f"rank {r}: {text}" for r, text in enumerate(texts) if text)

    def ranks_per_node(self, timeout_s: float) -> list[int]:
        """How many ranks of the group each machine has.  Collective the first time it is asked."""
        if self._ranks_per_node is None:
            name = hashlib.sha256(socket.gethostname().encode()).digest()
            mine = torch.tensor([int.from_bytes(name[:7], "big")])
            hosts = self.gather(mine, "open, exchanging the names of machines", timeout_s)
            self._ranks_per_node = list(Counter(hosts.flatten().tolist()).values())
        return self._ranks_per_node

    def wait(self, start: Callable[[dist.ProcessGroup], Any], what: str, timeout_s: float) -> None:
        """Start a collective on the torch group and wait for it, at most `timeout_s` seconds.

        Raises:
            GroupClosedError: the process group was destroyed.
            PeerError: the backend gave up or the time is over; names this rank and `what`.
        """
        group = self.process_group
        try:
            work = start(group)
            if self._stream is None:
                work.wait(timedelta(seconds=timeout_s))
            else:
                self._wait_for_device(work, timeout_s)
        except RuntimeError as error:  # what every backend raises for a dead peer or a timeout
            # The backend's own words seldom say who it was, and may be those of a consequence.
            lost = self._link.lost() or "a rank died, is late or left the group's order of calls"
            raise PeerError(
                f"rank {self.rank} of {self.size}: no answer from the other ranks of the "
                f"expert-parallel group in {what} (deadline {timeout_s:g} s): {lost}; look at the "
                f"other ranks' output. {error}"
            ) from error

    def _wait_for_device(self, work: Any, timeout_s: float) -> None:
        """Wait until the collective `work` is done on the device.

        NCCL's own wait with a deadline sleeps a millisecond at a time, longer than a whole layer
        takes; so this asks an event.
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
    """The text for ranks in different calls; `where` says which rank is in which."""
    return (
        f"the ranks of the expert-parallel group are in different calls: {where}. "
        "Every rank must run the same layers in the same order, backward included"
    )


def difference(phase: str, name: str, each: str) -> str:
    """The text for a value that ranks must have alike; `each` says which rank has which."""
    return (
        f"{phase}: {name} differs between the ranks of the expert-parallel group: {each}. "
        f"Give every rank the same {name}"
    )


def check_all() -> None:
    """Call `EpGroup.check` of every group of this process.  Not collective.

    Raises:
        PeerError, RowsDroppedError: see `EpGroup.check`.
    """
    for group in list(_groups.values()):
        group.check()


def lost_ranks() -> str:
    """Say which ranks of this process's groups have died or left, after an error of any kind.

    Not collective.  Empty if none is known: only ranks that share memory know of each other.
    """
    found = [(group, group._link.lost()) for group in list(_groups.values())]
    return "; ".join(
        f"rank {group.rank} of {group.size} of an expert-parallel group: {lost}"
        for group, lost in found
        if lost
    )


@dataclass(frozen=True)
class Agreement:
    """What `EpGroup.agree` found.

    Attributes:
        call: the number of the call, the same on every rank.
        told: what each rank told the others, by rank.
    """

    call: int
    told: list[int]


@dataclass
class _Shared:
    """Something that belongs to a group, and how many use it."""

    thing: Any
    num_users: int = 0


_CPU = torch.device("cpu")
_DESTROYED = (
    "the expert-parallel process group was destroyed: make the engine (or the model) anew after "
    "torch.distributed is initialised again"
)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """Copy what a tensor holds; torch itself needs numpy for that."""
    tensor = tensor.cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _is_alive(process_group: dist.ProcessGroup) -> bool:
    """Whether torch still knows the group.

    Every call of an engine asks; of torch's functions that fail for a group that it does not know,
    this is the quickest.
    """
    try:
        dist.get_process_group_ranks(process_group)
    except KeyError:
        return False
    return True


def _require_alive(process_group: dist.ProcessGroup) -> None:
    """Raise GroupClosedError when torch no longer knows the group."""
    if not _is_alive(process_group):
        raise GroupClosedError(_DESTROYED)
