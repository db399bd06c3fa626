"""Recipes of Megatron-Bridge train on one GPU for 20 steps; one override selects our dispatcher.

This file is also the training program: `test_gpu_bridge.py RECIPE OVERRIDES...`.  It calls
Megatron-Bridge's own recipe functions.  They would download the model's configuration; this file
makes a configuration with fewer layers and smaller widths instead.  Overrides have Hydra's syntax,
as in Megatron-Bridge's launcher.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("transformer_engine") is None
        or importlib.util.find_spec("megatron.bridge") is None,
        reason="Megatron-Bridge, which needs TransformerEngine, is not installed",
    ),
]

TIMEOUT_S = 240
# In bf16, with up to eight assignments per token, whose rows are added in different orders.
TOLERANCE = 2e-2
# Few layers and small widths; RECIPES sets the numbers of experts and assignments.
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}
# Name -> the recipe's module and function, the class of the model's configuration, and its sizes.
RECIPES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen.h100.qwen3_moe",
        "qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config",
        "Qwen3Moe",
        {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 256},
    ),
    "deepseek-v3": (
        "deepseek.h100.deepseek_v3",
        "deepseek_v3_pretrain_256gpu_h100_bf16_32nodes_config",
        "DeepseekV3",
        {
            "n_routed_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 256,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 8,
            "q_lora_rank": 128,
            "kv_lora_rank": 128,
        },
    ),
    "gpt-oss-20b": (
        "gpt_oss.h100.gpt_oss",
        "gpt_oss_20b_pretrain_16gpu_h100_bf16_config",
        "GptOss",
        {"num_local_experts": 32, "num_experts_per_tok": 4, "head_dim": 64},
    ),
}
# Settings that fit one GPU and log every step.
ONE_GPU = (
    *(f"model.{kind}_model_parallel_size=1" for kind in ("tensor", "pipeline", "expert")),
    "model.virtual_pipeline_model_parallel_size=null",
    "model.pipeline_model_parallel_layout=null",
    "model.sequence_parallel=false",
    "model.gradient_accumulation_fusion=false",  # needs Apex
    "model.seq_length=512",
    "dataset.seq_length=512",
    "dataset.num_workers=0",
    "tokenizer.tokenizer_type=NullTokenizer",
    "tokenizer.tokenizer_model=null",
    "tokenizer.vocab_size=4096",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.train_iters=20",
    "scheduler.lr_warmup_iters=2",
    "validation.eval_iters=0",
    "checkpoint.save=null",
    "checkpoint.load=null",
    "logger.tensorboard_dir=null",
    "logger.log_interval=1",
)


def cut_down(name: str, overrides: list[str]) -> Any:
    """Megatron-Bridge's ConfigContainer for the recipe, with the overrides applied."""
    import transformers
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    module, function, kind, sizes = RECIPES[name]
    model = getattr(transformers, f"{kind}Config")(**{**SMALL, **sizes})
    model.architectures = [f"{kind}ForCausalLM"]
    AutoBridge.from_hf_pretrained = lambda *_, **__: AutoBridge.from_hf_config(model)
    recipe = getattr(importlib.import_module(f"megatron.bridge.recipes.{module}"), function)
    return process_config_with_overrides(recipe(), cli_overrides=[*ONE_GPU, *overrides])


def main() -> None:
    import megatron_ncclep

    megatron_ncclep.install()
    # Megatron-Core's wheel brings these compiled, and no Makefile.
    datasets: Any = importlib.import_module("megatron.core.datasets.utils")
    datasets.compile_helpers = lambda: None
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(cut_down(sys.argv[1], sys.argv[2:]), forward_step)


def train(folder: Path, recipe: str, *overrides: str) -> tuple[str, list[float]]:
    """Train for 20 steps; return the log and the losses."""
    from small_job import environment  # not importable in the training program

    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    done = subprocess.run(
        [*launch, __file__, recipe, *overrides],
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TIMEOUT_S,
    )
    (folder / "log.txt").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout, [float(loss) for loss in re.findall(r"lm loss: ([-+.\dE]+)", done.stdout)]


@pytest.mark.limit_s(2 * TIMEOUT_S)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains(tmp_path: Path, engine_name: str, recipe: str) -> None:
    """Even if the recipe sets HybridEP; another override selects the engine."""
    kind = "model.moe_token_dispatcher_type"
    log, ours = train(tmp_path, recipe, f"{kind}=ncclep", f"model.ncclep.engine={engine_name}")
    print(*(line for line in log.splitlines() if "ncclep" in line or "lm loss" in line), sep="\n")
    assert f"engine {engine_name!r} for 1 ranks" in log
    _, theirs = train(tmp_path, recipe, f"{kind}=alltoall")
    assert len(ours) == len(theirs) == 20
    assert ours == pytest.approx(theirs, rel=TOLERANCE)
    assert ours[-1] < ours[0]


if __name__ == "__main__":
    main()
