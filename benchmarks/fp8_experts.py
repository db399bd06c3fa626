"""Experts alone in FP8: TransformerEngine's and this package's, with the same recipe and rows.

Weights are quantised once a step, so the passes timed take what an earlier one has quantised, as
all micro-batches of a step but the first do.  Rows are in blocks of a multiple of 16, which
TransformerEngine's products need; Megatron's dispatchers, or ours, leave them so.
"""

from __future__ import annotations

import copy
import importlib
from functools import partial
from typing import Any

import torch

from benchmarks import layer_model as model
from benchmarks.catalogue import BLOCKWISE
from benchmarks.layers import ExpertsSubject

RECIPES, MODULES = "transformer_engine.common.recipe", "transformer_engine.pytorch"
# e4m3 moves a value by at most 2^-4 of itself; sums of many such products lie within this share of
# their tensor's largest value.
COARSE = 2**-3


class Fp8ExpertsSubject(ExpertsSubject):
    """See `Subject`.  Each pass is in `fp8_autocast`, as in Megatron's layers."""

    _compare = staticmethod(partial(model.results_problem, coarse=COARSE))

    def _experts_of(self) -> Any:
        self._recipe = importlib.import_module(RECIPES).Float8BlockScaling()
        self._autocast = importlib.import_module(MODULES).fp8_autocast
        experts = copy.copy(self._megatrons_experts())
        if not self._variant.grouped:
            return experts  # without the option they do not pad their rows
        from megatron_ncclep.integration.experts.grouped import group_experts

        experts.config = copy.copy(experts.config)
        vars(experts.config).update(BLOCKWISE)
        group_experts(experts, reverse_local_experts=True)
        return experts

    def _run(self) -> torch.Tensor:
        with self._autocast(enabled=True, fp8_recipe=self._recipe):
            return super()._run()
