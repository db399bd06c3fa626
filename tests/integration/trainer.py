"""Small GPTModels, trained on the ranks of a pool with a dispatcher of choice.

`train` takes some steps of plain descent and returns losses and gradients by name; `differences`
compares two such results to the bit.  `adam_training.py` has Megatron's optimizer and checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from layer_case import options_shown
from megatron_setup import initialize, make_config, make_experts_differ
from rank_pool import RankContext

VOCABULARY, BATCH = 48, 2
Results = dict[str, torch.Tensor]

# With two model chunks on a rank of two, and without overlap_p2p_comm, Megatron's sends meet the
# wrong receives; its command line refuses that.
PIPELINE = {
    "num_layers": 4,
    "virtual_pipeline_model_parallel_size": 2,
    "pipeline_dtype": torch.bfloat16,
    "overlap_p2p_comm": True,
    "batch_p2p_comm": False,
}


@dataclass(frozen=True, eq=False)
class ModelCase:
    """One model and how it is trained.

    Attributes:
        name: of the case.
        options: fields of TransformerConfig.
        sizes: more of them, which the case is not about.
        dtype: of the model.
        ep, tp, etp, pp, cp: ranks that share experts, layers, one expert, a pipeline, in which each
            of them has two stages, and a sequence.
        te: the layers are TransformerEngine's.
        grouped_gemm: so are the experts.
        sequence: tokens of a sequence; evaluations have twice as many.
        micro_batches: of a step.
        steps: of `train`.
        evaluates: after each step.
        padding: positions at the end of each sequence that are masked as padding.
        lengths: of packed sequences (THD), by step and rank; a step then is one micro-batch.
        since: the Megatron-Core release that has the options.
    """

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    ep: int = 2
    tp: int = 1
    etp: int = 1
    pp: int = 1
    cp: int = 1
    te: bool = False
    grouped_gemm: bool = True
    sequence: int = 12
    micro_batches: int = 2
    steps: int = 2
    evaluates: bool = True
    padding: int = 0
    lengths: tuple[tuple[tuple[int, ...], ...], ...] = ()
    since: str = "0.16"

    def __str__(self) -> str:
        return self.name

    def options_shown(self) -> list[str]:
        """The options that the case shows to work, for docs/support.md."""
        shown = options_shown(self.options)
        sizes = {"expert": self.ep, "tensor": self.tp, "pipeline": self.pp}
        shown += ["context_parallel_size"] if self.cp > 1 else []
        if self.te:
            shown.append("transformer_impl=transformer_engine")
        shown += [f"{kind}_model_parallel_size" for kind, size in sizes.items() if size > 1]
        if self.evaluates and not self.lengths:
            shown.append("other sizes in evaluations")
        if self.padding and "padding" in self.name:
            shown.append("padding_mask")
        if self.lengths:
            shown += ["packed sequences (THD)", "ranks with different numbers of tokens"]
        return shown


class Attention(torch.nn.Module):
    """Causal attention that takes packed sequences, and values of another size than keys: on a CPU
    Megatron has neither.
    """

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, *qkv: torch.Tensor, packed_seq_params: Any = None, **_: Any) -> torch.Tensor:
        """From queries, keys and values, each [length, batch, heads, size], and a mask to
        [length, batch, heads * size]; where sequences are packed, there is no batch.
        """
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

        q, *kv = qkv[:3]
        group, before = parallel_state.get_context_parallel_group(), 0
        if group.size() > 1:  # ranks have parts of a sequence, one after the other
            kv = [gather_from_sequence_parallel_region(t, group=group) for t in kv]
            before = group.rank() * len(q)
        starts = [0, len(kv[0])]
        if packed_seq_params is not None:
            starts = packed_seq_params.cu_seqlens_q.tolist()
        parts = []
        for start, end in pairwise(starts):
            queries, keys, values = (t[start:end].movedim(0, -2) for t in (q, *kv))
            lengths = queries.shape[-2], keys.shape[-2]
            mask = torch.ones(lengths, dtype=torch.bool, device=q.device).tril(before)
            out = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, mask, enable_gqa=True
            )
            parts.append(out.movedim(-2, 0).flatten(-2))
        return torch.cat(parts)


class Model:
    """A GPTModel in Megatron's DDP, and the schedule that runs its micro-batches.

    Attributes:
        config: the TransformerConfig.
        chunks: the parts of the model that this rank has; two of them with pipeline stages.
        wrapped: each of them in DDP.
    """

    def __init__(self, ctx: RankContext, dispatcher: str, case: ModelCase, **of_ddp: Any) -> None:
        """Set Megatron up, and build the model, the same each time.  Collective.

        `of_ddp`: fields of DistributedDataParallelConfig.
        """
        initialize(case.ep, case.tp, ctx.device, case.etp, case.pp, case.cp)
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        MTPLossLoggingHelper.tracker = {}  # for as many predictions as the last model had
        self.case, self.rank, self.device = case, ctx.rank, ctx.device
        self.replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        pipeline = {**PIPELINE, "pipeline_model_parallel_size": case.pp} if case.pp > 1 else {}
        pipeline["context_parallel_size"] = case.cp
        options = {
            "expert_tensor_parallel_size": case.etp,
            **pipeline,
            **case.options,
            **case.sizes,
        }
        self.config = make_config(dispatcher, case.dtype, case.ep, case.tp, **options)
        self.config.finalize_model_grads_func = finalize_model_grads
        wrapping = DistributedDataParallelConfig(
            grad_reduce_in_fp32=case.dtype != torch.float64,
            delay_wgrad_compute=self.config.delay_wgrad_compute,
            **of_ddp,
        )
        self.chunks: list[Any] = []
        self.wrapped: list[Any] = []
        for stage in (0, 1) if case.pp > 1 else (None,):
            place = {"ignore_virtual": stage is None, "vp_stage": stage}
            layers, ahead = self._specs(stage)
            with _output_layer_adds_nothing_itself():
                chunk = GPTModel(
                    self.config,
                    layers,
                    VOCABULARY,
                    max(64, 2 * case.sequence),
                    pre_process=parallel_state.is_pipeline_first_stage(**place),
                    post_process=parallel_state.is_pipeline_last_stage(**place),
                    vp_stage=stage,
                    mtp_block_spec=ahead,
                ).to(ctx.device, case.dtype)
            self._change(chunk)
            self.chunks.append(chunk)
            self.wrapped.append(self._in_ddp(chunk, wrapping))

    def _specs(self, stage: int | None) -> tuple[Any, Any]:
        """Specs of a stage's layers, and of those that predict further tokens."""
        from megatron.core.models.gpt import gpt_layer_specs as specs

        config, case = self.config, self.case
        experts = config.num_moe_experts
        if case.te:
            grouped = {"num_experts": experts, "moe_grouped_gemm": case.grouped_gemm}
            return specs.get_gpt_layer_with_transformer_engine_spec(**grouped), None
        place = {"use_transformer_engine": False, "vp_stage": stage}
        layers = specs.get_gpt_decoder_block_spec(config, **place)
        if config.multi_latent_attention or case.lengths or case.cp > 1:
            for layer in layers.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = Attention
        if not config.mtp_num_layers:
            return layers, None
        return layers, specs.get_gpt_mtp_block_spec(config, layers, **place)

    def _in_ddp(self, chunk: Any, wrapping: Any) -> Any:
        from megatron.core.distributed import DistributedDataParallel

        return DistributedDataParallel(self.config, wrapping, chunk)

    def _schedule(self, forward_only: bool) -> Any:
        """The function that runs the micro-batches."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return get_forward_backward_func()

    def _change(self, chunk: Any) -> None:
        """Change a part of the model before DDP takes its parameters."""
        make_experts_differ(chunk)

    def gradients(self, step: int) -> torch.Tensor:
        """Make the gradients those of one step; its losses."""
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        return self._run(step, self.case.sequence, forward_only=False)

    @torch.no_grad()
    def evaluate(self, step: int) -> torch.Tensor:
        """Losses on longer sequences."""
        for chunk in self.wrapped:
            chunk.eval()
        losses = self._run(100 + step, 2 * self.case.sequence, forward_only=True)
        for chunk in self.wrapped:
            chunk.train()
        return losses

    def _run(self, seed: int, length: int, forward_only: bool) -> torch.Tensor:
        batches = [self.batches(seed, length) for _ in self.wrapped]
        losses = self._schedule(forward_only)(
            forward_step_func=self._forward_step,
            data_iterator=[iter(b) for b in batches] if len(batches) > 1 else iter(batches[0]),
            model=self.wrapped,
            num_microbatches=len(batches[0]),
            seq_length=length,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
        return torch.stack([loss["loss"] for loss in losses] or [torch.zeros(())])

    def batches(self, seed: int, length: int) -> list[dict[str, Any]]:
        """The arguments of the model in each micro-batch."""
        generator = torch.Generator().manual_seed(1000 * seed + self.replica)
        if self.case.lengths:
            return [self._packed(self.case.lengths[seed][self.rank], generator)]
        size = (self.case.micro_batches, BATCH, length + 1)
        mask = None  # TransformerEngine has a causal one of its own
        if not self.case.te:
            mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1).to(self.device)
        more: dict[str, Any] = {}
        if self.case.padding:
            is_padding = torch.arange(length, device=self.device) >= length - self.case.padding
            more["padding_mask"] = is_padding.repeat(BATCH, 1)
        return [
            {
                "input_ids": tokens[:, :-1].contiguous().to(self.device),
                "labels": tokens[:, 1:].contiguous().to(self.device),
                "position_ids": torch.arange(length, device=self.device).expand(BATCH, -1),
                "attention_mask": mask,
                **more,
            }
            for tokens in torch.randint(0, VOCABULARY, size, generator=generator)
        ]

    def _packed(self, lengths: tuple[int, ...], generator: torch.Generator) -> dict[str, Any]:
        """One batch of sequences of these lengths."""
        from megatron.core.packed_seq_params import PackedSeqParams

        tokens = torch.randint(0, VOCABULARY, (1, sum(lengths) + 1), generator=generator)
        tokens = tokens.to(self.device)
        ends = torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32)
        return {
            "input_ids": tokens[:, :-1],
            "labels": tokens[:, 1:].contiguous(),
            "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].to(self.device),
            "attention_mask": None,
            "packed_seq_params": PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
                max_seqlen_q=max(lengths),
                max_seqlen_kv=max(lengths),
            ),
        }

    def _forward_step(
        self, batches: Iterator[dict[str, Any]], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Any]:
        batch = next(batches)
        # Micro-batches that overlap are run in parts, by a plan.
        call = model.build_schedule_plan if return_schedule_plan else model
        return call(**batch), partial(self._loss, batch.get("padding_mask"))

    def _loss(self, padding: torch.Tensor | None, losses: torch.Tensor) -> tuple[Any, ...]:
        losses = losses if losses.dtype == torch.float64 else losses.float()
        weights = torch.ones_like(losses) if padding is None else (~padding).to(losses)
        total, number = (losses * weights).sum(), weights.sum()
        seen = {"loss": (total / number).detach().clone()}
        if self.config.calculate_per_token_loss:
            return total, number.int(), seen
        return total / number, seen


@contextmanager
def _output_layer_adds_nothing_itself() -> Iterator[None]:
    """Let DDP add the output layer's gradient to main_grad; Megatron's layer needs Apex for it."""
    from megatron.core import tensor_parallel

    original = tensor_parallel.ColumnParallelLinear

    def unfused(*args: Any, config: Any, **kwargs: Any) -> Any:
        config = copy.copy(config)
        config.gradient_accumulation_fusion = False
        return original(*args, config=config, **kwargs)

    with mock.patch.object(tensor_parallel, "ColumnParallelLinear", unfused):
        yield


def train(ctx: RankContext, dispatcher: str, case: ModelCase) -> Results:
    """Train with plain descent: losses, gradients and routers' biases of each step, and losses of
    evaluations, by name.  Collective.
    """
    model = Model(ctx, dispatcher, case)
    results: Results = {}
    for step in range(case.steps):
        results[f"losses {step}"] = model.gradients(step)
        for index, chunk in enumerate(model.chunks):
            for name, parameter in chunk.named_parameters():
                results[f"gradient {step} of {index} {name}"] = parameter.main_grad.clone()
                with torch.no_grad():
                    parameter -= 0.1 * parameter.main_grad
            for name, buffer in chunk.named_buffers():
                if name.endswith(("expert_bias", "qb_beta")):
                    results[f"{name} {step}"] = buffer.clone()
        if case.evaluates and not case.lengths:
            results[f"evaluation {step}"] = model.evaluate(step)
    return results


def differences(
    found: Mapping[str, torch.Tensor | None],
    expected: Mapping[str, torch.Tensor | None],
    tolerance: float = 0.0,
    least: float = 1.0,
) -> list[str]:
    """Names of what differs by more than `tolerance`, as a part of a tensor's largest value (at
    least of `least`), or is not finite; and whether experts were trained at all.

    None is the gradient of what has none.
    """
    assert found.keys() == expected.keys()
    values = {name: value for name, value in expected.items() if value is not None}
    trained = [name for name, value in values.items() if "experts" in name and value.any()]
    problems = [] if trained else ["no expert was trained"]
    problems += [name for name in found if (found[name] is None) != (name not in values)]
    for name, value in values.items():
        mine = found[name]
        if mine is None or not value.numel():
            continue  # of a rank without tokens
        if mine.shape != value.shape:
            problems.append(f"{name} is {list(mine.shape)}")
            continue
        error = (mine - value).abs().max().item()
        # Not so where one of them is NaN.
        if not error <= tolerance * max(least, value.abs().max().item()):
            problems.append(f"{name}: {error}")
        if not torch.isfinite(value).all():
            problems.append(f"{name} is not finite")
    return problems
