"""The C interface as a C program finds it: a header, a library and an example.

`sanitized/host.cpp` calls its functions, with right and with wrong arguments.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from c_program import CC, HEADER, LIBRARY, build_example, run
from fakes import needs_extension

CXX = shutil.which("g++")
STRICT = ("-Wall", "-Wextra", "-pedantic", "-Werror")
pytestmark = pytest.mark.skipif(CC is None or CXX is None, reason="no gcc and g++ on PATH")


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


# The fields of version 1.00.
# fmt: off
FIRST_FIELDS = {
    "Tensor": "data dtype ndim shape",
    "CommConfig": "unique_id num_ranks rank device timeout_s nccl_path poll user",
    "GroupConfig": "num_experts timeout_s all_gather poll user",
    "Shape": "num_tokens top_k row_bytes",
    "GroupInfo": "num_ranks rank num_experts max_tokens max_top_k row_bytes num_bytes was_captured "
                 "growth",
    "Failure": "reason phase peer operation deadline_s own_call peer_call",
    "PlanConfig": "topk_idx most_tokens number alignment max_recv_rows counts token_routes routes "
                  "max_pairs max_assignments kept lacked num_sms stream",
    "PlanSizes": "num_rows num_pairs num_assignments first_bad_rank has_room",
    "Rows": "tokens topk_w rows row_w sums num_sms stream",
    "LowLatencyConfig": "max_tokens hidden top_k payload dtype num_scales",
    "LowLatencyBuffers": "rows scales experts weights num_bytes",
    "LowLatencyDispatch": "x scales topk_idx weights counts completes num_ctas stream",
    "LowLatencyCombine": "y rows_of out sends completes num_ctas stream",
}
# fmt: on


def test_fields_of_structs_are_only_appended() -> None:
    """A library must read the struct of a program that was compiled before."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    structs = dict(re.findall(r"struct \{([^}]*)\} ncclep(\w+)_t;", text))
    fields = {
        name: re.findall(r"(\w+)(?:\[\w+\])?\s*[,;]", body)
        for body, name in structs.items()
        if "size_t size;" in body
    }
    assert fields.keys() == FIRST_FIELDS.keys()
    sizes = (HEADER.parents[1] / "common" / "c_struct.h").read_text()
    for name, first in FIRST_FIELDS.items():
        expected = ["size", *first.split()]
        assert fields[name][: len(expected)] == expected
        if appended := fields[name][len(expected) :]:
            assert re.search(
                rf"kFirstSize<ncclep{name}_t> =\s*offsetof\(\w+, {appended[0]}\)", sizes
            )


@needs_extension
def test_the_library_exports_what_the_header_declares() -> None:
    declared = re.findall(r"^NCCLEP_API (?:.*[ *])?(ncclep\w+)\(", HEADER.read_text(), re.MULTILINE)
    symbols = run("nm", "--dynamic", "--defined-only", LIBRARY).stdout
    exported = [line.split()[-1] for line in symbols.splitlines()]
    assert sorted(declared) == sorted(n for n in exported if n.startswith("ncclep"))
    assert not [name for name in exported if "ncclep" in name and name not in declared]


@needs_extension
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
