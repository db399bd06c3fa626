"""A model that trains: Megatron-Core's GPT in its wrappers, with its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_ncclep.training.data import Batch
from megatron_ncclep.training.settings import Settings


@dataclass(frozen=True)
class TrainedModel:
    """What `build` makes.

    Attributes:
        gpt: Megatron's GPTModel.
        model: the same in Float16Module (bf16 only) and DistributedDataParallel.
        optimizer: Megatron's Adam for it.
    """

    gpt: Any
    model: Any
    optimizer: Any


def build(
    settings: Settings,
    config: Any,
    vocab_size: int,
    device: torch.device,
    wrapping: AbstractContextManager[Any] | None = None,
    distributed: bool = False,
    **of_optimizer: Any,
) -> TrainedModel:
    """Build the model and its optimizer.  Collective: the ranks' weights come from one seed.

    Gradients are added up and reduced in fp32.

    Args:
        settings: of the model and its optimizer.
        config: what `settings.transformer_config` made; gets the functions that training needs.
        vocab_size: rows of the embedding.
        device: of the weights.
        wrapping: entered while the model is put into DistributedDataParallel.
        distributed: the optimizer's state is divided among data-parallel ranks.
        of_optimizer: further fields of Megatron's OptimizerConfig.
    """
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    config.finalize_model_grads_func = finalize_model_grads
    gpt = settings.gpt_model(config, vocab_size).to(device)
    module = Float16Module(config, gpt) if settings["bf16"] else gpt
    with wrapping or nullcontext():
        model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
            ),
            module,
        )
    optimizer = settings.optimizer(model, use_distributed_optimizer=distributed, **of_optimizer)
    config.grad_scale_func = optimizer.scale_loss
    return TrainedModel(gpt, model, optimizer)


def forward_step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's forward_step_func: the token losses [micro_batch, seq_length] and their mean."""
    batch = next(batches)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return losses, partial(_mean_loss, batch["loss_mask"])


def _mean_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, Any]:
    loss = (losses.float() * mask).sum() / mask.sum()
    # A copy, because Megatron divides `loss` by the number of micro-batches in place.
    return loss, {"loss": loss.detach().clone()}
