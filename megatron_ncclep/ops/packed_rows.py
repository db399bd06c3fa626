"""Rows quantised before dispatch, packed with their scales into rows of bytes that are sent once.

A packed row is the row's values, one byte each, then its scales in fp32, then zeros up to a
multiple of 16 bytes.  Example: 256 numbers in FP8 with a scale for every 128 take 256 + 8 bytes,
packed into 272; in bf16 they take 512.  `Engine.dispatch` copies them as they are
(`EngineCaps.moves_bytes`), so rows quantised at the source rank and then routed equal rows routed
and then quantised, bit for bit.  A padding row is zero, values and scales.

Serving packs rows, and so does training with grouped experts in FP8
(integration/experts/fp8_crossing.py).  For TransformerEngine's experts rows cross in the model's
dtype: its release 2.20.2 quantises the rows of an expert with information beyond a single row, and
its grouped GEMM takes rows of bf16 and quantises them itself.

    blockwise     a weight's gradient needs blocks of 128 x 1 of the unquantised rows, after routing
    tensorwise    one scale for all rows of an expert, from all ranks
    delayed       each expert has its own scale: a token's row would differ from expert to expert,
                  and cross once for each assignment instead of once for each rank
"""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_ncclep.engines.engine import BYTES
from megatron_ncclep.errors import InputError

# The bytes of a packed row are a multiple of this, the unit that the kernels copy.
MULTIPLE = 16
_SCALE_BYTES = 4


class Packing(Protocol):
    """Who packs rows before they are dispatched, and gets those that arrive."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Pack [num_tokens, hidden]: uint8 [num_tokens, row_bytes]."""
        ...

    def deliver(self, packed: torch.Tensor) -> torch.Tensor:
        """Take over [num_rows, row_bytes], and return what autograd gets in place of the rows."""
        ...


def pack_rows(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack quantised rows and their scales together.  Not collective, no autograd.

    Args:
        data: [num_tokens, hidden] of a dtype of one byte (float8_e4m3fn, uint8); hidden is a
            multiple of 4.
        scales: [num_tokens, num_scales] fp32, on the same device.

    Returns:
        [num_tokens, row_bytes] uint8.

    Raises:
        InputError: shapes, dtypes or devices do not fit.
    """
    fits = (
        data.dim() == scales.dim() == 2
        and data.shape[0] == scales.shape[0]
        and data.device == scales.device
        and data.shape[1] % _SCALE_BYTES == 0
    )
    if not fits or data.element_size() != 1 or scales.dtype != torch.float32:
        raise InputError(
            f"data is {data.dtype} {list(data.shape)} on {data.device} and scales {scales.dtype} "
            f"{list(scales.shape)} on {scales.device}: they must be of one byte each [num_tokens, "
            "hidden], with hidden a multiple of 4, and float32 [num_tokens, num_scales]"
        )
    num_tokens, hidden = data.shape
    end, row_bytes = extent(hidden, scales.shape[1])
    packed = torch.empty(num_tokens, row_bytes, dtype=BYTES, device=data.device)
    packed[:, :hidden] = data.view(BYTES)
    packed[:, hidden:end] = scales.contiguous().view(BYTES)
    packed[:, end:] = 0
    return packed


def unpack_rows(
    packed: torch.Tensor, hidden: int, num_scales: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split rows and scales again; both are views.  Not collective, does not wait.

    Args:
        packed: [num_rows, row_bytes] uint8, as `pack_rows` made them or dispatch delivered them.
        hidden: of the packed rows.
        num_scales: of each row.
        dtype: of the packed rows.

    Returns:
        data [num_rows, hidden] of `dtype`, and scales [num_rows, num_scales] fp32.

    Raises:
        InputError: the rows do not have the length of such packed rows.
    """
    end, row_bytes = extent(hidden, num_scales)
    if packed.dtype != BYTES or packed.dim() != 2 or packed.shape[1] != row_bytes:
        raise InputError(
            f"packed is {packed.dtype} {list(packed.shape)}: rows of {hidden} bytes with "
            f"{num_scales} scales are {BYTES} [num_rows, {row_bytes}]"
        )
    return packed[:, :hidden].view(dtype), packed[:, hidden:end].view(torch.float32)


def extent(hidden: int, num_scales: int) -> tuple[int, int]:
    """The ends of a packed row's scales and of the row, in bytes."""
    end = hidden + _SCALE_BYTES * num_scales
    return end, -(-end // MULTIPLE) * MULTIPLE
