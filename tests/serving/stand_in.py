"""Stands in for vLLM 0.26 where it is not installed: as much of it as megatron_ncclep/vllm.py uses.

Names, arguments and what is abstract are vLLM's, the bodies are ours.  With `registry`, what
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


# --- modular_kernel.py ---------------------------------------------------------------------------


class FusedMoEActivationFormat(enum.Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor
    expert_num_tokens_cpu: torch.Tensor | None


class FusedMoEPrepareAndFinalize(ABC):
    def post_init_setup(self, fused_experts):
        return

    @property
    @abstractmethod
    def activation_format(self): ...

    @abstractmethod
    def topk_indices_dtype(self): ...

    @abstractmethod
    def max_num_tokens_per_rank(self): ...

    @abstractmethod
    def num_dispatchers(self): ...

    @abstractmethod
    def output_is_reduced(self): ...

    def supports_async(self):
        return False

    def on_commit(self):
        return


class FusedMoEPrepareAndFinalizeModular(FusedMoEPrepareAndFinalize):
    @abstractmethod
    def prepare(
        self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input,
        quant_config, defer_input_quant,
    ): ...  # fmt: skip

    def prepare_async(
        self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input,
        quant_config, defer_input_quant,
    ):  # fmt: skip
        raise NotImplementedError

    @abstractmethod
    def finalize(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input,
        weight_and_reduce_impl,
    ): ...  # fmt: skip

    def finalize_async(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input,
        weight_and_reduce_impl,
    ):  # fmt: skip
        raise NotImplementedError


# --- topk_weight_and_reduce.py -------------------------------------------------------------------


class TopKWeightAndReduceDelegate:
    def apply(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
    ):
        raise RuntimeError("the pair chooses")


class TopKWeightAndReduceNoOP:
    def apply(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
    ):
        assert output is None
        return fused_expert_output


class TopKWeightAndReduceContiguous:
    def apply(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
    ):
        assert output is None
        assert fused_expert_output.shape[:2] == topk_ids.shape
        if not apply_router_weight_on_input:
            fused_expert_output.mul_(topk_weights.view(*topk_ids.shape, 1))
        return fused_expert_output.float().sum(dim=1).to(fused_expert_output.dtype)


# --- utils.py ------------------------------------------------------------------------------------


def moe_kernel_quantize_input(A, A_scale, quant_dtype, per_act_token_quant, block_shape=None):
    """Blocks divided by 1, 2, 4, 1...: exact for the tests' numbers, and different."""
    assert A_scale is None
    assert not per_act_token_quant
    blocks = A.float().unflatten(1, (-1, block_shape[1]))
    scales = (2.0 ** (torch.arange(blocks.shape[1]) % 3)).expand(len(A), -1).contiguous()
    return (blocks / scales[:, :, None]).view(A.shape).to(quant_dtype), scales


# --- prepare_finalize/, all2all_utils.py of the proposal ------------------------------------------


class MoEPrepareFinalizeFactory(ABC):
    backend_name: str
    supports_sequence_parallel = False

    @classmethod
    @abstractmethod
    def create(
        cls, *, moe, quant_config, routing_tables, allow_new_interface, use_monolithic, eep_stage,
        all2all_manager,
    ): ...  # fmt: skip


def install(group: dist.ProcessGroup | None = None, registry: bool = True) -> dict[str, type]:
    """Put the stand-in into sys.modules; returns what is registered, by backend.

    Args:
        group: what vLLM calls the expert-parallel group.
        registry: with what the proposal adds.
    """
    registered: dict[str, type] = {}

    def register_moe_prepare_finalize_factory(factory: type) -> type:
        registered[factory.backend_name] = factory
        return factory

    here = globals()
    modules: dict[str, dict[str, Any]] = {
        "vllm.distributed": {"get_ep_group": lambda: SimpleNamespace(device_group=group)},
        f"{PACKAGE}.modular_kernel": {
            name: here[name]
            for name in (
                "FusedMoEActivationFormat", "ExpertTokensMetadata", "FusedMoEPrepareAndFinalize",
                "FusedMoEPrepareAndFinalizeModular",
            )
        },
        f"{PACKAGE}.topk_weight_and_reduce": {
            name: thing for name, thing in here.items() if name.startswith("TopKWeightAndReduce")
        },
        f"{PACKAGE}.utils": {"moe_kernel_quantize_input": moe_kernel_quantize_input},
        f"{PACKAGE}.all2all_utils": {
            f.__name__: f for f in (register_moe_prepare_finalize_factory,) if registry
        },
        f"{PACKAGE}.prepare_finalize": {
            c.__name__: c for c in (MoEPrepareFinalizeFactory,) if registry
        },
    }  # fmt: skip
    for name, content in modules.items():
        parent = None
        for end in [i for i, c in enumerate(name) if c == "."] + [len(name)]:
            module = sys.modules.setdefault(name[:end], ModuleType(name[:end]))
            module.__path__ = []
            if parent is not None:
                setattr(parent, name[:end].rpartition(".")[2], module)
            parent = module
        for key in [key for key in vars(module) if not key.startswith("__")]:
            if isinstance(vars(module)[key], ModuleType):
                continue
            delattr(module, key)
        vars(module).update(content)
    return registered
