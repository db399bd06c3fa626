"""An expert layer with SwiGLU in FP8 as one autograd node: two products forward, four backward.

    forward   rows, quantised by rows and transposed; by rows already where they crossed in FP8
              gate, up = rows @ fc1^T, in bf16
              silu(gate) * up * probability, quantised both ways
              activated @ fc2^T
    backward  the gradient, likewise
              its product with fc2
              SwiGLU's gradients, quantised both ways, and those of the probabilities
              their product with fc1; the weights' gradients, summed and added in fp32

For backward are kept: rows and activated rows, transposed in FP8, where weights are trained, gate
and up in bf16, and the weights in FP8.  With `moe_act` among `recompute_modules` the activated rows
are made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ncclep.integration.experts.fp8_crossing import Fp8Crossing
from megatron_ncclep.integration.experts.fp8_products import Fp8Products, Fp8Rows, Fp8Weights
from megatron_ncclep.integration.experts.main_grad import GradientTarget, store_weight_gradients


@dataclass(frozen=True)
class Fp8Layer:
    """The settings of a call, the same for all rows.

    Attributes:
        products: the layer's products.
        fc1, fc2: the weights in FP8, as of this step.
        target: where the weights' gradients go.
        recomputes: make the activated rows again in backward instead of keeping them.
    """

    products: Fp8Products
    fc1: Fp8Weights
    fc2: Fp8Weights
    target: GradientTarget
    recomputes: bool = False


def fp8_swiglu_experts(
    rows: Tensor,
    probs: Tensor,
    offsets: Tensor,
    fc1: Sequence[Tensor],
    fc2: Sequence[Tensor],
    layer: Fp8Layer,
    crossing: Fp8Crossing | None = None,
) -> Tensor:
    """Apply every expert to its block of rows: fc2(silu(gate) * up * probability).

    The host reads nothing.  Rows after the last block may hold anything; their results and
    gradients are undefined.  Gradients of weights without a main_grad have the weights' dtype.

    Args:
        rows: bf16 [num_rows, hidden], or what stands in for them.
        probs: [num_rows], of any dtype.
        offsets: ends of the blocks, int32 [num_experts], on the rows' device.
        fc1: one parameter [2 * ffn, hidden] for each block, in the blocks' order, gates first.
        fc2: likewise, [hidden, ffn].
        layer: all else; its weights are made from these parameters.
        crossing: has the rows, and later perhaps the gradient, that crossed in FP8.

    Returns:
        bf16 [num_rows, hidden].

    Raises:
        UnsupportedError: a stand-in came without its rows, or the other way round.
    """
    result: Tensor = _Fp8SwigluExperts.apply(
        rows, probs, offsets, layer, crossing, torch.is_grad_enabled(), *fc1, *fc2
    )
    return result


_WEIGHTS = 6  # place of the first weight among the arguments of forward


class _Fp8SwigluExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        probs: Tensor,
        offsets: Tensor,
        layer: Fp8Layer,
        crossing: Fp8Crossing | None,
        has_gradients: bool,
        *weights: Tensor,
    ) -> Tensor:
        products, ends = layer.products, F.pad(offsets, (1, 0))
        scale = probs.float().contiguous()
        trains_fc1, trains_fc2 = map(any, _halves(ctx.needs_input_grad[_WEIGHTS:]))
        keeps_fc1, keeps_fc2 = has_gradients and trains_fc1, has_gradients and trains_fc2
        quantised = _quantised(products, crossing, rows, ends, True, keeps_fc1)
        gate_up = products.multiply(quantised, layer.fc1.weights, layer.fc1.scales, ends)
        kept = keeps_fc2 and not layer.recomputes
        activated = products.swiglu(gate_up, scale, ends, transposed=kept)
        out = products.multiply(activated, layer.fc2.weights, layer.fc2.scales, ends)
        # The weights too, although backward reads only their main_grads: changed before backward,
        # they are an error of torch's.
        ctx.save_for_backward(*quantised[2:], *activated[2:], gate_up, scale, ends, *weights)
        ctx.layer, ctx.crossing, ctx.probs_dtype = layer, crossing, probs.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: what waits on the host is fetched each time
        rows, activated = Fp8Rows(None, None, *saved[:2]), Fp8Rows(None, None, *saved[2:4])
        gate_up, probs, ends, *weights = saved[4:]
        layer: Fp8Layer = ctx.layer
        products, wanted = layer.products, ctx.needs_input_grad
        (fc1, fc2), (fc1_trained, fc2_trained) = _halves(weights), _halves(wanted[_WEIGHTS:])
        trains_fc1, trains_fc2 = any(fc1_trained), any(fc2_trained)
        needs_inputs = trains_fc1 or wanted[0] or wanted[1]

        # What one product needs is freed before the next one begins.
        of_out = _quantised(products, ctx.crossing, grad, ends, needs_inputs, trains_fc2)
        fc2_grads: list[Tensor | None] = [None] * len(fc2)
        if trains_fc2:
            if layer.recomputes:
                activated = products.swiglu(gate_up, probs, ends, by_rows=False)
            dtype = fc2[0].dtype
            product = partial(products.weight_gradients, of_out, activated, ends, dtype)
            fc2_grads = store_weight_gradients(fc2, fc2_trained, product, layer.target)
            del product
        del activated
        rows_grad = probs_grad = None
        fc1_grads: list[Tensor | None] = [None] * len(fc1)
        if needs_inputs:
            of_activated = products.multiply(
                of_out, layer.fc2.transposed, layer.fc2.scales_transposed, ends
            )
            del of_out
            of_gate_up, probs_grad = products.swiglu_gradients(
                gate_up, probs, of_activated, ends, by_rows=True, transposed=trains_fc1
            )
            probs_grad = probs_grad.to(ctx.probs_dtype)
            del of_activated
            if wanted[0]:
                rows_grad = products.multiply(
                    of_gate_up, layer.fc1.transposed, layer.fc1.scales_transposed, ends
                )
            if trains_fc1:
                product = partial(products.weight_gradients, of_gate_up, rows, ends, fc1[0].dtype)
                fc1_grads = store_weight_gradients(fc1, fc1_trained, product, layer.target)
        return rows_grad, probs_grad, None, None, None, None, *fc1_grads, *fc2_grads


def _quantised(
    products: Fp8Products,
    crossing: Fp8Crossing | None,
    rows: Tensor,
    ends: Tensor,
    by_rows: bool,
    transposed: bool,
) -> Fp8Rows:
    """Rows or gradients in FP8, however they crossed."""
    packed = None if crossing is None else crossing.take(rows)
    if packed is None:
        return products.quantize_rows(rows, ends, by_rows, transposed)
    return products.unpack(packed, rows.shape[1], ends, by_rows, transposed)


def _halves(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The values for fc1, and those for fc2."""
    half = len(values) // 2
    return values[:half], values[half:]
