"""What the native engines of one group share: windows, and what failed on the device.

Kernels wait for other ranks, and compare their calls.  When such a wait passes its deadline, or
when a rank is in another call or has refused one, the Python call has already returned: the kernel
makes its outputs NaN, as do later kernels of the group, and the host raises at the next
opportunity: the engine's next call, or `NativeGroup.check`.  Kernels also report bad routings that
no host has looked at; after those the group can go on.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from megatron_ncclep.errors import EpError, InputError, PeerError, RefusedError
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.agreement import on_all_ranks
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.hosts import difference, different_calls

# What a rank reports once it knows of a bad routing; the details follow.
BAD_ROUTING = "the routing of an earlier plan was bad"
# Hosts agree on so many static plans more after one to which ranks brought different numbers of
# tokens.
EVEN_PLANS = 100
# What must be equal on all ranks besides the phase, in the order in which differences are reported.
VALUES = (
    *("top_k", "alignment", "max_recv_rows"),
    *("plan", "dtype", "hidden size", "presence of weights"),
)


class NativeGroup:
    """The extension's group for one number of experts, shared by the layers that have as many.

    Attributes:
        group: the ranks.
        num_experts: of the whole group.
        native: the `_C.NativeGroup`.
        module: `_C`.
        plans_to_meet: static plans in which hosts are still to agree, because ranks have brought
            different numbers of tokens to one; the same on all ranks.
    """

    def __init__(self, group: EpGroup, num_experts: int, timeout_s: float) -> None:
        """Collective; makes the group's communicator, if need be.

        Raises:
            LibraryError: on every rank, when one has no memory for it.
        """
        self.group = group
        self.num_experts = num_experts
        self.plans_to_meet = 0
        self._refusal: str | None = None  # this rank's own
        self.module = extension.load()
        communicator = communicator_of(group, timeout_s)
        self.native: Any = on_all_ranks(
            group,
            "making the native engine",
            lambda: self.module.NativeGroup(communicator, num_experts, timeout_s),
            timeout_s,
        )

    def raise_failure(self) -> None:
        """Raise what is known to have failed on the device.  Waits for nothing; not collective.

        Raises:
            RefusedError: a rank has refused a call.
            InputError: ranks have called with different arguments.
            PeerError: a wait for another rank passed its deadline, or ranks are in different calls;
                names rank, phase and operation.
        """
        if self._refusal is not None:
            raise RefusedError(self._refusal)
        failure = self.native.failure()
        if failure is not None:
            raise self._error_of(failure)

    def refuse(self, phase: str, problem: str) -> NoReturn:
        """Raise for what is wrong on this rank, and have the other ranks raise it.

        Not collective, and does not wait.  The others' waits end, their present results become NaN,
        and their next call raises the same InputError, as do all later calls on every rank.  A
        group of one rank goes on as if nothing had been called.

        Args:
            phase: "plan", "dispatch" or "combine".
            problem: what is wrong.

        Raises:
            InputError: always; where there are other ranks, a RefusedError.
        """
        refusal = f"{phase}: rank {self.group.rank}: {problem}"
        if self.group.size > 1:
            self._refusal = refusal
            self.group.refuse(refusal)
            # A graph would tell the others at each replay, and not now.
            if not torch.cuda.is_current_stream_capturing():
                self.native.refuse(phase, extension.current_stream())
            raise RefusedError(refusal)
        raise InputError(refusal)

    def _error_of(self, failure: Any) -> EpError:
        """The exception for a failure of the device."""
        me, peer, phase = self.group.rank, failure.peer, failure.phase
        # It may have refused during a capture, when the device could not be told.
        if refusal := self.group.refusal(peer):
            return RefusedError(refusal)
        if failure.reason == "refused":
            return RefusedError(f"{phase}: rank {peer} has refused a call: look at its output")
        if failure.reason == "out of turn":
            return InputError(
                f"{phase}: rank {me}, operation {failure.epoch} of its low-latency object, out of "
                "turn: dispatch and combine take turns on the device, too; replay CUDA graphs so"
            )
        if failure.reason == "differs":
            calls = sorted([(me, failure.own_call), (peer, failure.peer_call)])
            return _difference({r: self.module.call_values(call) for r, call in calls}, phase)
        whose = "its low-latency object" if phase.startswith("low-latency") else "the group"
        lost = self.group.lost(0) or "it died, is late, or made a different sequence of calls"
        return PeerError(
            f"rank {me} of {self.group.size}: rank {peer} did not come in {phase}, operation "
            f"{failure.epoch} of {whose} (deadline {failure.deadline_s:g} s): {lost}; look at the "
            "other ranks' output. What this group has returned since is NaN"
        )

    def note_batches(self, num_tokens: list[int]) -> None:
        """Have hosts meet in the plans after a static one to which ranks brought different batches.

        One of these may be the first that is too large for the windows, on some ranks only.  A
        batch that all ranks have alike by chance says nothing of the next one; many in a row do.

        Args:
            num_tokens: of each rank, in a static plan on which all hosts agreed.
        """
        is_even = len(set(num_tokens)) == 1
        self.plans_to_meet = max(0, self.plans_to_meet - 1) if is_even else EVEN_PLANS

    def bad_routings(self, *, forget: bool) -> str | None:
        """Say whose routing was bad in earlier calls in which no host looked at it.

        As far as the device has come: what was queued on all ranks before they waited for their
        devices, all ranks know.

        Args:
            forget: it will be raised, once.  Where there are other ranks nothing may be under way.
        """
        masks = {
            "plan (static mode)": self.native.bad_ranks(forget=forget),
            "low-latency dispatch": self.native.bad_low_latency(forget=forget),
        }
        said = [self._bad_routings_of(call, [mask]) for call, mask in masks.items() if mask]
        return "; ".join(said) or None

    def raise_bad_routings(self, error: InputError, timeout_s: float) -> None:
        """Raise `error` with what static plans had wrong so far, once.  Collective, as `error` is.

        Does nothing if nothing was wrong.
        """
        is_captured = torch.cuda.is_current_stream_capturing()
        if not is_captured:
            torch.cuda.synchronize(self.group.device)  # the news may still be on its way
        mine = torch.tensor([self.native.bad_ranks(forget=False)])
        what = "plan, exchanging whose routing was bad"
        theirs = self.group.gather(mine, what, timeout_s).flatten().tolist()
        if not any(theirs):
            return
        if not is_captured:
            self.native.bad_ranks(forget=True)
        text = self._bad_routings_of("plan (static mode)", theirs)
        raise InputError(f"{error}: {text}") from None

    def _bad_routings_of(self, call: str, masks: list[int]) -> str:
        """The text for bad routings in a `call`; `masks` have a bit for each rank."""
        bad = [str(r) for r in range(self.group.size) if any(mask >> r & 1 for mask in masks)]
        return (
            f"in an earlier {call}, topk_idx of rank {', '.join(bad)} named what is not one of the "
            f"{self.num_experts} experts, or an expert twice for a token, or a routing map named "
            "more than top_k: those assignments were not routed; a plan without max_recv_rows "
            "raises the error in time and says which"
        )

    def check(self) -> None:
        """Wait for what is queued in this group; raise what is wrong with it.  Not collective.

        A CUDA graph that holds calls of the group is waited for if it was replayed on the current
        stream.  While that stream is being captured nothing can be waited for, and only failures
        that are known are raised.

        Raises:
            InputError: a routing was bad, in calls since the last check.  Ranks that check after
                the same calls all raise it, and the group can go on.
            RefusedError, PeerError: as `raise_failure`.
        """
        is_capturing = torch.cuda.is_current_stream_capturing()
        if not is_capturing:
            self.native.wait_until_idle()
            if self.native.was_captured:
                torch.cuda.current_stream(self.group.device).synchronize()
        self.raise_failure()
        if not is_capturing and (problem := self.bad_routings(forget=True)):
            raise InputError(problem)

    def device_waited_ns(self) -> torch.Tensor:
        """For how long kernels here have waited for other ranks to enter the same call: int64 [1].

        Not collective, and waits for nothing: the current stream writes it when it comes to it.
        """
        waited = torch.empty(1, dtype=torch.int64, device=self.group.device)
        self.native.copy_waited_ns(waited, extension.current_stream())
        return waited

    def close(self) -> None:
        """Free the windows.  Collective."""
        if self._refusal is not None:  # a new engine starts afresh
            self.group.forget_refusal()
        self.native.close()


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """`rows` as the kernels read them: contiguous, in vectors of 16 bytes."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


def _difference(calls: dict[int, dict[str, Any]], phase: str) -> EpError:
    """The exception for two ranks whose calls differ."""
    phases = {rank: values["phase"] for rank, values in calls.items()}
    if len(set(phases.values())) > 1:
        where = "; ".join(f"rank {rank} is in {phase}" for rank, phase in phases.items())
        return PeerError(different_calls(where))
    first, second = calls.values()
    name = next((n for n in VALUES if first.get(n) != second.get(n)), "a call")
    each = ", ".join(f"rank {rank} has {values.get(name)}" for rank, values in calls.items())
    return InputError(difference(phase, name, each))
