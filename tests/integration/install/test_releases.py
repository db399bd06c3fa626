"""The supported releases of Megatron-Core, and that tests run with the one they are to run with.

Those that are not installed are unpacked wheels under `<environment>/megatron/<release>`
(scripts/fetch_megatron.sh); `pytest --megatron RELEASE` runs what depends on the release with it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_versions import INSTALLED, SUPPORTED

from megatron_ncclep.integration.releases import MEGATRON
from megatron_ncclep.ranks.pool import RankContext


def test_the_range_is_the_tested_one() -> None:
    assert (SUPPORTED[0], SUPPORTED[-1]) == (MEGATRON.oldest, MEGATRON.newest)
    assert MEGATRON.is_tested(INSTALLED)


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
