"""SwiGLU experts in fp64, and how far and how alike results are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def exact_experts(
    rows: Tensor, probs: Tensor, sizes: Sequence[int], fc1: Sequence[Tensor],
    fc2: Sequence[Tensor], grad: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Output of blocks of so many rows, and gradients of rows, probabilities, fc1 and fc2.

    Args:
        rows: [num_rows, hidden]; of them, of `probs` and of `grad` the first sum(sizes) count.
        probs: [num_rows].
        sizes: rows of each expert.
        fc1, fc2: [2 * ffn, hidden] and [hidden, ffn] for each expert, gates first.
        grad: of the output.
    """
    used = sum(sizes)
    rows, probs = (tensor[:used].double().requires_grad_() for tensor in (rows, probs))
    stacks = [
        torch.stack([weight.detach() for weight in weights]).double().requires_grad_()
        for weights in (fc1, fc2)
    ]
    parts = []
    for block, scale, of_fc1, of_fc2 in zip(
        rows.split(list(sizes)), probs.split(list(sizes)), *stacks, strict=True
    ):
        gate, up = (block @ of_fc1.t()).chunk(2, dim=1)
        parts.append(F.silu(gate) * up * scale[:, None] @ of_fc2.t())
    out = torch.cat(parts)
    return [out, *torch.autograd.grad(out, [rows, probs, *stacks], grad[:used].double())]


def distance(found: Tensor, wanted: Tensor) -> float:
    """The norm of what lies between them, as a part of that of `wanted`."""
    return float((found.double() - wanted.detach()).norm() / wanted.detach().norm())


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[bool]:
    """Of which pairs all bits are equal."""
    return [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
