"""The Triton kernels of adapters in Triton's interpreter, against fp64."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from megatron_setup import drawn
from rank_pool import RankContext
from torch_products import TorchProducts

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="torch for this machine brings no Triton"
)

# More and fewer rows than a program has, none, and rows after the last block.
SIZES, REST = (16, 0, 200, 64, 0, 96), 24
ENDS = torch.tensor([0, *SIZES]).cumsum(0).int()
USED = sum(SIZES)
# Of the largest value: sums of at most 320 terms in fp32.  The interpreter has no bf16.
CLOSE = 1e-6
# Of shared memory, for a CTA on compute capability 9.0.
MOST_BYTES = 227 * 1024


def draw(columns: int, seed: int) -> torch.Tensor:
    """Rows that are NaN after the last block."""
    values = drawn(seed, USED + REST, columns)
    values[USED:] = torch.nan
    return values


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.double() - wanted).abs().max() <= CLOSE * wanted.abs().max()


@pytest.mark.alone  # on a rank: there the interpreter was chosen before Triton was imported
@pytest.mark.parametrize(
    ("rank", "features"), [(8, 192), (24, 320), pytest.param(136, 192, id="in parts")]
)
def test_in_the_interpreter(ctx: RankContext, rank: int, features: int) -> None:
    from megatron_ncclep.integration.experts.low_rank_kernels import factor_gradients, with_low_rank

    low, wide, exact = draw(rank, 1), draw(features, 2), TorchProducts()
    for interleaved in (False, True):
        second = factor_gradients(wide, low, ENDS, interleaved)
        wanted = exact.factor_gradients(wide.double(), low.double(), ENDS, interleaved)
        assert_close(second, wanted)
    part_of_wider = torch.cat([wide, low], dim=1)[:, features:]
    first = factor_gradients(part_of_wider, wide, ENDS, False)
    assert_close(first, exact.factor_gradients(low.double(), wide.double(), ENDS))
    assert not first[1].any()  # of an expert without rows

    rows, factor = draw(features, 3), drawn(4, len(SIZES), features, rank)
    found = with_low_rank(rows, factor, ENDS, 0.5)[:USED]
    assert torch.equal(found[:, :features], rows[:USED])
    assert_close(found, exact.with_low_rank(rows.double(), factor.double(), ENDS, 0.5)[:USED])


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

        kinds = {torch.bfloat16: "*bf16", torch.int32: "*i32", int: "i32", float: "fp32"}
        named = dict(zip(self.kernel.arg_names, args, strict=False))
        signature = {name: kinds[getattr(v, "dtype", type(v))] for name, v in named.items()}
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
    from megatron_ncclep.integration.experts import low_rank_kernels as kernels

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
