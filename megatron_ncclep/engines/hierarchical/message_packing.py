"""Messages between nodes: one for each token that crosses, row and weights together.

    pack       tokens' rows, or a piece of each, and weights -> messages, by node, then token
    unpack     received messages -> rows and weights, for the engine inside the node
    add_up     returned messages -> the nodes' sums for each token, added up at its source

On GPUs each is a kernel (csrc/hierarchical/message_packing.cu); on CPUs, and where the extension
cannot run, the code here does the same.  It defines the kernels' results to the bit.

A message is a piece of the row followed by the weights, padded to a multiple of 16 bytes.
Example: a piece of 32 bytes and 3 weights take 32 + 12 bytes, and 4 bytes of padding.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from megatron_ncclep.libraries import extension

VECTOR = 16  # bytes; divides all sizes of pieces and messages (the extension's MESSAGE_VECTOR)


class Piece(NamedTuple):
    """The same part of every row: bytes `first` to `first + size`, both multiples of 16."""

    first: int
    size: int

    def numbers(self, dtype: torch.dtype) -> slice:
        """The columns of this piece in rows of that dtype."""
        return slice(self.first // dtype.itemsize, (self.first + self.size) // dtype.itemsize)


def pieces_of(row_bytes: int, number: int) -> list[Piece]:
    """Divide rows into `number` pieces of about the same size, or as many as they have vectors."""
    vectors = row_bytes // VECTOR
    number = max(1, min(number, vectors))
    starts = [vectors * i // number * VECTOR for i in range(number + 1)]
    return [Piece(a, b - a) for a, b in pairwise(starts)]


def message_bytes(piece: Piece, num_weights: int) -> int:
    """Bytes of a message with a piece of a row and `num_weights` weights, in fp32."""
    return piece.size + -(-4 * num_weights // VECTOR) * VECTOR


def pack(
    rows: torch.Tensor,
    piece: Piece,
    w: torch.Tensor | None,
    token: torch.Tensor | None,
    num_messages: int,
    tokens_each: int,
) -> torch.Tensor:
    """Make the messages.  Does not wait.

    Args:
        rows: [num_tokens, hidden], of any dtype.
        piece: of each row.
        w: fp32 [num_tokens, top_k], or None.
        token: int32 [num_messages]: the token whose row each message carries; None: message i
            carries that of token i modulo `tokens_each`, and is undefined where there is no such
            token.
        num_messages: how many there are.
        tokens_each: see `token`.

    Returns:
        uint8 [num_messages, message_bytes].
    """
    num_weights = 0 if w is None else w.shape[1]
    messages = rows.new_empty(num_messages, message_bytes(piece, num_weights), dtype=torch.uint8)
    if (kernels := extension.kernels_on(rows.device)) is not None:
        stream = extension.current_stream()
        inputs = (rows.contiguous(), None if w is None else w.contiguous(), token)
        kernels.pack_messages(*inputs, tokens_each, *piece, messages, stream)
        return messages
    num_tokens = len(rows)
    if token is None:
        token = torch.arange(num_messages, device=rows.device) % max(tokens_each, 1)
        token = token.clamp(max=max(num_tokens - 1, 0))
    if num_tokens == 0:
        return messages.zero_()
    as_bytes = rows.contiguous().view(torch.uint8)
    messages[:, : piece.size] = as_bytes[token, piece.first : piece.first + piece.size]
    messages[:, piece.size :] = 0
    if w is not None:
        end = piece.size + 4 * num_weights
        messages[:, piece.size : end] = w.contiguous().view(torch.uint8)[token]
    return messages


def unpack(
    messages: torch.Tensor, piece: Piece, num_weights: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Unpack messages.  Does not wait.

    Args:
        messages: uint8 [num_messages, message_bytes].
        piece: the piece of a row in each message.
        num_weights: weights in each message; 0: none, and rows need not be copied.
        dtype: of the rows.

    Returns:
        rows [num_messages, numbers of a piece], and weights fp32 [num_messages, num_weights].
    """
    if num_weights == 0:
        return messages.view(dtype), None
    rows = messages.new_empty(len(messages), piece.size)
    w = messages.new_empty(len(messages), num_weights, dtype=torch.float32)
    if (kernels := extension.kernels_on(messages.device)) is not None:
        kernels.unpack_messages(messages, rows, w, extension.current_stream())
    else:
        rows.copy_(messages[:, : piece.size])
        end = piece.size + 4 * num_weights
        w.copy_(messages[:, piece.size : end].contiguous().view(torch.float32))
    return rows.view(dtype), w


def add_up(
    messages: torch.Tensor,
    piece: Piece,
    message_index: torch.Tensor,
    out: torch.Tensor,
    assignment_node: torch.Tensor | None,
    topk_w: torch.Tensor | None,
) -> None:
    """Add up what the nodes return for each token, into a piece of its row.  Does not wait.

    In fp32, from +0, over the nodes in ascending order; rounded once.

    Args:
        messages: uint8 [num_messages, message_bytes]: sums of the nodes, and values of
            assignments.
        piece: the piece of a row in each message.
        message_index: int32 [nodes, num_tokens]: the message of each node for each token; -1: none.
        out: [num_tokens, hidden]; only the piece is written.
        assignment_node: int32 [num_tokens, top_k]: the node of each assignment, otherwise -1;
            None where messages have no values.
        topk_w: fp32 [num_tokens, top_k]: receives the values of assignments, zero where an
            assignment goes nowhere; None where messages have none.
    """
    if (kernels := extension.kernels_on(messages.device)) is not None:
        stream = extension.current_stream()
        kernels.add_up_messages(
            messages, message_index, out, *piece, assignment_node, topk_w, stream
        )
        return
    total = out.new_zeros(len(out), piece.size // out.itemsize, dtype=torch.float32)
    if len(messages):
        sums = messages[:, : piece.size].contiguous().view(out.dtype)
        for at in message_index:
            there = (at >= 0)[:, None]
            total = torch.where(there, total + sums[at.clamp(min=0)].float(), total)
    out[:, piece.numbers(out.dtype)] = total.to(out.dtype)
    if topk_w is None or assignment_node is None:
        return
    topk_w.zero_()
    end = piece.size + 4 * topk_w.shape[1]
    if len(messages):
        values = messages[:, piece.size : end].contiguous().view(torch.float32)
        for node, at in enumerate(message_index):
            is_on_node = assignment_node == node
            topk_w.copy_(torch.where(is_on_node, values[at.clamp(min=0)], topk_w))
