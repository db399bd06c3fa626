"""All ranks of a model, which decide together at the end of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.overflow import OverflowReport
from megatron_ncclep.integration.rerun.state import ModelState
from megatron_ncclep.ranks.torch_group import TorchGroup


class TrainingRanks:
    """Those that take part in every step of a model, also where its layers have no experts.

    Attributes:
        is_first: whether this rank is the first of all.
        device: of what they exchange.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], options: EpConfig) -> None:
        """Not collective.

        Args:
            groups: see `groups_of`.
            options: of the model's dispatchers; their deadlines are used.
        """
        self._groups = [TorchGroup(group, called="the training") for group in groups]
        self.is_first = not any(group.rank for group in self._groups)
        self.device = self._groups[0].device
        self._options, self._has_met = options, False

    def largest(self, words: list[torch.Tensor | int], what: str) -> list[int]:
        """The largest value of any rank for each of `words`.  Collective; waits for the device.

        Raises:
            PeerError: a rank did not come in time.
        """
        mine = torch.zeros(len(words), dtype=torch.int64, device=self.device)
        for place, word in zip(mine, words, strict=True):
            place.copy_(word) if isinstance(word, torch.Tensor) else place.fill_(word)
        if self.device.type == "cuda":  # the deadline is for the others
            torch.cuda.current_stream().synchronize()
        options = self._options
        deadline_s = options.timeout_s if self._has_met else options.first_deadline_s
        self._has_met = True
        for each in self._groups:
            each.wait(
                lambda group: dist.all_reduce(mine, dist.ReduceOp.MAX, group=group, async_op=True),
                what,
                deadline_s,
            )
        return mine.tolist()

    def largest_word(self, reports: Iterable[OverflowReport]) -> torch.Tensor:
        """This rank's largest word of these, int64 on the device; 0: all rows fit.

        The ranks of an expert-parallel group know each other's reports; those of other groups,
        such as other pipeline stages and replicas, get them from `largest`.
        """
        found = [report.words.max().to(self.device) for report in reports]
        return torch.stack([torch.zeros((), dtype=torch.int64, device=self.device), *found]).max()


def groups_of(chunk: Any, collection: Any) -> list[dist.ProcessGroup]:
    """Process groups that reach all ranks of a model, for what goes through one after the other.

    Models on other ranks of the job are left alone.  Where a model has its groups from Megatron's
    `parallel_state`, or does not name any, all ranks of the job have a part of it.

    Args:
        chunk: a part of the model.
        collection: the ProcessGroupCollection of a schedule's caller; None: the model's own.
    """
    world = dist.group.WORLD
    assert world is not None  # the engines have groups
    found: list[dist.ProcessGroup] = []
    for names in (("tp",), ("pp",), ("dp_cp_gtp_remat", "dp_cp", "ep")):
        of_caller = [getattr(collection, name, None) for name in names]
        own = [getattr(of_model(chunk, "pg_collection"), name, None) for name in names]
        of_ddp = [of_model(chunk, f"{name}_group") for name in names]
        group = next(filter(None, of_caller + own + of_ddp), None)
        if group is None:
            return [world]
        found += group if isinstance(group, list) else [group]
    if math.prod(group.size() for group in found) == world.size():
        return [world]
    return [group for group in found if group.size() > 1] or found[:1]


def of_model(chunk: Any, name: str, otherwise: Any = None) -> Any:
    """An attribute of a part of the model, whatever wraps it."""
    while getattr(chunk, name, None) is None and hasattr(chunk, "module"):
        chunk = chunk.module
    return getattr(chunk, name, otherwise)


class StepsOfModel:
    """What runs the steps of one model has: the model's state, and the ranks that decide."""

    def __init__(self, chunks: list[Any], options: EpConfig, collection: Any = None) -> None:
        """`chunks`: the parts of the model on this rank; `options`: of its dispatchers;
        `collection`: see `groups_of`.
        """
        self._state, self._options = ModelState(chunks), options
        self._ranks = TrainingRanks(groups_of(chunks[0], collection), options)
        self._is_running = False  # a FullCudaGraphWrapper calls the schedule

    def __reduce__(self) -> Any:
        """A copy of the model, or one from a file, makes its own."""
        return type(None), ()
