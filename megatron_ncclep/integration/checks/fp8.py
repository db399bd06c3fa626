"""Experts that compute in FP8, or from TransformerEngine's grouped tensors: the alignment of their
blocks of rows, and where it comes from.

TransformerEngine's FP8 GEMMs need a multiple of 16 rows (MXFP8 of 32, FP4 of 128, its op fuser and
grouped tensors of 256).  Megatron provides that in one of two ways:

    without an option      the experts copy their rows to where zero rows fit in between, and cut
                           those out of their output: two passes over the rows, and two backward
    moe_router_padding_    the router's map gives each expert tokens that did not choose it, with
    for_quantization       probability zero, until their numbers fit: these rows travel too

Here dispatch itself leaves the zero rows between the blocks: they are the engine's alignment.  So
the experts have nothing to do.  TEGroupedMLP from 0.18 on does not even look, as with dispatchers
of Megatron's own that pad (`change_padding`); all others check the numbers of rows before they copy
any.  The map stays as the router made it.  Zero rows do not change the scale of a tensor or of a
block of it, which depends on the largest magnitude, and add nothing to a weight's gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from types import ModuleType
from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import InputError, UnsupportedError
from megatron_ncclep.integration.options.field import NAME
from megatron_ncclep.integration.patching import is_changed, mark_patched
from megatron_ncclep.ranks.group import EpGroup

# Compute capability of GPUs whose GEMMs take blocks of 16 or 32 numbers with a scale each.
BLACKWELL = (10, 0)


def is_quantized(config: Any) -> bool:
    """Whether the experts of a TransformerConfig compute in FP8 or FP4."""
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def needs_padding(config: Any) -> bool:
    """Whether Megatron's experts would pad their rows if no dispatcher had."""
    # Before 0.20 the op fuser pads rows in FP8 only; from then on it sets the option, and does so
    # in bf16 too.
    return is_quantized(config) or bool(getattr(config, "moe_use_grouped_tensor", False))


def change_padding(module: ModuleType) -> None:
    """Let the experts of layers with our dispatcher take their blocks as they come.

    What they do otherwise reads the numbers of rows on the host, even where it copies none.

    Args:
        module: Megatron's `experts`, which has the question whether to pad by name from 0.18 on.
    """
    original = getattr(module, "skip_routed_expert_padding", None)
    if original is None or is_changed(original):
        return

    @functools.wraps(original)
    def skip_routed_expert_padding(config: Any) -> bool:
        return config.moe_token_dispatcher_type == NAME or bool(original(config))

    changed = mark_patched(skip_routed_expert_padding)
    setattr(module, "skip_routed_expert_padding", changed)  # noqa: B010


def align_for_experts(config: Any, options: EpConfig) -> EpConfig:
    """Set the alignment of row blocks that the experts need.  Not collective.

    Args:
        config: TransformerConfig, validated.
        options: of the dispatcher; an alignment that is not set becomes the one needed.

    Returns:
        the options, unchanged if these experts need none.

    Raises:
        UnsupportedError: this GPU does not support the recipe; names the option, its value, the
            reason and the remedy.
        InputError: the requested alignment is too small, or another option conflicts with the one
            needed.
    """
    if not needs_padding(config):
        return options
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

    recipe = _recipe(config)
    if is_quantized(config):
        _check_gpu(config)
    needed = get_align_size_for_quantization(config)
    if options.alignment is None:
        try:
            options = dataclasses.replace(options, alignment=needed)
        except InputError as error:  # about an alignment that the user did not set
            raise InputError(f"{recipe} makes the alignment {needed}: {error}") from None
    if options.block_alignment % needed:
        raise InputError(
            f"alignment {options.alignment}: experts with {recipe} need blocks of a multiple of "
            f"{needed} rows: leave it out (--ncclep-alignment), or ask for {needed} or more"
        )
    return options


def announce_alignment(config: Any, options: EpConfig, process_group: Any) -> None:
    """Log that dispatch pads the experts' rows, once per group and on its first rank only."""
    group = EpGroup.of(process_group)
    if needs_padding(config) and group.rank == 0:
        text = (
            f"{_recipe(config)}: experts get blocks of a multiple of {options.alignment} rows from "
            "the dispatch, and pad none themselves"
        )
        group.log_once(logging.INFO, text, text)


def _recipe(config: Any) -> str:
    if not is_quantized(config):
        return "moe_use_grouped_tensor=True"
    kind = "fp8" if config.fp8 else "fp4"
    recipe = getattr(config, f"{kind}_recipe")
    return f"{kind}={getattr(config, kind)!r}, {kind}_recipe={getattr(recipe, 'value', recipe)!r}"


def _check_gpu(config: Any) -> None:
    """Refuse a recipe that TransformerEngine would refuse in the first step."""
    if not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability()
    needs_blackwell = not config.fp8 or config.fp8_recipe == "mxfp8"
    if needs_blackwell and (major, minor) < BLACKWELL:
        raise UnsupportedError(
            f"{_recipe(config)}: a GPU of compute capability {major}.{minor} has no GEMMs for "
            "such blocks, whatever the dispatcher: TransformerEngine needs 10.0 or newer; use fp8 "
            "with fp8_recipe 'blockwise', 'tensorwise' or 'delayed'"
        )
