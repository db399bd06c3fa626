"""Nodes as `ncclep doctor` would find them, with and without GPUs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_ncclep.doctor import examine
from megatron_ncclep.doctor.report import Finding

UUIDS = [f"{digit * 8}-{letter * 4}-0000-0000-000000000000" for digit, letter in ("0a", "1b", "2c")]


def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees the second and the first GPU of UUIDS, in this order."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a != b)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, multi_processor_count=132,
            total_memory=140 * 2**30, uuid=UUIDS[1 - index],
        ),
    )  # fmt: skip


def section(title: str) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(title)}
