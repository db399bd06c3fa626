"""Sets Megatron up and builds its layers on the ranks of a pool, for all comparisons."""

from __future__ import annotations

import gc
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from imports import import_megatron
from torch.distributed.distributed_c10d import _world

from megatron_ncclep.config import EpConfig

SEQUENCE, BATCH, HIDDEN, EXPERTS = 6, 2, 16, 8
SWIGLU = {"gated_linear_unit": True, "activation_func": F.silu, "bias_activation_fusion": True}
# The process groups that Megatron has made on this rank and that are not destroyed, and the sizes
# that they were made for.
MADE: list[dist.ProcessGroup] = []
SIZES: dict[str, int | None] = {}


def has(name: str) -> bool:
    """Whether this release has megatron/`name`: what can be imported may be another release's."""
    import megatron.core

    return (Path(megatron.core.__file__).parents[1] / name).exists()


def initialize(
    ep: int, tp: int = 1, device: str = "cpu", etp: int = 1, pp: int = 1, cp: int = 1
) -> None:
    """Set Megatron up on this rank, over all ranks of the pool, with fresh random numbers.

    On "cpu" Megatron is made to run on one.  With pipeline stages each rank has two of them.

    Groups are kept from the last call if their sizes are the same, and destroyed if not: Megatron
    makes dozens of process groups at a time and destroys none.
    """
    import megatron_ncclep

    if device == "cpu":
        from megatron_ncclep import cpu

        cpu.enable()

    for kind in ("FLASH", "FUSED", "UNFUSED"):  # another model's choice, which Megatron keeps
        os.environ.pop(f"NVTE_{kind}_ATTN", None)
    if device != "cpu":
        gc.collect()  # frees the GPU memory of the last test's models
    megatron_ncclep.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    if not parallel_state.model_parallel_is_initialized():
        import_megatron()
    wanted = {
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "virtual_pipeline_model_parallel_size": 2 if pp > 1 else None,
    }
    if not parallel_state.model_parallel_is_initialized() or wanted != SIZES:
        # Layers go before their groups do.  Not in every test: where torch.compile has been, to
        # search all objects takes most of the time.
        gc.collect()
        parallel_state.destroy_model_parallel()
        dist.barrier()  # no rank uses them any more
        while MADE:
            group = MADE.pop()
            if group in _world.pg_map:  # a few Megatron has destroyed itself
                dist.destroy_process_group(group)
        before = set(_world.pg_map)
        parallel_state.initialize_model_parallel(**wanted)
        SIZES.update(wanted)
        MADE.extend(group for group in _world.pg_map if group not in before)
    # The scale of auxiliary losses belongs to the class: schedules and our own loops give it
    # different shapes, and each copies into the last one.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    torch.manual_seed(123)


def make_config(dispatcher: str, dtype: torch.dtype, ep: int, tp: int = 1, **options: Any) -> Any:
    """A TransformerConfig for small MoE layers; `options` win over the defaults."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    ncclep = options.pop("ncclep", None)
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "ffn_hidden_size": 32,
        "moe_ffn_hidden_size": 32,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": dispatcher,
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "bias_dropout_fusion": False,
    }
    is_mla = options.get("multi_latent_attention", False)
    config = (MLATransformerConfig if is_mla else TransformerConfig)(**{**values, **options})
    assert config.moe_token_dispatcher_type == dispatcher
    if ncclep is not None and dispatcher == "ncclep":
        config.ncclep = ncclep
    return config


def selective(*modules: str) -> dict[str, Any]:
    """Options that have backward compute these modules again."""
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def ep_config(engine: str, **fields: Any) -> EpConfig:
    """Options with Megatron's own experts, which most comparisons are about, unless `fields` name
    others.
    """
    return EpConfig(**{"engine": engine, "experts": "megatron", **fields})


def build_layer(config: Any, device: str = "cpu", te: bool = False, linears: Any = None) -> Any:
    """One MoELayer, with random experts that all differ, the same for every dispatcher.

    With `te` its modules are TransformerEngine's, in the way that the config asks for.  `linears`,
    a stand-in for its grouped linear layer: the experts are Megatron's TEGroupedMLP over two.
    """
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec

    experts = config.num_moe_experts
    if te and config.transformer_impl == "inference_optimized":
        layer_spec = specs.get_gpt_layer_with_inference_spec(
            num_experts=experts, moe_grouped_gemm=True
        )
    elif te:
        layer_spec = specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            use_te_activation_func=config.use_te_activation_func,
        )
    else:
        layer_spec = specs.get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False)
    submodules = moe_submodules(layer_spec)
    if linears is not None:
        parts: Any = SimpleNamespace(linear_fc1=linears, linear_fc2=linears, activation_func=None)
        kind = ModuleSpec if isinstance(submodules.experts, ModuleSpec) else partial
        submodules.experts = kind(TEGroupedMLP, submodules=parts)
    layer = MoELayer(config, submodules=submodules, layer_number=1)
    layer.set_layer_number(1)
    make_experts_differ(layer)
    return layer.to(device, config.params_dtype)


def new_layer(
    ep: int, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
) -> Any:
    """Set Megatron up for `ep` ranks with our dispatcher, and build a layer.  Collective."""
    initialize(ep, device=device)
    return build_layer(make_config("ncclep", dtype, ep, **options), device)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Normal random numbers in fp32, always the same of a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def log_calls(order: list[str], owner: Any, name: str, text: str) -> None:
    """Have each call of the method `name` add `text` to `order`."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        order.append(text)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def moe_submodules(layer_spec: Any) -> Any:
    """The modules inside the MoELayer of a layer's spec."""
    spec = layer_spec.submodules.mlp
    # A ModuleSpec in old releases, a functools.partial of MoELayer in new ones.
    return spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]


def make_experts_differ(model: torch.nn.Module) -> None:
    """Give every expert of the whole group, and every slice of it, weights of its own: on a CPU,
    Megatron initialises the experts of all ranks from one seed.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    rank = torch.distributed.get_rank(group)
    experts = [p for name, p in model.named_parameters() if ".experts." in f".{name}"]
    assert experts
    for index, parameter in enumerate(experts):
        generator = torch.Generator().manual_seed(1 + index + len(experts) * rank)
        with torch.no_grad():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
