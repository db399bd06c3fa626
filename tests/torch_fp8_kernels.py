"""The extension's FP8 kernels in plain torch, on any device: fp8_format.py is their format."""

from __future__ import annotations

import importlib
from itertools import pairwise
from types import SimpleNamespace

import fp8_format as fp8
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

PRODUCTS = "megatron_ncclep.integration.experts.fp8_products"
STREAM = 7
GARBAGE = 0x7F  # NaN: what is not written must not be read


class TorchFp8Kernels:
    """Stands in for the extension; arguments and results are those of `_C.pyi`.

    Attributes:
        calls: names of the kernels that were called, in order.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    def fp8_quantize_rows(
        self, values: Tensor, offsets: Tensor, rows: Tensor | None, scales: Tensor | None,
        transposed: Tensor | None, scales_transposed: Tensor | None, powers_of_two: bool,
        stream: int,
    ) -> None:  # fmt: skip
        assert values.dtype is torch.bfloat16
        self._note("fp8_quantize_rows", stream)
        places = (rows, scales, transposed, scales_transposed)
        self._quantize(values, offsets, places, powers_of_two)

    def fp8_pack_rows(
        self, values: Tensor, packed: Tensor, powers_of_two: bool, stream: int
    ) -> None:  # fmt: skip
        assert values.dtype is torch.bfloat16
        self._note("fp8_pack_rows", stream)
        packed.copy_(fp8.packed(values, powers_of_two))

    def fp8_unpack_rows(
        self, packed: Tensor, offsets: Tensor, scales: Tensor | None, transposed: Tensor | None,
        scales_transposed: Tensor | None, powers_of_two: bool, stream: int,
    ) -> None:  # fmt: skip
        self._note("fp8_unpack_rows", stream)
        _, of_rows, values = fp8.unpacked(packed)
        used = int(offsets[-1])
        if scales is not None:
            scales[:, :used] = of_rows[:, :used]
        places = (None, None, transposed, scales_transposed)
        self._quantize(values, offsets, places, powers_of_two)

    def fp8_swiglu(
        self, gate_up: Tensor, probs: Tensor, offsets: Tensor, rows: Tensor | None,
        scales: Tensor | None, transposed: Tensor | None, scales_transposed: Tensor | None,
        powers_of_two: bool, stream: int,
    ) -> None:  # fmt: skip
        self._note("fp8_swiglu", stream)
        gate, up = gate_up.float().chunk(2, 1)
        activated = (F.silu(gate) * up * probs[:, None]).bfloat16()
        places = (rows, scales, transposed, scales_transposed)
        self._quantize(activated, offsets, places, powers_of_two)

    def fp8_swiglu_gradients(
        self, gate_up: Tensor, probs: Tensor, grads: Tensor, offsets: Tensor, prob_grads: Tensor,
        rows: Tensor | None, scales: Tensor | None, transposed: Tensor | None,
        scales_transposed: Tensor | None, powers_of_two: bool, stream: int,
    ) -> None:  # fmt: skip
        self._note("fp8_swiglu_gradients", stream)
        with torch.enable_grad():
            inputs = gate_up.float().requires_grad_()
            gate, up = inputs.chunk(2, 1)
            activated = F.silu(gate) * up
            (of_gate_up,) = torch.autograd.grad(activated, inputs, grads.float() * probs[:, None])
        sums = (activated.detach() * grads.float()).unflatten(1, (-1, fp8.BLOCK)).sum(2)
        prob_grads[:, : len(sums)] = sums.t()
        places = (rows, scales, transposed, scales_transposed)
        self._quantize(of_gate_up.bfloat16(), offsets, places, powers_of_two)

    def fp8_quantize_weights(
        self, values: Tensor, weights: Tensor, scales: Tensor, transposed: Tensor,
        scales_transposed: Tensor, powers_of_two: bool, stream: int,
    ) -> None:  # fmt: skip
        self._note("fp8_quantize_weights", stream)
        codes, of_blocks = fp8.of_weights(values, powers_of_two)
        weights.copy_(codes)
        scales.copy_(of_blocks)
        transposed.copy_(codes.mT)
        scales_transposed.copy_(of_blocks.mT)

    def fp8_multiply_rows(
        self, rows: Tensor, scales: Tensor, weights: Tensor, weight_scales: Tensor,
        offsets: Tensor, out: Tensor, stream: int,
    ) -> None:  # fmt: skip
        self._note("fp8_multiply_rows", stream)
        depth = weights.shape[2]
        assert rows.shape[1] in (depth, fp8.row_bytes(depth))
        values = fp8.rows_again(rows[:, :depth], scales)
        factors = fp8.weights_again(weights, weight_scales)
        out.fill_(torch.nan)
        for (begin, end), factor in zip(pairwise(offsets.tolist()), factors, strict=True):
            out[begin:end] = (values[begin:end] @ factor.t()).bfloat16()

    def fp8_multiply_for_weights(
        self, a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, offsets: Tensor,
        out: Tensor, adds: bool, stream: int,
    ) -> None:  # fmt: skip
        self._note("fp8_multiply_for_weights", stream)
        assert out.dtype is torch.float32
        assert out.is_contiguous()
        ends = offsets.tolist()
        left, right = (fp8.transposed_again(*s, ends) for s in ((a, a_scales), (b, b_scales)))
        for each, (begin, end) in zip(out, pairwise(ends), strict=True):
            product = (left[begin:end].t() @ right[begin:end]).float()
            each.add_(product) if adds else each.copy_(product)

    def _note(self, name: str, stream: int) -> None:
        assert stream == STREAM
        self.calls.append(name)

    def _quantize(
        self, values: Tensor, offsets: Tensor, places: tuple[Tensor | None, ...],
        powers_of_two: bool,
    ) -> None:  # fmt: skip
        rows, scales, transposed, scales_transposed = places
        ends = offsets.tolist()
        for place in (rows, transposed):
            if place is not None:
                place.fill_(GARBAGE)
        if rows is not None:
            assert scales is not None
            codes, of_rows = fp8.by_rows(values[: ends[-1]], powers_of_two)
            rows[: ends[-1]], scales[:, : ends[-1]] = codes, of_rows
        if transposed is not None:
            assert scales_transposed is not None
            codes, of_blocks = fp8.transposed(values, ends, powers_of_two)
            transposed[: len(codes)] = codes
            scales_transposed[: len(of_blocks)] = of_blocks


def stand_in(patch: pytest.MonkeyPatch) -> TorchFp8Kernels:
    """Have the experts' FP8 products call them; all else keeps the extension."""
    kernels = TorchFp8Kernels()
    theirs = SimpleNamespace(load=lambda: kernels, current_stream=lambda: STREAM)
    # As it is imported now: earlier tests of the process may have imported it again.
    patch.setattr(importlib.import_module(PRODUCTS), "extension", theirs)
    return kernels
