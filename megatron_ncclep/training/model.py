"""A model ready for training: Megatron-Core's GPT in its wrappers, with optimizer and schedule.

`ncclep train`, benchmarks/ and the convergence protocol all train this model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import EpError, InputError
from megatron_ncclep.training.data import Batch
from megatron_ncclep.training.settings import Settings, layer_pattern

# Fields whose names differ from Megatron-LM's arguments.
FIELDS = {"num-experts": "num_moe_experts", "norm-epsilon": "layernorm_epsilon"}


def seed_everything(seed: int, **of_tracker: Any) -> None:
    """Set all random states; `of_tracker` goes to Megatron's tracker of GPU states."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, **of_tracker)


def _fields_of(config: type, settings: Settings) -> dict[str, Any]:
    """The values for which `config`, a dataclass of Megatron-Core's, has fields."""
    fields = {field.name for field in dataclasses.fields(config)}
    named = {FIELDS.get(k, k.replace("-", "_")): value for k, value in settings.values.items()}
    dtype = torch.bfloat16 if settings["bf16"] else torch.float32
    named |= {"params_dtype": dtype, "pipeline_dtype": dtype}
    return {name: value for name, value in named.items() if name in fields}


def transformer_config(
    settings: Settings,
    dispatcher: str,
    expert_parallel: int,
    options: EpConfig | None,
    **more: Any,
) -> Any:
    """Build Megatron's TransformerConfig (or MLATransformerConfig).

    Args:
        settings: settings of the model.
        dispatcher: value of `moe_token_dispatcher_type`; for `ncclep` the caller has already called
            `megatron_ncclep.install()`.
        expert_parallel: ranks among which the experts are divided.
        options: the dispatcher's options; None for Megatron's own dispatchers.
        more: further fields.

    Raises:
        InputError: Megatron-Core refuses a value, or values that do not go together.
    """
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    kind = MLATransformerConfig if settings["multi-latent-attention"] else TransformerConfig
    pattern = layer_pattern(settings["moe-layer-freq"], settings["num-layers"])
    fields = _fields_of(kind, settings) | {
        "add_bias_linear": not settings["disable-bias-linear"],
        "gated_linear_unit": settings["swiglu"],
        # Apex's kernel; torch's norms, the fallback of `local`, refuse it.
        "persist_layer_norm": settings.uses_engine and not settings["no-persist-layer-norm"],
        # A list, even one of only ones, makes Megatron treat the layers as heterogeneous.
        "moe_layer_freq": pattern if 0 in pattern else 1,
        "moe_token_dispatcher_type": dispatcher,
        "expert_model_parallel_size": expert_parallel,
    }
    if settings["multi-latent-attention"]:
        # As Megatron-LM does: Megatron-Core's default is 512.
        fields.setdefault("q_lora_rank", None)
    if settings["swiglu"]:
        fields["activation_func"] = torch.nn.functional.silu
    try:
        config = kind(**(fields | more))
    except (AssertionError, ValueError) as error:
        if isinstance(error, EpError):
            raise
        raise InputError(f"Megatron-Core refuses the model's settings: {error}") from error
    if options is not None:
        config.ncclep = options
    return config


def gpt_model(settings: Settings, config: Any, vocab_size: int) -> Any:
    """Build the GPTModel."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    if settings.uses_engine and find_spec("transformer_engine") is None:
        raise InputError(
            "transformer-impl: transformer_engine needs TransformerEngine, which is not "
            "installed: pip install 'megatron-ncclep[te]', or use "
            "--set transformer-impl=local moe-grouped-gemm=false"
        )
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=settings.uses_engine, normalization=config.normalization
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocab_size,
        max_sequence_length=settings["max-position-embeddings"],
        share_embeddings_and_output_weights=not settings["untie-embeddings-and-output-weights"],
        rotary_base=settings["rotary-base"],
        rotary_percent=settings["rotary-percent"],
        position_embedding_type=settings["position-embedding-type"],
    )


class TrainedModel:
    """A GPT with gradients in fp32 and Megatron's Adam.  Everything is collective.

    Args:
        settings: settings of the model and its optimizer.
        config: the result of `transformer_config`; this sets the functions that training needs.
        vocab_size: rows of the embedding.
        device: device of the weights, which have the same seed on all ranks.
        wrapping: context in which the model is wrapped in DistributedDataParallel.
        distributed: the optimizer's state is divided among data-parallel ranks.
        of_optimizer: further fields of Megatron's OptimizerConfig.

    Attributes:
        gpt: Megatron's GPTModel.
        model: the same in Float16Module (bf16 only) and DistributedDataParallel.
        optimizer: Megatron's.
        schedule, optimizer_step: run forward and backward, and the optimizer: Megatron's functions,
            or CUDA graphs of them.

    Raises:
        InputError: `transformer-impl: transformer_engine` without TransformerEngine.
    """

    def __init__(
        self,
        settings: Settings,
        config: Any,
        vocab_size: int,
        device: torch.device,
        wrapping: AbstractContextManager[Any] | None = None,
        distributed: bool = False,
        **of_optimizer: Any,
    ) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.transformer.module import Float16Module

        self.settings = settings
        config.finalize_model_grads_func = finalize_model_grads
        self.gpt = gpt_model(settings, config, vocab_size).to(device)
        module = Float16Module(config, self.gpt) if settings["bf16"] else self.gpt
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
        )
        with wrapping or nullcontext():
            self.model = DistributedDataParallel(config, ddp, module)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                **_fields_of(OptimizerConfig, settings),
                use_distributed_optimizer=distributed,
                **of_optimizer,
            ),
            [self.model],
            use_gloo_process_groups=False,
        )
        config.grad_scale_func = self.optimizer.scale_loss
        self.schedule: Callable[..., Any] = get_forward_backward_func()
        self.optimizer_step: Callable[[], Any] = self.optimizer.step

    def zero(self) -> None:
        """Clear the gradients."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def forward_backward(self, batches: list[Batch]) -> torch.Tensor:
        """Add the gradients of these micro-batches; return their losses, see `_run`."""
        return self._run(self.schedule, batches, forward_only=False)

    def update(self) -> Any:
        """Let the optimizer step; return the norm of the gradients."""
        _, grad_norm, _ = self.optimizer_step()
        return grad_norm

    def validate(self, batches: list[Batch]) -> torch.Tensor:
        """The losses of these micro-batches, see `_run`, without dropout or gradients."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.eval()
        with torch.no_grad():
            losses = self._run(get_forward_backward_func(), batches, forward_only=True)
        self.model.train()
        return losses

    def _run(
        self, schedule: Callable[..., Any], batches: list[Batch], forward_only: bool
    ) -> torch.Tensor:
        """Run one of Megatron's schedules.

        Returns:
            Tensor: fp32 [num_microbatches], this rank's mean loss of each in nats per token, in new
            memory, because a graph overwrites its losses at the next replay.
        """
        results = schedule(
            forward_step_func=_forward_step,
            # A new list, because graphs reuse theirs.
            data_iterator=iter([dict(batch) for batch in batches]),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=self.settings["seq-length"],
            micro_batch_size=self.settings["micro-batch-size"],
            forward_only=forward_only,
        )
        return torch.stack([result["loss"] for result in results])

    def scheduler(self) -> Any:
        """Build the learning-rate schedule; one unit of it is one sample, as in Megatron-LM.

        A resumed run follows its own settings and takes only the position from the checkpoint, so
        `--steps` can be raised.
        """
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        settings = self.settings
        batch, steps = settings["global-batch-size"], settings["train-iters"]
        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=settings["lr"],
            min_lr=settings["min-lr"],
            lr_warmup_steps=int(settings["lr-warmup-fraction"] * steps) * batch,
            lr_decay_steps=steps * batch,
            lr_decay_style=settings["lr-decay-style"],
            start_wd=settings["weight-decay"],
            end_wd=settings["weight-decay"],
            wd_incr_steps=steps * batch,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )


def _forward_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's forward_step_func: the token losses [micro_batch, seq_length] and their mean."""
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(_mean_loss, batch["loss_mask"])


def _mean_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, Any]:
    loss = (losses.float() * mask).sum() / mask.sum()
    # A copy, because Megatron divides `loss` by the number of micro-batches in place.
    return loss, {"loss": loss.detach().clone()}
