"""TransformerEngine's Float8BlockScaling in plain torch: what e4m3 codes and scales values become.

The rule, for each block of values that share a scale, with amax the largest magnitude among them
that is no NaN:

    scale = 448 / amax in fp32; the largest bf16 where that is too large for fp32; 1 if amax is 0 or
    infinite; rounded down to a power of two, unless the recipe says otherwise
    code = value * scale as e4m3, to the nearest, ties to even, at most 448; NaN stays NaN
    what is stored beside it: 1 / scale

Nothing of the package is used here.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 128
LARGEST = 448.0


def scales_of(amax: Tensor, powers_of_two: bool = True) -> Tensor:
    """By what blocks with these largest magnitudes are multiplied, fp32."""
    scale = torch.full_like(amax, LARGEST, dtype=torch.float32) / amax.float()  # rounded once
    scale = torch.where(scale.isinf(), torch.finfo(torch.bfloat16).max, scale)
    if powers_of_two:
        scale = (scale.view(torch.int32) & -0x800000).view(torch.float32)
    return torch.where((amax == 0) | amax.isinf(), 1.0, scale)


def codes_of(values: Tensor, scale: Tensor) -> Tensor:
    """uint8: `values` times `scale`, fp32 of shapes that fit, as e4m3."""
    scaled = (values * scale).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def values_of(codes: Tensor) -> Tensor:
    """fp32: what e4m3 codes stand for."""
    return codes.view(torch.float8_e4m3fn).float()


def largest(values: Tensor, *dims: int) -> Tensor:
    """The largest magnitude that is no NaN, with these dimensions kept as 1."""
    return values.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dims, keepdim=True)


def by_rows(values: Tensor, powers_of_two: bool = True) -> tuple[Tensor, Tensor]:
    """Blocks of 128 in a row: codes [num_rows, columns], and 1 / scales [columns / 128, num_rows].

    values: [num_rows, columns], of bf16 or fp32.
    """
    blocks = values.float().unflatten(1, (-1, BLOCK))
    scale = scales_of(largest(blocks, 2), powers_of_two)
    return codes_of(blocks, scale).flatten(1), (1 / scale).squeeze(2).t().contiguous()


def row_bytes(columns: int) -> int:
    """Of a packed row: its values, an fp32 scale for each block, zeros up to a multiple of 16."""
    return -(-(columns + 4 * columns // BLOCK) // 16) * 16


def packed(values: Tensor, powers_of_two: bool = True) -> Tensor:
    """Packed rows of the results of `by_rows`: uint8 [num_rows, row_bytes]."""
    codes, scales = by_rows(values, powers_of_two)
    of_rows = scales.t().clone(memory_format=torch.contiguous_format)
    parts = torch.cat([codes, of_rows.view(torch.uint8)], 1)
    return torch.nn.functional.pad(parts, (0, row_bytes(values.shape[1]) - parts.shape[1]))


def unpacked(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `by_rows` again, and what they stand for, bf16 [num_rows, columns]."""
    columns = rows.shape[1] // (BLOCK + 4) * BLOCK
    assert rows.shape[1] == row_bytes(columns)
    codes, end = rows[:, :columns], columns + 4 * columns // BLOCK
    scales = rows[:, columns:end].contiguous().view(torch.float32).t()
    values = values_of(codes.contiguous()) * scales.t().repeat_interleave(BLOCK, 1)
    return codes, scales, values.bfloat16()


def transposed(
    values: Tensor, ends: list[int], powers_of_two: bool = True
) -> tuple[Tensor, Tensor]:
    """Blocks of 128 rows of a column: codes [blocks, columns, 128], 1 / scales [blocks, columns].

    Each expert, with rows from ends[g] to ends[g + 1], begins a block, which zeros fill up.
    """
    columns = values.shape[1]
    parts = [values.new_zeros(0, columns).float()]
    for begin, end in pairwise(ends):
        parts += [values[begin:end].float(), values.new_zeros((begin - end) % BLOCK, columns)]
    blocks = torch.cat(parts).unflatten(0, (-1, BLOCK))
    scale = scales_of(largest(blocks, 1), powers_of_two)
    return codes_of(blocks, scale).mT.contiguous(), (1 / scale).squeeze(1)


def of_weights(weights: Tensor, powers_of_two: bool = True) -> tuple[Tensor, Tensor]:
    """Blocks of 128 x 128: codes like `weights`, 1 / scales [experts, rows / 128, columns / 128].

    weights: [num_experts, rows, columns].
    """
    blocks = weights.float().unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    scale = scales_of(largest(blocks, 2, 4), powers_of_two)
    return codes_of(blocks, scale).view_as(weights), (1 / scale).squeeze(4).squeeze(2)


def rows_again(codes: Tensor, scales: Tensor) -> Tensor:
    """fp64 [num_rows, columns]: what the results of `by_rows` stand for."""
    of_columns = scales[:, : len(codes)].t().double().repeat_interleave(BLOCK, 1)
    return values_of(codes).double() * of_columns


def transposed_again(codes: Tensor, scales: Tensor, ends: list[int]) -> Tensor:
    """fp64 [ends[-1], columns]: what the results of `transposed` stand for."""
    values = (values_of(codes).double() * scales.double()[..., None]).mT.flatten(0, 1)
    parts, first = [values[:0]], 0
    for begin, end in pairwise(ends):
        parts.append(values[first : first + end - begin])
        first += -(-(end - begin) // BLOCK) * BLOCK
    return torch.cat(parts)


def weights_again(codes: Tensor, scales: Tensor) -> Tensor:
    """fp64: what the results of `of_weights` stand for."""
    each = scales.double().repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return values_of(codes).double() * each
