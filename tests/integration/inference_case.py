"""Layers and models of Megatron's for generating text, the same on a CPU and on GPUs.

On GPUs the experts' weights are TransformerEngine's.  On a CPU a stand-in holds them; all else is
Megatron's own, its inference experts and their Triton kernels included (interpreted).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from adapter_libraries import TEGroupedLinear
from megatron_setup import initialize, make_config, make_experts_differ
from rank_pool import RankContext

from megatron_ncclep.config import EpConfig

VOCABULARY, LONGEST = 48, 64


@dataclass(frozen=True)
class InferenceCase:
    """A model for generating text; `options` are TransformerConfig fields."""

    # The dispatchers' types, for inference and for training.
    kind: str = "ncclep"
    trains: str = "alltoall"
    ep: int = 2
    ncclep: dict[str, Any] = field(default_factory=lambda: {"inference_tokens": 4})
    options: dict[str, Any] = field(default_factory=dict)


def make_inference_config(case: InferenceCase) -> Any:
    from megatron.core.activations import squared_relu

    options: dict[str, Any] = {
        "transformer_impl": "inference_optimized",
        "inference_moe_token_dispatcher_type": case.kind,
        "inference_grouped_gemm_backend": "torch",
        "activation_func": squared_relu,
        "moe_grouped_gemm": True,
        "normalization": "RMSNorm",
        "masked_softmax_fusion": False,
        **case.options,
    }
    config = make_config(case.trains, torch.bfloat16, case.ep, **options)
    if "ncclep" in (case.kind, case.trains):
        config.ncclep = EpConfig(**case.ncclep)
    return config


def moe_builder(device: str) -> Any:
    """What builds an MoELayer for generating text: Megatron's, on a CPU with other weights."""
    from megatron.core.transformer.moe import experts, moe_layer, router

    if device == "cuda":
        from megatron.core.models.gpt.moe_module_specs import get_inference_optimized_moe_spec

        return get_inference_optimized_moe_spec()
    from megatron.core.inference.moe import permute

    permute._NUM_SMS = 2  # which it would ask a GPU
    linears = experts.GroupedMLPSubmodules(linear_fc1=TEGroupedLinear, linear_fc2=TEGroupedLinear)
    return partial(
        moe_layer.MoELayer,
        submodules=moe_layer.MoESubmodules(
            experts=partial(experts.InferenceGroupedMLP, submodules=linears),
            router=router.InferenceTopKRouter,
        ),
    )


def build_inference_layer(ctx: RankContext, case: InferenceCase) -> Any:
    initialize(case.ep, device=ctx.device)
    layer = moe_builder(ctx.device)(config=make_inference_config(case), layer_number=1)
    layer.set_layer_number(1)
    make_experts_differ(layer)
    layer.to(ctx.device, torch.bfloat16).eval()
    if case.kind == "nccl":
        ready_for_nccl()
    return layer


def ready_for_nccl() -> None:
    """Prepare Megatron's own dispatcher for steps without graphs, as its context does."""
    from megatron.core.transformer.moe.token_dispatcher_inference import NCCLAllGatherDispatcher

    NCCLAllGatherDispatcher.allocate_buffers()
    NCCLAllGatherDispatcher._use_allgather_v = True


# --- experts of whole numbers --------------------------------------------------------------------


def expert_weights(expert: int, ffn: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each output of either product is one input, or its negative; another one in each expert."""
    first, second = torch.zeros(ffn, hidden), torch.zeros(hidden, ffn)
    f, h = torch.arange(ffn), torch.arange(hidden)
    first[f, (3 * f + 5 * expert + 1) % hidden] = (f + expert) % 2 * 2.0 - 1
    second[h, (h + 7 * expert) % ffn] = (h // 2 + expert) % 2 * 2.0 - 1
    return first, second


def use_whole_numbers(layer: Any) -> None:
    """Give the layer's experts `expert_weights`."""
    for index, expert in enumerate(layer.local_expert_indices):
        linears = layer.experts.linear_fc1, layer.experts.linear_fc2
        first, second = (getattr(linear, f"weight{index}").data for linear in linears)
        for weight, value in zip(
            (first, second), expert_weights(expert, *first.shape), strict=True
        ):
            weight.copy_(value)


@dataclass(frozen=True)
class Batch:
    """What a router would hand on.  All sums of experts' rows are exact in bf16."""

    hidden: torch.Tensor
    topk: torch.Tensor
    probs: torch.Tensor

    @classmethod
    def random(cls, num_tokens: int, seed: int, config: Any, device: str) -> Batch:
        """Whole numbers up to 3, probabilities in eighths; some go nowhere, as padding does."""
        experts, top_k = config.num_moe_experts, config.moe_router_topk
        generator = torch.Generator().manual_seed(seed)
        shape = (num_tokens, config.hidden_size)
        hidden = torch.randint(-3, 4, shape, generator=generator).bfloat16()
        topk = torch.rand(num_tokens, experts, generator=generator).argsort(dim=1)[:, :top_k]
        topk[torch.rand(num_tokens, generator=generator) < 0.2] = -1
        probs = torch.randint(1, 9, topk.shape, generator=generator) / 8
        return cls(hidden.to(device), topk.to(device), probs.to(device))

    def expected(self, ffn: int) -> torch.Tensor:
        """What the whole layer makes of it, from the definition of its experts."""
        hidden = self.hidden.shape[1]
        out = torch.zeros(self.hidden.shape, device=self.hidden.device)
        for expert in self.topk[self.topk >= 0].unique().tolist():
            weights = [w.to(out.device) for w in expert_weights(expert, ffn, hidden)]
            rows = (self.hidden.float() @ weights[0].T).relu().square() @ weights[1].T
            out += rows * torch.where(self.topk == expert, self.probs, 0).sum(dim=1, keepdim=True)
        return out.bfloat16()


@torch.no_grad()
def experts_of(layer: Any, batch: Batch) -> torch.Tensor:
    """The layer's pass behind the router, while text is generated: Megatron's order of hooks."""
    from megatron.core.inference.utils import InferenceMode

    dispatcher = layer.token_dispatcher = layer._inference_token_dispatcher
    with InferenceMode.active():
        # Megatron has [tokens, 1, hidden].
        rows, probs = layer.preprocess(batch.hidden[:, None], batch.probs, batch.topk.clone())
        rows, probs = layer.dispatch(rows, probs)
        out, bias = layer.routed_experts_compute(rows, probs)
        assert bias is None
        assert layer.token_dispatcher is dispatcher
        return layer.postprocess(layer.combine(out), None)[:, 0]


# --- text ----------------------------------------------------------------------------------------


# A tokenizer of numbers.
WORDS = SimpleNamespace(
    vocab_size=VOCABULARY,
    eod=VOCABULARY - 1,
    bos=None,
    tokenize=lambda text: [int(word) for word in text.split()],
    detokenize=lambda tokens, **_: " ".join(map(str, tokens)),
)


def build_gpt(ctx: RankContext, case: InferenceCase) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    initialize(case.ep, device=ctx.device)
    config = make_inference_config(case)
    spec = get_gpt_layer_local_spec(
        config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm"
    )
    spec.submodules.mlp = moe_builder(ctx.device)
    gpt = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LONGEST)
    make_experts_differ(gpt)
    if case.kind == "nccl":
        ready_for_nccl()
    return gpt.to(ctx.device, torch.bfloat16).eval()


@contextmanager
def text_generated(gpt: Any) -> Iterator[Any]:
    """Megatron's static engine around a model: it generates the likeliest tokens after a prompt.

    Its inference router takes one sequence at a time, or those that the dynamic engine has joined,
    which needs FlashAttention.
    """
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.inference.engines import StaticInferenceEngine, static_engine
    from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
        GPTInferenceWrapper,
    )
    from megatron.core.inference.sampling_params import SamplingParams
    from megatron.core.inference.text_generation_controllers import text_generation_controller
    from megatron.core.inference.utils import InferenceMode

    static_engine.HAVE_TQDM = True  # it would draw a bar, with a stand-in where there is no tqdm
    wrapped = GPTInferenceWrapper(gpt, StaticInferenceContext(1, LONGEST))
    controller = text_generation_controller.TextGenerationController(wrapped, WORDS)
    engine = StaticInferenceEngine(controller, legacy=True)

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        params = SamplingParams(num_tokens_to_generate=num_tokens, top_k=1)
        params.add_attributes({"no_early_termination": True})  # as many steps on all ranks
        text = " ".join(map(str, prompt))
        found: list[int] = engine.generate([text], sampling_params=params)[0].generated_tokens
        return torch.as_tensor(found).tolist()

    try:
        yield generate
    finally:
        InferenceMode.unset_active()
