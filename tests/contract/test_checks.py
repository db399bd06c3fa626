"""Errors about a tensor on the wrong device, without a GPU: devices are only names here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_ncclep.engines.checks import device_problem


@pytest.mark.parametrize(
    ("tensor", "group", "problem"),
    [
        ("cpu", "cpu", None),
        ("cuda:1", "cuda:1", None),
        ("cuda:1", "cuda", None),  # a group that does not say which
        ("cuda:1", "cuda:0", "x is on cuda:1, but the group is on cuda:0, "),
        ("cuda:0", "cuda:3", r"x is on cuda:0, .* \.to\('cuda:3'\), or call torch\.cuda\.set_"),
        ("cpu", "cuda:0", r"x is on cpu, .* moves cuda tensors: move it with \.to\('cuda'\)"),
        ("cuda:0", "cpu", "x is on cuda:0, but the process group moves cpu tensors"),
        ("meta", "cuda:0", "x is on meta"),
    ],
)
def test_devices(tensor: str, group: str, problem: str | None) -> None:
    """With real tensors two GPUs in one process would be needed, and ranks have one."""
    found = device_problem("x", SimpleNamespace(device=torch.device(tensor)), torch.device(group))
    if problem is None:
        assert found is None
    else:
        assert found is not None
        with pytest.raises(ValueError, match=problem):
            raise ValueError(found)
