"""The supported releases of Megatron-Core, and that tests run with the one they are to run with.

Those that are not installed are unpacked wheels under `<environment>/megatron/<release>`
(scripts/fetch_megatron.sh); `pytest --megatron RELEASE` runs what depends on the release with it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_versions import INSTALLED, SUPPORTED
from rank_pool import RankContext

from megatron_ncclep import create_engine
from megatron_ncclep.config import EpConfig
from megatron_ncclep.integration.releases import MEGATRON
from megatron_ncclep.libraries.tested import NEWEST_TORCH, OLDEST_TORCH, untested_torch


def test_the_range_is_the_tested_one() -> None:
    assert (SUPPORTED[0], SUPPORTED[-1]) == (MEGATRON.oldest, MEGATRON.newest)
    assert MEGATRON.is_tested(INSTALLED)
    assert untested_torch() is None


@pytest.mark.parametrize(
    ("version_text", "expected"),
    [("0.16.0", False), ("0.16.1", True), ("0.19.2", True), ("0.19.2+bf2a027", True),
     ("0.19.3", True), ("0.20.0", True), ("0.20.1", False), ("0.19.0rc1", True)],
)  # fmt: skip
def test_is_tested(version_text: str, expected: bool) -> None:
    """A wheel installed inside a git checkout calls itself 0.19.2+COMMIT, which sorts after 0.19.2:
    there every build of a layer warned of an untested version.
    """
    assert MEGATRON.is_tested(version_text) is expected


@pytest.mark.parametrize(
    ("version_text", "is_tested"),
    [("2.5.1", False), ("2.6.0+cu124", True), ("2.12.0a0+nv26.05", True), ("2.14.1", True),
     ("2.99.0", False), ("3.0.0", False)],
)  # fmt: skip
def test_an_untested_torch_is_named_once(
    version_text: str, is_tested: bool, process_group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "__version__", version_text)
    for _ in range(2):
        create_engine(process_group, 2, EpConfig(engine="reference"))
    found = [record for record in caplog.records if record.levelno == logging.WARNING]
    expected = f"torch {version_text} is not tested: {OLDEST_TORCH} to {NEWEST_TORCH} are"
    assert [record.getMessage() for record in found] == [expected] * (not is_tested)


@pytest.fixture
def release(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--megatron")


@pytest.mark.each_release
def test_ranks_have_the_release(ctx: RankContext, release: str) -> None:
    """What is compared with `alltoall` is compared with this release's."""
    import megatron.core
    from megatron.core.transformer.moe import moe_layer as last_imported

    # Not half of one and half of another: `megatron` is a namespace that several folders share.
    assert Path(last_imported.__file__).parents[2] == Path(megatron.core.__file__).parent
    # In a git checkout 0.18 and later add "+" and the checkout's commit.
    assert megatron.core.__version__.split("+")[0] == release
