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
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.errors import PeerError

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
