"""Layers with frozen experts and with adapters: the check accepts right results only."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from adapter_libraries import LoRALinear, ParallelLinearAdapter
from rank_pool import RankContext, RankPool
from stand_ins import FFN, prepared_on, problem_of
from test_layers import CASES

from benchmarks import adapted_layers
from megatron_ncclep.benchmark import UnavailableError
from megatron_ncclep.benchmark.shapes import Workload


class LoRA:
    """In place of Megatron-Bridge's, on Megatron's own experts."""

    def __init__(self, target_modules: list[str], dim: int, alpha: int, **more: Any) -> None:
        self.linears, self.dim, self.alpha = target_modules, dim, alpha
        assert more == {"share_expert_adapters": False}

    def __call__(self, whole: Any) -> None:
        experts = whole.mlp.experts
        for expert in experts.local_experts:
            for name in self.linears:
                linear = getattr(expert, name)
                adapter = ParallelLinearAdapter(linear.weight, experts.config, rank=self.dim)
                adapter.dim, adapter.alpha = self.dim, self.alpha
                setattr(expert, name, LoRALinear(linear, adapter))


def check_on_rank(context: RankContext, name: str, case: str, spoil: str) -> str | None:
    """Prepare a layer, spoil something on rank 1, and check it."""
    workload: Any = Workload(CASES[case], context.rank, FFN)
    bridge: Any = SimpleNamespace(LoRA=LoRA)
    with mock.patch.dict(sys.modules, {adapted_layers.LORA: bridge}):
        prepared = prepared_on(context, name, workload)
    experts = prepared._layer.experts.local_experts if context.rank == 1 else []
    for expert in experts:
        if spoil == "scale":
            expert.linear_fc1.adapter.alpha *= 3
        elif spoil == "gradient":
            expert.linear_fc2.adapter.linear_in.weight.register_hook(lambda grad: grad / 2)
    return problem_of(prepared)


@pytest.mark.parametrize("layer", ["layer:alltoall", "layer:ncclep:reference:grouped"])
def test_right_results_pass_and_wrong_ones_do_not(two_ranks: RankPool, layer: str) -> None:
    for word, case in itertools.product(("frozen", "lora16"), CASES):
        assert two_ranks.run(check_on_rank, f"{layer}:{word}", case, "none") == [None, None]
    for spoil, found in (("scale", "output"), ("gradient", "first factor")):
        assert found in str(two_ranks.run(check_on_rank, f"{layer}:lora16", "fp32", spoil))


def test_without_megatron_bridge() -> None:
    with (
        mock.patch.object(adapted_layers, "LORA", "no_such_library"),
        pytest.raises(UnavailableError, match="adapters need Megatron-Bridge, whose import fails"),
    ):
        adapted_layers.put_on(None, 16, 0)
