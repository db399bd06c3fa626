"""The engines of one layer: in static mode for attempts at a step, in exact mode for the rest."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing

from megatron_ncclep.config import AUTO, AUTO_START, DROP, RERUN, EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.engines.overflow import OverflowReport, can_drop
from megatron_ncclep.integration.rerun.limit import MOST_LOAD
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.uncopied import Uncopied


class LayerEngines(Uncopied):
    """The engine that a layer's options ask for; and with on_overflow="rerun" one in exact mode.

    Attributes:
        engine: with the options; with max_recv_rows="auto" a new one whenever the limit changes.
        load: with "auto", float64 on the device: this rank's largest load since the last step, in
            thousandths of a balanced load.
        is_attempt: calls belong to a step that is run again where rows do not fit.
    """

    def __init__(
        self, process_group: Any, num_experts: int, options: EpConfig | None, num_slices: int
    ) -> None:
        """Collective; the arguments are those of `create_engine`, and so are the errors."""
        self._arguments = process_group, num_experts, num_slices
        self.is_attempt = False
        self._max_gib = math.inf
        follows_load = options is not None and options.max_recv_rows == AUTO
        if options is not None and follows_load:
            self._max_gib = options.max_recv_gib or math.inf
            options = _with_factor(options, AUTO_START)
        self.engine = self._new(options)
        self._ranks = EpGroup.of(process_group)
        self._exact: Engine | None = None
        config = self.engine.config
        if config.on_overflow == RERUN and can_drop(config):
            no_limit = dataclasses.replace(
                config, max_recv_rows=None, max_tokens_per_rank=None, on_overflow=DROP
            )
            self._exact = self._new(no_limit)
        self.load: torch.Tensor | None = None
        if follows_load:
            self.load = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        # Of the dispatched tensor with a balanced load, in the largest batch so far or as declared.
        self._balanced_bytes = 1

    def in_use(self) -> Engine:
        """The engine of this pass; it is the same in all hooks of a dispatcher."""
        if self._exact is None or self.is_attempt or is_graph_capturing():
            return self.engine
        return self._exact

    @property
    def overflow_report(self) -> OverflowReport | None:
        """Where the engine records rows that ranks lacked; layers may share it.  None: nowhere."""
        name = OverflowReport.name(self.engine.config)
        found: OverflowReport | None = self._ranks.resources.find(name)
        return found

    def is_static(self) -> bool:
        """Whether the engine in use is in static mode."""
        return self.in_use().config.max_recv_rows is not None

    def record_load(self, plan: RoutePlan, hidden_states: torch.Tensor) -> None:
        """Take note of a plan's load, if the limit follows the load.  Waits for nothing."""
        balanced = (self.engine.config.max_tokens_per_rank or plan.num_tokens) * plan.top_k
        if self.load is None or not balanced:
            return
        num_bytes = balanced * hidden_states.shape[-1] * hidden_states.element_size()
        self._balanced_bytes = max(self._balanced_bytes, num_bytes)
        assignments = plan.counts[len(plan.counts) // 2 :].sum()  # dropped ones included
        torch.maximum(self.load, assignments * (1000 / balanced), out=self.load)

    def most_load(self) -> int:
        """The most thousandths of a balanced load for which `max_recv_gib` has room."""
        most = 1000 * self._max_gib * 2**30 / self._balanced_bytes
        return max(1, int(min(most, MOST_LOAD)))

    def follow(self, factor: int) -> None:
        """Have room for `factor` thousandths of a balanced load from the next pass on.  Collective.

        No CUDA graph may be replayed that holds calls of the old engine: it would write to memory
        that was the engine's.
        """
        old, self.engine = self.engine, self._new(_with_factor(self.engine.config, factor))
        old.close()

    def close(self) -> None:
        """Close the engines.  Collective; see `Engine.close`."""
        self.engine.close()
        if self._exact is not None:
            self._exact.close()

    def _new(self, options: EpConfig | None) -> Engine:
        process_group, num_experts, num_slices = self._arguments
        return create_engine(process_group, num_experts, options, num_slices)


def _with_factor(options: EpConfig, factor: int) -> EpConfig:
    """The options with room for `factor` thousandths of a balanced load."""
    rows = f"{factor // 1000}.{factor % 1000:03}x"
    return dataclasses.replace(options, max_recv_rows=rows, max_recv_gib=None)
