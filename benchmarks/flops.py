"""The work of a training step, for rates in TFLOP/s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ncclep.training.settings import TOP_K, Settings, layer_pattern

TEXT_VOCABULARY = 384  # bytes, and the end of a file, padded


def flops_per_token(settings: Settings, vocab_size: int) -> float:
    """Floating-point operations of forward and backward, as Megatron-LM counts them for its log.

    Three GEMMs for every weight that a token uses (output, input's and weight's gradient), with two
    operations each; half of the square for causal attention.  Norms, activations, the embedding and
    the router do not count, nor does recomputation.

    Args:
        vocab_size: rows of the output layer.
    """
    hidden, layers, heads = (
        settings[name] for name in ("hidden-size", "num-layers", "num-attention-heads")
    )
    given = settings.values.get
    if settings["multi-latent-attention"]:
        # With Megatron-Core's defaults.
        lora, rank = given("q-lora-rank"), given("kv-lora-rank", 512)
        head, value = given("qk-head-dim", 128), given("v-head-dim", 128)
        rope = given("qk-pos-emb-head-dim", 64)
        query = heads * (head + rope)
        # The two norms in between are counted, as a weight of each row.
        weights = lora * (hidden + query + 1) if lora else hidden * query
        weights += rank * (hidden + heads * (head + value) + 1)
        weights += hidden * (rope + heads * value)
        attended = (query + heads * value) / 2
    else:
        channels = given("kv-channels", hidden // heads)
        attended = heads * channels
        weights = 2 * hidden * (attended + given("num-query-groups", heads) * channels)
    dense = given("ffn-hidden-size", 4 * hidden)
    width = given("moe-router-topk", TOP_K) * given("moe-ffn-hidden-size", dense)
    width += given("moe-shared-expert-intermediate-size", 0)
    pattern = layer_pattern(settings["moe-layer-freq"], layers)
    widths = sum(width if has_experts else dense for has_experts in pattern)
    weights = layers * weights + (3 if settings["swiglu"] else 2) * hidden * widths
    return 6.0 * (weights + layers * attended * settings["seq-length"] + hidden * vocab_size)


def step_tflops(run: Mapping[str, Any]) -> dict[str, float]:
    """TFLOP/s of a GPU in the steps of a training (see result.py), by the name of a subject."""
    settings = Settings(run["settings"])
    of_one_rank = settings["micro-batch-size"] * run["shape"]["microbatches"]
    # Results from before the field was there have the text's vocabulary.
    flops = flops_per_token(settings, run.get("vocab_size", TEXT_VOCABULARY))
    flops *= of_one_rank / settings["global-batch-size"]
    ran = [subject for subject in run["subjects"] if subject["tokens_per_s"]]
    return {subject["name"]: flops * subject["tokens_per_s"] * 1e-12 for subject in ran}
