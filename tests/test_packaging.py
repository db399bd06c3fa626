"""What the package is made of: its layers, what an import costs, and what setup.py names."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from timeouts import patient

from megatron_ncclep.libraries import extension

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron_ncclep"

MOST_LINES_OF_A_FILE = 450

# docs/architecture.md: imports point only to what is to the left or in the same column.
LAYERS = ("base", "libraries", "ranks", "engines", "steps", "integration", "tools")
LAYER_OF = {
    "version": "base",
    "errors": "base",
    "envs": "base",
    "logs": "base",
    "config": "base",
    "error_reporting": "base",
    "libraries": "libraries",
    "ranks": "ranks",
    "engines": "engines",
    "autoload": "integration",
    "gradient_averaging": "steps",
    "ops": "steps",
    "metrics": "steps",
    "integration": "integration",
    # What people run.  The package's own file only loads names when they are used.
    "__init__": "tools",
    "__main__": "tools",
    "benchmark": "tools",
    "cli": "tools",
    "cpu": "tools",
    "doctor": "tools",
    "serving": "tools",
    "sglang": "tools",
    "training": "tools",
    "vllm": "tools",
}
WITHOUT_MEGATRON = ("base", "libraries", "ranks", "engines", "steps")
# Set by whoever starts the processes of a job; not options of this package.
LAUNCHER_VARIABLES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
    # Of NCCL: ranks that share a GPU, or appear on hosts of their own.
    "NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE",
}  # fmt: skip

MODULES = sorted(PACKAGE.rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))
# What others begin with: the commands and entry points, and what their programs import.
ENTRIES = {
    "megatron_ncclep", "megatron_ncclep.__main__", "megatron_ncclep.autoload",
    "megatron_ncclep.vllm", "megatron_ncclep.sglang", "megatron_ncclep.metrics",
    "megatron_ncclep.gradient_averaging",
}  # fmt: skip


def layer_of(dotted: str) -> str:
    """The layer of a module such as `megatron_ncclep.ranks.group`."""
    parts = dotted.split(".")
    return LAYER_OF[parts[1] if len(parts) > 1 else "__init__"]


def dotted_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of everything that `source` imports, in functions too.

    Left out is what only a type checker sees, under `if TYPE_CHECKING`.  `from a import b` counts
    as `a.b` if that is a module of this package and as `a` otherwise.
    """
    left = [ast.parse(source)]
    while left:
        match node := left.pop():
            case ast.If(ast.Name("TYPE_CHECKING")):
                continue
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                assert node.level == 0, f"line {node.lineno}: write imports in full"
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    yield node.lineno, whole if is_module(whole) else str(node.module)
            case ast.Call(function, [ast.Constant(name), *_]):
                if ast.unparse(function).endswith(("import_module", "__import__")):
                    yield node.lineno, str(name)
        left += ast.iter_child_nodes(node)


# A read of one environment variable; to hand all of them to a child process, or to set some for
# it, is none.
ENVIRONMENT_READ = re.compile(
    r"(?<!del )os\.(?:getenv\(|environ\.(?:get|pop|setdefault)\(|environ\[(?![^]]*\] = ))([^],)]*)"
    r"|(\S+) (?:not )?in os\.environ(?![\w.])"
    r"|from os import (.*(?:environ|getenv).*)"
)


def environment_reads(source: str) -> list[str]:
    """What names the variable in each read of one."""
    names = ["".join(read) for read in ENVIRONMENT_READ.findall(source)]
    return [name for name in names if name.strip("\"'") not in LAUNCHER_VARIABLES]


# --- layers --------------------------------------------------------------------------------------


def test_every_module_has_a_layer():
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert found == set(LAYER_OF), "name the layer of a new module in LAYER_OF"


def test_imports_point_one_way():
    """And only the integration, and what people run, know Megatron; no engine knows autograd."""
    wrong = []
    for path in MODULES:
        own = layer_of(dotted_name(path))
        right = LAYERS[: LAYERS.index(own) + 1]
        for line, name in imports(path.read_text()):
            if (
                (name.startswith("megatron_ncclep.") and layer_of(name) not in right)
                or (name.split(".")[0] == "megatron" and own in WITHOUT_MEGATRON)
                or (own == "engines" and "autograd" in name)
                or name.split(".")[0] in ("benchmarks", "scripts", "tests")
            ):
                wrong.append(f"{path}:{line}: {own} imports {name}")
        # Gradients are the business of dispatch.py and combine.py, once for all engines.
        if own == "engines" and "autograd.Function" in path.read_text():
            wrong.append(f"{path}: autograd.Function")
    assert wrong == []


def test_integration_stands_on_a_ground_floor():
    """Patching knows no place that is patched; servers' hooks use nothing else of Megatron's."""
    floor = {
        f"megatron_ncclep.integration.{name}" for name in ("import_hook", "patching", "releases")
    }
    on_it = [
        *(path for name in ("serving", "sglang", "vllm") for path in (PACKAGE / name).glob("*.py")),
        *(path for path in MODULES if dotted_name(path) in floor),
    ]
    assert len(on_it) > len(floor)
    for path in on_it:
        used = {name for _, name in imports(path.read_text())}
        assert {name for name in used if "ncclep.integration" in name} <= floor, path


def test_every_module_of_the_wheel_is_used_in_it():
    """A pool of ranks and cases of tests were installed, which only tests and benchmarks used."""
    wanted, used = sorted(ENTRIES), set[str]()
    while wanted:
        dotted = wanted.pop()
        if dotted in used or not dotted.startswith("megatron_ncclep"):
            continue
        used.add(dotted)
        path = ROOT.joinpath(*dotted.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.is_file():  # the extension
            continue
        source = file.read_text()
        # Some are imported by their names, such as the commands and what hooks wait for.
        texts = re.findall(r'"(megatron_ncclep(?:\.\w+)+)"', source)
        wanted += [name for _, name in imports(source)]
        wanted += [name for name in texts if is_module(name)]
        wanted.append(dotted.rpartition(".")[0])
    assert {dotted_name(path) for path in MODULES} - used == set()


def test_includes_of_native_folders_form_no_circle():
    folders: dict[str, set[str]] = {}
    for path in (ROOT / "csrc").rglob("*.*"):
        own = str(path.parent.relative_to(ROOT / "csrc"))
        included = re.findall(r'^#include "(.+)/', path.read_text(), re.MULTILINE)
        folders.setdefault(own, set()).update(folder for folder in included if folder != own)
    TopologicalSorter(folders).prepare()


def test_tensors_say_where_they_are():
    """Those for the host were on a GPU, or had no memory, where a user had set a default device."""
    makers = {"tensor", "zeros", "ones", "empty", "full", "arange", "as_tensor"}
    wrong = []
    for path in MODULES:
        for call in ast.walk(ast.parse(path.read_text())):
            match call:
                case ast.Call(ast.Attribute(ast.Name("torch"), made), _, keywords):
                    named = {keyword.arg for keyword in keywords}
                    if made in makers and "device" not in named and path.parent.name != "benchmark":
                        wrong.append(f"{path}:{call.lineno}: torch.{made} without a device")
    assert wrong == []


def test_only_envs_reads_the_environment():
    """Where `ncclep env` lists the variables."""
    reads = {path: environment_reads(path.read_text()) for path in (*MODULES, *BENCHMARKS)}
    assert reads.pop(PACKAGE / "envs.py")
    assert {path: found for path, found in reads.items() if found} == {}


# --- what an import costs ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "import megatron_ncclep; megatron_ncclep.check()",
        "import megatron_ncclep.autoload",
        "from megatron_ncclep.cli import main; main(['render', '--model', 'tiny', "
        "'--dispatcher', 'ncclep', '--cluster', 'local-cpu'])",
    ],
)
def test_imports_neither_torch_nor_megatron(statement: str):
    code = (
        f"import sys; {statement}; "
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=patient(60)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


# --- what setup.py names -------------------------------------------------------------------------


def test_setup_names_every_package():
    """A folder without `__init__.py` would silently be missing from the wheel, too."""
    (declared,) = re.findall(r"packages=(\[.*?\])", (ROOT / "setup.py").read_text(), re.DOTALL)
    found = {dotted_name(path.parent / "__init__.py") for path in MODULES}
    elsewhere = {"megatron_ncclep.configs", "megatron_ncclep.include"}  # of configs/ and csrc/
    assert found | elsewhere == set(ast.literal_eval(declared))
    assert all((path.parent / "__init__.py").is_file() for path in MODULES)


def test_the_extension_is_built_where_there_is_a_toolkit():
    """setup.py looks in the same places; without a toolkit the package says what is missing."""
    setup = (ROOT / "setup.py").read_text()
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    assert "CUDA_HOME" in setup
    assert "/usr/local/cuda" in setup
    if any(home and Path(home, "bin/nvcc").exists() for home in homes):
        assert extension.unavailable_reason() is None
        # Of newer GPUs without machine code of their own, drivers compile the PTX.
        assert extension.architectures()[:2] == ["sm_90", "compute_90"]
        assert ("sm_100" in extension.architectures()) == (extension.cuda_version() >= (12, 8))
    elif extension.unavailable_reason() is not None:
        assert "CUDA toolkit" in str(extension.unavailable_reason())


def test_no_file_is_too_long():
    kinds = (".py", ".c", ".h", ".cpp", ".cu", ".cuh")
    others = ("benchmarks", "csrc", "examples", "scripts", "tests")
    tops = (PACKAGE, *(ROOT / top for top in others))
    sources = [path for top in tops for path in top.rglob("*") if path.suffix in kinds]
    lines = {str(path.relative_to(ROOT)): path.read_bytes().count(b"\n") for path in sources}
    assert {path: n for path, n in lines.items() if n > MOST_LINES_OF_A_FILE} == {}


def test_a_change_of_native_code_makes_no_environment(tmp_path: Path):
    """One changed kernel ran pip and its downloads again, before each test.

    And `make lint` and `make wheel` first compiled all kernels, which they do not use.
    """
    for stamp in (".ready", ".built"):
        (tmp_path / stamp).touch()
    command = ["make", "-n", f"VENV={tmp_path}", "setup"]
    said = [
        subprocess.run(
            [*command, "-W", changed], cwd=ROOT, text=True, capture_output=True, check=True
        ).stdout
        for changed in ("csrc/include/ncclep.h", "pyproject.toml")
    ]
    environment = "NCCLEP_BUILD_EXTENSION=0 scripts/setup_venv.sh"
    assert [environment in text for text in said] == [False, True]
    assert all("setup.py --quiet build_ext --inplace" in text for text in said)
