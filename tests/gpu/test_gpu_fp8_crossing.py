"""Rows in FP8 before and after they cross, on a Hopper GPU: bit by bit against the format."""

from __future__ import annotations

import fp8_format as fp8
import pytest
import torch
from fp8_rows import FFN, HIDDEN, REST, SIZES, draw, ends_of, same_codes, special_rows
from rank_pool import RankContext

from megatron_ncclep.integration.experts.fp8_products import Fp8Products


@pytest.mark.parametrize("powers_of_two", [True, False])
def test_packed_rows(ctx: RankContext, powers_of_two: bool) -> None:
    """Packed before they cross, with rows of padding between, and unpacked; products take both."""
    products, weights = Fp8Products(powers_of_two), draw(4, len(SIZES), FFN, HIDDEN, scale=0.05)
    of_weights = products.quantize_weights(list(weights))
    for sizes, columns in ((SIZES, HIDDEN), ((1,), 384), ((0, 0, 512), 128)):
        ends = ends_of(sizes)
        on_gpu, used = torch.tensor(ends, device="cuda", dtype=torch.int32), ends[-1]
        rows = special_rows(SIZES, HIDDEN)[: used + REST, :columns]
        packed = products.pack(rows)
        assert packed.shape == (len(rows), fp8.row_bytes(columns))
        wanted = fp8.packed(rows.cpu(), powers_of_two)
        assert torch.equal(packed[:, columns:].cpu(), wanted[:, columns:])
        assert same_codes(packed[:, :columns], wanted[:, :columns]) == 0
        packed[2:5] = 0
        values = fp8.unpacked(packed.cpu())[2]
        found = products.unpack(packed, columns, on_gpu)
        assert found.rows is packed
        assert torch.equal(found.scales[:, :used].cpu(), fp8.unpacked(packed.cpu())[1][:, :used])
        codes, scales = fp8.transposed(values, ends, powers_of_two)
        assert same_codes(found.transposed[: len(codes)], codes) == 0
        assert torch.equal(found.scales_transposed[: len(scales)].cpu(), scales)
        # One way alone.
        one = products.unpack(packed, columns, on_gpu, transposed=False)
        other = products.unpack(packed, columns, on_gpu, by_rows=False)
        assert torch.equal(one.scales[:, :used], found.scales[:, :used])
        assert torch.equal(other.transposed[: len(codes)], found.transposed[: len(codes)])
        if columns == HIDDEN:
            operands = (of_weights.weights, of_weights.scales, on_gpu)
            apart = found._replace(rows=packed[:, :columns].contiguous())
            out = products.multiply(found, *operands)[:used]
            # NaN too, of which rows have some.
            expected = products.multiply(apart, *operands)[:used]
            assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
    assert products.pack(rows[:0]).shape == (0, fp8.row_bytes(columns))
