"""A GPTModel of any layers, trained, evaluated and asked for text with a dispatcher of choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from layer_case import options_shown
from megatron_setup import initialize, make_config, make_experts_differ
from te_stand_ins import Attention

from megatron_ncclep.ranks.pool import RankContext

VOCABULARY, SEQUENCE, BATCH, EP, STEPS, MICRO_BATCHES = 48, 12, 2, 2, 2, 2
PROMPT, GENERATED = 5, 4


@dataclass(frozen=True, eq=False)
class ModelCase:
    """One model.

    Attributes:
        name: of the case.
        options: fields of TransformerConfig.
        sizes: more of them, which are not what the case is about.
        padding: positions at the end of each sequence that the model is told are padding.
        generates: the model ends each step with some text, with a cache of keys and values.
        since: the Megatron-Core release that has the options.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    padding: int = 0
    generates: bool = False
    since: str = "0.16"

    def __str__(self) -> str:
        return self.name

    def options_shown(self) -> list[str]:
        """What the case shows to work, for docs/support.md."""
        shown = [*options_shown(self.options), "other sizes in evaluations"]
        if self.padding and "padding" in self.name:
            shown.append("padding_mask")
        if self.generates:
            shown += ["generation of text", "moe_pad_experts_for_cuda_graph_inference"]
        return shown


def train_model_on_rank(
    ctx: RankContext, dispatcher: str, case: ModelCase, ncclep: Any
) -> dict[str, torch.Tensor]:
    """Losses, gradients and routers' biases of each step of plain SGD over Megatron's schedule and
    DDP, with an evaluation on longer sequences after each, by name.
    """
    initialize(EP)
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    MTPLossLoggingHelper.tracker = {}  # for as many predictions as the last model had
    config = make_config(dispatcher, torch.float64, EP, ncclep=ncclep, **case.options, **case.sizes)
    config.finalize_model_grads_func = finalize_model_grads
    layers = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    if config.multi_latent_attention:
        for layer in layers.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = Attention
    ahead = None
    if config.mtp_num_layers:
        ahead = gpt_layer_specs.get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False)
    gpt = GPTModel(config, layers, VOCABULARY, 2 * SEQUENCE, mtp_block_spec=ahead).double()
    make_experts_differ(gpt)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
    seed = 1000 * parallel_state.get_data_parallel_rank()
    results: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        model.zero_grad_buffer()
        run = partial(run_schedule, model, case)
        results[f"losses {step}"] = run(seed + step, SEQUENCE, forward_only=False)
        for name, parameter in gpt.named_parameters():
            results[f"gradient {step} of {name}"] = parameter.main_grad.clone()
            with torch.no_grad():
                parameter -= 0.1 * parameter.main_grad
        for name, buffer in gpt.named_buffers():
            if name.endswith(("expert_bias", "qb_beta")):
                results[f"{name} {step}"] = buffer.clone()
        model.eval()
        with torch.no_grad():
            results[f"evaluation {step}"] = run(seed + 50 + step, 2 * SEQUENCE, forward_only=True)
        if case.generates:
            results[f"logits of text {step}"] = generate(gpt, seed + 70 + step)
        model.train()
    return results


def run_schedule(
    model: Any, case: ModelCase, seed: int, length: int, forward_only: bool
) -> torch.Tensor:
    """One step's micro-batches; their losses."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses = get_forward_backward_func()(
        forward_step_func=partial(forward_step, case),
        data_iterator=batches(seed, length),
        model=[model],
        num_microbatches=MICRO_BATCHES,
        seq_length=length,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    return torch.stack([loss["loss"] for loss in losses])


def batches(seed: int, length: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randint(0, VOCABULARY, (BATCH, length + 1), generator=generator)


def forward_step(case: ModelCase, data: Iterator[torch.Tensor], model: Any) -> tuple[Any, Any]:
    tokens = next(data)
    labels, length = tokens[:, 1:].contiguous(), tokens.shape[1] - 1
    positions = torch.arange(length).expand(BATCH, -1)
    weights = torch.ones(BATCH, length, dtype=torch.float64)
    arguments: dict[str, Any] = {}
    if case.padding:
        weights[:, -case.padding :] = 0
        arguments["padding_mask"] = weights == 0
    losses = model(tokens[:, :-1], positions, causal(length), labels=labels, **arguments)

    def reduce(losses: torch.Tensor) -> tuple[Any, ...]:
        total, number = (losses * weights).sum(), weights.sum()
        seen = {"loss": (total / number).detach()}
        if model.config.calculate_per_token_loss:
            return total, number.int(), seen
        return total / number, seen

    return losses, reduce


@torch.inference_mode()
def generate(gpt: Any, seed: int) -> torch.Tensor:
    """Logits of a prompt's end and of the most probable tokens after it, one at a time, for which
    Megatron pads experts to capacity.
    """
    from megatron.core.inference import utils
    from megatron.core.inference.contexts import StaticInferenceContext

    context = StaticInferenceContext(BATCH, PROMPT + GENERATED)
    tokens = next(batches(seed, PROMPT - 1))
    found = []
    utils.moe_layer_cache = None  # of another model
    for _ in range(GENERATED):
        start = context.sequence_len_offset
        length = tokens.shape[1]
        positions = torch.arange(start, start + length).expand(BATCH, -1)
        arguments = {"inference_context": context, "runtime_gather_output": True}
        logits = gpt(tokens, positions, causal(length), **arguments)[:, -1:]
        context.sequence_len_offset += length
        context.enable_decode_mode()
        tokens = logits.argmax(dim=-1)
        found.append(logits)
        if start == 0:
            config = gpt.config
            full = config.num_moe_experts / config.moe_router_topk
            utils.set_decode_expert_padding(gpt, True, full)
    utils.set_decode_expert_padding(gpt, False)
    utils.moe_layer_cache = None
    return torch.cat(found, dim=1).clone()


def causal(length: int) -> torch.Tensor:
    return torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
