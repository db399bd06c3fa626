"""Megatron-Core for the subjects that need it: process groups, configurations, dispatchers."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import torch

from megatron_ncclep import cpu
from megatron_ncclep.benchmark.names import INSTALL_MEGATRON, DispatcherChoice
from megatron_ncclep.benchmark.subjects import Setting, UnavailableError
from megatron_ncclep.benchmark.workload import Workload
from megatron_ncclep.config import EpConfig

MEGATRONS = "megatron.core.transformer.moe.token_dispatcher"
CLASSES = {
    "alltoall": (MEGATRONS, "MoEAlltoAllTokenDispatcher"),
    "allgather": (MEGATRONS, "MoEAllGatherTokenDispatcher"),
    "flex": (MEGATRONS, "MoEFlexTokenDispatcher"),
    "ncclep": ("megatron_ncclep.integration.dispatcher", "NcclEpTokenDispatcher"),
}


def is_installed() -> bool:
    """Whether Megatron-Core is."""
    names = ("megatron", "megatron.core")
    return all(importlib.util.find_spec(name) is not None for name in names)


def import_on_cpu() -> None:
    """Import Megatron-Core, if it is installed, for ranks without GPUs that are forks of this."""
    if is_installed():
        cpu.enable()


def initialize(setting: Setting) -> None:
    """Set up Megatron's process groups with all ranks in one expert-parallel group.  Collective.

    Once per process; later calls find them.

    Raises:
        UnavailableError: Megatron-Core is not installed.
    """
    if not is_installed():
        raise UnavailableError(INSTALL_MEGATRON)
    if setting.device == "cpu":
        cpu.enable()
    from megatron.core import parallel_state

    from megatron_ncclep.integration.hooks import install

    install()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=setting.num_ranks,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,  # only the distributed optimizer needs them
            distributed_timeout_minutes=math.ceil(setting.timeout_s / 60),
        )


def make_config(
    choice: DispatcherChoice,
    setting: Setting,
    workload: Workload,
    ep_options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Make a TransformerConfig for one MoE layer of the workload's sizes.

    Args:
        choice: of the dispatcher.
        setting, workload: where and what.
        ep_options: further fields of EpConfig, for our own dispatcher.
        more: further fields.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    case = workload.case
    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=1,
        num_moe_experts=case.num_experts,
        moe_router_topk=case.top_k,
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_router_pre_softmax=case.top_k == 1,  # Megatron refuses a softmax over one assignment
        moe_token_dispatcher_type=choice.dispatcher,
        expert_model_parallel_size=case.num_ranks,
        expert_tensor_parallel_size=1,
        add_bias_linear=False,
        params_dtype=case.dtype,
        bf16=case.dtype == torch.bfloat16,
        fp16=case.dtype == torch.float16,
        **choice.options,
        **more,
    )
    if choice.engine is not None:
        config.ncclep = EpConfig(
            engine=choice.engine,
            # Without one, experts have what they need.
            alignment=None if case.alignment == 1 else case.alignment,
            timeout_s=setting.timeout_s,
            first_timeout_s=setting.timeout_s,
            **(ep_options or {}),
        )
    return config


def build_dispatcher(
    choice: DispatcherChoice,
    setting: Setting,
    workload: Workload,
    ep_options: Mapping[str, Any] | None = None,
    **wanted: Any,
) -> Any:
    """Make a dispatcher as MoELayer does.  Collective for some.

    Args:
        choice, setting, workload, ep_options: see `make_config`.
        wanted: further arguments of the dispatcher, which the experts need.
    """
    from megatron.core.transformer.moe.moe_layer import get_default_pg_collection

    module, name = CLASSES[choice.dispatcher]
    num_local = workload.case.num_experts // workload.case.num_ranks
    first = setting.rank * num_local
    return getattr(importlib.import_module(module), name)(
        num_local,
        list(range(first, first + num_local)),
        config=make_config(choice, setting, workload, ep_options),
        pg_collection=get_default_pg_collection(),
        **wanted,
    )


def close_dispatcher(dispatcher: Any) -> None:
    """Release the engine of our own dispatcher; Megatron's own have nothing to release."""
    engine = getattr(dispatcher, "engine", None)
    if engine is not None:
        engine.close()
