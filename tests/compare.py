"""Exact comparisons that report where the first difference is."""

from __future__ import annotations

import torch

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
