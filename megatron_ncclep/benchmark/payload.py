"""Payload: rows whose values name their owner, the same on every rank and device.

A row's values are a hash of (what it is, rank, row, column), so that any rank can write down what
another rank's row must hold without having it sent.  All of them are in [0.5, 1.5): sums do not
cancel, and a relative tolerance means what it says where one is needed.
"""

from __future__ import annotations

import torch

# What a tensor is: each has values of its own, so that a result left over from another pass shows.
X, Y, GRAD_OUT, GRAD_ROWS, WEIGHTS, GRAD_WEIGHTS = range(6)

_MASK = 2**32 - 1


def rows(
    kind: int, ranks: torch.Tensor, row: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Make the rows `row` of `ranks`.

    Args:
        kind: one of the constants above.
        ranks: int64 [n]: who owns each row.
        row: int64 [n]: its number there, on the same device.
        width: values of a row.
        dtype: of the result; values are rounded to it from 24 bits.

    Returns:
        [n, width] on the device of `row`.
    """
    column = torch.arange(width, device=row.device)
    key = _mix(_mix(row + 0x9E3779B1 * (ranks + 1)) + 0x85EBCA6B * (kind + 1))
    bits = _mix(key[:, None] + 0x27D4EB2F * column)
    return ((bits >> 8).float() * 2.0**-24 + 0.5).to(dtype)


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Spread every bit of int64 `values` over 32 bits; no product leaves 63 bits."""
    values = values & _MASK
    values = ((values ^ (values >> 16)) * 0x45D9F3B) & _MASK
    values = ((values ^ (values >> 16)) * 0x45D9F3B) & _MASK
    return values ^ (values >> 16)
