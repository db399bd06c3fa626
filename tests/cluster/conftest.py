"""Leaves out what needs a Slurm on a machine without one: not skipped, and listed by name."""

from __future__ import annotations

import pytest
import slurm_cluster
from deselect import leave_out
from fixtures import closed
from slurm_cluster import SlurmCluster


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    reason = slurm_cluster.unavailable_reason()
    needing = [item for item in items if reason and "slurm" in item.fixturenames]
    leave_out(config, items, dict.fromkeys(needing, reason or ""))


slurm = closed(SlurmCluster)
