"""The combinations of options in recipes of Megatron-Bridge and examples of Megatron-LM for MoE.

Each model trains for three steps with Megatron's optimizer, and its losses match those of
`alltoall`.  docs/support.md lists the combinations, and the options that a CPU cannot run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adam_training import SAME, Training, checkpoints_written
from megatron_setup import SWIGLU, selective
from rank_pool import RankContext
from test_gpt_model import full
from trainer import ModelCase, differences

pytestmark = [pytest.mark.each_release, pytest.mark.since("0.19")]

STEPS = 3
AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
QWEN = SWIGLU | {"normalization": "RMSNorm", "qk_layernorm": True, "num_query_groups": 2}
MLA = dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8) | dict.fromkeys(
    ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 4
)
SHARED = {"moe_shared_expert_intermediate_size": 32}
DEEPSEEK = {
    **SWIGLU,
    **SHARED,
    **MLA,
    "rope_type": "rope",
    "multi_latent_attention": True,
    "normalization": "RMSNorm",
    "moe_router_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-4,
}
GPT_OSS = {
    "gated_linear_unit": True,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
    "add_bias_linear": True,
    "softmax_type": "learnable",
    "window_size": (8, 0),
    "window_attn_skip_freq": 2,
    "moe_router_topk": 4,
}
FULL = full("uniform")
# Options that a case needs but does not test.
SIZES = {*MLA, "num_layers", "num_query_groups", "pipeline_dtype", "rope_type"}
LAYOUT = "pipeline_model_parallel_layout"


def stages(layers: int, **options: Any) -> dict[str, Any]:
    return {"num_layers": layers, "pipeline_dtype": torch.float32, **options}


def mtp(layers: int) -> dict[str, Any]:
    return {"mtp_num_layers": layers, "mtp_loss_scaling_factor": 0.1}


def recipe(name: str, *parts: dict[str, Any], **layout: int) -> ModelCase:
    options = {option: value for part in parts for option, value in part.items()}
    sizes = {option: options.pop(option) for option in {*SIZES, LAYOUT} & options.keys()}
    return ModelCase(name, options, sizes, torch.float32, **layout)


UNEVEN = {"moe_layer_freq": [0, 1, 1, 1, 1], LAYOUT: "Ett|t|t|tmL"}
COUNTED = {f"account_for_{end}_in_pipeline_split": True for end in ("embedding", "loss")}
RECIPES = [
    recipe(
        "mixtral",
        SWIGLU | AUX_LOSS | {"bias_dropout_fusion": True, "cross_entropy_loss_fusion": True},
        tp=2,
        ep=4,
    ),
    recipe("qwen3", QWEN, selective("moe")),
    recipe("qwen3-uneven", QWEN, FULL, stages(6, num_layers_in_last_pipeline_stage=4), pp=2),
    recipe("qwen3-long", QWEN, FULL, cp=2, ep=4),
    recipe(
        "deepseek-v3",
        DEEPSEEK,
        mtp(1),
        selective("core_attn", "mlp"),
        stages(5, **UNEVEN),
        pp=2,
    ),
    recipe("deepseek-v3-overlap", DEEPSEEK, {"moe_shared_expert_overlap": True}, ep=4),
    recipe("kimi-k2", DEEPSEEK, selective("moe", "shared_experts"), stages(6, **COUNTED), pp=2),
    recipe("gpt-oss", GPT_OSS, ep=4),
    recipe("nemotron", SHARED | mtp(2) | {"mtp_use_repeated_layer": True}, ep=4),
]


@pytest.mark.supports(
    LAYOUT,
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    compared="losses with alltoall's, within 2e-6, and gradient norms, within 2e-5 (fp32, Adam)",
)
@pytest.mark.parametrize("case", RECIPES, ids=str)
def test_recipes_train_as_with_alltoall(ctx: RankContext, case: ModelCase) -> None:
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    curves = []
    for kind in ("ncclep", "alltoall"):
        destroy_moe_metrics_tracker()  # its size is that of the previous model
        training = Training(ctx, kind, case)
        curves.append([training.step() for _ in range(STEPS)])
    for (loss, norm), (other_loss, other_norm) in zip(*curves, strict=True):
        assert loss == pytest.approx(other_loss, rel=SAME[ctx.device])
        assert norm == pytest.approx(other_norm, rel=10 * SAME[ctx.device])
        assert norm > 0.1


@pytest.mark.supports("async_save", compared="parameters and Adam's state, to the bit")
@pytest.mark.alone  # each rank's writer takes seconds to start
@checkpoints_written(in_background=True)
def test_a_checkpoint_is_written_during_training(ctx: RankContext, tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    case = replace(RECIPES[0], ep=1, tp=1)
    saved = Training(ctx, "ncclep", case)
    for _ in range(2):
        saved.step()
    expected = saved.everything()
    writers = AsyncCallsQueue()
    how = {"async_sharded_save": True, "async_strategy": "mcore"}
    writers.schedule_async_request(saved.save(tmp_path, **how))
    next_step = saved.step()
    writers.maybe_finalize_async_calls(blocking=True)
    writers.close()
    loaded = Training(ctx, "ncclep", case, seed=1)
    loaded.load(tmp_path)
    assert differences(loaded.everything(), expected) == []
    assert loaded.step() == next_step
