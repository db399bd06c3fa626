"""Evaluations in which rows were dropped return no loss: `on_overflow="raise"`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ncclep.engines.overflow import needed_and_had, rows_dropped, set_aside
from megatron_ncclep.integration.rerun.training_ranks import StepsOfModel


class CheckedEvaluations(StepsOfModel):
    """Checks the forward-only passes of one model, which no optimizer's step follows."""

    def run(
        self, first: Callable[..., Any], again: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        """Run one step; its results.  Evaluations are collective over all ranks of the model.

        `first` runs the step with `arguments`, in CUDA graphs where the model has any.

        Raises:
            RowsDroppedError: on all ranks: rows were dropped in the evaluation, or before it and
                not reported yet.
            PeerError: a rank did not come in time.
        """
        is_capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if not arguments.get("forward_only") or self._is_running or is_capturing:
            return first(**arguments)
        overflow_reports, ranks = self._state.overflow_reports(), self._ranks
        earlier = ranks.largest_word(overflow_reports)
        self._is_running = True
        try:
            with set_aside(overflow_reports):
                results = first(**arguments)
                own = ranks.largest_word(overflow_reports)
        finally:
            self._is_running = False
        words = ranks.largest([earlier, own], "the decision whether an evaluation is right")
        for word, when in zip(words, ("before this evaluation", "in this evaluation"), strict=True):
            if word:
                for report in overflow_reports:
                    report.words.zero_()
                needed, had = needed_and_had(word)
                option, on_overflow = self._options.max_recv_rows, self._options.on_overflow
                who = f"a rank needed {needed} rows and had {had} {when}"
                raise rows_dropped(option, on_overflow, who, "its loss is not returned", needed)
        return results
