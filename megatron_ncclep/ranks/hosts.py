"""How the hosts of a group's ranks exchange messages, count their calls, and agree on them.

Ranks that move rows must be in the same call with matching arguments.  So each rank sends a message
to all others, through shared memory where they have some (`host_link.py`), and otherwise over torch
(`torch_group.py`).  Everywhere in ranks/, `what` names a call in errors, and a rank waits for the
others for `timeout_s` seconds.
"""

from __future__ import annotations

import ast
import hashlib
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megatron_ncclep.errors import (
    EngineUnavailableError,
    EpError,
    InputError,
    LibraryError,
    PeerError,
    RefusedError,
)  # fmt: skip
from megatron_ncclep.ranks.host_link import HostLink
from megatron_ncclep.ranks.torch_group import TEXT_BYTES, TorchGroup, bytes_of

PHASES = ("open", "plan", "dispatch", "combine", "close", "release_memory")
# Phase, call, state, payload; length and hash of the values' text.  The same size for every call,
# so that ranks in different calls can still read each other's messages.
HASH_BYTES = 8
MESSAGE = struct.Struct(f"<5q{HASH_BYTES}s")
# Bits of a rank's state in a call: it has a problem with it; it has refused an earlier one.
HAS_PROBLEM, HAS_REFUSED = 1, 2
# What to do with a group whose ranks are alive but cannot agree any more.
START_AGAIN = (
    "call megatron_ncclep.close(process_group) on all ranks, and then create the engines (or build "
    "the model) again"
)
# Calls in which ranks that have refused one take part.
CLEARING_PHASES = ("open", "close")


# Errors of a step that are raised on all ranks with their own type; any other counts as the first.
# If ranks differ, the first of these is raised: a late rank may have waited for one that failed.
STEP_ERRORS: tuple[type[EpError], ...] = (
    LibraryError,
    InputError,
    EngineUnavailableError,
    PeerError,
)

_Result = TypeVar("_Result")


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
    """The hosts of one process group's ranks, in rank order.

    Attributes:
        link: the memory that they share, if they do, and what it tells of other ranks.
        is_used: any call but opening and closing was made.
        failure: the error after which the ranks cannot agree any more; empty if there was none.
        waited_ns: for other ranks, in `exchange`.
    """

    def __init__(self, torch_group: TorchGroup) -> None:
        """Not collective."""
        self._torch, self.size = torch_group, torch_group.size
        self.is_used, self.failure, self.waited_ns = False, "", 0
        self._num_calls = 0
        self._since = 0  # refusals of earlier calls do not affect the current one
        self._own_refusal = ""
        self.link = HostLink(torch_group.rank, self.size)
        torch_group.lost = self.link.lost

    # --- calls ------------------------------------------------------------------------------------

    def enter(self, skips_exchange: bool = True, clears_refusals: bool = False) -> int:
        """Count a call in which the hosts need not agree; `agree` counts its own.

        Not collective, but every rank counts the same calls.

        Args:
            skips_exchange: this rank exchanges nothing in it; ranks that do exchange raise.
            clears_refusals: ranks that have refused an earlier call take part too.

        Returns:
            the number of the call, the same on every rank.

        Raises:
            GroupClosedError: the process group was destroyed.
        """
        _ = self._torch.process_group  # raises when torch no longer knows it
        self._num_calls += 1
        self.is_used |= not clears_refusals
        self._since = self._num_calls if clears_refusals else 0
        self.link.enter(self._num_calls, skips_exchange, self._since)
        return self._num_calls

    def refuse(self, reason: str) -> None:
        """Count a call, and tell the other ranks why this one refuses it.

        Not collective, and does not wait.  Ranks that wait for this one in `exchange` raise; the
        engine has to notify ranks that wait on the device, which then ask `HostLink.refusal`.
        """
        self.enter()
        self._own_refusal = reason
        self.link.refuse(reason)

    def forget_refusal(self) -> None:
        """Withdraw a refusal when the engine that it ended is created again.  Not collective."""
        self._own_refusal = ""
        self.link.refuse("")

    def agree(
        self,
        phase: str,
        values: dict[str, int | str | None],
        problem: str | None,
        timeout_s: float,
        payload: int = 0,
    ) -> Agreement:
        """Make sure that every rank is in the same call with matching arguments.  Collective.

        The ranks compare a hash of the values, and exchange the values only if it differs.

        Args:
            phase: one of `PHASES`.
            values: what must be equal on all ranks, by the names that errors give them.
            problem: what is wrong on this rank, if anything is.
            payload: a number that may differ between ranks and is passed on to all of them.

        Raises:
            InputError: on every rank, when values differ or any rank has a problem.
            RefusedError: a rank has refused a call, and will not come.
            PeerError: a rank did not come in time, died, or is in a different call.
        """
        # A rank that has refused a call still takes part in closing engines and opening new ones.
        clears_refusals = phase in CLEARING_PHASES
        call = self.enter(skips_exchange=False, clears_refusals=clears_refusals)
        head = (PHASES.index(phase), call)
        state = HAS_PROBLEM * (problem is not None) | HAS_REFUSED * bool(self._own_refusal)
        text = repr(values).encode()  # takes a third of JSON's time
        text_hash = hashlib.blake2b(text, digest_size=HASH_BYTES).digest()
        mine = MESSAGE.pack(*head, state, payload, len(text), text_hash)
        everything = self.exchange(mine, f"{phase}, call {call}", timeout_s)
        if state == 0 and everything == mine * self.size:  # the usual case: nothing more to do
            return Agreement(call, [payload] * self.size)
        theirs = list(MESSAGE.iter_unpack(everything))

        while any(row[:2] != head for row in theirs):
            if not any(row[2] & HAS_REFUSED for row in theirs):
                raise self._failed(PeerError(different_calls(_where(theirs))))
            if clears_refusals and {row[0] for row in theirs} == {head[0]}:
                # Some ranks queued further calls before they heard of the refusal.
                self._num_calls = call = max(row[1] for row in theirs)
                break
            self._tell_of_refusal(theirs, clears_refusals, phase, timeout_s)
            everything = self.exchange(mine, f"{phase}, call {call}", timeout_s)
            theirs = list(MESSAGE.iter_unpack(everything))
        if any(row[2] & HAS_PROBLEM for row in theirs):
            raise InputError(f"{phase}: {self.gather_problems(problem, phase, timeout_s)}")
        if len({row[4:] for row in theirs}) > 1:
            most_bytes = max(row[4] for row in theirs)
            raise InputError(self._what_differs(text, most_bytes, phase, timeout_s))
        return Agreement(call, [row[3] for row in theirs])

    def _tell_of_refusal(
        self, theirs: list[tuple[Any, ...]], clears_refusals: bool, phase: str, timeout_s: float
    ) -> None:
        """Meet ranks that have refused a call while others are in it.  Collective.

        Without shared memory, ranks learn of a refusal only here, when who has refused is in its
        next open or close.

        Args:
            clears_refusals: this rank is in an open or close too, and will exchange its message
                again.

        Raises:
            RefusedError: on ranks that are in another call; the same text on all.
            PeerError: ranks are in different calls for another reason.
        """
        what = f"{phase}, exchanging why a call was refused"
        texts = self._exchange_texts(self._own_refusal, what, timeout_s)
        if not clears_refusals:
            raise RefusedError(next(filter(None, texts)))
        if all(PHASES[row[0]] in CLEARING_PHASES for row in theirs):
            raise self._failed(PeerError(different_calls(_where(theirs))))

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
        """Send `mine`, as many bytes on each rank, to all; return all ranks'.  Collective.

        In the order of ranks, at least one byte of each; through shared memory if all ranks can
        share some, otherwise over the process group (see `HostLink`).  Waits for no device.

        Raises:
            GroupClosedError: the process group was destroyed.
            RefusedError: a rank has refused a call, and will not come.
            PeerError: a rank did not come in time, died, went on to a later call, or sent a
                different number of bytes; names this rank and `what`.  Or the ranks have failed to
                agree in an earlier call.
        """
        _ = self._torch.process_group  # raises when torch no longer knows it
        if self.failure:
            raise PeerError(
                f"{what} cannot be agreed on: the expert-parallel group has failed in an earlier "
                f"call: {self.failure}. If all of its ranks are alive, {START_AGAIN}"
            )
        begin = time.monotonic_ns()
        try:
            theirs = self.link.exchange(mine, what, timeout_s)
            if theirs is None:
                theirs = self._exchange_without_memory(mine, what, timeout_s)
            self.waited_ns += time.monotonic_ns() - begin
            return theirs
        except PeerError as error:
            for rank in range(self.size):
                if refusal := self.link.refusal(rank, self._since):
                    raise RefusedError(refusal) from None
            if self.link.rank_ahead() is None:  # it may meet this one in a later call
                self._failed(error)
            raise

    def _failed(self, error: PeerError) -> PeerError:
        """`error`, after which every exchange raises at once: the ranks are out of step."""
        self.failure = self.failure or str(error)
        return error

    def _exchange_without_memory(self, mine: bytes, what: str, timeout_s: float) -> bytes:
        """`exchange` where no memory is shared, or not yet: on the first exchange."""
        if not self.link.is_open:
            self.link.open(lambda part: self._torch.exchange_by_torch(part, what, timeout_s))
            theirs = self.link.exchange(mine, what, timeout_s)
            if theirs is not None:
                return theirs
        return self._torch.exchange_by_torch(mine, what, timeout_s)

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

    def gather(
        self, mine: torch.Tensor | Sequence[int], what: str, timeout_s: float
    ) -> torch.Tensor:
        """Gather a 1-D tensor, or numbers, of one length, not 0: [ranks, length] on the CPU.

        Collective; raises the same errors as `exchange`.
        """
        mine = torch.as_tensor(mine, device="cpu")
        theirs = bytearray(self.exchange(bytes_of(mine), what, timeout_s))
        return torch.frombuffer(theirs, dtype=mine.dtype).view(self.size, -1)

    def gather_problems(self, problem: str | None, phase: str, timeout_s: float) -> str:
        """Exchange the ranks' problems.  Collective.

        Returns:
            one text, the same on every rank; empty when no rank has a problem.  A problem that all
            ranks have appears once.
        """
        texts = self._exchange_texts(
            problem or "", f"{phase}, exchanging error messages", timeout_s
        )
        if self.size > 1 and len(set(texts)) == 1:
            return texts[0]
        return "; ".join(f"rank {r}: {text}" for r, text in enumerate(texts) if text)

    def on_all_ranks(self, what: str, step: Callable[[], _Result], timeout_s: float) -> _Result:
        """Take a step that may fail on one rank alone; if it fails on any, raise on all.

        For local work between two exchanges, such as opening a library: if a rank just raised, the
        others would wait for it in the next exchange and never learn why it is missing.

        Returns:
            the result of `step` on this rank, if it succeeded on all ranks.

        Raises:
            one of STEP_ERRORS: on every rank, with the reasons of all that failed.
            PeerError: a rank did not come in time.
        """
        failure: Exception | None = None
        try:
            result = step()
        except Exception as error:  # of any kind: the other ranks have to know
            failure = error
        problem = None
        if failure is not None:  # with its type, unless it is one of this package's
            is_ours = isinstance(failure, EpError) and str(failure)
            problem = str(failure) if is_ours else f"{type(failure).__name__}: {failure}"
        if problems := self.gather_problems(problem, what, timeout_s):
            kinds = [k for k, kind in enumerate(STEP_ERRORS) if isinstance(failure, kind)]
            mine = -1 if failure is None else (kinds or [0])[0]
            all_kinds = self.gather([mine], what, timeout_s).flatten().tolist()
            raised = STEP_ERRORS[min(kind for kind in all_kinds if kind >= 0)]
            # An error of this package is complete, and as a cause would only be printed twice.
            cause = None if isinstance(failure, EpError) else failure
            raise raised(f"{what}: {problems}") from cause
        return result

    def _exchange_texts(self, mine: str, what: str, timeout_s: float) -> list[str]:
        """Exchange texts, of which the first `TEXT_BYTES` bytes go; by rank.  Collective."""
        theirs = self.exchange_padded(mine.encode()[:TEXT_BYTES], TEXT_BYTES, what, timeout_s)
        return [text.decode(errors="ignore") for text in theirs]


def _where(messages: list[tuple[Any, ...]]) -> str:
    """Which rank is in which call; `messages`: of all ranks."""
    return "; ".join(f"rank {r} is in {PHASES[m[0]]}, call {m[1]}" for r, m in enumerate(messages))


def different_calls(where: str) -> str:
    """Error text for ranks in different calls; `where` lists rank and call."""
    return (
        f"the ranks of the expert-parallel group are in different calls: {where}. "
        "Every rank must run the same layers in the same order, backward included; to go on, "
        f"{START_AGAIN}"
    )


def difference(phase: str, name: str, each: str) -> str:
    """Error text for a value that differs between ranks; `each` lists rank and value."""
    return (
        f"{phase}: {name} differs between the ranks of the expert-parallel group: {each}. "
        f"Give every rank the same {name}"
    )
