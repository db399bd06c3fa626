"""The C interface as a C program finds it: a header, a library, and errors as codes with texts."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from c_program import CC, HEADER, LIBRARY, build, build_example, run
from fakes import compile_fake

from megatron_ncclep.libraries import extension

CXX = shutil.which("g++")
STRICT = ("-Wall", "-Wextra", "-pedantic", "-Werror")
pytestmark = pytest.mark.skipif(CC is None or CXX is None, reason="no gcc and g++ on PATH")
# tests/test_packaging.py sees to it that there is an extension wherever there is a CUDA toolkit.
needs_library = pytest.mark.skipif(
    extension.unavailable_reason() is not None,
    reason=f"nothing to call: {extension.unavailable_reason()}",
)


@pytest.mark.parametrize(
    "compiler", [(CC, "-std=c99", "-xc"), (CXX, "-std=c++11", "-xc++")], ids=["C99", "C++"]
)
def test_the_header_compiles_alone(compiler: tuple[str, ...], tmp_path: Path) -> None:
    source = tmp_path / "program.c"
    macros = dict.fromkeys(re.findall(r"#define NCCLEP_(\w+)_INIT\b", HEADER.read_text()))
    assert len(macros) > 10
    named = {"TENSOR": "Tensor", "COMM_CONFIG": "CommConfig", "GROUP_INFO": "GroupInfo"}
    lines = [
        f"  ncclep{named.get(name, name.title().replace('_', ''))}_t v{i} = NCCLEP_{name}_INIT; "
        f"if (v{i}.size != sizeof(v{i})) return 1;"
        for i, name in enumerate(macros)
    ]
    source.write_text("\n".join(["#include <ncclep.h>", "int main(void) {", *lines, "}"]))
    made = run(*compiler, *STRICT, f"-I{HEADER.parent}", source, "-o", tmp_path / "program")
    assert made.returncode == 0, made.stderr
    assert run(tmp_path / "program").returncode == 0


@needs_library
def test_the_library_exports_what_the_header_declares() -> None:
    declared = re.findall(r"^NCCLEP_API (?:.*[ *])?(ncclep\w+)\(", HEADER.read_text(), re.MULTILINE)
    symbols = run("nm", "--dynamic", "--defined-only", LIBRARY).stdout
    exported = [line.split()[-1] for line in symbols.splitlines()]
    assert sorted(declared) == sorted(n for n in exported if n.startswith("ncclep"))
    assert not [name for name in exported if "ncclep" in name and name not in declared]


@needs_library
def test_wrong_arguments_are_codes_with_texts(tmp_path: Path) -> None:
    nccl = compile_fake(tmp_path / "libfake.so")
    source = Path(__file__).with_name("c_arguments.c")
    program = build(tmp_path / "arguments", source, *STRICT, "-ldl")
    ran = run(program, nccl)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = dict(line.split(": ", 1) for line in ran.stdout.splitlines())
    argument, system = "1 invalid argument: ", "3 error of CUDA, NCCL or the system: "
    expected = {
        "fresh thread": "0 success: ",
        "no NCCL": f"{system}cannot open /nowhere/libnccl.so: ",
        "no id": f"{argument}id: NULL",
        "no config": f"{argument}ncclepCommConfig_t: NULL",
        "no comm": f"{argument}comm: NULL",
        "old size": f"{argument}ncclepCommConfig_t of 16 bytes: this library, version 100, knows",
        "rank": f"{argument}rank 2 of 2",
        "deadline": f"{argument}a deadline of 0 s: it must be positive",
        "poll": "5 ended by a callback of the caller: the caller ended the call",
        "late": "4 another rank did not come, refused a call, or made a different one: no communic",
        "experts": f"{argument}3 experts: from 1 to 512, and a multiple of the 2 ranks",
        "no GPU": f"{system}cudaMalloc failed: ",
        "no group": f"{argument}the native group was closed, or is NULL",
        "nothing to destroy": f"{argument}the native group was closed, or is NULL",
        "no plan": f"{argument}the plan was closed, or is NULL",
        "ranks": f"{argument}33 ranks: from 1 to 32",
        "no result": "99 not a result of this library: ",
    }
    assert said.keys() == expected.keys()
    for name, text in expected.items():
        assert said[name].startswith(text), f"{name}: {said[name]}"


@needs_library
def test_the_example_compiles_and_reports_errors(tmp_path: Path) -> None:
    """On GPUs `scripts/gpu.py` runs it to its end (tests/gpu/test_gpu_c_example.py)."""
    program = build_example(tmp_path / "example")
    refused = run(program, 2, 3)
    assert refused.returncode == 2
    assert "2 ranks, 3 experts" in refused.stderr
    failed = run(program, 2, 4, NCCLEP_NCCL_LIBRARY="/nowhere/libnccl.so")
    assert failed.returncode == 1
    assert "(code 3): cannot open /nowhere/libnccl.so" in failed.stderr
    assert failed.stdout.splitlines()[-1] == "failed"
