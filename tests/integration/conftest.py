"""Fixtures for tests that run Megatron-Core on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from imported import ImportedMegatron
from imports import import_megatron_on_cpu
from left_out import leave_out
from megatron_versions import INSTALLED, SUPPORTED, importable, python_path
from packaging.version import Version
from patience import PatientPool

from megatron_ncclep.ranks.pool import RankPool


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "since(release): left out with older releases of Megatron-Core"
    )
    config.addinivalue_line(
        "markers",
        "turn(number, of): every `of`th case is the turn of each release that is not the installed "
        "one, which runs them all",
    )
    config.addinivalue_line(
        "markers",
        "share(number, of): every `of`th case is the share of each release, the installed one too",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Leave out what a release does not have, and what it is not its turn to show."""

    def is_left_out(item: pytest.Function) -> bool:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        release = params.get("megatron_release", INSTALLED)
        if any(Version(release) < Version(mark.args[0]) for mark in item.iter_markers("since")):
            return True
        marks = [*item.iter_markers("share")]
        if release != INSTALLED:
            marks += item.iter_markers("turn")
        number = [*SUPPORTED, release].index(release)
        return any((mark.args[0] + number) % mark.args[1] for mark in marks)

    leave_out(config, items, dict.fromkeys(filter(is_left_out, items), ""))


@pytest.fixture(scope="session", params=importable())
def megatron_release(request: pytest.FixtureRequest) -> str:
    """Each release in turn; pytest sorts the tests by it, so that one pool is alive at a time."""
    return request.param


@pytest.fixture(scope="session")
def megatron_pool(megatron_release: str) -> Iterator[RankPool]:
    """Four processes of their own with that release: Megatron on a CPU needs patches that last."""
    # The kernels with which Megatron generates text are Triton's, which runs them on a CPU if told
    # so before they are imported.
    environment = {"TRITON_INTERPRET": "1"}
    pool = PatientPool(
        4, "gloo", python_path(megatron_release), environment, import_megatron_on_cpu
    )
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def imported() -> Iterator[ImportedMegatron]:
    """Megatron-Core imported, without our hooks; every run starts from there."""
    process = ImportedMegatron()
    yield process
    process.close()
