"""Leaves out what needs a server where it is not unpacked: not skipped, and listed by name."""

from __future__ import annotations

import pytest
import real_sglang
import real_vllm
from deselect import leave_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    for name, server in (("test_vllm", real_vllm), ("test_sglang", real_sglang)):
        reason = server.unavailable_reason()
        needing = [item for item in items if reason and item.path.stem == name]
        leave_out(config, items, dict.fromkeys(needing, reason or ""))
