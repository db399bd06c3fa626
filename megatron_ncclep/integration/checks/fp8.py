"""Row alignment for experts that compute in FP8 or from TransformerEngine's grouped tensors.

TransformerEngine's FP8 GEMMs need each expert block to be a multiple of 16 rows (32 for MXFP8, 128
for FP4, 256 for its op fuser and grouped tensors).  Megatron pads the blocks in one of two ways:

    by default             the experts copy their rows apart, insert zero rows, and remove these
                           from their output: two passes over the rows, and two more in backward
    moe_router_padding_    the router also assigns tokens to experts that they did not choose, with
    for_quantization       probability zero, until the row counts fit: these rows are sent too

Here, dispatch leaves zero rows between the blocks as the engine's alignment, so the experts need
not pad.  From 0.18 on, TEGroupedMLP skips padding without reading the row counts, as it does with
Megatron's own dispatchers that pad (`change_padding`); all other experts read the counts before
they copy any rows.  The routing map is unchanged.  Zero rows do not affect the scale of a tensor or
of one of its blocks, which depends on the largest magnitude, and add nothing to weight gradients.
The FP8 products of grouped experts take blocks of any size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import InputError, UnsupportedError
from megatron_ncclep.integration.options.field import NAME
from megatron_ncclep.integration.patching import replaces

# The lowest compute capability with GEMMs for blocks of 16 or 32 numbers that share a scale.
BLACKWELL = (10, 0)


def is_quantized(config: Any) -> bool:
    """Whether the experts of a TransformerConfig compute in FP8 or FP4."""
    return bool(getattr(config, "fp8", None) or getattr(config, "fp4", None))


def needs_padding(config: Any) -> bool:
    """Whether Megatron's experts would pad their rows if the dispatcher did not."""
    # Before 0.20 the op fuser pads rows only in FP8; from 0.20 on it sets the option, in bf16 too.
    return is_quantized(config) or bool(getattr(config, "moe_use_grouped_tensor", False))


# In Megatron's `experts` from 0.18 on.
@replaces("skip_routed_expert_padding", ["config"], optional=True)
def change_padding(original: Any) -> Any:
    """Make experts behind our dispatcher skip their own padding.

    Otherwise they read the row counts on the host, even if no rows have to be copied.
    """

    def skip_routed_expert_padding(config: Any) -> bool:
        return config.moe_token_dispatcher_type == NAME or bool(original(config))

    return skip_routed_expert_padding


def align_for_experts(config: Any, options: EpConfig) -> EpConfig:
    """Set the alignment of row blocks that the experts need.  Not collective.

    Returns:
        the options, unchanged if these experts need no alignment.

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
            raise InputError(f"{recipe} sets the alignment to {needed}: {error}") from None
    if options.block_alignment % needed:
        raise InputError(
            f"alignment {options.alignment}: experts with {recipe} need blocks of a multiple of "
            f"{needed} rows: leave it out (--ncclep-alignment), or set it to {needed} or more"
        )
    return options


def pads_rows(config: Any, options: EpConfig) -> str | None:
    """Say that dispatch pads the experts' rows, if it does."""
    if not needs_padding(config):
        return None
    return (
        f"{_recipe(config)}: dispatch pads expert blocks to a multiple of {options.alignment} "
        "rows, so the experts do not pad them"
    )


def _recipe(config: Any) -> str:
    if not is_quantized(config):
        return "moe_use_grouped_tensor=True"
    kind = "fp8" if config.fp8 else "fp4"
    recipe = getattr(config, f"{kind}_recipe")
    return f"{kind}={getattr(config, kind)!r}, {kind}_recipe={getattr(recipe, 'value', recipe)!r}"


def _check_gpu(config: Any) -> None:
    """Refuse a recipe that TransformerEngine would reject in the first step."""
    if not torch.cuda.is_available():
        return
    major, minor = torch.cuda.get_device_capability()
    needs_blackwell = not config.fp8 or config.fp8_recipe == "mxfp8"
    if needs_blackwell and (major, minor) < BLACKWELL:
        raise UnsupportedError(
            f"{_recipe(config)}: a GPU of compute capability {major}.{minor} has no GEMMs for "
            "this format, with any dispatcher: TransformerEngine needs 10.0 or newer; use fp8 "
            "with fp8_recipe 'blockwise', 'tensorwise' or 'delayed'"
        )
