"""A GPTModel trained on packed sequences (THD), of which every rank has its own number."""

from __future__ import annotations

from typing import Any

import torch
from megatron_setup import initialize, make_config, make_experts_differ
from te_stand_ins import Attention

from megatron_ncclep.ranks.pool import RankContext

VOCABULARY, MAX_LENGTH = 48, 64
# Lengths of the sequences of each rank's batch, step by step: more and fewer tokens than before,
# ranks that have many times those of others, and a batch of one token.
LENGTHS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((3, 2), (7,), (1, 1, 1), (4, 9)),
    ((12, 1, 30), (2, 2), (1,), (5,)),
    ((1,), (9, 8, 7, 6), (20,), (3, 3)),
)


def train_packed_on_rank(
    ctx: RankContext,
    dispatcher: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    use_te: bool = False,
) -> dict[str, torch.Tensor]:
    """Losses and gradients of each step of plain SGD, by name; nothing is averaged over ranks."""
    initialize(ctx.num_ranks, device=ctx.device)
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams

    config = make_config(dispatcher, dtype, ctx.num_ranks, **options)
    experts = config.num_moe_experts
    if use_te:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=True
        )
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(experts, moe_grouped_gemm=False)
        spec.submodules.self_attention.submodules.core_attention = Attention
    model = GPTModel(config, spec, VOCABULARY, MAX_LENGTH).to(ctx.device, dtype)
    make_experts_differ(model)
    results: dict[str, torch.Tensor] = {}
    for step, of_ranks in enumerate(LENGTHS):
        lengths = of_ranks[ctx.rank]
        generator = torch.Generator().manual_seed(100 * step + ctx.rank)
        tokens = torch.randint(0, VOCABULARY, (1, sum(lengths) + 1), generator=generator)
        tokens = tokens.to(ctx.device)
        positions = torch.cat([torch.arange(n) for n in lengths])[None].to(ctx.device)
        ends = torch.tensor([0, *lengths]).cumsum(0).to(ctx.device, torch.int32)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        labels = tokens[:, 1:].contiguous()
        model.zero_grad()
        losses = model(tokens[:, :-1], positions, None, labels=labels, packed_seq_params=packed)
        losses.float().mean().backward()
        results[f"losses {step}"] = losses.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is None:  # of an expert without rows
                parameter.grad = torch.zeros_like(parameter)
            results[f"gradient {step} of {name}"] = parameter.grad.clone()
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
    return results
