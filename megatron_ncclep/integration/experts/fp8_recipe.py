"""FP8 as grouped experts compute it: which of Megatron's recipes, where, and whether it is on now.

TransformerEngine's `Float8BlockScaling` in e4m3 (`--fp8-format e4m3 --fp8-recipe blockwise`) is the
only one.  As for Megatron's own experts, its `fp8_autocast` decides for each pass: around layers
that stay in bf16 (`first_last_layers_bf16`) there is none.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from megatron_ncclep.integration.experts.refusals import FP8_FORMAT, unsupported
from megatron_ncclep.libraries import extension

_CAPABILITY = 9
# Where TransformerEngine's releases keep the state of fp8_autocast.
_STATES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")


def unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say what keeps the FP8 products from running there, if anything does."""
    if device.type != "cuda":
        return f"FP8 on a {device.type.upper()}: their FP8 products need a GPU"
    if reason := extension.unavailable_reason():
        return f"FP8 here: {reason}"
    if not hasattr(extension.load(), "fp8_pack_rows"):
        built_for = extension.architectures()
        if any(name.startswith("sm_90") for name in built_for):
            return "FP8 here: the extension is older than this code: install the package again"
        return (
            f"FP8 here: the extension is built for {', '.join(built_for)}, without sm_90: install "
            "the package again without NCCLEP_CUDA_ARCHITECTURES in the environment"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major != _CAPABILITY:
        return (
            f"FP8 on {torch.cuda.get_device_name(device)}, of compute capability {major}.{minor}: "
            f"their FP8 products are for {_CAPABILITY}.x"
        )
    if dtype is not torch.bfloat16:
        return f"FP8 with parameters in {dtype}: use bf16 (--bf16)"
    return None


def powers_of_two_in_use(config: Any) -> bool | None:
    """Whether the pass that begins is in FP8, and then whether scales are powers of two.

    TransformerEngine's recipe says the latter; the variable NVTE_FP8_BLOCK_SCALING_FP32_SCALES
    makes it False.

    Args:
        config: TransformerConfig, checked by `config_problem` in refusals.py.

    Returns:
        None: the pass is not in FP8.

    Raises:
        UnsupportedError: `fp8_autocast` has another recipe than the config, or one of other blocks.
    """
    if not getattr(config, "fp8", None) or (state := autocast_state()) is None:
        return None
    if not state.is_fp8_enabled():
        return None
    recipe = state.get_fp8_recipe()
    of_operands = [
        getattr(recipe, f"fp8_quant_{name}", None) for name in ("fwd_inp", "fwd_weight", "bwd_grad")
    ]
    dims = [getattr(recipe, f"{name}_block_scaling_dim", None) for name in ("x", "w", "grad")]
    powers = {getattr(each, "power_2_scale", None) for each in of_operands}
    if (
        type(recipe).__name__ != "Float8BlockScaling"  # its subclasses also train for other formats
        or recipe.fp8_format.name != FP8_FORMAT.upper()
        or dims != [1, 2, 1]
        or len(powers) != 1
        or any(getattr(each, "amax_epsilon", 0.0) for each in of_operands)
        or getattr(recipe, "backward_override", None) is not None
    ):
        raise unsupported(
            f"fp8_autocast with {recipe!r}: use Float8BlockScaling of {FP8_FORMAT} with its "
            "default blocks, and leave NVTE_BACKWARD_OVERRIDE out"
        )
    return bool(powers.pop())


def autocast_state() -> Any:
    """The class with TransformerEngine's state of fp8_autocast; None if nothing has imported it."""
    for name in _STATES:
        if (found := getattr(sys.modules.get(name), "FP8GlobalStateManager", None)) is not None:
            return found
    return None
