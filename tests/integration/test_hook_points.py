"""Every supported Megatron-Core still has the places that the integration changes.

The installed version is tested by everything else here too; the others are unpacked wheels under
`<environment>/megatron/<version>` (scripts/fetch_megatron.sh) that a child process imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron_versions import INSTALLED, SUPPORTED, importable, python_path

from megatron_ncclep.integration.checks.unsupported import NEWEST, OLDEST, is_tested
from megatron_ncclep.ranks.pool import RankContext, RankPool

HERE = Path(__file__).parent

CHECK = """
import warnings
warnings.filterwarnings("error", message="megatron_ncclep")  # hook_imports warns, here it raises
from megatron_ncclep import autoload
from megatron_ncclep import cpu
autoload.hook_imports()
import megatron.core
# In a git checkout 0.18 and later add "+" and the checkout's commit.
assert megatron.core.__version__.split("+")[0] == "{version}", megatron.core.__file__
cpu.enable()
import hooked_core
hooked_core.check_all()
import framework_configs
framework_configs.check_all()
import graph_rules
graph_rules.check_all()
import expert_kinds
expert_kinds.check_all()
print("ok")
"""


def test_the_range_is_the_tested_one() -> None:
    assert (SUPPORTED[0], SUPPORTED[-1]) == (OLDEST, NEWEST)
    assert is_tested(INSTALLED)


@pytest.mark.parametrize(
    ("version_text", "expected"),
    [("0.16.0", False), ("0.16.1", True), ("0.19.2", True), ("0.19.2+bf2a027", True),
     ("0.19.3", False), ("0.20.0", False), ("0.19.0rc1", True)],
)  # fmt: skip
def test_is_tested(version_text: str, expected: bool) -> None:
    """A wheel installed inside a git checkout calls itself 0.19.2+COMMIT, which sorts after 0.19.2:
    there every build of a layer warned of an untested version.
    """
    assert is_tested(version_text) is expected


def release_on_rank(ctx: RankContext) -> str:
    import megatron.core
    from megatron.core.transformer.moe import moe_layer as last_imported

    # Not half of one and half of another: `megatron` is a namespace that several folders share.
    assert Path(last_imported.__file__).parents[2] == Path(megatron.core.__file__).parent
    return megatron.core.__version__.split("+")[0]  # as in CHECK


def test_ranks_have_the_release(megatron_pool: RankPool, megatron_release: str) -> None:
    """What is compared with `alltoall` here is compared with this release's."""
    assert megatron_pool.run(release_on_rank) == [megatron_release] * megatron_pool.size


@pytest.mark.supports(
    *(f"cuda_graph_modules={name}" for name in ("attn", "moe_router", "moe_preprocess")),
    compared="outputs and all gradients with those without graphs, to the bit, where stand-ins for "
    "graphs leave out what a replay leaves out",
)
@pytest.mark.parametrize("megatron_version", importable())
def test_hook_points(megatron_version: str) -> None:
    environment = dict(os.environ, NCCLEP_AUTOLOAD="0", OMP_NUM_THREADS="1")
    folders = [
        str(HERE),
        str(HERE.parent),
        *python_path(megatron_version),
        environment.get("PYTHONPATH"),
    ]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(version=megatron_version)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("ok")
