"""A GPTModel trained with Megatron's own schedule, eager or with two micro-batches overlapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron_setup import EXPERTS, initialize, make_config, make_experts_differ

from megatron_ncclep.testing.launcher import RankContext

VOCABULARY, SEQUENCE, BATCH, MICRO_BATCHES, STEPS = 48, 12, 2, 3, 3

Batch = dict[str, Any]


def train_on_schedule(
    ctx: RankContext,
    dispatcher: str,
    ep: int,
    options: dict[str, Any],
    use_te: bool = False,
    sequence: int = SEQUENCE,
) -> dict[str, torch.Tensor]:
    """Losses and gradients of some steps of plain SGD, with an evaluation between them, by name.

    Args:
        ctx: this rank.
        dispatcher: type of the token dispatcher.
        ep: expert-parallel ranks.
        options: TransformerConfig fields.
        use_te: the layers are TransformerEngine's, and add weight gradients to main_grad
            themselves: those that they delay they cannot add up anywhere else.
        sequence: length of the training's sequences; the evaluation's are twice as long.
    """
    initialize(ep, device=ctx.device)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config = make_config(dispatcher, torch.bfloat16, ep, **options)
    if use_te:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=EXPERTS, moe_grouped_gemm=True
        )
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(EXPERTS, moe_grouped_gemm=False)
    gpt = GPTModel(config, spec, VOCABULARY, 2 * sequence).to(ctx.device, torch.bfloat16)
    make_experts_differ(gpt)
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, delay_wgrad_compute=config.delay_wgrad_compute
        ),
        gpt,
    )
    forward_backward = get_forward_backward_func()
    results: dict[str, torch.Tensor] = {}

    def run(step: int, length: int, forward_only: bool) -> torch.Tensor:
        losses = forward_backward(
            forward_step_func=_forward_step,
            data_iterator=iter(_batches(ctx, step, length, use_te)),
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=length,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
        return torch.stack([loss["loss"] for loss in losses])

    for step in range(STEPS):
        model.zero_grad_buffer()
        results[f"losses of step {step}"] = run(step, sequence, forward_only=False)
        for name, parameter in gpt.named_parameters():
            results[f"gradient of {name} in step {step}"] = parameter.main_grad.clone()
            with torch.no_grad():
                parameter -= 0.1 * parameter.main_grad
        with torch.no_grad():
            results[f"losses after step {step}"] = run(100 + step, 2 * sequence, forward_only=True)
    return results


def differences(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of what differs in a bit, or is not finite; and whether experts were trained at all."""
    assert found.keys() == expected.keys()
    trained = [name for name, value in expected.items() if "experts" in name and value.any()]
    problems = [] if trained else ["no expert was trained"]
    return problems + [
        name
        for name, value in expected.items()
        if not torch.equal(found[name], value) or not torch.isfinite(value).all()
    ]


def _batches(ctx: RankContext, step: int, sequence: int, use_te: bool) -> list[Batch]:
    generator = torch.Generator().manual_seed(1000 * step + ctx.rank)
    size = (MICRO_BATCHES, BATCH, sequence + 1)
    mask = torch.triu(torch.ones(1, 1, sequence, sequence, dtype=torch.bool), 1)
    return [
        {
            "input_ids": tokens[:, :-1].contiguous().to(ctx.device),
            "labels": tokens[:, 1:].contiguous().to(ctx.device),
            "position_ids": torch.arange(sequence, device=ctx.device).expand(BATCH, -1),
            # TransformerEngine has a causal one of its own.
            "attention_mask": None if use_te else mask.to(ctx.device),
        }
        for tokens in torch.randint(0, VOCABULARY, size, generator=generator)
    ]


def _forward_step(
    batches: Iterator[Batch], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    batch = next(batches)
    call = model.build_schedule_plan if return_schedule_plan else model
    return call(**batch), _mean


def _mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}
