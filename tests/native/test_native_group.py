"""What the host says of a wait on the device that failed, and what it waits for before it does.

`tests/virtual` and `tests/gpu` let kernels fail; here a stand-in says that they have.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ncclep.engines.native_group import NativeGroup
from megatron_ncclep.engines.native_plan import NativePlan
from megatron_ncclep.errors import PeerError

FAILURE = SimpleNamespace(phase=3, peer=2, epoch=41, deadline_s=1.5)
TEXT = (
    "rank 1 of 4: rank 2 did not come in dispatch, operation 41 of the group (deadline 1.5 s): it "
    "died, is late or left the group's order of calls; look at the other ranks' output. What this "
    "group has returned since is NaN"
)


class FailingNative:
    """An extension's group in which a kernel that is under way will fail."""

    def __init__(self, was_captured: bool = False) -> None:
        self.was_captured = was_captured
        self.waited_for: list[str] = []
        self.is_over = False

    def failure(self) -> Any:
        return FAILURE if self.is_over else None

    def wait_until_idle(self) -> None:
        self.waited_for.append("what is queued")
        self.is_over = not self.was_captured

    def replay_ends(self) -> None:
        self.waited_for.append("the current stream")
        self.is_over = True


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> FailingNative:
    native = FailingNative()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    stream = SimpleNamespace(synchronize=native.replay_ends)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return native


def group_of(native: FailingNative) -> NativeGroup:
    group = object.__new__(NativeGroup)
    group.group = SimpleNamespace(rank=1, size=4, device=torch.device("cuda", 1))  # type: ignore[assignment]
    group.native = native
    return group


def test_a_check_waits_for_the_device_before_it_says_that_all_is_well(
    native: FailingNative,
) -> None:
    group = group_of(native)
    group.raise_failure()  # nothing is known yet, and it does not wait
    assert native.waited_for == []
    with pytest.raises(PeerError) as caught:
        group.check()
    assert str(caught.value) == TEXT
    assert native.waited_for == ["what is queued"]


def test_a_check_waits_for_a_replayed_graph(native: FailingNative) -> None:
    """A replay makes no call of the engine: nothing but the caller's stream knows of it."""
    native.was_captured = True
    with pytest.raises(PeerError, match="rank 2 did not come in dispatch"):
        group_of(native).check()
    assert native.waited_for == ["what is queued", "the current stream"]


def test_a_check_in_a_capture_waits_for_nothing(
    native: FailingNative, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    group = group_of(native)
    group.check()
    native.is_over = True
    with pytest.raises(PeerError):
        group.check()
    assert native.waited_for == []


def test_sizes_of_a_plan_that_failed_are_not_given_out(native: FailingNative) -> None:
    """A failed static plan has zero rows for every expert: experts would train on nothing."""
    plan = NativePlan(
        plan_id=1, num_tokens=0, top_k=1, num_experts=4, num_rows=8,
        tokens_per_expert=torch.zeros(1, dtype=torch.int64),
        routed_per_expert=torch.zeros(1, dtype=torch.int64),
        num_dropped=torch.zeros((), dtype=torch.int64),
        counts=torch.zeros(3, dtype=torch.int64), home=torch.zeros(4, 0), routes=torch.zeros(8),
        most_tokens=0, handle=None, stream=0, shared=group_of(native), rows_on_host=None,
    )  # fmt: skip
    assert plan.tokens_per_expert_on_host().tolist() == [0]
    native.is_over = True
    with pytest.raises(PeerError, match="rank 2 did not come in dispatch"):
        plan.tokens_per_expert_on_host()
