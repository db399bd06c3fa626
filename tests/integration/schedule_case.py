"""A GPTModel trained with Megatron's own schedule, eager or with two micro-batches overlapped."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron_setup import initialize, make_config, make_experts_differ

from megatron_ncclep.ranks.pool import RankContext

VOCABULARY, SEQUENCE, BATCH, MICRO_BATCHES, STEPS = 48, 12, 2, 3, 3

# With two model chunks on a rank of two, and without overlap_p2p_comm, Megatron's sends meet the
# wrong receives; its command line refuses that.
PIPELINE = {
    "num_layers": 4,
    "virtual_pipeline_model_parallel_size": 2,
    "pipeline_dtype": torch.bfloat16,
    "overlap_p2p_comm": True,
    "batch_p2p_comm": False,
}

Batch = dict[str, Any]


class ScheduledModel:
    """A GPTModel in Megatron's DDP, and what runs its micro-batches.

    Attributes:
        chunks: the parts of the model that this rank has; two of them with pipeline stages.
    """

    def __init__(
        self,
        ctx: RankContext,
        dispatcher: str,
        ep: int,
        options: dict[str, Any],
        use_te: bool = False,
        sequence: int = SEQUENCE,
        num_micro_batches: int = MICRO_BATCHES,
        pp: int = 1,
    ) -> None:
        """Set Megatron up, and build the model, the same each time.

        Args:
            ctx: this rank.
            dispatcher: type of the token dispatcher.
            ep: expert-parallel ranks.
            options: TransformerConfig fields.
            use_te: the layers are TransformerEngine's, and add weight gradients to main_grad
                themselves: those that they delay they cannot add up anywhere else.
            sequence: length of the training's sequences; the evaluation's are twice as long.
            num_micro_batches: of one step.
            pp: ranks of a pipeline.
        """
        initialize(ep, device=ctx.device, pp=pp)
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._device, self._use_te = ctx.device, use_te
        self._sequence, self._num_micro_batches = sequence, num_micro_batches
        self._replica = parallel_state.get_data_parallel_rank()
        if pp > 1:
            options = {**PIPELINE, "pipeline_model_parallel_size": pp, **options}
        config = make_config(dispatcher, torch.bfloat16, ep, **options)
        experts = config.num_moe_experts
        if use_te:
            spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
                num_experts=experts, moe_grouped_gemm=True
            )
        else:
            spec = gpt_layer_specs.get_gpt_layer_local_spec(experts, moe_grouped_gemm=False)
        wrapping = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, delay_wgrad_compute=config.delay_wgrad_compute
        )
        self.chunks, self._wrapped = [], []
        for stage in (0, 1) if pp > 1 else (None,):
            place = {"ignore_virtual": stage is None, "vp_stage": stage}
            with _output_layer_adds_nothing_itself():
                chunk = GPTModel(
                    config,
                    spec,
                    VOCABULARY,
                    2 * sequence,
                    pre_process=parallel_state.is_pipeline_first_stage(**place),
                    post_process=parallel_state.is_pipeline_last_stage(**place),
                    vp_stage=stage,
                ).to(ctx.device, torch.bfloat16)
            self.chunks.append(chunk)
            self._wrapped.append(DistributedDataParallel(config, wrapping, chunk))
        self._forward_backward = get_forward_backward_func()

    def gradients(self, step: int) -> torch.Tensor:
        """Make the gradients those of one step; its losses."""
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        return self._run(step, self._sequence, forward_only=False)

    @torch.no_grad()
    def evaluate(self, step: int) -> torch.Tensor:
        """Losses on sequences of another length."""
        return self._run(100 + step, 2 * self._sequence, forward_only=True)

    def _run(self, seed: int, length: int, forward_only: bool) -> torch.Tensor:
        batches = [iter(self._batches(seed, length)) for _ in self._wrapped]
        losses = self._forward_backward(
            forward_step_func=_forward_step,
            data_iterator=batches if len(batches) > 1 else batches[0],
            model=self._wrapped,
            num_microbatches=self._num_micro_batches,
            seq_length=length,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
        return torch.stack([loss["loss"] for loss in losses] or [torch.zeros(())])

    def _batches(self, seed: int, length: int) -> list[Batch]:
        device = self._device
        generator = torch.Generator().manual_seed(1000 * seed + self._replica)
        size = (self._num_micro_batches, BATCH, length + 1)
        mask = None  # TransformerEngine has a causal one of its own
        if not self._use_te:
            mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1).to(device)
        return [
            {
                "input_ids": tokens[:, :-1].contiguous().to(device),
                "labels": tokens[:, 1:].contiguous().to(device),
                "position_ids": torch.arange(length, device=device).expand(BATCH, -1),
                "attention_mask": mask,
            }
            for tokens in torch.randint(0, VOCABULARY, size, generator=generator)
        ]


@contextmanager
def _output_layer_adds_nothing_itself() -> Iterator[None]:
    """Let DDP add the output layer's gradient to main_grad: Megatron's own layer needs Apex for it,
    also where all others are TransformerEngine's.
    """
    from megatron.core import tensor_parallel

    original = tensor_parallel.ColumnParallelLinear

    def unfused(*args: Any, config: Any, **kwargs: Any) -> Any:
        config = copy.copy(config)
        config.gradient_accumulation_fusion = False
        return original(*args, config=config, **kwargs)

    tensor_parallel.ColumnParallelLinear = unfused
    try:
        yield
    finally:
        tensor_parallel.ColumnParallelLinear = original


def train_on_schedule(*args: Any, evaluates: bool = True, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Losses and gradients of some steps of plain SGD, by name.

    With `evaluates` there is an evaluation after each.  The other arguments are those of
    `ScheduledModel`.
    """
    model = ScheduledModel(*args, **kwargs)
    for chunk in model.chunks:
        make_experts_differ(chunk)
    results: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        results[f"losses of step {step}"] = model.gradients(step)
        for index, chunk in enumerate(model.chunks):
            for name, parameter in chunk.named_parameters():
                results[f"gradient of {index} {name} in step {step}"] = parameter.main_grad.clone()
                with torch.no_grad():
                    parameter -= 0.1 * parameter.main_grad
        if evaluates:
            results[f"losses after step {step}"] = model.evaluate(step)
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


def _forward_step(
    batches: Iterator[Batch], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    batch = next(batches)
    call = model.build_schedule_plan if return_schedule_plan else model
    return call(**batch), _mean


def _mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}
