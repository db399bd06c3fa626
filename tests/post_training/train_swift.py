"""Trains with ms-swift's own trainer for Megatron, from its command line's words.

    torchrun ... train_swift.py FOLDER WORDS...

Prints the dispatchers' classes and, as ms-swift does, the losses.
"""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

import torch.distributed as dist
import without_gpu

WORDS = """
    --model_type qwen3_moe --template qwen3 --torch_dtype bfloat16 --attention_backend local
    --tuner_type full --bridge_backend megatron-bridge --padding_free false --max_length 32
    --micro_batch_size 2 --global_batch_size 4 --train_iters 4 --lr 1e-3 --logging_steps 1
    --recompute_granularity none --dataloader_num_workers 0 --finetune true
    --no_save_optim true --no_save_rng true --add_version false
"""


def main(folder: str, words: list[str]) -> None:
    without_gpu.prepare()
    dist.init_process_group("gloo")
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from swift.megatron.arguments import MegatronSftArguments
    from swift.megatron.pipelines.train.sft import MegatronSft
    from swift.utils import parse_args

    places = {"model": folder, "dataset": f"{folder}/data.jsonl", "output_dir": f"{folder}/swift"}
    given = [word for name, place in places.items() for word in (f"--{name}", place)]
    given += ["--expert_model_parallel_size", os.environ["WORLD_SIZE"], *shlex.split(WORDS)]
    args: Any
    args, rest = parse_args(MegatronSftArguments, [*given, *words])
    assert not rest, rest
    for name, value in without_gpu.FIELDS.items():
        if hasattr(args, name):
            setattr(args, name, value)
    layers = {"transformer_layer_spec": without_gpu.local_layers()}
    args.megatron_extra_kwargs = {**without_gpu.FIELDS, **(args.megatron_extra_kwargs or {})}
    args.megatron_extra_kwargs |= layers
    args.save_args = lambda *_: None  # layers are no JSON
    model_parallel_cuda_manual_seed(1)

    class Sft(MegatronSft):  # type: ignore[misc, unused-ignore]
        def prepare_trainer(self) -> Any:
            trainer = super().prepare_trainer()
            trainer.save_checkpoint = lambda *_, **__: None  # goes through NVIDIA's modelopt
            for module in trainer.unwrapped_models:
                without_gpu.say("dispatchers", *without_gpu.take_no_mask(module))
            return trainer

    Sft(args).main()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
