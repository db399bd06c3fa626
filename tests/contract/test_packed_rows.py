"""Rows of bytes: rows quantised at the source rank, with their scales, arrive bit for bit."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from compare import assert_same_bits
from oracle import oracle_dispatch
from rank_pool import RankContext, RankPool
from run_case import config_of, fitted, opened, oracle_of, run_case

from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import BYTES
from megatron_ncclep.errors import InputError
from megatron_ncclep.ops.dispatch import dispatch
from megatron_ncclep.ops.packed_rows import pack_rows, unpack_rows

E4M3 = torch.float8_e4m3fn
HIDDEN, BLOCK = 64, 16  # numbers of a row; those that have a scale of their own
NUM_SCALES = HIDDEN // BLOCK

# Four experts on each rank where all ranks are there, as in the other contract tests.
CASES = [
    Case("uneven", (5, 11, 17, 23), 16, 3, HIDDEN),
    Case("bf16-aligned", (7, 0, 21, 29), 16, 3, HIDDEN, torch.bfloat16, 32, dropped=0.2),
    Case("static", (30,) * 4, 16, 3, HIDDEN, torch.float32, 16, 96, skew=0.5),
    Case("no-tokens", (0,) * 4, 16, 2, HIDDEN),
]


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of numbers in FP8, each with the power of two by which they were divided."""
    blocks = rows.float().unflatten(1, (NUM_SCALES, BLOCK))
    largest = blocks.abs().amax(dim=2, keepdim=True)
    scales = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    scales = torch.where(largest == 0, torch.ones_like(scales), scales)
    return (blocks / scales).flatten(1).to(E4M3), scales.squeeze(2)


def any_bytes(case: Case, rank: int) -> torch.Tensor:
    """Every byte there is, where a number would be NaN too."""
    generator = torch.Generator().manual_seed(rank)
    shape = (case.tokens[rank], HIDDEN)
    return torch.randint(0, 256, shape, generator=generator, dtype=BYTES).to(case.device)


def dispatch_on_rank(
    ctx: RankContext, case: Case, engine_name: str
) -> tuple[torch.Tensor | None, ...]:
    """Rows as numbers; packed ones with weights, and without; bytes of any kind."""
    with opened(ctx, case, engine_name) as (case, engine):
        plan = engine.plan(case.topk_idx(ctx.rank))
        x, w = case.rows(ctx.rank, case.tokens[ctx.rank], salt=2), case.weights(ctx.rank)
        packed = pack_rows(*quantize(x))
        return (
            engine.dispatch(plan, x)[0],
            *engine.dispatch(plan, packed, w),
            engine.dispatch(plan, packed)[0],
            engine.dispatch(plan, any_bytes(case, ctx.rank), w)[0],
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_quantised_rows_arrive_as_they_were(pool: RankPool, engine_name: str, case: Case) -> None:
    """Quantised and then routed, or routed and then quantised: the same bits."""
    case = fitted(case, pool, engine_name)
    results = run_case(pool, dispatch_on_rank, case, engine_name)
    if results is None:
        return  # refused, as it must be
    ranks, oracle = range(case.num_ranks), oracle_of(case, engine_name)
    w = [case.weights(r) for r in ranks]
    sent = [pack_rows(*quantize(case.rows(r, case.tokens[r], salt=2))) for r in ranks]
    expected, expected_w = oracle_dispatch(oracle, sent, w)
    expected_bytes, _ = oracle_dispatch(oracle, [any_bytes(case, r) for r in ranks], w)
    for rank, (rows, packed, row_w, packed_alone, other) in enumerate(results):
        assert_same_bits(packed, expected[rank], f"packed rows of rank {rank}")
        assert_same_bits(row_w, expected_w[rank], f"weights of rank {rank}")
        assert_same_bits(packed_alone, expected[rank], f"packed rows of rank {rank}, no weights")
        assert_same_bits(other, expected_bytes[rank], f"bytes of rank {rank}")
        # Of padding, the scales are 1 if it is quantised afterwards.
        routed_before = pack_rows(*quantize(rows))
        routed_before[[slot is None for slot in oracle.slots[rank]]] = 0
        assert_same_bits(packed, routed_before, f"rows of rank {rank}, quantised afterwards")


def backward_on_rank(ctx: RankContext, case: Case, engine_name: str) -> str:
    case = case.on(ctx.device)
    # Without `opened`, which checks the group: where no host waits in combine, it has failed.
    config = config_of(case, engine_name)
    with closing(create_engine(ctx.group, case.num_experts, config)) as engine:
        plan = engine.plan(case.topk_idx(ctx.rank))
        w = case.weights(ctx.rank).requires_grad_()
        _, row_w = dispatch(engine, plan, any_bytes(case, ctx.rank), w)
        with pytest.raises(InputError) as caught:
            row_w.sum().backward()
    return str(caught.value)


def test_bytes_have_no_backward(pool: RankPool, engine_name: str) -> None:
    """Gradients of weights would come back with those of the rows, which bytes have not."""
    case = fitted(CASES[0], pool, engine_name)
    for text in pool.run(backward_on_rank, case, engine_name, ranks=case.num_ranks):
        assert "y is torch.uint8: combine cannot add up rows of bytes" in text


def test_packing() -> None:
    """The example of the module; a row's bytes are where it says they are."""
    data = torch.arange(512).view(2, 256).to(BYTES)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    packed = pack_rows(data.view(E4M3), scales)
    assert packed.shape == (2, 272)
    assert packed[1, :256].tolist() == list(range(256))
    assert packed[1, 256:264].tolist() == [0, 0, 64, 64, 0, 0, 128, 64]  # 3.0 and 4.0
    assert not packed[:, 264:].any()
    unpacked, unpacked_scales = unpack_rows(packed, 256, 2, E4M3)
    assert_same_bits(unpacked, data.view(E4M3), "data")
    assert_same_bits(unpacked_scales, scales, "scales")
    assert unpacked.data_ptr() == packed.data_ptr()
    empty, no_scales = unpack_rows(pack_rows(data[:0], scales[:0, :0]), 256, 0, BYTES)
    assert (empty.shape, no_scales.shape) == ((0, 256), (0, 0))
