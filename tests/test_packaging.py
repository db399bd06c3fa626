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

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield node.lineno, whole if is_module(whole) else str(node.module)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(ast.parse(source))


def environment_reads(source: str) -> Iterator[tuple[int, str]]:
    """Line and expression of every read of one environment variable.

    Handing the whole environment to a child process and setting variables for it are no reads.
    """
    for node in ast.walk(ast.parse(source)):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            if ast.unparse(node.value) == "os.environ":
                key = node.slice
        elif isinstance(node, ast.Call):
            if re.fullmatch(r"os\.(getenv|environ\.(get|pop|setdefault))", ast.unparse(node.func)):
                key = node.args[0]
        elif isinstance(node, ast.Compare):
            if ast.unparse(node.comparators[0]) == "os.environ":
                key = node.left
        elif (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {alias.name for alias in node.names} & {"environ", "getenv"}
        ):
            yield node.lineno, ast.unparse(node)
        if key is not None and not (
            isinstance(key, ast.Constant) and key.value in LAUNCHER_VARIABLES
        ):
            yield node.lineno, ast.unparse(node)


def declared_packages() -> list[str]:
    """The `packages` of setup.py."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.keyword) and node.arg == "packages":
            return list(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no packages")


# --- layers --------------------------------------------------------------------------------------


def test_every_module_has_a_layer():
    found = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert found == set(LAYER_OF), "name the layer of a new module in LAYER_OF"


@pytest.mark.parametrize("path", MODULES, ids=dotted_name)
def test_imports_point_one_way(path: Path):
    """And only the integration, and what people run, know Megatron."""
    own = layer_of(dotted_name(path))
    right = LAYERS[: LAYERS.index(own) + 1]
    wrong = [
        f"line {line}: {own} imports {name}"
        for line, name in imports(path.read_text())
        if (name.startswith("megatron_ncclep.") and layer_of(name) not in right)
        or (name.split(".")[0] == "megatron" and own in WITHOUT_MEGATRON)
        or name.split(".")[0] in ("benchmarks", "scripts", "tests")
    ]
    assert not wrong


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


@pytest.mark.parametrize("path", sorted((PACKAGE / "engines").rglob("*.py")), ids=dotted_name)
def test_engines_know_nothing_of_autograd(path: Path):
    """Gradients are the business of dispatch.py and combine.py, once for all engines."""
    assert not [name for _, name in imports(path.read_text()) if "autograd" in name]
    assert "autograd.Function" not in path.read_text()


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.parent.name != "benchmark"], ids=dotted_name
)
def test_tensors_say_where_they_are(path: Path):
    """Those for the host were on a GPU, or had no memory, where a user had set a default device."""
    makers = {"tensor", "zeros", "ones", "empty", "full", "arange", "as_tensor"}
    for call in ast.walk(ast.parse(path.read_text())):
        match call:
            case ast.Call(ast.Attribute(ast.Name("torch"), made), _, keywords) if made in makers:
                named = {keyword.arg for keyword in keywords}
                assert "device" in named, f"{path}:{call.lineno}: torch.{made} without a device"


@pytest.mark.parametrize(
    "path",
    [*(path for path in MODULES if path != PACKAGE / "envs.py"), *BENCHMARKS],
    ids=dotted_name,
)
def test_only_envs_reads_the_environment(path: Path):
    wrong = [f"line {line}: {text}" for line, text in environment_reads(path.read_text())]
    assert not wrong, "put the variable into envs.py, where `ncclep env` lists it"


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
    found = {dotted_name(path) for path in MODULES if path.name == "__init__.py"}
    elsewhere = {"megatron_ncclep.configs", "megatron_ncclep.include"}  # of configs/ and csrc/
    assert found | elsewhere == set(declared_packages())


def test_every_folder_with_modules_is_a_package():
    """A folder without `__init__.py` would silently be missing from the wheel."""
    for path in MODULES:
        assert (path.parent / "__init__.py").is_file(), path.parent


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
