"""Leaves out what needs vLLM where it is not unpacked: not skipped, and listed by name."""

from __future__ import annotations

import pytest
import real_vllm
from deselect import leave_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    reason = real_vllm.unavailable_reason()
    needing = [item for item in items if reason and item.path.parent.name == "serving"]
    leave_out(config, items, dict.fromkeys(needing, reason or ""))
