"""Which experts `experts="auto"` chooses: grouped ones where they were measured to be faster.

Grouped experts compute in one of two ways.  With quack-kernels, the GEMMs add weight gradients to
main_grad themselves, in fp32, and include SwiGLU: they were faster in all shapes measured.  With
torch's grouped_mm, gradients are rounded, and a pass over all weights adds them, which
TransformerEngine's fused accumulation does not need.  Then the choice depends on the work of one
expert, in multiply-adds of one of its three GEMMs: rows times hidden size times the expert's own
size.  TransformerEngine launches its experts' GEMMs one by one, and each costs the host the same
time, whatever its size.

In FP8 they were faster than Megatron's in the same recipe in all shapes measured (1.3 to 7.0 times,
one H200, 2026-11-29, experts alone).

The number of rows is that of a balanced routing: tokens of a rank times top-k, divided by the
experts of a rank, however many ranks share them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ncclep.config import GROUPED_ALIGNMENT, EpConfig
from megatron_ncclep.integration.checks.fp8 import is_quantized
from megatron_ncclep.integration.experts import fused_swiglu
from megatron_ncclep.integration.experts.fp8_recipe import unavailable_reason as fp8_unavailable
from megatron_ncclep.integration.experts.grouped import class_problem
from megatron_ncclep.integration.experts.grouped_gemm import unavailable_reason
from megatron_ncclep.integration.experts.refusals import config_problem

# Where torch's GEMMs and Megatron's experts took equally long. One H100, 2026-11-24, experts alone,
# forward and backward into main_grad with gradient_accumulation_fusion, `python -m benchmarks
# --subjects experts:megatron,experts:grouped`: G multiply-adds, and how many times as fast torch's
# were
#
#     0.8   qwen3-30b-a3b              3.31
#     1.1   gpt-oss-120b               1.32
#     1.6   moe-2b                     2.17
#     6.4   qwen3-30b-a3b, 1 of 8      1.29
#     8.5   gpt-oss-120b, 1 of 8       0.96
#    60     deepseek-v3, 1 of 8        0.89
#   120     mixtral-8x7b               0.86
#
# (with quack-kernels 4.11, 2.01, 3.17, 1.39, 1.29, 1.19 and 1.21)
EVEN_WORK = 7.5e9
# The same without the option; one H200, 2026-11-22, whole layers: from 8.5 (1.08 times as fast) to
# 15 G (0.99).
EVEN_WORK_UNFUSED = 12e9
# Tokens of a micro-batch where Megatron's arguments do not say.
USUAL_TOKENS = 4096


@dataclass(frozen=True)
class Choice:
    """A choice of experts, "grouped" or "megatron", and the reason for the log."""

    experts: str
    reason: str


def choose(
    config: Any,
    options: EpConfig,
    experts: Any,
    num_experts: int,
    num_slices: int,
    in_graph: bool,
    device: torch.device | None = None,
) -> Choice:
    """Choose between the experts that Megatron has built and grouped ones.  Not collective.

    Args:
        options: where they ask for grouped experts, only how these compute is open.
        experts, num_experts: Megatron's, just built, of this rank.
        num_slices: ranks that each expert's own hidden size is divided among.
        in_graph: a CUDA graph will hold them.
        device: on which they will compute; by default a GPU if there is one.  Their present device
            says little: Megatron may build on the CPU, or without memory at all.

    Returns:
        the same on all ranks with the same device and Megatron's arguments.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if config.bf16 else config.params_dtype
    hold_all, products = _products(config, device, dtype)
    if options.experts == "grouped":
        return Choice("grouped", f"the options ask for them; {products}")
    problem = (
        config_problem(config, num_experts, num_slices)
        or class_problem(experts)
        or unavailable_reason(device, dtype)
        or (fp8_unavailable(device, dtype) if is_quantized(config) else None)
        or _blocks_problem(options)
    )
    if problem:
        return Choice("megatron", f"grouped ones do not support {problem}")
    if in_graph:
        return Choice("grouped", f"CUDA graphs hold them, and Megatron's need the host; {products}")
    if device.type != "cuda":
        return Choice("megatron", f"grouped ones were not measured on a {device.type.upper()}")
    if hold_all:
        return Choice("grouped", f"they were faster in all shapes measured; {products}")
    known = tokens_of_micro_batch(config)
    tokens = known or USUAL_TOKENS
    said = f"{tokens} tokens" if known else f"{tokens} tokens, assumed"
    # Each slice of an expert gets the rows of all ranks that hold one, for its part of the weights.
    rows = max(1, tokens * config.moe_router_topk * num_slices // num_experts)
    width = getattr(config, "moe_latent_size", None) or config.hidden_size
    ffn_width = config.moe_ffn_hidden_size // num_slices
    work = rows * width * ffn_width
    even = EVEN_WORK if config.gradient_accumulation_fusion else EVEN_WORK_UNFUSED
    is_small = work <= even
    shape = (
        f"each of {num_experts} has about {rows} rows ({said}) of {width} x {ffn_width}, "
        f"{work / 1e9:.1f} G multiply-adds"
    )
    limit = f"up to {even / 1e9:g} G" if is_small else f"from {even / 1e9:g} G on"
    return Choice(
        "grouped" if is_small else "megatron",
        f"{shape}: {limit} they were faster, compared with grouped ones with {products}",
    )


def _products(config: Any, device: torch.device, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether grouped experts' GEMMs include everything else, and how they compute, as text."""
    if is_quantized(config):
        return True, "FP8 products, which quantise SwiGLU and add weight gradients in fp32"
    if reason := fused_swiglu.unavailable_reason(device, dtype):
        return False, f"torch's GEMMs, and weight gradients in a separate pass ({reason})"
    named = f"GEMMs of {fused_swiglu.PACKAGE}, which add weight gradients in fp32"
    if other := fused_swiglu.other_activation(config):
        return False, f"{named}; the activation takes separate passes ({other})"
    return True, named


def tokens_of_micro_batch(config: Any) -> int | None:
    """Tokens that one rank's layer gets, if Megatron's training script knows; else None."""
    # Megatron-LM keeps its arguments there; this imports no part of it.
    holder = sys.modules.get("megatron.training.global_vars")
    arguments = getattr(holder, "_GLOBAL_ARGS", None)
    length = getattr(arguments, "seq_length", None)
    batch = getattr(arguments, "micro_batch_size", None)
    if not length or not batch:
        return None
    ranks = config.context_parallel_size
    if config.sequence_parallel:
        ranks *= config.tensor_model_parallel_size
    return max(1, int(length) * int(batch) // int(ranks))


def _blocks_problem(options: EpConfig) -> str | None:
    if options.alignment == 1:
        return f"alignment=1: it must be a multiple of {GROUPED_ALIGNMENT}, or left out"
    rows = options.max_recv_rows
    if isinstance(rows, int) and rows % GROUPED_ALIGNMENT:
        return f"max_recv_rows={rows}: it must be a multiple of {GROUPED_ALIGNMENT}"
    return None
