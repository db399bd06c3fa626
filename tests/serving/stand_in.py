"""Stands in for vLLM 0.26 where it is not installed: as much of it as megatron_ncclep/vllm.py uses.

Names, arguments and abstract methods are vLLM's, the bodies are ours.  `registry` stands for what
https://github.com/vllm-project/vllm/pull/50556 adds.
"""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

PACKAGE = "vllm.model_executor.layers.fused_moe"


class FusedMoEActivationFormat(enum.Enum):
    Standard = ("standard",)


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor
    expert_num_tokens_cpu: torch.Tensor | None


class FusedMoEPrepareAndFinalizeModular(ABC):
    @abstractmethod
    def prepare(self): ...

    activation_format = topk_indices_dtype = max_num_tokens_per_rank = prepare
    num_dispatchers = output_is_reduced = finalize = prepare


class MoEPrepareFinalizeFactory(ABC):
    @abstractmethod
    def create(self): ...


class TopKWeightAndReduceDelegate:
    """The experts leave it to the pair."""


class TopKWeightAndReduceNoOP:
    def apply(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
    ):
        return fused_expert_output


class TopKWeightAndReduceContiguous:
    def apply(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
    ):
        assert fused_expert_output.shape[:2] == topk_ids.shape
        if not apply_router_weight_on_input:
            fused_expert_output.mul_(topk_weights.view(*topk_ids.shape, 1))
        return fused_expert_output.float().sum(dim=1).to(fused_expert_output.dtype)


def moe_kernel_quantize_input(A, A_scale, quant_dtype, per_act_token_quant, block_shape=None):
    """Divide blocks by 1, 2, 4, 1...: exact for the tests' numbers, and different."""
    blocks = A.float().unflatten(1, (-1, block_shape[1]))
    scales = (2.0 ** (torch.arange(blocks.shape[1]) % 3)).expand(len(A), -1).contiguous()
    return (blocks / scales[:, :, None]).view(A.shape).to(quant_dtype), scales


def install(group: dist.ProcessGroup | None = None, registry: bool = True) -> dict[str, type]:
    """Put the stand-in into sys.modules; returns the registered factories, by backend.

    Args:
        group: vLLM's expert-parallel group.
        registry: with what the proposal adds.
    """
    registered: dict[str, Any] = {}

    def register_moe_prepare_finalize_factory(factory: Any) -> None:
        registered[factory.backend_name] = factory

    def get_ep_group() -> SimpleNamespace:
        return SimpleNamespace(device_group=group)

    proposed = [register_moe_prepare_finalize_factory] if registry else []
    modules: dict[str, list[Any]] = {
        "vllm.distributed": [get_ep_group],
        f"{PACKAGE}.modular_kernel": [
            FusedMoEActivationFormat, ExpertTokensMetadata, FusedMoEPrepareAndFinalizeModular,
        ],
        f"{PACKAGE}.topk_weight_and_reduce": [
            TopKWeightAndReduceDelegate, TopKWeightAndReduceContiguous,
        ],
        f"{PACKAGE}.utils": [moe_kernel_quantize_input],
        f"{PACKAGE}.all2all_utils": proposed,
        f"{PACKAGE}.prepare_finalize": [MoEPrepareFinalizeFactory] if registry else [],
    }  # fmt: skip
    for name, content in modules.items():
        while name:  # each package around the module, too
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = []
            vars(sys.modules[name]).update({thing.__name__: thing for thing in content})
            name, content = name.rpartition(".")[0], []
    return registered
