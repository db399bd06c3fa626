"""Which experts `experts="auto"` takes: grouped ones where they were measured to be faster.

TransformerEngine's experts (Megatron's) are launched one by one, at a constant cost to the host for
each, whatever its size.  Grouped experts are launched all at once, and no host waits for their
numbers of rows.  So what counts is the work of one expert, in multiply-adds of one of its three
products: rows times hidden size times the expert's own size.

The rows are those of a balanced routing: tokens of a rank times top-k over the experts of a rank,
however many ranks share them.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ncclep.config import GROUPED_ALIGNMENT, EpConfig
from megatron_ncclep.integration.experts.grouped import class_problem
from megatron_ncclep.integration.experts.grouped_gemm import unavailable_reason
from megatron_ncclep.integration.experts.refusals import config_problem
from megatron_ncclep.ranks.group import EpGroup

# Where both took as long.  One H200, forward and backward of a layer with the dispatcher `ncclep`,
# `ncclep bench --config layers`, 2026-11-22: G multiply-adds, us with Megatron's and grouped ones
#
#     0.8   qwen3-30b-a3b            16479    5954
#     1.1   gpt-oss-120b             25756   11588
#     1.9   deepseek-v3              41103   30386
#     6.4   qwen3-30b-a3b, 1 of 8     6738    5739
#     8.5   gpt-oss-120b, 1 of 8      6951    6409
#    15     deepseek-v3, 1 of 8      17042   17227
#     120   mixtral-8x7b             30808   31442
EVEN_WORK = 12e9
# Of a micro-batch, where Megatron's arguments do not say.
USUAL_TOKENS = 4096


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        experts: "grouped" or "megatron".
        reason: in words.
    """

    experts: str
    reason: str


def announce(choice: Choice, process_group: Any) -> None:
    """Log a choice, once for the group and on its first rank only."""
    group = EpGroup.of(process_group)
    if group.rank == 0:
        text = f"experts: {choice.experts}, because {choice.reason}"
        group.log_once(logging.INFO, text, text)


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
        config: TransformerConfig, validated.
        options: of the dispatcher, with experts="auto".
        experts: Megatron's, just built.
        num_experts: of this rank.
        num_slices: ranks that each expert's own hidden size is divided among.
        in_graph: a CUDA graph will hold them.
        device: on which they will compute; by default a GPU where there is one.  Where they are
            now says little: Megatron may build on the CPU, or without memory at all.

    Returns:
        the same on all ranks with the same device and Megatron's arguments.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if config.bf16 else config.params_dtype
    problem = (
        config_problem(config, num_experts, num_slices)
        or class_problem(experts)
        or unavailable_reason(device, dtype)
        or _rows_problem(options)
    )
    if problem:
        return Choice("megatron", f"grouped ones do not support {problem}")
    if in_graph:
        return Choice("grouped", "CUDA graphs hold the experts, and Megatron's need the host")
    if device.type != "cuda":
        return Choice("megatron", f"grouped ones were not measured on a {device.type.upper()}")
    known = tokens_of_micro_batch(config)
    tokens = known or USUAL_TOKENS
    said = f"{tokens} tokens" if known else f"{tokens} tokens, assumed"
    # Slices of an expert get the rows of all ranks that hold one, for a part of its weights each.
    rows = max(1, tokens * config.moe_router_topk * num_slices // num_experts)
    width = getattr(config, "moe_latent_size", None) or config.hidden_size
    ffn_width = config.moe_ffn_hidden_size // num_slices
    work = rows * width * ffn_width
    shape = (
        f"each of {num_experts} has about {rows} rows ({said}) of {width} x {ffn_width}, "
        f"{work / 1e9:.1f} G multiply-adds"
    )
    if work <= EVEN_WORK:
        return Choice("grouped", f"{shape}: up to {EVEN_WORK / 1e9:g} G they were the faster ones")
    return Choice("megatron", f"{shape}: from {EVEN_WORK / 1e9:g} G on they were the faster ones")


def tokens_of_micro_batch(config: Any) -> int | None:
    """Tokens that one rank's layer gets, if Megatron's training script knows; else None."""
    # Megatron-LM keeps its arguments there; nothing of it is imported for this.
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


def _rows_problem(options: EpConfig) -> str | None:
    rows = options.max_recv_rows
    if isinstance(rows, int) and rows % GROUPED_ALIGNMENT:
        return f"max_recv_rows={rows}: it must be a multiple of {GROUPED_ALIGNMENT}"
    return None
