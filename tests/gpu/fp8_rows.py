"""Rows for tests of FP8 on a GPU, and how their codes are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HIDDEN, FFN = 512, 256
# One row, one more than a block, none, whole blocks, and a last block that ends inside one.
SIZES = (129, 0, 1, 300, 128, 16, 0, 48)
REST = 40  # rows after the last block, all NaN
BF16 = torch.bfloat16


def draw(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, device="cuda")).bfloat16()


def ends_of(sizes: Sequence[int]) -> list[int]:
    return [0, *torch.tensor(sizes).cumsum(0).tolist()]


def special_rows(sizes: Sequence[int], columns: int) -> Tensor:
    """Rows with every kind of number, blocks of one value, of zeros, and of denormals."""
    rows = draw(3, sum(sizes) + REST, columns)
    rows[::7] *= 1e-30
    rows[::11] *= 1e30
    rows[3, :128] = 0
    rows[5, 128:256] = 3.0
    rows[8:140, 7] = -500.0
    rows[130:, 9] = 0
    for place, value in ((0, torch.inf), (17, -torch.inf), (19, torch.nan), (23, 2.0**-133)):
        rows[2, place], rows[place + 131, 256 + place] = value, value
    rows[6, :128] = 2.0**-133  # 448 / amax is no fp32
    rows[9, 128:256] = torch.finfo(BF16).max
    rows[10, :128] = torch.nan
    rows[sum(sizes) :] = torch.nan
    return rows


def same_codes(found: Tensor, expected: Tensor) -> float:
    """The share of codes that differ; every NaN is one, and so is every zero."""
    found, expected = found.cpu(), expected.cpu()
    alike = [(found & 0x7F == code) & (expected & 0x7F == code) for code in (0x7F, 0)]
    differ = (found != expected) & ~alike[0] & ~alike[1]
    return float(differ.double().mean()) if found.numel() else 0.0
