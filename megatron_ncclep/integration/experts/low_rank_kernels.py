"""Two passes over rows that adapters need beside the experts' GEMMs, as Triton kernels.

Both read memory once and wait for nothing else.  A GEMM of quack-kernels reads the rows for an
adapter's gradients at half the speed: it prepares a tensor map for each tile, and a tile here is
one expert's few hundred rows.

Expert g has the rows from `ends[g]` up to `ends[g + 1]`; the kernels read `ends` on the device.
Rows after the last block are not read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# Columns of a program and rows of a step; rows of a program and columns of a step.
_GRADIENTS = {"COLUMNS": 128, "STEP": 128, "num_warps": 4, "num_stages": 3}
_LOW_RANK = {"ROWS": 64, "FEATURES": 256, "num_warps": 8, "num_stages": 3}
# A program has so much of a higher rank: more does not fit into shared memory.
_MOST_RANK = 64


def factor_gradients(grad: Tensor, rows: Tensor, ends: Tensor, interleaved: bool = False) -> Tensor:
    """Compute grad[g]^T @ rows[g] for every expert, where one of both is as narrow as a rank.

    Sums are made in fp32, in the order of the rows, and rounded once.  An expert without rows gets
    zeros.

    Args:
        grad: [num_rows, out_features], bf16; the distance between rows may be larger.
        rows: [num_rows, in_features], likewise.
        ends: int32 [num_experts + 1].
        interleaved: the gradient's columns are gate 0, up 0, gate 1, ...; the result's rows are
            all gates, then all ups.

    Returns:
        [num_experts, out_features, in_features].
    """
    number, (out_features, in_features) = len(ends) - 1, (grad.shape[1], rows.shape[1])
    result = rows.new_empty(number, out_features, in_features)
    is_second = out_features >= in_features  # of the factors: the result has the rank's columns
    low, wide = (rows, grad) if is_second else (grad, rows)
    part, parts = _parts(low.shape[1])
    grid = (number, triton.cdiv(wide.shape[1], _GRADIENTS["COLUMNS"]), parts)
    _factor_gradients[grid](
        low,
        wide,
        result,
        ends,
        low.stride(0),
        wide.stride(0),
        low.shape[1],
        wide.shape[1],
        RANK=part,
        IS_SECOND=is_second,
        INTERLEAVED=interleaved,
        **_GRADIENTS,
    )
    return result


def with_low_rank(rows: Tensor, factor: Tensor, ends: Tensor, scale: float) -> Tensor:
    """Return the rows, with `scale * rows @ factor[g]` as more columns.

    Args:
        rows: [num_rows, features], bf16, contiguous.
        factor: [num_experts, features, rank], contiguous.
        ends: int32 [num_experts + 1].
        scale: multiplied in fp32.

    Returns:
        [num_rows, features + rank]; undefined after the last block.
    """
    (num_rows, features), (number, _, rank) = rows.shape, factor.shape
    result = rows.new_empty(num_rows, features + rank)
    # The last program of an expert may have fewer rows.
    part, parts = _parts(rank)
    grid = (triton.cdiv(num_rows, _LOW_RANK["ROWS"]) + number, parts)
    _with_low_rank[grid](
        rows,
        factor,
        result,
        ends,
        number,
        features,
        rank,
        scale,
        EXPERTS=triton.next_power_of_2(number),
        RANK=part,
        **_LOW_RANK,
    )
    return result


def _parts(rank: int) -> tuple[int, int]:
    """How much of the rank a program has, a power of two, and the number of such parts."""
    part = min(_MOST_RANK, max(16, triton.next_power_of_2(rank)))
    return part, triton.cdiv(rank, part)


@triton.jit
def _factor_gradients(  # type: ignore[no-untyped-def]
    low,
    wide,
    result,
    ends,
    low_stride,
    wide_stride,
    rank,
    columns,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    IS_SECOND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    of_rank = tl.program_id(2) * RANK + tl.arange(0, RANK)
    begin, end = tl.load(ends + expert).to(tl.int64), tl.load(ends + expert + 1).to(tl.int64)
    total = tl.zeros((RANK, COLUMNS), tl.float32)
    for first in range(begin, end, STEP):
        row = first + tl.arange(0, STEP).to(tl.int64)
        is_row = row[:, None] < end
        low_at = low + row[:, None] * low_stride + of_rank[None, :]
        wide_at = wide + row[:, None] * wide_stride + column[None, :]
        some_low = tl.load(low_at, is_row & (of_rank < rank)[None, :], other=0.0)
        some_wide = tl.load(wide_at, is_row & (column < columns)[None, :], other=0.0)
        total = tl.dot(tl.trans(some_low), some_wide, total)
    place = column
    if INTERLEAVED:
        place = column % 2 * (columns // 2) + column // 2
    if IS_SECOND:
        at = place[None, :] * rank + of_rank[:, None]
    else:
        at = of_rank[:, None] * columns + place[None, :]
    is_value = (of_rank < rank)[:, None] & (column < columns)[None, :]
    at += expert * rank * columns
    tl.store(result + at, total.to(result.dtype.element_ty), is_value)


@triton.jit
def _with_low_rank(  # type: ignore[no-untyped-def]
    rows,
    factor,
    result,
    ends,
    number,
    features,
    rank,
    scale,
    EXPERTS: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    # Every expert has as many programs as it has rows for; which one is this?
    experts = tl.arange(0, EXPERTS)
    begins = tl.load(ends + experts, experts < number, other=0)
    all_ends = tl.load(ends + experts + 1, experts < number, other=0)
    programs = (all_ends - begins + ROWS - 1) // ROWS
    through = tl.cumsum(programs, 0)
    expert = tl.sum((through <= tl.program_id(0)).to(tl.int32), 0)
    if expert >= number:
        return
    before = tl.sum(tl.where(experts < expert, programs, 0), 0)
    begin = tl.sum(tl.where(experts == expert, begins, 0), 0)
    end = tl.sum(tl.where(experts == expert, all_ends, 0), 0)
    row = begin + (tl.program_id(0) - before) * ROWS + tl.arange(0, ROWS)
    is_row, row = (row < end)[:, None], row.to(tl.int64)[:, None]
    of_rank = (tl.program_id(1) * RANK + tl.arange(0, RANK))[None, :]
    width = features + rank
    low = tl.zeros((ROWS, RANK), tl.float32)
    for first in range(0, features, FEATURES):
        feature = first + tl.arange(0, FEATURES)
        is_value = is_row & (feature < features)[None, :]
        some = tl.load(rows + row * features + feature[None, :], is_value, other=0.0)
        is_first = is_value & (tl.program_id(1) == 0)
        tl.store(result + row * width + feature[None, :], some, is_first)
        factor_at = factor + (expert.to(tl.int64) * features + feature[:, None]) * rank + of_rank
        has_factor = (feature < features)[:, None] & (of_rank < rank)
        low = tl.dot(some, tl.load(factor_at, has_factor, other=0.0), low)
    low_at = result + row * width + features + of_rank
    tl.store(low_at, (low * scale).to(result.dtype.element_ty), is_row & (of_rank < rank))
