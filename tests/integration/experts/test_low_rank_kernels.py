"""The Triton kernels of adapters in Triton's interpreter, against fp64."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch_products import TorchProducts

# More and fewer rows than a program has, none, and rows after the last block.
SIZES, REST = (16, 0, 200, 64, 0, 96), 24
ENDS = torch.tensor([0, *SIZES]).cumsum(0).int()
USED = sum(SIZES)
# Of the largest value: sums of at most 320 terms in fp32.  The interpreter has no bf16.
CLOSE = 1e-6
# Of shared memory, for a CTA on compute capability 9.0.
MOST_BYTES = 227 * 1024


def test_in_the_interpreter() -> None:
    """In another process: Triton asks for the variable when it is imported."""
    pytest.importorskip("triton", reason="torch for this machine brings no Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


class Launches:
    """In place of a kernel: how many bytes of shared memory each launch would need on a GPU."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.shared: list[int] = []

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *args: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
        from triton import compile as compile_kernel
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        kinds = {torch.bfloat16: "*bf16", torch.int32: "*i32"}
        named = dict(zip(self.kernel.arg_names, args, strict=False))
        signature = {
            name: kinds[value.dtype]
            if isinstance(value, torch.Tensor)
            else {int: "i32", float: "fp32"}[type(value)]
            for name, value in named.items()
        }
        # As Triton sees tensors from torch's allocator, and numbers that are multiples of 16.
        is_multiple = [isinstance(v, torch.Tensor) or v % 16 == 0 for v in named.values()]
        attrs = {(i,): [["tt.divisibility", 16]] for i, is_one in enumerate(is_multiple) if is_one}
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(self.kernel, signature, constants, attrs)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        target = GPUTarget("cuda", 90, 32)
        compiled: Any = compile_kernel(source, target=target, options=options)
        self.shared.append(compiled.metadata.shared)


@pytest.mark.parametrize("rank", [64, 128, 512])
def test_shared_memory(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of rank 128 had no place there, so the first backward pass of whoever trained such
    ones ended in Triton's OutOfResources; tests on GPUs went up to rank 32.
    """
    pytest.importorskip("triton", reason="torch for this machine brings no Triton")
    kernels = import_kernels()
    launches = [Launches(kernels._factor_gradients), Launches(kernels._with_low_rank)]
    monkeypatch.setattr(kernels, "_factor_gradients", launches[0])
    monkeypatch.setattr(kernels, "_with_low_rank", launches[1])
    number, wide = len(SIZES), torch.zeros(16, 2048, dtype=torch.bfloat16)
    kernels.factor_gradients(wide[:, :rank], wide, ENDS, False)
    kernels.factor_gradients(wide, wide[:, :rank], ENDS, True)
    kernels.with_low_rank(wide, wide.new_zeros(number, 2048, rank), ENDS, 0.5)
    found = [shared for launch in launches for shared in launch.shared]
    assert len(found) == 3
    assert max(found) <= MOST_BYTES, found


def import_kernels() -> ModuleType:
    from megatron_ncclep.integration.experts import low_rank_kernels

    return low_rank_kernels


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
        check(rank=136, features=192)  # in parts
