"""The experts' activation times the rows' probabilities, as Megatron's experts compute it.

It calls Megatron's own functions under the same options, so the results have the same bits.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu, weighted_bias_quick_geglu_impl
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.fusions.fused_weighted_squared_relu import weighted_squared_relu_impl
from torch import Tensor

# From 0.20 on Megatron's fused SwiGLU clamps too; before, it passes over the option.
_SWIGLU_CLAMPS = "clamp_value" in inspect.signature(weighted_bias_swiglu_impl).parameters


def activate(config: Any, rows: Tensor, probs: Tensor) -> Tensor:
    """Apply the activation and multiply every row by its probability.

    Args:
        config: TransformerConfig, checked by `config_problem` in refusals.py.
        rows: [num_rows, features], twice as many with gated_linear_unit: gates, then values.
        probs: [num_rows].

    Returns:
        [num_rows, moe_ffn_hidden_size] in the rows' dtype.
    """
    probs = probs.unsqueeze(-1)
    function = config.activation_func
    result: Tensor
    if not is_fused(config):
        if config.gated_linear_unit:
            gate, value = rows.chunk(2, dim=-1)
            if (limit := config.activation_func_clamp_value) is not None:
                gate, value = gate.clamp(max=limit), value.clamp(min=-limit, max=limit)
            activated = function(gate) * (value + config.glu_linear_offset)
        else:
            activated = function(rows)
        result = (activated * probs).to(activated.dtype)
    elif function is F.silu:
        limits = (config.activation_func_clamp_value,) if _SWIGLU_CLAMPS else ()
        result = weighted_bias_swiglu_impl(rows, None, probs, False, *limits)
    elif function is quick_gelu:
        offset, limit = config.glu_linear_offset, config.activation_func_clamp_value
        result = weighted_bias_quick_geglu_impl(rows, None, probs, False, offset, limit)
    else:
        result = weighted_squared_relu_impl(rows, probs)
    return result


def is_fused(config: Any) -> bool:
    """Whether activation and probabilities are one step that keeps only its inputs."""
    function = config.activation_func
    if config.gated_linear_unit:
        return config.bias_activation_fusion and function in (F.silu, quick_gelu)
    return function is squared_relu and config.use_fused_weighted_squared_relu
