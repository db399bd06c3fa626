"""`ncclep doctor`: true on this machine, and each problem comes with a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version

import torch


def doctor(*arguments: str, code: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter, after `code`."""
    run = f"{code}\nimport sys\nfrom megatron_ncclep.cli import main\nsys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", run, "doctor", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def findings(*arguments: str, **options: str) -> dict[str, dict[str, str | None]]:
    done = doctor("--json", *arguments, **options)
    assert done.returncode in (0, 1), done.stderr
    report = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == any(finding["problem"] for finding in report.values())
    return report


def test_it_says_what_is_here() -> None:
    report = findings()
    assert report["torch"]["value"].startswith(torch.__version__)
    assert report["Megatron-Core"]["value"].startswith(version("megatron-core"))
    assert report["autoload"]["value"].startswith("on")
    assert report["megatron.core.transformer.moe.moe_layer"]["value"] == "as expected"
    assert report["engine auto"]["value"] == "takes reference (reference can run)"
    assert not any(finding["problem"] for finding in report.values())


def test_plain_text_names_the_same_subjects() -> None:
    done = doctor()
    assert done.returncode == 0, done.stderr
    assert "engine auto" in done.stdout
    assert done.stdout.rstrip().endswith("0 problems")


def test_a_changed_hook_point_is_a_problem() -> None:
    code = (
        "import megatron.core.transformer.moe.moe_layer as layer\n"
        "layer.MoELayer.__init__ = lambda self: None"
    )
    found = findings(code=code, NCCLEP_AUTOLOAD="0")
    assert "MoELayer.__init__ is not a function" in str(
        found["megatron.core.transformer.moe.moe_layer"]["problem"]
    )
    assert found["autoload"]["value"].startswith("off (NCCLEP_AUTOLOAD=0)")


def test_an_untested_megatron_is_a_problem() -> None:
    code = "import megatron.core; megatron.core.__version__ = '0.99.0'"
    assert "tested are 0.16.1 to 0.19.2" in str(findings(code=code)["Megatron-Core"]["problem"])


def test_without_megatron_it_says_how_to_get_it() -> None:
    """A look-up that knows of no `megatron` plays a bare environment."""
    code = (
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name.startswith('megatron.') or name == 'megatron'"
        " else real(name, *a)"
    )
    found = findings(code=code)
    assert found["Megatron-Core"]["value"] == "not installed"
    assert "pip install 'megatron-ncclep[train]'" in str(found["Megatron-Core"]["problem"])
