"""All ranks of a training, which decide together at the end of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.overflow import OverflowReport
from megatron_ncclep.integration.rerun.state import ModelState
from megatron_ncclep.ranks.torch_group import TorchGroup


class TrainingRanks:
    """Those that take part in every step of a model, also where its layers have no experts."""

    def __init__(self, options: EpConfig) -> None:
        """`options`: of the model's dispatchers; their deadlines are used."""
        assert dist.group.WORLD is not None  # the engines have groups
        self._torch = TorchGroup(dist.group.WORLD, called="the training")
        self.rank, self.device = self._torch.rank, self._torch.device
        self._options, self._is_first = options, True

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
        deadline_s = options.first_deadline_s if self._is_first else options.timeout_s
        self._is_first = False
        self._torch.wait(
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


class StepsOfModel:
    """What runs the steps of one model has: the model's state, and the ranks that decide."""

    def __init__(self, chunks: list[Any], options: EpConfig) -> None:
        """`chunks`: the parts of the model on this rank; `options`: of its dispatchers."""
        self._state, self._options = ModelState(chunks), options
        self._ranks = TrainingRanks(options)
        self._is_running = False  # a FullCudaGraphWrapper calls the schedule

    def __reduce__(self) -> Any:
        """A copy of the model, or one from a file, makes its own."""
        return type(None), ()
