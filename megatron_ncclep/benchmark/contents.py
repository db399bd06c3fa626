"""Payloads of any size whose values identify their place, made where they are needed.

Every element is a hash of (salt, rank, row, column), so any rank can make any other rank's payload,
and with a different salt for each operation the results left by an earlier one are wrong.
"""

from __future__ import annotations

import torch

# Rows are made piece by piece: a tensor of any size needs this many extra elements, in int32.
PIECE = 2**25
BITS = 24  # as many as fp32 holds exactly
_ODD = 0x2C1B3C6D


def rows_of(
    rank: int, num_rows: int, hidden: int, dtype: torch.dtype, salt: int, device: str
) -> torch.Tensor:
    """[num_rows, hidden] of values from -1 to 1, rounded to `dtype`."""
    rows = torch.empty(num_rows, hidden, dtype=dtype, device=device)
    column = _hash(torch.arange(hidden, device=device), salt)
    step = max(1, PIECE // hidden)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        row = _hash(torch.arange(first, last, device=device), (salt << 8) + rank + 1)
        mixed = (row[:, None] ^ column) * _ODD  # int32: large numbers wrap around
        mixed ^= mixed >> 15
        mixed &= 2**BITS - 1
        rows[first:last] = mixed.float().mul_(2.0 ** (1 - BITS)).sub_(1)
    return rows


def weights_of(rank: int, shape: tuple[int, ...], salt: int, device: str) -> torch.Tensor:
    """Fp32 from 0 (excluded) to 1: all different on 16 ranks with 2^20 of them each."""
    count = torch.Size(shape).numel()
    number = torch.arange(count, device=device) + (rank << 20)
    mixed = (number * _ODD + salt) & (2**BITS - 1)
    return (mixed.float() + 1).mul_(2.0**-BITS).view(shape)


def _hash(number: torch.Tensor, salt: int) -> torch.Tensor:
    """Int32 from int64: with the same salt, no two are equal."""
    mixed = (number * 0x1F35 + (salt * 0x5BD1E995 & 0xFFFFFFFF)) & 0xFFFFFFFF
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)).int()
