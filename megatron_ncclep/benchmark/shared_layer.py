"""The MoELayer that all subjects of layers and experts share, with the gradients of its weights.

Its experts are Megatron-Core's, gated with SwiGLU and without bias: on a GPU TEGroupedMLP, with
TransformerEngine's grouped GEMM, on a CPU SequentialMLP; subjects with this package's experts have
them over the same weights.  Its router is Megatron-Core's TopKRouter with all its work forward and
backward; only the values of its logits are given, so that every subject routes as the workload
says.

The layer is in Megatron's DistributedDataParallel, as in training: every weight has a `main_grad`
in fp32, to which TransformerEngine's layers and this package's add their gradients themselves
(`gradient_accumulation_fusion`, on a GPU), and DistributedDataParallel's hooks all others.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from typing import Any

import torch

from megatron_ncclep.benchmark.megatron_setup import make_config
from megatron_ncclep.benchmark.names import DISPATCHERS, INSTALL_ENGINE
from megatron_ncclep.benchmark.subjects import Setting, UnavailableError
from megatron_ncclep.benchmark.workload import Workload

# Key in Workload.shared.
SHARED = "layer"
# Logit of experts that a token does not go to; those of its assignments are at least log(0.5).
UNPICKED = -100.0


def shared_layer(setting: Setting, workload: Workload) -> tuple[Any, int]:
    """Give the MoELayer of a workload, made by the first subject that needs it.

    It goes when the last subject lets go of it.  Subjects run copies of it (`layer_of_subject`).

    Returns:
        Megatron's DistributedDataParallel, whose `module` is the layer with Megatron-Core's
        experts, and how many bytes of weights and gradients were there already.

    Raises:
        UnavailableError: the shape does not say how large experts are, or the GPU's experts need
            TransformerEngine, which is not installed.
    """
    shared = workload.shared.get(SHARED)
    if shared is not None:
        weights = shared.module.parameters()
        return shared, sum(weight.nbytes + weight.main_grad.nbytes for weight in weights)
    shared = _with_gradients(_build(setting, workload))
    workload.shared[SHARED] = shared
    return shared, 0


def layer_of_subject(shared: Any, dispatcher: Any, grouped: bool) -> Any:
    """Make a MoELayer with the router and the weights of the shared one.

    Args:
        shared: what `shared_layer` gives.
        dispatcher: of the new one.
        grouped: its experts are this package's.

    Raises:
        UnsupportedError: the GPU has no grouped GEMM.
    """
    layer = copy.copy(shared.module)
    layer._modules = dict(layer._modules)
    layer.token_dispatcher = dispatcher
    layer.experts = experts_of_subject(shared, grouped)
    return layer


def experts_of_subject(shared: Any, grouped: bool) -> Any:
    """Give Megatron-Core's experts, or this package's over the same weights.

    These take their rows last expert first, and lay the weights out as Megatron's buffers do,
    behind one another, for all subjects.  Arguments and errors as of `layer_of_subject`.
    """
    experts = shared.module.experts
    if grouped:
        from megatron_ncclep.integration.experts.grouped import group_experts

        experts = copy.copy(experts)
        group_experts(experts, last_expert_first=True)
    return experts


def route(shared: Any, workload: Workload) -> None:
    """Have every subject's router decide as `workload` says; CUDA graphs too, when replayed."""
    shared.module.router.given_logits.copy_(_logits(workload))


def _build(setting: Setting, workload: Workload) -> Any:
    """Make the layer, with Megatron's `alltoall` for the time being."""
    import torch.nn.functional as F

    on_gpu = setting.device == "cuda"
    if workload.ffn_hidden_size is None:
        raise UnavailableError("the shape does not give ffn_hidden_size, the size of an expert")
    if on_gpu and importlib.util.find_spec("transformer_engine") is None:
        raise UnavailableError(f"the experts need {INSTALL_ENGINE}")
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    case = workload.case
    config = make_config(
        DISPATCHERS["alltoall"],
        setting,
        workload,
        moe_ffn_hidden_size=workload.ffn_hidden_size,
        activation_func=F.silu,
        gated_linear_unit=True,
        bias_activation_fusion=on_gpu,  # as --swiglu does; on a CPU it would need a compiler
        moe_grouped_gemm=on_gpu,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=on_gpu,  # Megatron's layers on a CPU would need Apex
    )
    spec = get_moe_module_spec(use_te=on_gpu, num_experts=case.num_experts, moe_grouped_gemm=on_gpu)
    # A ModuleSpec in old versions, a functools.partial of MoELayer in new ones.
    submodules = spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]
    submodules = dataclasses.replace(submodules, router=_router_class())
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    layer = MoELayer(config, submodules=submodules, layer_number=1)
    layer.set_layer_number(1)
    wanted = TEGroupedMLP if on_gpu else SequentialMLP
    if type(layer.experts) is not wanted:
        raise UnavailableError(
            f"Megatron-Core makes {type(layer.experts).__name__}, not {wanted.__name__}: "
            "TransformerEngine is too old"
        )
    layer.to(setting.device, case.dtype)
    layer.router.given_logits = _logits(workload)
    _set_weights(layer, setting.rank)
    return layer


def _with_gradients(layer: Any) -> Any:
    """Put the layer into Megatron's DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    # Not for the distributed optimizer: that would move the weights into a buffer, which
    # `experts_of_subject` moves too, and there would be two copies of them.
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(layer.config, ddp, layer)


def _router_class() -> type:
    """TopKRouter with given logits; a class of its own, since Megatron is imported late."""
    from megatron.core.transformer.moe.router import TopKRouter

    class GivenRouter(TopKRouter):
        given_logits: torch.Tensor

        def gating(self, hidden: torch.Tensor) -> Any:
            return _Given.apply(super().gating(hidden), self.given_logits)

    return GivenRouter


class _Given(torch.autograd.Function):
    """Values of one tensor, and its gradient to another one that takes part in nothing else."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given.to(own.dtype).view_as(own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _logits(workload: Workload) -> torch.Tensor:
    """fp32 [T, E]: logits whose top-k are the assignments and whose softmax is their weights."""
    chosen = workload.topk_idx
    logits = torch.full((len(chosen), workload.case.num_experts), UNPICKED, device=chosen.device)
    return logits.scatter(1, chosen, workload.w.log())


def _set_weights(layer: Any, rank: int) -> None:
    """Give every weight values of its own, also across ranks, that keep activations near one.

    On a CPU, Megatron initialises the experts of all ranks alike: a token at the right expert of
    the wrong rank would not be noticed.
    """
    parameters = list(layer.named_parameters())
    for index, (name, weight) in enumerate(parameters):
        owner = 1 + rank if "experts." in name else 0  # ranks have the same router
        generator = torch.Generator(weight.device).manual_seed(index + owner * len(parameters))
        with torch.no_grad():
            weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
