"""What a group keeps for its engines: who may use it, when it is closed, what it tells of failures.

In a group of this process alone, with stand-ins for what engines share.
"""

from __future__ import annotations

import gc
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from timeouts import patient

import megatron_ncclep
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.low_latency import create_low_latency
from megatron_ncclep.engines.reference.low_latency import ReferenceLowLatency
from megatron_ncclep.errors import (
    EpError,
    GroupClosedError,
    InputError,
    LibraryError,
    PeerError,
    RefusedError,
)
from megatron_ncclep.ranks import all_to_all, torch_group
from megatron_ncclep.ranks import group as ranks_group
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.host_link import HostLink
from megatron_ncclep.ranks.resources import Resource

DEADLINE_S = patient(60.0)
# Each test has groups of this process alone: with GPUs nothing of them would differ.
pytestmark = pytest.mark.cpu_only


class Thing(Resource):
    """Something that engines share.

    Attributes:
        name: in `log`.
        log: what was done with all things, in order.
        failure: what `check` raises, if anything.
    """

    def __init__(self, name: str, log: list[str], failure: str | None = None) -> None:
        self.name, self.log, self.failure = name, log, failure

    def check(self) -> None:
        self.log.append(f"check {self.name}")
        if self.failure:
            raise PeerError(self.failure)

    def close(self) -> None:
        self.log.append(f"close {self.name}")


# --- failures on the device ----------------------------------------------------------------------


def test_everything_shared_is_checked(process_group: dist.ProcessGroup) -> None:
    """A deadline that passed on the device in the last backward must be told before the optimizer
    steps: no call of an engine comes in between.
    """
    log: list[str] = []
    other = dist.new_group([0])
    first, second = EpGroup.of(process_group), EpGroup.of(other)
    megatron_ncclep.check()  # nothing is shared
    first.resources.share("communicator", Resource)  # has no check
    first.resources.share("a", lambda: Thing("a", log))
    second.resources.share("b", lambda: Thing("b", log))
    megatron_ncclep.check()
    assert sorted(log) == ["check a", "check b"]
    second.resources.share("c", lambda: Thing("c", log, "rank 1 did not come in dispatch"))
    first.check()
    with pytest.raises(PeerError, match="rank 1 did not come in dispatch"):
        second.check()
    with pytest.raises(PeerError, match="rank 1 did not come in dispatch"):
        megatron_ncclep.check()
    second.close()
    megatron_ncclep.check()


def test_a_group_that_failed_on_the_device_gets_no_new_engine(
    process_group: dist.ProcessGroup,
) -> None:
    """Its kernels would have delivered NaN; the hosts agreed, and nothing said how to go on."""
    config = EpConfig(engine="reference")
    windows = mock.Mock(Resource)
    EpGroup.of(process_group).resources.share("windows", lambda: windows)
    windows.raise_failure.side_effect = PeerError("rank 1 did not come in dispatch")
    with pytest.raises(InputError, match=r"rank 1 did not come .*; call megatron_ncclep\.close"):
        megatron_ncclep.create_engine(process_group, 4, config)
    # To close the engines that have refused is enough.
    windows.raise_failure.side_effect = RefusedError("dispatch: rank 1: x is wrong")
    megatron_ncclep.create_engine(process_group, 4, config)
    megatron_ncclep.close(process_group)
    windows.close.assert_called_once()
    megatron_ncclep.create_engine(process_group, 4, config)


# --- who may use what is shared, and how long ----------------------------------------------------


def test_what_an_engine_still_uses_stays(process_group: dist.ProcessGroup) -> None:
    """Two layers share windows; the first that is closed leaves them to the other."""
    log: list[str] = []
    group = EpGroup.of(process_group)
    first = group.resources.share("windows", lambda: Thing("windows", log))
    assert group.resources.share("windows", lambda: Thing("others", log)) is first
    group.resources.release("windows", DEADLINE_S)
    assert log == []
    assert group.resources.share("windows", lambda: Thing("others", log)) is first
    group.resources.release("windows", DEADLINE_S)
    group.resources.release("windows", DEADLINE_S)
    assert log == ["close windows"]
    # What comes then is new.
    assert group.resources.share("windows", lambda: Thing("new windows", log)) is not first


def test_a_group_closes_the_last_made_first(process_group: dist.ProcessGroup) -> None:
    """Windows are registered with a communicator, which must be there when they go."""
    log: list[str] = []
    group = EpGroup.of(process_group)

    def windows() -> Thing:
        # As engines make them.
        group.resources.share("communicator", lambda: Thing("communicator", log))
        return Thing("windows", log)

    group.resources.share("windows", windows)
    group.resources.share("other windows", lambda: Thing("other windows", log))
    group.close()
    assert log == ["close other windows", "close windows", "close communicator"]
    group.close()
    assert len(log) == 3


class Communicator(Thing):
    """A thing that can also end without the other ranks."""

    def abort(self) -> None:
        self.log.append(f"abort {self.name}")


def test_all_groups_are_closed_in_the_order_of_their_making(
    process_group: dist.ProcessGroup,
) -> None:
    """Ranks that close two groups in different orders wait for each other."""
    log: list[str] = []
    groups = [dist.new_group([0]) for _ in range(3)]
    for number in (2, 0, 1):
        EpGroup.of(groups[number]).resources.share(
            "thing", lambda n=number: Thing(f"thing {n}", log)
        )
    megatron_ncclep.close(groups[0])
    megatron_ncclep.close(dist.new_group([0]))  # one without engines
    megatron_ncclep.close()
    megatron_ncclep.close()
    assert log == ["close thing 0", "close thing 2", "close thing 1"]


def test_a_closed_group_says_what_to_do_and_can_be_used_again(
    process_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(ReferenceLowLatency, "close", lambda calls: ended.append("low latency"))
    config = EpConfig(engine="reference")
    sizes: Any = {"max_tokens": 1, "hidden": 8, "top_k": 1}
    routing = torch.zeros(1, 1, dtype=torch.int64)
    engine = megatron_ncclep.create_engine(process_group, 4, config)
    low_latency = create_low_latency(engine, **sizes)
    plan = engine.plan(routing)
    x, w = torch.ones(1, 8, dtype=torch.bfloat16), torch.ones(1, 1)
    low_latency.send_dispatch(x, routing, w)
    megatron_ncclep.close(process_group)
    for call in (
        lambda: engine.plan(routing),
        lambda: engine.dispatch(plan, x),
        lambda: engine.combine(plan, x),
        low_latency.complete_dispatch,
        lambda: low_latency.dispatch(x, routing, w),
        lambda: create_low_latency(engine, **sizes),
    ):
        with pytest.raises(GroupClosedError, match=r"closed, by megatron_ncclep\.close.*again"):
            call()
    assert ended == ["low latency"]
    low_latency.close()
    engine.close()
    assert ended == ["low latency"]
    again = megatron_ncclep.create_engine(process_group, 4, config)
    assert again.plan(routing).num_rows == 1
    again.close()


def test_what_is_over_a_destroyed_process_group_is_freed(process_group: dist.ProcessGroup) -> None:
    """No rank is left to agree with: `close` frees it, or the next group that is made."""
    log: list[str] = []
    first, second = dist.new_group([0]), dist.new_group([0])
    for number, each in enumerate((first, second)):
        name = f"communicator {number}"
        EpGroup.of(each).resources.share("communicator", lambda name=name: Communicator(name, log))
        EpGroup.of(each).resources.share("windows", lambda: Thing("windows", log))
    old = EpGroup.of(first)
    dist.destroy_process_group(first)
    old.close()
    assert log == ["close windows", "abort communicator 0"]
    dist.destroy_process_group(second)
    del first, second, each  # nor does torch's object have to be there
    gc.collect()
    EpGroup.of(dist.new_group([0]))
    assert log[2:] == ["close windows", "abort communicator 1"]


@pytest.mark.parametrize("error", [LibraryError, PeerError])
def test_what_cannot_be_freed_keeps_only_what_its_kernels_use(
    process_group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, error: type[EpError]
) -> None:
    """After a PeerError the device has yet to run some: their communicator must not go."""
    log: list[str] = []
    group = EpGroup.of(process_group)
    group.resources.share("communicator", lambda: Thing("communicator", log))
    windows = mock.Mock(Resource)
    windows.close.side_effect = error("ncclCommWindowDeregister failed")
    group.resources.share("windows", lambda: windows)
    megatron_ncclep.close()
    assert log == ([] if error is PeerError else ["close communicator"])
    assert "rank 0 of 1 of an expert-parallel group: windows could not be freed: nccl" in (
        caplog.text
    )


def test_a_busy_device_does_not_keep_the_host(
    process_group: dist.ProcessGroup,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Freeing waits for the device, which may wait for a rank that is gone for many minutes."""
    monkeypatch.setattr(ranks_group, "FREE_TIMEOUT_S", 0.0)
    is_idle, is_freed = threading.Event(), threading.Event()
    group = EpGroup.of(process_group)
    group.timeout_s = 0.0
    group.resources.share("communicator", lambda: mock.Mock(Resource, close=is_freed.set))
    group.resources.share("windows", lambda: mock.Mock(Resource, close=is_idle.wait))
    megatron_ncclep.close()
    assert "the device is still busy; the group's memory is freed when it is idle" in (caplog.text)
    assert group.torch.is_closed
    assert not is_freed.is_set()
    is_idle.set()
    assert is_freed.wait(DEADLINE_S)


# --- an environment that is wrong on one rank ----------------------------------------------------


def test_how_hosts_exchange_is_read_where_all_can_be_told(
    process_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the first exchange raised on one rank, the others would wait for it until their deadline:
    it goes over torch, and `create_engine` tells them.
    """
    monkeypatch.setenv("NCCLEP_HOST_EXCHANGE", "maybe")
    link = HostLink(rank=1, size=2)
    link.open(lambda mine: mine + mine)
    assert link.exchange(b"me", "open", DEADLINE_S) is None  # over torch
    with pytest.raises(InputError, match="open: rank 0: NCCLEP_HOST_EXCHANGE='maybe': not one of"):
        megatron_ncclep.create_engine(process_group, 4, EpConfig(engine="reference"))


def test_gloos_threads_let_go_of_tensors(
    process_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch 2.6 every other run of an example hung at its end: a thread of gloo that was the
    last to hold a tensor waited for Python's lock, and destroy_process_group() for the thread.
    """
    waited: list[int] = []

    class Held(torch.Tensor):
        """A tensor that a thread holds, until it is asked for the third time."""

        def _use_count(self) -> int:
            waited.append(max(1, 3 - len(waited)))
            return waited[-1]

    tensor = torch.zeros(3).as_subclass(Held)
    for version, expected in (("2.8.0", []), ("2.7.1+cu126", [3, 2, 1])):
        monkeypatch.setattr(torch, "__version__", version)
        torch_group.wait_until_let_go(tensor)
        assert waited == expected

    let_go: list[torch.Tensor] = []
    for module in (torch_group, all_to_all):
        monkeypatch.setattr(module, "wait_until_let_go", let_go.append)
    group = EpGroup.of(process_group)
    group.torch.exchange_by_torch(b"text", "a call", 60.0)
    rows = all_to_all.exchange(group, torch.ones(3), [3], [3], "rows", 60.0)
    assert let_go[1].data_ptr() == rows.data_ptr()
    assert len(let_go) == 2
