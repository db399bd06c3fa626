"""State that the native engines of one group share: windows, and failures on the device.

Kernels wait for other ranks, and compare their calls.  When such a wait passes its deadline, or
when a rank is in a different call or has refused one, the Python call has already returned: the
kernel fills its outputs with NaN, as do later kernels of the group, and the host raises at the next
opportunity: the engine's next call, or `NativeGroup.check`.  Kernels also report bad routings that
no host has checked; the group remains usable after those.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from megatron_ncclep.errors import EpError, InputError, LibraryError, PeerError, RefusedError
from megatron_ncclep.libraries import extension
from megatron_ncclep.logs import get_logger
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.hosts import difference, different_calls
from megatron_ncclep.ranks.nodes import Nodes
from megatron_ncclep.ranks.resources import Resource

if TYPE_CHECKING:
    from megatron_ncclep import _C

MIB = 2**20
# Windows are made for a multiple of this many tokens, or of a larger step for large batches.
MIN_TOKENS = 128
# Bytes of a row before the first one has come.
ROW_BYTES = 16
# A rank's problem once it knows of a bad routing; the details follow.
BAD_ROUTING = "the routing of an earlier plan was bad"
# After a static plan to which ranks brought different numbers of tokens, hosts agree on this many
# more static plans.
EVEN_PLANS = 100
# The deadline of a rank that closes its windows alone, in seconds.
ALONE_TIMEOUT_S = 1e-3
# Values besides the phase that must be equal on all ranks, in the order in which differences are
# reported.
VALUES = (
    "top_k",
    "alignment",
    "max_recv_rows",
    "plan",
    "dtype",
    "hidden size",
    "presence of weights",
)


class NativeGroup(Resource):
    """The extension's group for one number of experts, shared by the layers with that number.

    Attributes:
        native, module: the `_C.GroupHandle`, and `_C`.
        domains: the NVLink domains that the ranks are in.
        plans_to_meet: static plans on which hosts have yet to agree, because ranks brought
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
        self._sizes = (0, 0, 0)  # tokens, top-k and row bytes that windows are or were for
        self.module = extension.load()
        communicator = communicator_of(group, timeout_s)
        self.domains = Nodes(communicator.num_domains, communicator.lsa_size)
        self.native: _C.GroupHandle = group.hosts.on_all_ranks(
            "making the native engine",
            lambda: self.module.GroupHandle(communicator, num_experts, timeout_s),
            timeout_s,
        )

    def begin(
        self, timeout_s: float, num_tokens: int = 0, top_k: int = 0, row_bytes: int = 0
    ) -> bool:
        """Begin a call: raise pending failures, set the deadline.  Does not wait; not collective.

        Returns:
            whether the windows are large enough for its largest batch, `num_tokens` and so on.

        Raises:
            as `raise_failure`.
        """
        if self._refusal is None:
            fits: bool | None = self.native.begin(timeout_s, num_tokens, top_k, row_bytes)
            if fits is not None:
                return fits
            raise self._error_of(self.native.failure())
        raise RefusedError(self._refusal)

    def raise_failure(self) -> None:
        """Raise a failure that the device has reported.  Does not wait; not collective.

        Raises:
            RefusedError: a rank has refused a call.
            InputError: ranks have called with different arguments.
            PeerError: a wait for another rank passed its deadline, or ranks are in different calls;
                the error names rank, phase and operation.
        """
        if self._refusal is not None:
            raise RefusedError(self._refusal)
        failure = self.native.failure()
        if failure is not None:
            raise self._error_of(failure)

    def refuse(self, phase: str, problem: str) -> NoReturn:
        """Raise a problem of this rank, and make the other ranks raise it too.

        Not collective, and does not wait.  The others' waits end, their current results become NaN,
        and their next call raises the same InputError, as do all later calls on every rank.  A
        single-rank group continues as if the call had not been made.

        Raises:
            InputError: always; where there are other ranks, a RefusedError.
        """
        refusal = f"{phase}: rank {self.group.rank}: {problem}"
        if self.group.size > 1:
            self._refusal = refusal
            self.group.hosts.refuse(refusal)
            # A graph would tell the others at each replay instead of now.
            if not torch.cuda.is_current_stream_capturing():
                self.native.refuse(phase, extension.current_stream())
            raise RefusedError(refusal)
        raise InputError(refusal)

    def _error_of(self, failure: Any) -> EpError:
        """The exception for a failure on the device."""
        me, peer, phase = self.group.rank, failure.peer, failure.phase
        # It may have refused during a capture, when it could not signal through the device.
        if refusal := self.group.hosts.link.refusal(peer):
            return RefusedError(refusal)
        if failure.reason == "refused":
            return RefusedError(f"{phase}: rank {peer} has refused a call: look at its output")
        if failure.reason == "out of turn":
            return InputError(
                f"{phase}: rank {me}, operation {failure.operation} of its low-latency object, "
                "out of turn: dispatch and combine must alternate on the device too; replay CUDA "
                "graphs so"
            )
        if failure.reason == "differs":
            calls = sorted([(me, failure.own_call), (peer, failure.peer_call)])
            return _difference({r: self.module.call_values(call) for r, call in calls}, phase)
        whose = "its low-latency object" if phase.startswith("low-latency") else "the group"
        why = "it died, is late, or made a different sequence of calls"
        if failure.peer_call:
            why = (
                "it has entered the call, but its data has not come: it waits for another rank "
                "itself, or the links or the network between the two have failed"
            )
        who = f"rank {peer}"
        if peer == me:
            who = "parts of its own kernel"
            why = "other work, such as kernels of another group, keeps them from the GPU's SMs"
        lost = self.group.hosts.link.lost(0) or why
        return PeerError(
            f"rank {me} of {self.group.size}: {who} did not come in {phase}, operation "
            f"{failure.operation} of {whose} (deadline {failure.deadline_s:g} s): {lost}; look at "
            "the other ranks' output. What this group has returned since is NaN"
        )

    def reserve(self, num_tokens: int, top_k: int, row_bytes: int) -> None:
        """Make sure that windows are large enough; log on rank 0 how they have grown.

        Collective when they grow, with the same arguments: the most tokens of a rank, assignments
        of a token, bytes of a row.  Waits for the device then, until the deadline of the last
        `begin`.  `csrc/native/host/group.cpp` makes them, on all ranks or on none, and has the
        ranks verify that they reach each other's (`csrc/native/host/window_check.h`).

        Raises:
            InputError: on every rank, when they must grow and a CUDA graph uses them.
            LibraryError: on every rank, when one has no memory, when NCCL makes no window, or when
                a rank does not reach another's memory.  No windows are left then.
            PeerError: a rank did not come in time.
        """
        held = self.native.num_bytes
        requested = (tokens_of_windows(num_tokens), top_k, row_bytes)
        num_tokens, top_k, row_bytes = map(max, requested, self._sizes)
        growth = self.native.reserve(
            num_tokens=num_tokens,
            top_k=top_k,
            row_bytes=row_bytes,
            stream=extension.current_stream(),
            all_gather=self.group.hosts.exchange,
        )
        self._sizes = (num_tokens, top_k, row_bytes)
        if growth is None or self.group.rank != 0:
            return
        holds = self.native.num_bytes
        # The first plan precedes the first row: its windows are made without knowing row lengths.
        get_logger().log(
            logging.INFO if holds >= MIB else logging.DEBUG,
            "native: windows grew from %.1f to %.1f MiB on each of %d ranks (%s)",
            held / MIB,
            holds / MIB,
            self.group.size,
            growth,
        )

    def record_batches(self, num_tokens: list[int]) -> None:
        """Make hosts agree on plans for a while after ranks have brought different batches.

        One of the next static plans may be the first that is too large for the windows, on some
        ranks only.  One batch size that all ranks share by chance says nothing about the next; many
        in a row do.

        `num_tokens`: of each rank, in a static plan on which all hosts agreed.
        """
        is_even = len(set(num_tokens)) == 1
        self.plans_to_meet = max(0, self.plans_to_meet - 1) if is_even else EVEN_PLANS

    def bad_routings(self, *, forget: bool) -> str | None:
        """Say whose routing was bad in earlier calls in which no host checked it.

        Covers the work that the device has finished: what was queued on all ranks before they
        waited for their devices is known to all of them.  `forget`: clear it, because the caller
        raises it; with other ranks, no work may be in flight.
        """
        by_call = {
            "plan (static mode)": self.native.bad_ranks(forget),
            "low-latency dispatch": self.native.bad_low_latency(forget),
        }
        said = [self._bad_routings_of(call, bad) for call, bad in by_call.items() if bad]
        return "; ".join(said) or None

    def raise_bad_routings(self, error: InputError, timeout_s: float) -> None:
        """Raise `error` with the bad routings of static plans so far, once.

        Collective, as `error` is.  Does nothing if there are none.
        """
        is_captured = torch.cuda.is_current_stream_capturing()
        if not is_captured:
            torch.cuda.synchronize(self.group.device)  # reports may still be in flight
        mine = torch.zeros(self.group.size, dtype=torch.int64, device="cpu")
        mine[self.native.bad_ranks(forget=False)] = 1
        what = "plan, exchanging whose routing was bad"
        bad = self.group.hosts.gather(mine, what, timeout_s).sum(dim=0).nonzero().flatten().tolist()
        if not bad:
            return
        if not is_captured:
            self.native.bad_ranks(forget=True)
        text = self._bad_routings_of("plan (static mode)", bad)
        raise InputError(f"{error}: {text}") from None

    def _bad_routings_of(self, call: str, ranks: list[int]) -> str:
        """The text for bad routings of these ranks in a `call`."""
        return (
            f"in an earlier {call}, topk_idx of rank {', '.join(map(str, ranks))} named an index "
            f"that is not one of the {self.num_experts} experts, or an expert twice for a token, "
            "or a routing map named more than top_k: those assignments were not routed; a plan "
            "without max_recv_rows raises the error at once and names the assignment"
        )

    def check(self) -> None:
        """Wait for the work queued in this group; raise its failures.  Not collective.

        This includes a CUDA graph that holds calls of the group, if it was replayed on the current
        stream.  While that stream is being captured waiting is impossible, and only failures that
        are already known are raised.

        Raises:
            InputError: a routing was bad, in calls since the last check.  Ranks that check after
                the same calls all raise it, and the group remains usable.
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
        """Nanoseconds that kernels here have waited for ranks to enter a call: int64 [1].

        Not collective, and does not wait: the value is written in the order of the current stream.
        """
        waited = torch.empty(1, dtype=torch.int64, device=self.group.device)
        self.native.copy_waited_ns(waited, extension.current_stream())
        return waited

    def memory_problem(self, graphs_are_dropped: bool) -> str | None:
        """See `Resource.memory_problem`."""
        if graphs_are_dropped or not self.native.was_captured:
            return None
        return (
            "a CUDA graph holds calls of the expert-parallel group, and a replay would write to "
            "memory that is no longer its own: drop all such graphs, and say so with "
            "graphs_are_dropped=True"
        )

    def release_memory(self) -> None:
        """Close the windows.  Collective; calls that need them make them again."""
        self.native.release_windows()

    def close(self) -> None:
        """Free the windows.  Collective."""
        if self._refusal is not None:  # so that a new engine can start
            self.group.hosts.forget_refusal()
        self.native.close()

    def abort(self) -> None:
        """Free the windows without the other ranks.  Not collective."""
        self.leave()
        self.close()

    def leave(self) -> None:
        """Make closing wait for no other rank, which several NVLink domains' ranks otherwise do."""
        self.native.begin(ALONE_TIMEOUT_S, 0, 0, 0)


class Refusing:
    """Queue kernels inside this context; if that fails, the other ranks hear why.

    Not collective by itself: a launch may fail on one rank alone, and the others' kernels would
    wait for it until their deadline.  A generator would take several times as long in every call.

    Raises:
        LibraryError: it failed, and there are no other ranks.
        RefusedError: it failed, and all ranks raise this.
    """

    __slots__ = ("_phase", "_shared")

    def __init__(self, shared: NativeGroup, phase: str) -> None:
        self._shared, self._phase = shared, phase

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, LibraryError) or self._shared.group.size == 1:
            return
        try:
            self._shared.refuse(self._phase, str(error))
        except LibraryError:  # the device takes nothing more; their late waits end with this
            raise RefusedError(str(self._shared._refusal)) from error


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


def tokens_of_windows(num_tokens: int) -> int:
    """The number of tokens to make windows for when a batch has `num_tokens`.

    At most an eighth more, or `MIN_TOKENS` more, so that slightly growing batches do not replace
    the windows each time.  Example: 5000 tokens get windows for 5120.
    """
    step = max(MIN_TOKENS, (1 << num_tokens.bit_length()) // 16)
    return max(1, -(-num_tokens // step)) * step
