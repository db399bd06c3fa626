"""Exact comparisons that report where the first difference is."""

from __future__ import annotations

import torch
from oracle import OraclePlan

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(actual: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    """Compare two tensors bit by bit (NaN equals the same NaN, +0 differs from -0), or two Nones.

    Tensors on different devices are compared on the CPU.

    Raises:
        AssertionError: names `what`, the first coordinates that differ, and both values.
    """
    if actual is None or expected is None:
        if actual is not expected:
            raise AssertionError(f"{what}: {'no' if actual is None else 'an unexpected'} tensor")
        return
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: {actual.dtype} {list(actual.shape)}, expected {expected.dtype} "
            f"{list(expected.shape)}"
        )
    actual, expected = actual.detach(), expected.detach()
    if actual.device != expected.device:
        actual, expected = actual.cpu(), expected.cpu()
    bits = _BITS[actual.element_size()]
    different = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    if bool(different.any()):
        first = tuple(int(i) for i in different.nonzero()[0])
        raise AssertionError(
            f"{what}{list(first)} is {actual[first].item()!r}, "
            f"expected {expected[first].item()!r}; "
            f"{int(different.sum())} of {different.numel()} elements differ"
        )


def assert_dispatched(
    plan: OraclePlan,
    x: list[torch.Tensor],
    w: list[torch.Tensor],
    rank: int,
    rows: torch.Tensor,
    row_w: torch.Tensor,
) -> None:
    """Check what one rank received against the slots of the oracle's plan, row by row.

    Raises:
        AssertionError: names the row, who should sit there, and both values.
    """
    if len(rows) != len(plan.slots[rank]):
        raise AssertionError(f"rank {rank} has {len(rows)} rows, not {len(plan.slots[rank])}")
    for row, slot in enumerate(plan.slots[rank]):
        if slot is None:
            expected, expected_w = torch.zeros_like(rows[row]), torch.zeros_like(row_w[row])
        else:
            expected = x[slot.source][slot.token]
            expected_w = w[slot.source][slot.token, slot.assignment]
        who = f"rank {rank}, row {row} ({slot or 'padding'})"
        assert_same_bits(rows[row], expected, who)
        assert_same_bits(row_w[row], expected_w, f"{who}, weight")
