"""What the host says of a wait on the device that failed, and what it waits for before it does.

`tests/gpu` lets kernels fail; here a stand-in says that they have.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fake_extension import STREAM, FakeExtension, FakeFailure, FakeGroup, play

from megatron_ncclep.engines.native.group import NativeGroup, Refusing
from megatron_ncclep.engines.native.plan import NativePlan
from megatron_ncclep.errors import InputError, LibraryError, PeerError, RefusedError

LATE = FakeFailure(phase="dispatch", peer=2, operation=41, deadline_s=1.5)
TEXT = (
    "rank 1 of 4: rank 2 did not come in dispatch, operation 41 of the group (deadline 1.5 s): it "
    "died, is late, or made a different sequence of calls; look at the other ranks' output. What "
    "this group has returned since is NaN"
)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> FakeGroup:
    """One in which a kernel that is under way will fail."""

    def calls_end() -> None:
        native.is_over = not native.was_captured

    def replay_ends() -> None:
        native.calls.append(("the current stream", ()))
        native.is_over = True

    native = FakeGroup(wait_until_idle=calls_end)
    native.is_over, native.failed = False, LATE
    play(monkeypatch)
    stream = SimpleNamespace(synchronize=replay_ends)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return native


def group_of(native: FakeGroup, lost: str = "") -> NativeGroup:
    group = object.__new__(NativeGroup)
    link = SimpleNamespace(refusal=lambda rank: "", lost=lambda wait_s: lost)
    hosts = SimpleNamespace(refuse=print, link=link)
    device = torch.device("cuda", 1)
    group.group = SimpleNamespace(rank=1, size=4, device=device, hosts=hosts)  # type: ignore[assignment]
    group.native = native
    group._refusal = None
    return group


def test_a_check_waits_for_the_device_before_it_says_that_all_is_well(native: FakeGroup) -> None:
    group = group_of(native)
    group.raise_failure()  # nothing is known yet, and it does not wait
    assert native.calls == []
    with pytest.raises(PeerError) as caught:
        group.check()
    assert str(caught.value) == TEXT
    assert native.names == ["wait_until_idle"]


def test_a_rank_that_has_died_is_named(native: FakeGroup) -> None:
    """Where ranks share a host's memory it is known; the device knows who has entered the call."""
    native.is_over = True
    with pytest.raises(PeerError, match=r"1\.5 s\): rank 2 \(process 7\) has died; look at the"):
        group_of(native, lost="rank 2 (process 7) has died").raise_failure()
    native.failed = LATE._replace(peer_call=22)
    with pytest.raises(PeerError, match=": it has entered the call, but its data has not come: "):
        group_of(native).raise_failure()


def test_a_rank_does_not_wait_for_itself(native: FakeGroup) -> None:
    """CTAs wait for their own kernel's, too: "rank 1: rank 1 did not come, it died"."""
    native.is_over, native.failed = True, LATE._replace(peer=1)
    with pytest.raises(PeerError, match=r"parts of its own kernel did not come in disp.* SMs"):
        group_of(native).raise_failure()


@pytest.mark.parametrize("is_dead", [False, True], ids=["a device", "a dead device"])
def test_a_launch_that_fails_on_one_rank_is_refused(
    native: FakeGroup, capsys: pytest.CaptureFixture[str], is_dead: bool
) -> None:
    """In a green context with few SMs it did: the other ranks waited for their whole deadline."""
    reason = "launching dispatch failed: too many blocks in cooperative launch"
    native.answers["dispatch"] = LibraryError(reason)
    if is_dead:
        native.answers["refuse"] = LibraryError("an illegal memory access")
    group, arguments = group_of(native), dict.fromkeys(native.methods["dispatch"])
    refused = pytest.raises(RefusedError, match=f"^dispatch: rank 1: {reason}$")
    with refused, Refusing(group, "dispatch"):
        native.dispatch(**arguments)
    assert capsys.readouterr().out == f"dispatch: rank 1: {reason}\n"  # to the other ranks
    assert native.named("refuse") == [("dispatch", STREAM)]
    group.group.size = 1
    with pytest.raises(LibraryError, match=f"^{reason}$"), Refusing(group, "dispatch"):
        native.dispatch(**arguments)


def test_a_check_waits_for_a_replayed_graph(native: FakeGroup) -> None:
    """A replay makes no call of the engine: nothing but the caller's stream knows of it."""
    native.was_captured = True
    with pytest.raises(PeerError, match="rank 2 did not come in dispatch"):
        group_of(native).check()
    assert native.names == ["wait_until_idle", "the current stream"]


def test_a_check_in_a_capture_waits_for_nothing(
    native: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    group = group_of(native)
    group.check()
    native.is_over = True
    with pytest.raises(PeerError):
        group.check()
    assert native.calls == []


@pytest.mark.parametrize("was_captured", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize(
    ("kind", "call"),
    [("bad_ranks", "plan (static mode)"), ("bad_low_latency", "low-latency dispatch")],
)
def test_a_check_tells_of_a_bad_routing_once(
    native: FakeGroup, monkeypatch: pytest.MonkeyPatch, kind: str, call: str, was_captured: bool
) -> None:
    """Only calls asked for it: with replayed graphs, which make none, it was never reported."""
    group = group_of(native)
    group.num_experts = 8
    native.failed, native.was_captured = None, was_captured
    for bad, ranks in (([1], "rank 1"), ([], ""), ([0, 2], "rank 0, 2")):
        native.is_over, native.calls = False, []
        native.bad[kind] = bad
        with monkeypatch.context() as patch:  # the ranks may not know the same yet
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            group.check()
        assert native.calls == []
        if not bad:
            group.check()
            continue
        with pytest.raises(InputError, match=f"^in an earlier {re.escape(call)}, .* of {ranks} na"):
            group.check()
        assert ("the current stream" in native.names) == was_captured
        group.raise_failure()  # the group can go on
        group.check()


def test_a_refusal_is_the_error_of_all_later_calls(
    native: FakeGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    group = group_of(native)
    for call in (lambda: group.refuse("dispatch", "x is wrong"), group.raise_failure, group.check):
        with pytest.raises(RefusedError) as caught:
            call()
        assert str(caught.value) == "dispatch: rank 1: x is wrong"
    assert capsys.readouterr().out == "dispatch: rank 1: x is wrong\n"  # to the other ranks
    assert native.calls[0] == ("refuse", ("dispatch", STREAM))


def test_a_group_of_one_rank_goes_on_after_a_refusal(native: FakeGroup) -> None:
    group = group_of(native)
    group.group.size = 1
    with pytest.raises(InputError, match=r"^dispatch: rank 1: x is wrong$"):
        group.refuse("dispatch", "x is wrong")
    group.raise_failure()
    assert native.calls == []


@pytest.mark.parametrize("reason", ["late", "refused"])
@pytest.mark.parametrize("said", ["dispatch: rank 2: x is wrong", ""])
def test_the_refusal_of_another_rank_is_told_in_its_words(
    native: FakeGroup, reason: str, said: str
) -> None:
    """In a capture a rank can only write it down, and the others are late for it; without shared
    memory it can only tell the device.
    """
    group = group_of(native)
    group.group.hosts.link.refusal = lambda rank: said if rank == 2 else ""  # type: ignore[method-assign]
    native.is_over = True
    native.failed = LATE._replace(reason=reason)
    expected = {
        ("late", ""): "rank 2 did not come in dispatch",
        ("refused", ""): "dispatch: rank 2 has refused a call: look at its output",
    }.get((reason, said), said)
    with pytest.raises(
        PeerError if (reason, said) == ("late", "") else RefusedError, match=expected
    ):
        group.raise_failure()


def test_an_operation_out_of_turn_says_what_is_in_turn(native: FakeGroup) -> None:
    """The device found it: a graph that holds a dispatch alone was replayed twice."""
    native.is_over, native.failed = True, LATE._replace(reason="out of turn")
    with pytest.raises(InputError, match=r"operation 41 .* out of turn: dispatch and combine must"):
        group_of(native).raise_failure()


ROWS = {
    "phase": "dispatch", "plan": 5, "dtype": "bfloat16", "hidden size": 64, "presence of weights": 1
}  # fmt: skip
PLAN = {"phase": "plan", "top_k": 2, "alignment": 16, "max_recv_rows": 64}


@pytest.mark.parametrize(
    ("mine", "theirs", "error", "text"),
    [
        (ROWS, {**ROWS, "hidden size": 128}, InputError, "dispatch: hidden size differs between"),
        (PLAN, ROWS, PeerError, "rank 1 is in plan; rank 2 is in dispatch. Every rank must run"),
    ],
    ids=str,
)
def test_calls_that_differ_say_in_what(
    native: FakeGroup, mine: Any, theirs: Any, error: Any, text: str,
) -> None:  # fmt: skip
    """The device found it: two numbers, in which the extension finds the values."""
    calls = {11: mine, 22: theirs}
    native.is_over = True
    native.failed = LATE._replace(reason="differs", phase=mine["phase"], own_call=11, peer_call=22)
    group = group_of(native)
    group.module = FakeExtension(call_values=calls.get)  # type: ignore[assignment]
    with pytest.raises(error, match=text):
        group.raise_failure()


def test_sizes_of_a_plan_that_failed_are_not_given_out(native: FakeGroup) -> None:
    """A failed static plan has zero rows for every expert: experts would train on nothing."""
    plan = NativePlan(
        plan_id=1, num_tokens=0, top_k=1, made_by=cast(Any, None), num_rows=8,
        counts=torch.zeros(3, dtype=torch.int64), token_routes=torch.zeros(4, 0),
        routes=torch.zeros(8), most_tokens=0, handle=None, stream=0, shared=group_of(native),
        rows_on_host=None,
    )  # fmt: skip
    assert plan.tokens_per_expert_on_host().tolist() == [0]
    native.is_over = True
    with pytest.raises(PeerError, match="rank 2 did not come in dispatch"):
        plan.tokens_per_expert_on_host()


def test_a_group_that_closes_alone_waits_for_nobody(native: FakeGroup) -> None:
    """Ranks of other NVLink domains were waited for, for the deadline of the last call."""
    group_of(native).abort()
    assert native.names == ["close"]
    assert native.timeout_s <= 0.01
