"""Experts alone in FP8: right results pass the check, others do not."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_pool import RankContext, RankPool
from stand_ins import prepared_on, problem_of
from te_autocast import State, autocast
from torch_fp8_kernels import TorchFp8Kernels, stand_in

from benchmarks import fp8_experts
from benchmarks.catalogue import known_variant, unavailable_reason
from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.benchmark.shapes import Workload

GROUPED = "megatron_ncclep.integration.experts.grouped"
WIDTH = 256
CASE = Case("bf16", (40, 30), 8, top_k=2, hidden=WIDTH, dtype=torch.bfloat16)
NAMES = ("experts:megatron_fp8", "experts:grouped_fp8")


def run_on_rank(context: RankContext, name: str, bug: bool) -> tuple[str | None, set[str]]:
    """What the check says, and which kernels ran."""

    @contextmanager
    def fp8_autocast(enabled: bool, fp8_recipe: Any) -> Any:
        with autocast(State(is_on=enabled)):
            yield

    with pytest.MonkeyPatch.context() as patch:
        kernels = stand_in(patch)
        # As it is imported now: earlier tests on these ranks may have imported it again.
        patch.setattr(importlib.import_module(GROUPED), "fp8_unavailable", lambda *_: None)
        modules = {fp8_experts.RECIPES: {"Float8BlockScaling": object},
                   fp8_experts.MODULES: {"fp8_autocast": fp8_autocast}}  # fmt: skip
        for module, contents in modules.items():
            patch.setitem(sys.modules, module, SimpleNamespace(**contents))
        if bug:
            whole = TorchFp8Kernels.fp8_multiply_for_weights
            patch.setattr(TorchFp8Kernels, "fp8_multiply_for_weights", halved(whole))
        prepared = prepared_on(context, name, Workload(CASE, context.rank, WIDTH))
        return problem_of(prepared), set(kernels.calls)


def halved(kernel: Any) -> Any:
    def wrong(self: Any, *arguments: Any) -> None:
        kernel(self, *arguments)
        arguments[5].mul_(0.5)

    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_right_results_pass(two_ranks: RankPool, name: str) -> None:
    """On a CPU Megatron's own compute in bf16, which is right too."""
    for problem, calls in two_ranks.run(run_on_rank, name, False):
        assert problem is None
        assert (len(calls) == 6) == known_variant(name).grouped, calls


def test_wrong_results_are_rejected(two_ranks: RankPool) -> None:
    for problem, _ in two_ranks.run(run_on_rank, NAMES[1], True):
        assert "gradient of experts." in str(problem)


def test_where_they_run() -> None:
    for name in NAMES:
        assert unavailable_reason(known_variant(name), "cuda") is None
        assert "FP8 products need a GPU" in str(unavailable_reason(known_variant(name), "cpu"))
