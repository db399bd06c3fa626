"""Messages between nodes, byte by byte: on a CPU the functions, on a GPU the kernels.

    pytest tests/contract/test_network_rows.py --backend nccl
    compute-sanitizer --tool memcheck python -m pytest tests/contract/test_network_rows.py \
        --backend nccl

What is expected is worked out here with Python's own bytes and numbers.
"""

from __future__ import annotations

import random
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


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8).tolist())


def random_rows(num_rows: int, row_bytes: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows * row_bytes)
    shape = (num_rows, row_bytes // dtype.itemsize)
    # Of many magnitudes: sums depend on their order.
    scale = 2.0 ** torch.randint(-6, 6, shape, generator=generator)
    return ((torch.rand(shape, generator=generator) - 0.5) * scale).to(dtype).to(device)


def random_weights(num_rows: int, top_k: int, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows + top_k)
    return torch.rand(num_rows, top_k, generator=generator).to(device)


def test_the_docstrings_example() -> None:
    assert message_bytes(Piece(0, 32), 3) == 48
    rows = torch.arange(16, dtype=torch.float32).view(1, 16)
    w = torch.tensor([[1.0, 2.0, 3.0]])
    (message,) = pack(rows, Piece(32, 32), w, None, 1, 1)
    assert bytes_of(message) == struct.pack("<12f", *range(8, 16), 1, 2, 3, 0)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("row_bytes", [16, 48, 4176])
def test_pieces_make_up_the_row(row_bytes: int, number: int) -> None:
    pieces = pieces_of(row_bytes, number)
    assert len(pieces) == min(number, row_bytes // 16)
    assert [p.first for p in pieces] == [0, *(p.first + p.size for p in pieces)][:-1]
    assert pieces[-1].first + pieces[-1].size == row_bytes
    assert max(p.size for p in pieces) - min(p.size for p in pieces) in (0, 16)


@pytest.mark.parametrize("lists_tokens", [False, True], ids=["all", "listed"])
@pytest.mark.parametrize("has_weights", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_messages_have_the_rows(
    device: str, shape: tuple[int, int, int, int], has_weights: bool, lists_tokens: bool
) -> None:
    num_tokens, row_bytes, nodes, top_k = shape
    rng = random.Random(row_bytes)
    rows = random_rows(num_tokens, row_bytes, torch.bfloat16, device)
    w = random_weights(num_tokens, top_k, device) if has_weights else None
    each = num_tokens + 2  # two of them belong to no token
    whose = [token for _ in range(nodes) for token in range(each)]
    token = None
    if lists_tokens:
        whose = [t for t in whose if t < num_tokens and rng.random() < 0.7]
        token = torch.tensor(whose, dtype=torch.int32, device=device)
    for piece in pieces_of(row_bytes, 3):
        messages = pack(rows, piece, w, token, len(whose), each)
        assert messages.shape == (len(whose), message_bytes(piece, top_k if has_weights else 0))
        got = bytes_of(messages)
        size = messages.shape[1]
        for i, t in enumerate(whose):
            if t >= num_tokens:
                continue
            expected = bytes_of(rows[t])[piece.first : piece.first + piece.size]
            expected += b"" if w is None else bytes_of(w[t])
            assert got[i * size : (i + 1) * size] == expected.ljust(size, b"\0"), f"message {i}"
        theirs = [i for i, t in enumerate(whose) if t < num_tokens]
        back, back_w = unpack(messages, piece, top_k if has_weights else 0, rows.dtype)
        mine = [whose[i] for i in theirs]
        assert_same_bits(back[theirs], rows[mine][:, piece.numbers(rows.dtype)], "rows")
        assert (back_w is None) == (w is None)
        if w is not None and back_w is not None:
            assert_same_bits(back_w[theirs], w[mine], "weights")


def fp32(value: float) -> float:
    """The nearest fp32; a sum of two fp32 in fp64 is rounded as their exact sum is."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def rounded(value: float, dtype: torch.dtype) -> bytes:
    if dtype == torch.float32:
        return struct.pack("<f", value)
    if dtype == torch.float16:
        return struct.pack("<e", value)
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    bits += 0x7FFF + (bits >> 16 & 1)  # to the nearest, ties to even
    return struct.pack("<H", bits >> 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_values", [False, True], ids=["", "values"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_in_the_order_of_nodes(
    device: str, shape: tuple[int, int, int, int], has_values: bool, dtype: torch.dtype
) -> None:
    num_tokens, row_bytes, nodes, top_k = shape
    rng = random.Random(row_bytes)
    count = num_tokens * nodes
    order = rng.sample(range(count), count)
    place = [
        [order[m * num_tokens + t] if rng.random() < 0.7 else -1 for t in range(num_tokens)]
        for m in range(nodes)
    ]
    there = [[m for m in range(nodes) if place[m][t] >= 0] for t in range(num_tokens)]
    of_assignment = [[rng.choice([-1, *there[t]]) for _ in range(top_k)] for t in range(num_tokens)]
    out = torch.full((num_tokens, row_bytes // dtype.itemsize), 7, dtype=dtype, device=device)
    topk_w = torch.full((num_tokens, top_k), 7.0, device=device) if has_values else None
    values = random_weights(count, top_k, "cpu").tolist()
    sums = random_rows(count, row_bytes, dtype, device)
    for number, piece in enumerate(pieces_of(row_bytes, 3)):
        with_values = has_values and number == 0
        messages = pack(
            sums,
            piece,
            random_weights(count, top_k, device) if with_values else None,
            None,
            count,
            count,
        )
        add_up(
            messages,
            piece,
            torch.tensor(place, dtype=torch.int32, device=device).view(nodes, num_tokens),
            out,
            torch.tensor(of_assignment, dtype=torch.int32, device=device).view(num_tokens, top_k),
            topk_w if with_values else None,
        )
        if number == 0 and num_tokens:
            rest = out[:, piece.numbers(dtype).stop :]
            assert bool((rest == 7).all()), "the other pieces are not written"
    numbers = sums.double().tolist()
    expected = b""
    for t in range(num_tokens):
        for i in range(out.shape[1]):
            total = 0.0
            for m in there[t]:
                total = fp32(total + numbers[place[m][t]][i])
            expected += rounded(total, dtype)
    assert bytes_of(out) == expected
    if topk_w is not None:
        wanted = [
            [0.0 if m < 0 else values[place[m][t]][k] for k, m in enumerate(of_assignment[t])]
            for t in range(num_tokens)
        ]
        assert topk_w.tolist() == wanted


def test_what_is_nobodys_is_not_added(device: str) -> None:
    """Messages without a token are memory as it was: NaN, say."""
    sums = torch.full((4, 8), float("nan"), device=device)
    sums[1], sums[2] = 1.0, 2.0
    place = torch.tensor([[1], [-1], [2]], dtype=torch.int32, device=device)
    out = torch.empty(1, 8, device=device)
    add_up(sums.view(torch.uint8), Piece(0, 32), place, out, None, None)
    assert out.tolist() == [[3.0] * 8]
