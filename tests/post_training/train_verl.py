"""Trains with verl's own engine for Megatron, from its command line's words: a rank of torchrun.

    torchrun ... train_verl.py FOLDER WORDS...

Prints the roles' settings, the dispatchers' classes and the losses.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import without_gpu

ACTOR = "actor_rollout_ref.actor"
STEPS = 4


def main(folder: str, words: list[str]) -> None:
    without_gpu.prepare()
    dist.init_process_group("gloo")
    from hydra import compose, initialize_config_module
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from omegaconf import OmegaConf
    from verl.trainer.config import CheckpointConfig
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    sizes = [
        f"{ACTOR}.megatron.expert_model_parallel_size={dist.get_world_size()}",
        f"{ACTOR}.megatron.expert_tensor_parallel_size=1",
        f"{ACTOR}.megatron.use_remove_padding=False",  # needs packed attention
        f"{ACTOR}.megatron.use_distributed_optimizer=False",
        f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.optim.total_training_steps=10",
        f"{ACTOR}.optim.lr_decay_steps=10",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=[*words, *sizes]).actor_rollout_ref
    for role in ("actor", "ref"):
        given = OmegaConf.to_container(config[role].megatron, resolve=True)
        without_gpu.say(role, given["override_transformer_config"].get("moe_token_dispatcher_type"))

    megatron: Any = omega_conf_to_dataclass(config.actor.megatron)
    fields = {**without_gpu.FIELDS, "attention_backend": "local"}
    fields["transformer_layer_spec"] = without_gpu.local_layers()
    given = {**megatron.override_transformer_config, **fields}
    object.__setattr__(megatron, "override_transformer_config", given)
    engine = MegatronEngineWithLMHead(
        HFModelConfig(path=folder),
        megatron,
        omega_conf_to_dataclass(config.actor.optim),
        CheckpointConfig(),
    )
    model_parallel_cuda_manual_seed(1)
    engine.initialize()
    for module in engine.module:
        without_gpu.say("dispatchers", *without_gpu.take_no_mask(module))
    without_gpu.say("losses", *train(engine))


def train(engine: Any) -> list[float]:
    """The losses of all micro-batches, of this rank."""
    from verl.utils import tensordict_utils
    from verl.utils.dataset.dataset_utils import DatasetPadMode
    from verl.workers.utils.losses import sft_loss

    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = [torch.randint(3, 128, (length,), generator=generator) for length in (9, 14, 11, 16)]
    columns = {
        "input_ids": rows,
        "loss_mask": [torch.ones_like(row) for row in rows],
        "position_ids": [torch.arange(len(row)) for row in rows],
    }
    settings = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "pad_mode": DatasetPadMode.NO_PADDING,
        "temperature": 1.0,
        "global_batch_size": 4 * dist.get_world_size(),
        "use_fused_kernels": False,
    }
    losses: list[float] = []
    with engine.train_mode():
        for _ in range(STEPS):
            tensors = {
                name: torch.nested.as_nested_tensor(column, layout=torch.jagged)
                for name, column in columns.items()
            }
            batch = tensordict_utils.get_tensordict(tensors, settings)
            losses += map(float, engine.train_batch(batch, partial(sft_loss, None))["loss"])
            engine.lr_scheduler_step()
    return losses


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
