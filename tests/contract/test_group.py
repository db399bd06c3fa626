"""What a group keeps for its engines: who may use it, when it is closed, what it tells of failures.

In a group of this process alone, with stand-ins for what engines share.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import megatron_ncclep
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import InputError, PeerError
from megatron_ncclep.ranks.exchange import HostLink
from megatron_ncclep.ranks.group import EpGroup

DEADLINE_S = 60.0
# Each test has groups of this process alone: with GPUs nothing of them would differ.
pytestmark = pytest.mark.cpu_only


@pytest.fixture
def process_group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None  # just made
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Thing:
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


class Unchecked:
    """A thing without `check`."""

    def close(self) -> None:
        pass


# --- failures on the device ----------------------------------------------------------------------


def test_everything_shared_is_checked(process_group: dist.ProcessGroup) -> None:
    """A deadline that passed on the device once came out with the next call of an engine only.

    After the last backward of a step none came before the optimizer had stepped on garbage.
    """
    log: list[str] = []
    other = dist.new_group([0])
    first, second = EpGroup.of(process_group), EpGroup.of(other)
    megatron_ncclep.check()  # nothing is shared
    first.share("communicator", Unchecked)
    first.share("a", lambda: Thing("a", log))
    second.share("b", lambda: Thing("b", log))
    megatron_ncclep.check()
    assert sorted(log) == ["check a", "check b"]
    second.share("c", lambda: Thing("c", log, "rank 1 did not come in dispatch"))
    first.check()
    with pytest.raises(PeerError, match="rank 1 did not come in dispatch"):
        second.check()
    with pytest.raises(PeerError, match="rank 1 did not come in dispatch"):
        megatron_ncclep.check()
    second.close()
    megatron_ncclep.check()


def test_a_check_without_groups_imports_nothing() -> None:
    code = (
        "import sys, megatron_ncclep\n"
        "megatron_ncclep.check()\n"
        "assert 'torch' not in sys.modules\n"
        "assert 'megatron_ncclep.engines' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- who may use what is shared, and how long ----------------------------------------------------


def test_what_an_engine_still_uses_stays(process_group: dist.ProcessGroup) -> None:
    """Two layers share windows; the first that is closed leaves them to the other."""
    log: list[str] = []
    group = EpGroup.of(process_group)
    first = group.share("windows", lambda: Thing("windows", log))
    assert group.share("windows", lambda: Thing("others", log)) is first
    group.release("windows", DEADLINE_S)
    assert log == []
    assert group.share("windows", lambda: Thing("others", log)) is first
    group.release("windows", DEADLINE_S)
    group.release("windows", DEADLINE_S)
    assert log == ["close windows"]
    # What comes then is new.
    assert group.share("windows", lambda: Thing("new windows", log)) is not first


def test_a_group_closes_the_last_made_first(process_group: dist.ProcessGroup) -> None:
    """Windows are registered with a communicator, which must be there when they go."""
    log: list[str] = []
    group = EpGroup.of(process_group)

    def windows() -> Thing:
        group.share("communicator", lambda: Thing("communicator", log))  # as engines make them
        return Thing("windows", log)

    group.share("windows", windows)
    group.share("other windows", lambda: Thing("other windows", log))
    group.close()
    assert log == ["close other windows", "close windows", "close communicator"]
    group.release("windows", DEADLINE_S)  # an engine that is closed after its group
    assert len(log) == 3


# --- an environment that is wrong on one rank ----------------------------------------------------


def test_how_hosts_exchange_is_read_where_all_can_be_told(
    process_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCLEP_HOST_EXCHANGE=maybe on one node raised there, inside the group's first exchange.

    The other ranks waited for that one until their deadline.  Now the first exchange goes the way
    that needs nothing, and `create_engine` tells them.
    """
    monkeypatch.setenv("NCCLEP_HOST_EXCHANGE", "maybe")
    link = HostLink(rank=1, size=2)
    link.open(lambda mine: mine + mine)
    assert link.exchange(b"me", "open", DEADLINE_S) is None  # over torch
    with pytest.raises(InputError, match="open: rank 0: NCCLEP_HOST_EXCHANGE='maybe': not one of"):
        megatron_ncclep.create_engine(process_group, 4, EpConfig(engine="reference"))
