"""Which engine `auto` takes on several nodes: what can run on all of them.

Ranks are threads, as in test_availability.py.
"""

from __future__ import annotations

import threading

import pytest
from fake_machine import Gpu, Machine, choice
from fakes import ThreadGroup

from megatron_ncclep import engines
from megatron_ncclep.ranks import nodes
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.nodes import Nodes


@pytest.fixture
def four_gpus(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Four ranks; NCCL finds `lsa_size` of them in each NVLink domain.  No libnccl_ep."""
    machine.gpus = [Gpu(f"uuid-{r}") for r in range(4)]
    monkeypatch.setattr(nodes, "communicator_of", machine.communicator_of)
    monkeypatch.delenv("NCCLEP_LOCAL_RANKS", raising=False)
    only = {name: engines.ENGINES[name] for name in ("native", "hierarchical", "reference")}
    monkeypatch.setattr(engines, "ENGINES", only)
    meetings: dict[int, tuple[list[bytes], threading.Barrier]] = {}
    lock = threading.Lock()

    class GridOfThreads:
        """The grid, with groups of threads for the machines."""

        def __init__(self, group: EpGroup, shape: Nodes, timeout_s: float) -> None:
            self.nodes = shape
            size, number = shape.ranks_on_each, shape.node_of(group.rank)
            with lock:
                messages, meeting = meetings.setdefault(
                    number, ([b""] * size, threading.Barrier(size))
                )
            self.local = ThreadGroup(shape.local_index(group.rank), messages, meeting)
            self.local.device = group.device

    monkeypatch.setattr(nodes, "Grid", GridOfThreads)
    return machine


NOT_NATIVE = "not native: only {} of 4 ranks, on 1 host(s), are in one NVLink"


@pytest.mark.parametrize(
    ("lsa_size", "no_access", "name", "says"),
    [
        (4, set(), "native", ["native can run"]),
        (2, set(), "hierarchical", [NOT_NATIVE.format(2), "\nhierarchical can run"]),
        (
            # One node's kernels cannot run: the ranks of the other one hear it, too.
            *(2, {(2, 3)}, "reference"),
            ["\nnot hierarchical: inside a node, not native: rank 2: the GPU of rank 0 cannot"],
        ),
        (1, set(), "reference", ["\nnot hierarchical: all ranks are on one node\nreference can"]),
    ],
    ids=["one domain", "two nodes", "a node without peer access", "no NVLink"],
)
def test_auto_takes_what_can_run_on_all_nodes(
    four_gpus: Machine, lsa_size: int, no_access: set[tuple[int, int]], name: str, says: list[str]
) -> None:
    """NCCL offers kernels no network between the nodes."""
    four_gpus.lsa_size, four_gpus.no_access = lsa_size, no_access
    chosen, reason = choice(4, 8)
    assert chosen == name
    assert all(text in reason for text in says), reason
    assert reason.endswith(f"{name} can run")
