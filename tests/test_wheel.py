"""What people install: the source distribution and the wheel that is made of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.version import Version
from timeouts import patient

from megatron_ncclep.version import __version__

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_ncclep"
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py"))
TYPES = ("megatron_ncclep/py.typed", "megatron_ncclep/_C.pyi")
# What a package is built of.
FOLDERS = ("megatron_ncclep", "configs", "csrc", "examples")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "NOTICE")
# And what `make test` needs besides.
OF_TESTS = ("benchmarks", "constraints", "docs", "scripts", "tests", ".ci", ".github")
MORE = (
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "Makefile",
    "RELEASE.md",
    "REUSE.toml",
    "mkdocs.yml",
)
# This Python's extension and the C library, as the set-up has built them.
EXTENSIONS = sorted(
    path
    for name in (f"_C{sysconfig.get_config_var('EXT_SUFFIX')}", "libncclep.so")
    for path in PACKAGE.glob(name)
)
# glibc of the oldest system that a wheel built for CI is to run on: RHEL 9; Ubuntu 22.04 has 2.35.
GLIBC = (2, 34)


def run(*command: object, **environment: str) -> str:
    """Run a command of this Python's environment, which must end well; what it printed."""
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT.parent, text=True, capture_output=True,
        timeout=patient(300), env={**os.environ, "PATH": os.pathsep.join(folders), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Built:
    """What `scripts/build_wheel.sh` makes, without compiling the extension once more.

    Attributes:
        sdist: the source distribution.
        wheel: made of it, as auditwheel has named it.
        tree: the unpacked source distribution.
    """

    sdist: Path
    wheel: Path
    tree: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built from a copy, so that nothing of the build stays in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "copy"
    leave_out = shutil.ignore_patterns("__pycache__", "*.so")
    for name in (*FOLDERS, *OF_TESTS):
        shutil.copytree(ROOT / name, copy / name, ignore=leave_out)
    for name in (*FILES, *MORE):
        shutil.copy2(ROOT / name, copy)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder]
    # On a machine without a toolkit csrc/ has to be in it as well.
    run(*build, "--sdist", copy, NCCLEP_BUILD_EXTENSION="0")
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    tree = folder / sdist.name.removesuffix(".tar.gz")
    # setup.py finds it newer than the sources, and built with the same toolkit.
    lib = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    (tree / "build" / lib / "megatron_ncclep").mkdir(parents=True)
    for extension in EXTENSIONS:
        shutil.copy(extension, tree / "build" / lib / "megatron_ncclep")
    output = run(*build, "--wheel", tree, NCCLEP_BUILD_EXTENSION="1" if EXTENSIONS else "0")
    (wheel,) = folder.glob("*.whl")
    if EXTENSIONS:
        assert "is newer than its sources" in output
        repaired = folder / "repaired"
        auditwheel = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto"]
        run(*auditwheel, "--wheel-dir", repaired, wheel)
        (wheel,) = repaired.glob("*.whl")
    return Built(sdist, wheel, tree)


def test_the_source_distribution_is_complete(built: Built):
    """What the wheel is built of and `make test` needs, and nothing that this machine has built.

    It lacked the tests: a packager could not try what was built.
    """
    held = {
        path.relative_to(built.tree).as_posix() for path in built.tree.rglob("*") if path.is_file()
    }
    held = {name for name in held if not name.startswith(("build/", "megatron_ncclep.egg-info/"))}
    sources = {
        path.relative_to(ROOT).as_posix()
        for folder in ("csrc", "configs", "examples", *OF_TESTS)
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == {*MODULES, *sources, *FILES, *MORE, *TYPES, "setup.cfg", "PKG-INFO"}


def test_the_wheel_is_complete(built: Built):
    with zipfile.ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        held = {name for name in names if ".dist-info/" not in name}
        metadata = {name.split("/")[-1] for name in names - held}
        (entry_points,) = (name for name in names if name.endswith("/entry_points.txt"))
        declared = archive.read(entry_points).decode()
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        described, _, shown = archive.read(about).decode().partition("\n\n")
    configs = {f"megatron_ncclep/{p.relative_to(ROOT)}" for p in ROOT.glob("configs/*/*.yaml")}
    compiled = {path.relative_to(ROOT).as_posix() for path in EXTENSIONS}
    header = "megatron_ncclep/include/ncclep.h"
    assert held == {*MODULES, *configs, *compiled, header, *TYPES}
    assert {"LICENSE", "NOTICE"} <= metadata
    for line in (
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.10",
        "Requires-Dist: torch",
        "Description-Content-Type: text/markdown",
    ):
        assert f"\n{line}" in described
    assert f"/blob/v{__version__}/docs/install.md)" in shown
    assert described.count("\nProject-URL: ") >= 3
    assert "ncclep = megatron_ncclep.cli:main" in declared
    assert "megatron_ncclep = megatron_ncclep.autoload:autoload" in declared
    assert "ncclep = megatron_ncclep.vllm:register" in declared
    assert "ncclep = megatron_ncclep.sglang:register" in declared


def test_the_wheel_says_where_it_runs(built: Built):
    """With the extension on this Python and no older a glibc; that is auditwheel's finding."""
    name, version, python, abi, platforms = built.wheel.name.removesuffix(".whl").split("-")
    assert (name, version) == ("megatron_ncclep", __version__)
    if not EXTENSIONS:
        assert (python, abi, platforms) == ("py3", "none", "any")
        return
    interpreter = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert (python, abi) == (interpreter, interpreter)
    found = re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", platforms.split(".")[-1])
    assert found, f"{platforms}: it needs more than manylinux allows"
    assert (int(found[1]), int(found[2])) <= GLIBC, "build it on an older system"


def test_the_extension_links_to_no_library_of_nvidia():
    """NCCL is found at run time, the CUDA runtime is part of it: one wheel serves every torch."""
    for extension in EXTENSIONS:
        needed = run("readelf", "--dynamic", "--wide", extension)
        names = re.findall(r"\(NEEDED\).*\[(.*)\]", needed)
        assert names
        assert not [name for name in names if re.search("cuda|nccl|torch|c10", name)]


def test_the_container_is_built_of_the_same_files():
    """With less, its package would lack parts; with a name that is gone, docker would stop."""
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "scripts/Dockerfile").read_text(), re.MULTILINE)
    assert sorted(" ".join(copied).split()) == sorted([*FOLDERS, *FILES])


def test_the_changelog_starts_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    releases = [re.fullmatch(r"(\S+) \((unreleased|\d{4}-\d{2}-\d{2})\)", h) for h in headings]
    assert all(releases), f"write a release as `## 1.2.3 (2026-01-31)`: {headings}"
    versions = [Version(release[1]) for release in releases]
    assert versions[0] == Version(__version__)
    assert versions == sorted(set(versions), reverse=True)
    assert all(release[2] != "unreleased" for release in releases[1:])


# --- installed -----------------------------------------------------------------------------------

LOOK = """
import importlib.util, os, sys
import torch
from megatron.core.transformer import transformer_config
accepted = str(transformer_config.TransformerConfig.__dataclass_fields__[
    "moe_token_dispatcher_type"].type)
spec = importlib.util.find_spec("megatron_ncclep")
from megatron_ncclep.cli import config_files, main
from megatron_ncclep.doctor import choice
choice.CPU_RANKS = 1  # each one imports Megatron-Core
print("ncclep" in accepted, os.path.dirname(spec.origin), config_files.folder())
sys.exit(main(["doctor", "--json"]))
"""


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A folder with everything that is installed here, this package excepted."""
    folder = tmp_path / "others"
    folder.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "megatron_ncclep" not in path.name:
            (folder / path.name).symlink_to(path)
    return folder


def test_an_installed_wheel_works_and_leaves_nothing_behind(
    built: Built, others: Path, tmp_path: Path
):
    home = tmp_path / "venv"
    venv.create(home)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "others.pth").write_text(f"{others}\n")
    (site / "configs" / "cluster").mkdir(parents=True)  # next to the package, and not its own
    # This tree on PYTHONPATH would be an installation too.
    clean = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "", "NCCLEP_AUTOLOAD": "1"}
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]

    def files() -> set[Path]:
        return set(home.rglob("*"))

    before = files()
    run(*pip, "install", "--no-index", "--no-deps", built.wheel, **clean)
    assert run(home / "bin" / "ncclep", "--version", **clean).strip() == __version__
    hooked, _, report = run(python, "-c", LOOK, **clean).partition("\n")
    assert hooked == f"True {site / 'megatron_ncclep'} {site / 'megatron_ncclep' / 'configs'}"
    findings = {finding["subject"]: finding for finding in json.loads(report)}
    assert findings["megatron_ncclep"]["value"].startswith(f"{__version__} in {site}")
    assert findings["extension"]["value"].startswith("built for " if EXTENSIONS else "none: ")

    run(*pip, "uninstall", "--yes", "megatron-ncclep", **clean)
    assert files() == before
    assert run(python, "-c", "import torch; print(1)", **clean).strip() == "1"
