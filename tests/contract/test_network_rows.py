"""Messages between nodes: on a CPU the functions, on a GPU the kernels.

    pytest tests/contract/test_network_rows.py --backend nccl
    compute-sanitizer --tool memcheck python -m pytest tests/contract/test_network_rows.py \
        --backend nccl

Whole dispatches and combines over them are compared with the oracle in test_nodes.py, and with
--engine hierarchical.
"""

from __future__ import annotations

import struct

import pytest
import torch
from compare import assert_same_bits

from megatron_ncclep.engines.hierarchical.message_packing import (
    Piece,
    add_up,
    message_bytes,
    pack,
    pieces_of,
    unpack,
)

# Tokens, bytes of a row, nodes, assignments.
SHAPES = [(37, 16, 1, 1), (9, 4176, 3, 8), (70, 208, 2, 40), (1, 48, 5, 3), (0, 32, 2, 2)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def device(backend: str) -> str:
    return "cpu" if backend == "gloo" else "cuda"


def random_rows(num_rows: int, row_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of many magnitudes, whose sums depend on their order."""
    generator = torch.Generator().manual_seed(num_rows * row_bytes)
    shape = (num_rows, row_bytes // dtype.itemsize)
    scale = 2.0 ** torch.randint(-6, 6, shape, generator=generator)
    return ((torch.rand(shape, generator=generator) - 0.5) * scale).to(dtype)


def random_numbers(*shape: int, most: int = 1) -> torch.Tensor:
    """From 0 to `most`."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * most


def test_the_docstrings_example() -> None:
    assert message_bytes(Piece(0, 32), 3) == 48
    rows = torch.arange(16, dtype=torch.float32).view(1, 16)
    w = torch.tensor([[1.0, 2.0, 3.0]])
    (message,) = pack(rows, Piece(32, 32), w, None, 1, 1)
    assert bytes(message.tolist()) == struct.pack("<12f", *range(8, 16), 1, 2, 3, 0)


@pytest.mark.parametrize("number", [1, 3, 100])
@pytest.mark.parametrize("row_bytes", [16, 48, 4176])
def test_pieces_make_up_the_row(row_bytes: int, number: int) -> None:
    pieces = pieces_of(row_bytes, number)
    assert len(pieces) == min(number, row_bytes // 16)
    assert [b for p in pieces for b in range(p.first, p.first + p.size)] == list(range(row_bytes))
    assert max(p.size for p in pieces) - min(p.size for p in pieces) in (0, 16)


@pytest.mark.parametrize("lists_tokens", [False, True], ids=["all", "listed"])
@pytest.mark.parametrize("has_weights", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_messages_have_the_rows(
    device: str, shape: tuple[int, int, int, int], has_weights: bool, lists_tokens: bool
) -> None:
    num_tokens, row_bytes, nodes, top_k = shape
    top_k = top_k if has_weights else 0
    rows = random_rows(num_tokens, row_bytes, torch.bfloat16).to(device)
    w = random_numbers(num_tokens, top_k).to(device) if has_weights else None
    each = num_tokens + 2  # two of them belong to no token
    token = torch.arange(each).repeat(nodes)
    if lists_tokens:
        token = token[(token < num_tokens) & (random_numbers(nodes * each) < 0.7)]
    token, listed = token.to(device), token.int().to(device) if lists_tokens else None
    for piece in pieces_of(row_bytes, 3):
        messages = pack(rows, piece, w, listed, len(token), each)
        assert messages.shape == (len(token), message_bytes(piece, top_k))
        assert not messages[:, piece.size + 4 * top_k :][token < num_tokens].any()  # padding
        theirs, their_w = unpack(messages, piece, top_k, rows.dtype)
        is_row = token < num_tokens
        mine = token[is_row]
        assert_same_bits(theirs[is_row], rows[mine][:, piece.numbers(rows.dtype)], "rows")
        assert (their_w is None) == (w is None)
        if w is not None and their_w is not None:
            assert_same_bits(their_w[is_row], w[mine], "weights")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_values", [False, True], ids=["", "values"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_in_the_order_of_nodes(
    device: str, shape: tuple[int, int, int, int], has_values: bool, dtype: torch.dtype
) -> None:
    """Messages that belong to no token are memory as it was: NaN, say."""
    num_tokens, row_bytes, nodes, top_k = shape
    count = num_tokens * nodes
    order = torch.randperm(count, generator=torch.Generator().manual_seed(row_bytes))
    is_sent = random_numbers(nodes, num_tokens) < 0.7
    place = order.view(nodes, num_tokens).int().masked_fill(~is_sent, -1)
    of_assignment = random_numbers(num_tokens, top_k, most=nodes + 1).int() - 1
    here = of_assignment.clamp(min=0).long().t()  # [top_k, num_tokens]
    of_assignment[(place.gather(0, here) < 0).t()] = -1
    sums, values = random_rows(count, row_bytes, dtype), random_numbers(count, top_k)
    sums[order.view(nodes, num_tokens)[~is_sent]] = torch.nan

    out = torch.full((num_tokens, row_bytes // dtype.itemsize), 7, dtype=dtype, device=device)
    topk_w = torch.full((num_tokens, top_k), 7.0, device=device) if has_values else None
    for number, piece in enumerate(pieces_of(row_bytes, 3)):
        w = values.to(device) if has_values and number == 0 else None
        messages = pack(sums.to(device), piece, w, None, count, count)
        add_up(
            messages,
            piece,
            place.to(device),
            out,
            of_assignment.to(device),
            None if w is None else topk_w,
        )
        if number == 0:
            rest = out[:, piece.numbers(dtype).stop :]
            assert bool((rest == 7).all()), "the other pieces are not written"

    expected = torch.zeros(out.shape)
    for places in place.long():
        is_sent = places >= 0
        expected[is_sent] += sums[places[is_sent]].float()
    assert_same_bits(out.cpu(), expected.to(dtype), "sums")
    if topk_w is not None:
        whose = place.gather(0, here).t().long()
        expected = values.gather(0, whose.clamp(min=0)).masked_fill(of_assignment < 0, 0)
        assert_same_bits(topk_w.cpu(), expected, "values")
