"""Experts that compute in FP8: how many rows their blocks have, and who sees to that.

TransformerEngine's FP8 products take a multiple of 16 rows (MXFP8 of 32, FP4 of 128, its op fuser
of 256).  Megatron gets there in one of two ways:

    without an option      the experts copy their rows to where zero rows fit in between, and cut
                           those out of their output: two passes over the rows, and two backward
    moe_router_padding_    the router's map gives each expert tokens that did not choose it, with
    for_quantization       probability zero, until their numbers fit: these rows travel too

Here the dispatch leaves the zero rows between the blocks: they are the engine's alignment.  Then
there is nothing to do for the experts, which look at the numbers of rows before they copy any, in
every release; and with the option, which says that it was done before them, 0.18 and later do not
look.  The map stays as the router made it.  Zero rows do not change the scale of a tensor or of a
block of it, which is that of its largest magnitude, and add nothing to a weight's gradient.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import InputError, UnsupportedError
from megatron_ncclep.ranks.group import EpGroup

# Of a GPU whose products take blocks of 16 or 32 numbers with a scale each.
BLACKWELL = (10, 0)


def is_quantized(config: Any) -> bool:
    """Whether a TransformerConfig has experts compute in FP8 or FP4."""
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def align_for_experts(config: Any, options: EpConfig) -> EpConfig:
    """Have the blocks of rows be what quantised experts need.  Not collective.

    Args:
        config: TransformerConfig, validated.
        options: of the dispatcher; an alignment that is left out becomes what is needed.

    Returns:
        the options; as they are where no experts are quantised.

    Raises:
        UnsupportedError: this GPU cannot compute so; names the option, its value, the reason and
            the remedy.
        InputError: an alignment that was asked for is too small, or another option does not go
            with the one that is needed.
    """
    if not is_quantized(config):
        return options
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

    recipe = _recipe(config)
    _check_gpu(config)
    needed = get_align_size_for_quantization(config)
    if options.alignment is None:
        try:
            options = dataclasses.replace(options, alignment=needed)
        except InputError as error:  # of an alignment that nobody has asked for
            raise InputError(f"{recipe} makes the alignment {needed}: {error}") from None
    if options.block_alignment % needed:
        raise InputError(
            f"alignment {options.alignment}: experts with {recipe} need blocks of a multiple of "
            f"{needed} rows: leave it out (--ncclep-alignment), or ask for {needed} or more"
        )
    return options


def announce_alignment(config: Any, options: EpConfig, process_group: Any) -> None:
    """Log who pads quantised experts' rows, once for the group and on its first rank only."""
    group = EpGroup.of(process_group)
    if is_quantized(config) and group.rank == 0:
        text = (
            f"{_recipe(config)}: experts get blocks of a multiple of {options.alignment} rows from "
            "the dispatch, and pad none themselves"
        )
        group.log_once(logging.INFO, text, text)


def _recipe(config: Any) -> str:
    kind = "fp8" if config.fp8 else "fp4"
    recipe = getattr(config, f"{kind}_recipe")
    return f"{kind}={getattr(config, kind)!r}, {kind}_recipe={getattr(recipe, 'value', recipe)!r}"


def _check_gpu(config: Any) -> None:
    """Refuse what TransformerEngine would refuse in the first step."""
    if not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability()
    needs_blackwell = not config.fp8 or config.fp8_recipe == "mxfp8"
    if needs_blackwell and (major, minor) < BLACKWELL:
        raise UnsupportedError(
            f"{_recipe(config)}: a GPU of compute capability {major}.{minor} has no products of "
            "such blocks, whatever the dispatcher: TransformerEngine needs 10.0 or newer; use fp8 "
            "with fp8_recipe 'blockwise', 'tensorwise' or 'delayed'"
        )
