"""What a release is made by: workflows, forms, and the check of its wheels."""

from __future__ import annotations

import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import setuptools
import yaml

from megatron_ncclep.engines import ENGINES
from megatron_ncclep.version import __version__

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

import check_wheels  # noqa: E402


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_workflows_name_what_is_there() -> None:
    """A renamed script or target would only be noticed when a release is made."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflows = sorted((ROOT / ".github").rglob("*.yml"))
    assert workflows
    for path in workflows:
        text = re.sub(r"\$\{\{.*?\}\}", "", path.read_text())
        loaded(path)
        for command in re.findall(r"run: make ([^\n]*)", text):
            assert {word for word in command.split() if "=" not in word} <= targets, path
        named = re.findall(r"\bscripts/\w+\.\w+", text) + re.findall(r"uses: \./(\S+)", text)
        assert all((ROOT / name).exists() for name in named), path


def test_what_ci_runs_is_what_a_visitor_sees() -> None:
    """Every command of .ci/run is in a workflow; Slurm's are left out without Slurm."""
    local = (ROOT / ".ci" / "run").read_text()
    hosted = (ROOT / ".github/workflows/checks.yml").read_text()
    wanted = set(re.findall(r"scripts/\w+\.sh", local)) - {"scripts/fetch_slurm.sh"}
    wanted |= {f"make {targets}" for targets in re.findall(r"make ([a-z ]+) PYTHON", local)}
    assert len(wanted) >= 4
    assert {command for command in wanted if command not in hosted} == set()


def test_a_report_has_what_a_bug_of_a_dispatcher_needs() -> None:
    form = loaded(ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml")
    fields = {field.get("id"): field for field in form["body"]}
    for name in ("doctor", "layout", "engine", "command", "seen"):
        assert fields[name]["validations"]["required"]
    engines = fields["engine"]["attributes"]["options"]
    assert {name for name in ENGINES if name != "auto"} <= set(engines)
    assert loaded(ROOT / "CITATION.cff")["version"] == __version__


# --- setup.py ------------------------------------------------------------------------------------


def test_links_lead_somewhere_on_a_page_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index and a release's page showed links to docs/ of their own sites, and no figure."""
    monkeypatch.setattr(setuptools, "setup", lambda **settings: None)
    shown = runpy.run_path(str(ROOT / "setup.py"))["long_description"]()
    version = f"https://github.com/\\w+/megatron-ncclep/blob/v{re.escape(__version__)}"
    for text in (shown, check_wheels.notes(None)):
        paths = re.findall(rf"\]\({version}/([^)?#]+)", text)
        assert paths
        assert all((ROOT / path).exists() for path in paths)
        assert not re.findall(r"\]\((?!https://|#)[^)]*", text)
    assert re.search(rf"!\[[^]]+\]\({version}/docs/figures/\w+\.svg\?raw=true\)", shown)


TOOLKIT = """#!/bin/sh
here=$(dirname "$0")
[ "$1" != --version ] || exec echo "release 13.0"
[ ! -e "$here/edited" ] || { sleep 0.1; touch "$(cat "$here/edited")"; }
echo "$2" >>"$here/calls"
touch "$4"
[ ! -e "$here/fails" ]
"""


def test_what_a_change_compiles_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A header that was saved while the kernels were compiled, for two minutes, was older than what
    had been made without it, so the next build found nothing to do.  And the four wheels of a
    release compiled all kernels four times, and said nothing meanwhile.
    """
    kernels = plan, wide, fp8 = [
        "csrc/native/plan/plan.cu", "csrc/native/wide/plan.cu", "csrc/experts/fp8_experts.cu"
    ]  # fmt: skip
    header, device, other = "csrc/common/a.h", "csrc/native/b.cuh", "csrc/host/c.cpp"
    for name in (*kernels, header, device, other, "bin/nvcc", "include/cuda_runtime.h"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(TOOLKIT)
        os.utime(tmp_path / name, (1, 1))
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    (tmp_path / "megatron_ncclep").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "megatron_ncclep/version.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(setuptools, "setup", lambda **settings: None)
    for name, value in (("CUDA_HOME", "."), ("NCCL_HOME", "."), ("NCCLEP_BUILD_EXTENSION", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NCCLEP_CUDA_ARCHITECTURES", raising=False)
    calls, linked = tmp_path / "bin" / "calls", list[str]()

    def link(command: Any, extension: Any) -> None:
        linked.append(extension.name)
        path = Path(command.get_ext_fullpath(extension.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"CUDA 13.0 for sm_90 compute_90 sm_100 with NCCL \0")

    def build(python: str = "") -> set[str]:
        """The kernels that are compiled for a Python."""
        calls.write_text("")
        linked.clear()
        made = runpy.run_path("setup.py")
        given = {"name": "megatron_ncclep", "ext_modules": made["extensions"]()}
        command = made["BuildExtension"](setuptools.Distribution(given))
        command.build_lib, command.build_temp = f"lib{python}", f"build/temp{python}"
        monkeypatch.setattr(type(command), "build_extension", link)
        command.ensure_finalized()
        command.run()
        found = {str(Path(line).relative_to(tmp_path)) for line in calls.read_text().split()}
        assert len(linked) == (2 if found or touched == other or python else 0)
        return found

    touched = ""
    (tmp_path / "bin" / "fails").touch()
    with pytest.raises(subprocess.CalledProcessError):
        build()
    assert not list(tmp_path.glob("build/**/*.cu.o"))  # they would look finished
    (tmp_path / "bin" / "fails").unlink()
    assert build() == {*kernels}
    assert f"{plan}: " in capsys.readouterr().out
    assert build() == set()
    assert build("of another Python") == set()
    for touched in (header, device, plan, wide, fp8, other):
        (tmp_path / touched).touch()
        few = {plan: {plan, wide}, wide: {wide}, fp8: {fp8, wide}, other: set[str]()}
        assert build() == few.get(touched, {*kernels}), touched
    edited = tmp_path / "bin" / "edited"
    edited.write_text(header)
    touched = plan
    (tmp_path / plan).touch()
    assert build() == {plan, wide}
    edited.unlink()
    assert build() == {*kernels}, "their sources changed meanwhile"
    touched = ""
    assert build() == set()


@pytest.mark.parametrize(
    ("architectures", "has_fp8"),
    [("", True), ("90", True), ("90a 100", True), ("100", False), ("120+PTX", False)],
)
def test_fp8_kernels_are_compiled_for_hopper_alone(
    architectures: str, has_fp8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the extension, not for the C library; without Hopper there are neither kernels nor their
    bindings.
    """
    for name in ("bin/nvcc", "include/cuda_runtime.h"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(TOOLKIT)
    (tmp_path / "bin" / "nvcc").chmod(0o755)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "setup", lambda **settings: None)
    for name, value in (("CUDA_HOME", str(tmp_path)), ("NCCLEP_BUILD_EXTENSION", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCLEP_CUDA_ARCHITECTURES", architectures)
    made = runpy.run_path("setup.py")
    command = made["BuildExtension"](
        setuptools.Distribution({"name": "x", "ext_modules": made["extensions"]()})
    )
    compiled: dict[str, list[str]] = {}
    linked: dict[str, Any] = {}

    def compile_one(_: Any, home: Path, folder: Path, forced: bool, options: Any, source: Path):
        compiled[source.name] = options
        return f"{source.name}.o"

    def link(command: Any, extension: Any) -> None:
        linked[extension.name] = extension
        Path(command.get_ext_fullpath(extension.name)).touch()

    (tmp_path / "megatron_ncclep").mkdir()
    for name, stand_in in (("compile_kernels", compile_one), ("build_extension", link)):
        monkeypatch.setattr(type(command), name, stand_in)
    monkeypatch.setattr(type(command), "is_built", lambda *_: False)
    command.build_lib, command.build_temp = str(tmp_path), str(tmp_path / "temp")
    command.ensure_finalized()
    command.run()
    source = "fp8_experts.cu"
    hopper = [option for option in compiled.get(source, ()) if option.startswith("arch")]
    assert hopper == (["arch=compute_90a,code=sm_90a"] if has_fp8 else [])
    others = {option for name, each in compiled.items() if name != source for option in each}
    assert "arch=compute_90a,code=sm_90a" not in others
    library, extension = (linked[f"megatron_ncclep.{name}"] for name in ("libncclep", "_C"))
    has_object = [f"{source}.o" in each.extra_objects for each in (library, extension)]
    has_bindings = ("NCCLEP_FP8_EXPERTS", "1") in extension.define_macros
    assert (has_object, has_bindings) == ([False, has_fp8], has_fp8)
    assert "dispatch.cu.o" in library.extra_objects


def test_an_extension_for_another_processor_has_its_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had this machine's: wheels for aarch64 took a variable with it, one build per Python."""
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "linux-aarch64")
    monkeypatch.setattr(setuptools, "setup", lambda **settings: None)
    build = runpy.run_path(str(ROOT / "setup.py"))["BuildExtension"]
    command = build(setuptools.Distribution())
    command.ensure_finalized()
    suffix = f".cpython-3{sys.version_info.minor}-aarch64-linux-gnu.so"
    assert command.get_ext_filename("megatron_ncclep._C") == f"megatron_ncclep/_C{suffix}"
    assert command.get_ext_filename("megatron_ncclep.libncclep") == "megatron_ncclep/libncclep.so"


# --- scripts/check_wheels.py ---------------------------------------------------------------------

CUDA_13, CUDA_12 = (f"CUDA {each} for sm_90 compute_90 with NCCL 2.30.7" for each in (13.0, 12.4))
TAGS = f"cp312-cp312-manylinux_2_28_{platform.machine()}"


def made(
    folder: Path,
    built: str = CUDA_13,
    version: str = __version__,
    tags: str = TAGS,
    suffix: str = f"cpython-312-{platform.machine()}-linux-gnu",
) -> Path:
    """A wheel whose two libraries were built so."""
    source, library = folder / "built.c", folder / "built.so"
    source.write_text(f'const char built[] = "{built}";')
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    path = folder / f"megatron_ncclep-{version}-{tags}.whl"
    info = f"megatron_ncclep-{version}.dist-info/licenses"
    with zipfile.ZipFile(path, "w") as archive:
        for name in (f"{info}/LICENSE", f"{info}/NOTICE"):
            archive.writestr(name, "")
        for name in (f"_C.{suffix}.so", "libncclep.so"):
            archive.write(library, f"megatron_ncclep/{name}")
    return path


def test_wheels_go_where_they_are_taken(tmp_path: Path) -> None:
    """An index refuses versions with `+`: those of CUDA 12 go beside the release."""
    index = made(tmp_path)
    beside = made(tmp_path, CUDA_12, f"{__version__}+cu12")
    assert check_wheels.look(index) == (platform.machine(), "3.12", CUDA_13)
    assert check_wheels.look(beside) == (platform.machine(), "3.12", CUDA_12)
    check_wheels.sort_into(tmp_path / "upload", [index, beside], check_wheels.notes(None))
    assert [path.name for path in (tmp_path / "upload/index").iterdir()] == [index.name]
    assert (tmp_path / "upload/release" / beside.name).exists()
    sums = (tmp_path / "upload/release/SHA256SUMS").read_text()
    assert [line.split()[1] for line in sums.splitlines()] == [index.name, beside.name]
    assert "The first release" in (tmp_path / "upload/notes.md").read_text()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"built": CUDA_12}, "it was built with"),
        ({"version": f"{__version__}+cu12"}, "it was built with"),
        ({"built": ""}, "it was built with set()"),
        # `make release` in an environment with an older NCCL made such wheels, and took them.
        ({"built": CUDA_13.partition("2.30")[0]}, "no kernels over a network: set NCCL_HOME"),
        ({"version": "9.9.9"}, f"the tree's version is {__version__}"),
        ({"tags": "cp312-cp312-manylinux_2_28_riscv64"}, "its code is for"),
        # One suffix for the wheels of all Pythons: all but one would find no extension.
        ({"suffix": "cpython-311-x86_64-linux-gnu"}, "its Python finds no"),
    ],
)
def test_wheels_that_must_not_be_uploaded(
    changes: dict[str, str], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=re.escape(problem)):
        check_wheels.look(made(tmp_path, **changes))


def test_what_was_checked_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Installing four wheels takes minutes without a line; after a failure nobody knew of which."""
    made(tmp_path)
    made(tmp_path, CUDA_12, f"{__version__}+cu12")
    (tmp_path / f"megatron_ncclep-{__version__}.tar.gz").touch()
    installed: list[str] = []

    def install_and_run(wheel: Path, python: str) -> None:
        installed.append(capsys.readouterr().out)
        if len(installed) > 1:
            raise subprocess.CalledProcessError(1, "ncclep doctor")

    monkeypatch.setattr(check_wheels, "find_python", lambda version: "python")
    monkeypatch.setattr(check_wheels, "install_and_run", install_and_run)
    monkeypatch.setattr(sys, "argv", ["check_wheels.py", str(tmp_path)])
    with pytest.raises(subprocess.CalledProcessError):
        check_wheels.main()
    first, second = installed
    assert ".tar.gz\n" in first
    assert f"{__version__}+cu12-{TAGS}.whl: {CUDA_12}\n" in first
    assert f"{__version__}-{TAGS}.whl: {CUDA_13}\n" in second
    assert second.count("ran with Python 3.12") == 1


@pytest.mark.parametrize(
    ("tag", "unfinished", "problem"),
    [
        ("v9.9.9", "", f"v9.9.9 is not v{__version__}"),
        (f"v{__version__}", "CHANGELOG.md", "CHANGELOG.md has no date for"),
        (f"v{__version__}", "pyproject.toml", "pyproject.toml: replace https://github.com/OWNER/"),
        (f"v{__version__}", "CITATION.cff", "CITATION.cff: replace https://github.com/OWNER/"),
        (f"v{__version__}", "", None),
    ],
)
def test_no_release_before_its_date_and_address(
    tag: str,
    unfinished: str,
    problem: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The address was looked for in one of its two files, and after the date: no test saw that."""
    for name in ("CHANGELOG.md", "pyproject.toml", "CITATION.cff"):
        text = (ROOT / name).read_text()
        if name != unfinished:
            text = re.sub(r"^(## [\d.]+) .*", r"\1 (2026-12-01)", text, flags=re.MULTILINE)
            text = text.replace("/OWNER/", "/somebody/")
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(check_wheels, "ROOT", tmp_path)
    if problem is None:
        assert "The first release" in check_wheels.notes(tag)
    else:
        with pytest.raises(SystemExit, match=re.escape(problem)):
            check_wheels.notes(tag)
