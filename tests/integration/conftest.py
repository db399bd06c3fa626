"""Fixtures for tests that run Megatron-Core on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from imported import ImportedMegatron
from megatron_versions import INSTALLED, importable, python_path
from packaging.version import Version

from megatron_ncclep.testing.launcher import RankPool


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "since(release): left out with older releases of Megatron-Core"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Leave out what a release does not have: not skipped, so that no report counts it."""

    def is_too_new(item: pytest.Function) -> bool:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        release = Version(params.get("megatron_release", INSTALLED))
        return any(release < Version(mark.args[0]) for mark in item.iter_markers("since"))

    left_out = [item for item in items if is_too_new(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.fixture(scope="session", params=importable())
def megatron_release(request: pytest.FixtureRequest) -> str:
    """Each release in turn; pytest sorts the tests by it, so that one pool is alive at a time."""
    return request.param


@pytest.fixture(scope="session")
def megatron_pool(megatron_release: str) -> Iterator[RankPool]:
    """Four processes of their own with that release: Megatron on a CPU needs patches that last."""
    pool = RankPool(4, folders=python_path(megatron_release))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def imported() -> Iterator[ImportedMegatron]:
    """Megatron-Core imported, without our hooks; every run starts from there."""
    process = ImportedMegatron()
    yield process
    process.close()
