"""The experts' FP8 products: memory for the results, and calls of the extension's kernels.

The format is that of TransformerEngine's `Float8BlockScaling`: e4m3, with one fp32 scale for 128
values of a row, for 128 rows of a column where a product sums over rows, and for 128 x 128 values
of a weight.  csrc/experts/fp8_experts.h says what each kernel computes.

Expert g has the rows from `ends[g]` up to `ends[g + 1]`, and `ends[0]` is 0.  The kernels read
`ends` on the device.  Rows after the last block have no effect, and their results are not written.
Sums over rows take blocks of 128 rows, and each expert begins a block; the host does not know how
many there are, so transposed matrices have room for the most: `num_rows // 128 + num_experts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ncclep.integration.experts.expert_stack import view_of
from megatron_ncclep.integration.experts.grouped_gemm import ADDRESS_BYTES
from megatron_ncclep.libraries import extension
from megatron_ncclep.ops.packed_rows import extent, unpack_rows

BLOCK = 128
# A row of scales begins at a multiple of 16 bytes.
_SCALES_PITCH = ADDRESS_BYTES // 4


class Fp8Rows(NamedTuple):
    """Rows in FP8, by rows, transposed, or both; None for what was not asked for.

    Attributes:
        rows: uint8 [num_rows, columns], e4m3; or packed rows, which begin with the same.
        scales: fp32 [columns / 128, num_rows or a few more]: by which values are multiplied again.
        transposed: uint8 [num_blocks, columns, 128]; zeros fill each expert's last block up.
        scales_transposed: fp32 [num_blocks, columns].
    """

    rows: Tensor | None
    scales: Tensor | None
    transposed: Tensor | None
    scales_transposed: Tensor | None


class Fp8Weights(NamedTuple):
    """The weights of all experts in FP8, as they are and transposed, with the same values.

    Attributes:
        weights: uint8 [num_experts, out_features, in_features], e4m3.
        scales: fp32 [num_experts, out_features / 128, in_features / 128].
        transposed: uint8 [num_experts, in_features, out_features].
        scales_transposed: fp32 [num_experts, in_features / 128, out_features / 128].
    """

    weights: Tensor
    scales: Tensor
    transposed: Tensor
    scales_transposed: Tensor


@dataclass(frozen=True)
class Fp8Products:
    """Calls of the kernels, on torch's current stream.  None waits for the device.

    Attributes:
        powers_of_two: scales are powers of two, as by default in TransformerEngine.
    """

    powers_of_two: bool = True

    def quantize_rows(
        self, rows: Tensor, ends: Tensor, by_rows: bool = True, transposed: bool = True
    ) -> Fp8Rows:
        """Quantise rows.

        Args:
            rows: bf16 [num_rows, columns], contiguous.
            ends: int32 [num_experts + 1].
            by_rows, transposed: which of both is made.
        """
        made = _empty_rows(rows, rows.shape[1], ends, by_rows, transposed)
        _call("fp8_quantize_rows", _aligned(rows), ends, *made, self.powers_of_two)
        return made

    def pack(self, rows: Tensor) -> Tensor:
        """Quantise rows before they are dispatched, by rows, and pack them (ops/packed_rows.py).

        Args:
            rows: bf16 [num_tokens, columns].

        Returns:
            uint8 [num_tokens, row_bytes], with a scale for every 128 values.
        """
        num_rows, columns = rows.shape
        _, row_bytes = extent(columns, columns // BLOCK)
        packed = torch.empty(num_rows, row_bytes, dtype=torch.uint8, device=rows.device)
        _call("fp8_pack_rows", _aligned(rows), packed, self.powers_of_two)
        return packed

    def unpack(
        self,
        packed: Tensor,
        columns: int,
        ends: Tensor,
        by_rows: bool = True,
        transposed: bool = True,
    ) -> Fp8Rows:
        """Make packed rows operands of products.

        By rows they are what `quantize_rows` makes before they are packed.  Transposed, the same
        values are quantised again by columns.

        Args:
            packed: uint8 [num_rows, row_bytes], as dispatch delivers them; the result refers to it.
            columns: numbers of a row.
            ends, by_rows, transposed: see `quantize_rows`.
        """
        packed = _aligned(packed)
        made = _empty_rows(packed, columns, ends, by_rows, transposed, packed)
        _call("fp8_unpack_rows", packed, ends, *made[1:], self.powers_of_two)
        return made

    def numbers(self, packed: Tensor, columns: int) -> Tensor:
        """The numbers of packed rows, rounded to bf16.

        Args:
            packed: uint8 [num_rows, row_bytes].
            columns: numbers of a row.

        Returns:
            bf16 [num_rows, columns].
        """
        blocks = columns // BLOCK
        data, scales = unpack_rows(packed, columns, blocks, torch.float8_e4m3fn)
        values = data.float().view(len(packed), blocks, BLOCK) * scales[..., None]
        return values.view(len(packed), columns).bfloat16()

    def swiglu(
        self,
        gate_up: Tensor,
        probs: Tensor,
        ends: Tensor,
        by_rows: bool = True,
        transposed: bool = True,
    ) -> Fp8Rows:
        """Quantise silu(gate) * up * probability, rounded to bf16: [num_rows, ffn].

        Args:
            gate_up: bf16 [num_rows, 2 * ffn], gates before ups.
            probs: fp32 [num_rows].
            ends, by_rows, transposed: see `quantize_rows`.
        """
        made = _empty_rows(gate_up, gate_up.shape[1] // 2, ends, by_rows, transposed)
        _call("fp8_swiglu", gate_up, probs, ends, *made, self.powers_of_two)
        return made

    def swiglu_gradients(
        self,
        gate_up: Tensor,
        probs: Tensor,
        grad: Tensor,
        ends: Tensor,
        by_rows: bool = True,
        transposed: bool = True,
    ) -> tuple[Fp8Rows, Tensor]:
        """Compute the gradients of SwiGLU's inputs.

        Args:
            gate_up, probs, ends, by_rows, transposed: of `swiglu`.
            grad: of its result, bf16 [num_rows, ffn].

        Returns:
            the gradients of gates and ups, rounded to bf16 and quantised, [num_rows, 2 * ffn]; and
            those of the probabilities, fp32 [num_rows].
        """
        made = _empty_rows(gate_up, gate_up.shape[1], ends, by_rows, transposed)
        num_rows, ffn = grad.shape
        # Adding up each block's sum in order gives the same bits every time.
        sums = torch.empty(ffn // BLOCK, num_rows, dtype=torch.float32, device=grad.device)
        _call("fp8_swiglu_gradients", gate_up, probs, grad, ends, sums, *made, self.powers_of_two)
        return made, sums.sum(dim=0)

    def quantize_weights(self, weights: Sequence[Tensor]) -> Fp8Weights:
        """Quantise the weights of all experts, by one kernel if they are one behind the other.

        Args:
            weights: one bf16 [out_features, in_features] for each expert.
        """
        number, (rows, columns) = len(weights), weights[0].shape
        make = partial(torch.empty, device=weights[0].device)
        down, across = rows // BLOCK, columns // BLOCK
        made = Fp8Weights(
            make(number, rows, columns, dtype=torch.uint8),
            make(number, down, across, dtype=torch.float32),
            make(number, columns, rows, dtype=torch.uint8),
            make(number, across, down, dtype=torch.float32),
        )
        stack = view_of(weights)
        if stack is not None and stack.is_contiguous():
            _call("fp8_quantize_weights", stack, *made, self.powers_of_two)
            return made
        for weight, *parts in zip(weights, *made, strict=True):
            values = _aligned(weight.detach())[None]
            _call("fp8_quantize_weights", values, *(p[None] for p in parts), self.powers_of_two)
        return made

    def multiply(self, rows: Fp8Rows, weights: Tensor, scales: Tensor, ends: Tensor) -> Tensor:
        """Return rows @ weights[g]^T in bf16, [num_rows, out_features].

        Args:
            rows: by rows, [num_rows, in_features].
            weights, scales: of `Fp8Weights`, as they are or transposed.
            ends: int32 [num_experts + 1].
        """
        assert rows.rows is not None
        shape = (len(rows.rows), weights.shape[1])
        result = torch.empty(shape, dtype=torch.bfloat16, device=weights.device)
        _call("fp8_multiply_rows", rows.rows, rows.scales, weights, scales, ends, result)
        return result

    def weight_gradients(
        self,
        grad: Fp8Rows,
        rows: Fp8Rows,
        ends: Tensor,
        dtype: torch.dtype,
        out: Tensor | Sequence[Tensor] | None = None,
        adds: bool = False,
    ) -> Tensor | Sequence[Tensor]:
        """Compute grad[g]^T @ rows[g] for every expert, with sums in fp32.

        What is not one contiguous fp32 tensor gets the sums of all experts through another one.

        Args:
            grad: transposed, [num_rows, out_features].
            rows: transposed, [num_rows, in_features].
            ends: int32 [num_experts + 1].
            dtype: of the result, without `out`.
            out, adds: see `main_grad.WeightProduct`.
        """
        assert grad.transposed is not None
        assert rows.transposed is not None
        is_direct = isinstance(out, Tensor) and out.dtype is torch.float32 and out.is_contiguous()
        shape = (len(ends) - 1, grad.transposed.shape[1], rows.transposed.shape[1])
        sums: Any = out
        if not is_direct:
            sums = torch.empty(shape, dtype=torch.float32, device=grad.transposed.device)
        operands = (
            grad.transposed, grad.scales_transposed, rows.transposed, rows.scales_transposed
        )  # fmt: skip
        _call("fp8_multiply_for_weights", *operands, ends, sums, adds and is_direct)
        if is_direct:
            return sums
        if out is None:
            return sums.to(dtype)
        pairs = [(out, sums)] if isinstance(out, Tensor) else zip(out, sums, strict=True)
        for each, gradient in pairs:
            each.add_(gradient) if adds else each.copy_(gradient)
        return out


def _empty_rows(
    like: Tensor,
    columns: int,
    ends: Tensor,
    by_rows: bool,
    transposed: bool,
    packed: Tensor | None = None,
) -> Fp8Rows:
    """Memory for the rows of `like` with so many columns; by rows, `packed` has the values."""
    num_rows, make = len(like), partial(torch.empty, device=like.device)
    rows = scales = blocks = of_blocks = None
    if by_rows:
        pitch = -(-num_rows // _SCALES_PITCH) * _SCALES_PITCH
        rows = make(num_rows, columns, dtype=torch.uint8) if packed is None else packed
        scales = make(columns // BLOCK, pitch, dtype=torch.float32)
    if transposed:
        most = num_rows // BLOCK + len(ends) - 1
        blocks = make(most, columns, BLOCK, dtype=torch.uint8)
        of_blocks = make(most, columns, dtype=torch.float32)
    return Fp8Rows(rows, scales, blocks, of_blocks)


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and from an address on that kernels load 16 bytes at once from."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ADDRESS_BYTES else tensor


def _call(name: str, *arguments: Any) -> None:
    getattr(extension.load(), name)(*arguments, extension.current_stream())
