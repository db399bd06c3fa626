"""What the engines of a group share: deadlines, windows that grow, and what is said of failures.

`tests/gpu` lets kernels fail; here a stand-in says that they have, and what the host waits for
before it says so.
"""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fake_extension import (
    NUM_EXPERTS,
    STREAM,
    FakeExtension,
    FakeFailure,
    FakeGroup,
    on_ranks,
)

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.native.engine import NativeEngine
from megatron_ncclep.engines.native.group import NativeGroup, tokens_of_windows
from megatron_ncclep.engines.native.plan import NativePlan
from megatron_ncclep.errors import InputError, PeerError, RefusedError

LATE = FakeFailure(phase="dispatch", peer=2, operation=41, deadline_s=1.5)
TEXT = (
    "rank 1 of 4: rank 2 did not come in dispatch, operation 41 of the group (deadline 1.5 s): it "
    "died, is late, or made a different sequence of calls; look at the other ranks' output. What "
    "this group has returned since is NaN"
)

pytestmark = pytest.mark.usefixtures("stand_in")


# --- windows and deadlines -----------------------------------------------------------------------


def test_growth_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megatron_ncclep")

    def reserve(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        # The first plan knows of no row: nothing worth saying.  The last one fits.
        for row_bytes in (16, 1024, 4096, 1024):
            engine._shared.reserve(1000, 8, row_bytes)
        asked = native.named("reserve")
        assert [call[:4] for call in asked] == [
            (1024, 8, row_bytes, STREAM) for row_bytes in (16, 1024, 4096, 4096)
        ]
        assert all(call.all_gather == engine.group.hosts.exchange for call in asked)

    on_ranks(reserve, 3)
    said = [record.getMessage().partition(" (")[0] for record in caplog.records]
    assert said == [
        "native: windows grew from 0.0 to 1.0 MiB on each of 3 ranks",
        "native: windows grew from 1.0 to 4.0 MiB on each of 3 ranks",
    ]


def test_engines_of_a_group_have_deadlines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And longer ones in the first step, but not in a graph, which would keep them for good."""
    is_captured = False
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_captured)

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        nonlocal is_captured
        patient = EpConfig(engine="native", timeout_s=60.0)
        another = NativeEngine(engine.group, NUM_EXPERTS, patient)

        def deadlines() -> list[float]:
            given = []
            for each in (engine, another, engine):
                each._shared.begin(each.timeout_s)
                given.append(native.timeout_s)
            return given

        assert deadlines() == [2.0, 600.0, 2.0]
        is_captured = True
        assert deadlines() == [2.0, 60.0, 2.0]
        is_captured = False
        engine.group.hosts.enter()
        assert deadlines() == [2.0, 600.0, 2.0]
        engine.group.check()
        assert deadlines() == [2.0, 60.0, 2.0]

    on_ranks(use, 1, timeout_s=2.0)


def test_windows_are_for_at_most_an_eighth_more_tokens() -> None:
    assert [tokens_of_windows(n) for n in (0, 1, 128, 129, 4096, 5000)] == [
        128, 128, 128, 256, 4096, 5120,
    ]  # fmt: skip
    for num_tokens in range(1, 65537, 61):
        made = tokens_of_windows(num_tokens)
        assert made % 128 == 0
        assert num_tokens <= made < num_tokens + max(128, num_tokens / 8 + 1)


# --- what the host waits for ---------------------------------------------------------------------


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
    stream = SimpleNamespace(synchronize=replay_ends)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return native


def group_of(native: FakeGroup, said: str = "", lost: str = "") -> NativeGroup:
    """Rank 1's of four; rank 2 has `said` that it refuses a call, or is known to be `lost`."""
    group: Any = object.__new__(NativeGroup)
    link = SimpleNamespace(refusal=lambda rank: said if rank == 2 else "", lost=lambda wait_s: lost)
    hosts = SimpleNamespace(refuse=print, link=link)
    device = torch.device("cuda", 1)
    group.group = SimpleNamespace(rank=1, size=4, device=device, hosts=hosts)
    group.native, group.num_experts, group._refusal = native, 8, None
    group.module = FakeExtension(call_values={11: ROWS, 12: PLAN, 21: LONGER, 22: ROWS}.get)
    return group


@pytest.mark.parametrize("was_captured", [False, True], ids=["eager", "replayed"])
def test_a_check_waits_before_it_says_that_all_is_well(
    native: FakeGroup, was_captured: bool
) -> None:
    """A replay makes no call of the engine: nothing but the caller's stream knows of it."""
    group = group_of(native)
    native.was_captured = was_captured
    group.raise_failure()  # nothing is known yet, and it does not wait
    assert native.calls == []
    with pytest.raises(PeerError) as caught:
        group.check()
    assert str(caught.value) == TEXT
    assert native.names == ["wait_until_idle", "the current stream"][: 1 + was_captured]


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


# --- what is said of a failure -------------------------------------------------------------------

ROWS = {
    "phase": "dispatch", "plan": 5, "dtype": "bfloat16", "hidden size": 64, "presence of weights": 1
}  # fmt: skip
LONGER = {**ROWS, "hidden size": 128}
PLAN = {"phase": "plan", "top_k": 2, "alignment": 16, "max_recv_rows": 64}
WORDS = "dispatch: rank 2: x is wrong"


@pytest.mark.parametrize(
    ("found", "error", "text"),
    [
        # Where ranks share a host's memory; the device knows who has entered the call.
        ({"lost": "rank 2 has died"}, PeerError, r"1\.5 s\): rank 2 has died; look at the"),
        ({"peer_call": 22}, PeerError, ": it has entered the call, but its data has not come"),
        # CTAs wait for their own kernel's, too: "rank 1: rank 1 did not come, it died".
        ({"peer": 1}, PeerError, r"parts of its own kernel did not come in disp.* SMs"),
        # In a capture a rank can only write its refusal down, and the others are late for it;
        # without shared memory it can only tell the device.
        ({"said": WORDS}, RefusedError, WORDS),
        ({"reason": "refused", "said": WORDS}, RefusedError, WORDS),
        ({"reason": "refused"}, RefusedError, "dispatch: rank 2 has refused a call: look at"),
        # A graph that holds a dispatch alone was replayed twice.
        ({"reason": "out of turn"}, InputError, "41 .* out of turn: dispatch and combine must"),
        # Two numbers, in which the extension finds the values.
        (
            {"reason": "differs", "own_call": 11, "peer_call": 21},
            InputError,
            "dispatch: hidden size differs between",
        ),
        (
            {"reason": "differs", "phase": "plan", "own_call": 12, "peer_call": 22},
            PeerError,
            "rank 1 is in plan; rank 2 is in dispatch. Every rank must run",
        ),
    ],
    ids=str,
)
def test_what_the_device_found_is_told(
    native: FakeGroup, found: dict[str, Any], error: Any, text: str
) -> None:
    """And what this rank knows of the other one, which is lost or has said something."""
    told = {name: found[name] for name in found.keys() & {"lost", "said"}}
    found = {name: found[name] for name in found.keys() - told.keys()}
    native.is_over, native.failed = True, LATE._replace(**found)
    with pytest.raises(error, match=text):
        group_of(native, **told).raise_failure()


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
