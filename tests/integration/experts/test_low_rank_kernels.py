"""The Triton kernels of adapters in Triton's interpreter, against fp64."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch_products import TorchProducts

# More and fewer rows than a program has, none, and rows after the last block.
SIZES, REST = (16, 0, 200, 64, 0, 96), 24
ENDS = torch.tensor([0, *SIZES]).cumsum(0).int()
USED = sum(SIZES)
# Of the largest value: sums of at most 320 terms in fp32.  The interpreter has no bf16.
CLOSE = 1e-6


def test_in_the_interpreter() -> None:
    """In another process: Triton asks for the variable when it is imported."""
    pytest.importorskip("triton", reason="torch for this machine brings no Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def draw(columns: int, seed: int) -> torch.Tensor:
    """Rows that are NaN after the last block."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(USED + REST, columns, generator=generator)
    values[USED:] = torch.nan
    return values


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.double() - wanted).abs().max() <= CLOSE * wanted.abs().max()


def check_factor_gradients(rank: int, features: int) -> None:
    from megatron_ncclep.integration.experts.low_rank_kernels import factor_gradients

    low, wide = draw(rank, 1), draw(features, 2)
    expected = TorchProducts().factor_gradients
    for interleaved in (False, True):
        second = factor_gradients(wide, low, ENDS, interleaved)
        assert_close(second, expected(wide.double(), low.double(), ENDS, interleaved))
    part_of_wider = torch.cat([wide, low], dim=1)[:, features:]
    first = factor_gradients(part_of_wider, wide, ENDS, False)
    assert_close(first, expected(low.double(), wide.double(), ENDS))
    assert not first[1].any()  # of an expert without rows


def check_with_low_rank(rank: int, features: int) -> None:
    from megatron_ncclep.integration.experts.low_rank_kernels import with_low_rank

    rows, generator = draw(features, 3), torch.Generator().manual_seed(4)
    factor = torch.randn(len(SIZES), features, rank, generator=generator)
    found = with_low_rank(rows, factor, ENDS, 0.5)[:USED]
    assert torch.equal(found[:, :features], rows[:USED])
    expected = TorchProducts().with_low_rank(rows.double(), factor.double(), ENDS, 0.5)[:USED]
    assert_close(found, expected)


if __name__ == "__main__":
    for check in (check_factor_gradients, check_with_low_rank):
        check(rank=8, features=192)
        check(rank=24, features=320)
