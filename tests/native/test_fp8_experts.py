"""The kernels of FP8 experts (csrc/experts) on the emulator, beside their definitions.

Copies, products and threads run in an order that is drawn (fp8/experts/hopper.cuh).  Then the
kernels are broken on purpose, in ways that must be noticed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from build_cache import ROOT, cached, run_all, version_of
from emulation.translate import Change, apply_changes

HERE = Path(__file__).parent / "fp8"
MACHINE = HERE.parent / "emulation" / "machine"
CSRC = ROOT / "csrc"
COMPILER = shutil.which("c++") or shutil.which("g++")
KERNELS = ("tiles.cuh", "products.cuh", "fp8_tile.cuh", "quantize.cuh")
PROGRAM_S = 300.0  # at most, on a slow and busy machine
SEED = "4"  # with which every mistake shows

pytestmark = [
    pytest.mark.any_python("it runs C++"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (c++ or g++) on PATH"),
    pytest.mark.skipif(sys.platform != "linux", reason="the emulator's fibers are for Linux"),
]

# What is changed (emulation/translate.py), in which check it shows, and what is said then.
# fmt: off
MISTAKES = {
    "a stage is released before its products are done": (Change(
        "experts/products.cuh", "«hopper::wait_for_products(product);»\n          if (half ==",
        "if (half == 0) { hopper::wait_for_products(product); }"), "products", "rows: "),
    "a stage is overwritten while the other CTA multiplies": (Change(
        "experts/products.cuh", "shared.empty(s), «kClusterCtas * kMultipliers * 4»);",
        "kMultipliers * 4"), "products", ""),
    "scales are read after the stage is released": (Change(
        "experts/products.cuh", "if («half == kHalves - 1») release();", "half == 0"),
        "products", ""),
    "a tile writes the rows of the next expert": (Change(
        "experts/products.cuh", "if («row >= gemm.rows» || (first", "false"),
        "products", ""),
    "columns have the scales of others": (Change(
        "experts/products.cuh", "own.load(columns + «ColumnScales::kPairs * 32», pair);", "0"),
        "products", "weights: "),
    "rows of the next expert are overwritten": (Change(
        "experts/products.cuh", "if («of_row < num_rows») {", "true"), "products", "rows: "),
    "rows of the next expert are copied over": (Change(
        "experts/products.cuh", "if («num_rows >= kOutRows») {", "true"), "products", "rows: "),
    "rows are overwritten before they are stored": (Change(
        "experts/products.cuh", "«hopper::wait_for_reads();»  // of the", ""),
        "products", "rows: "),
    "all rows have the scale of the upper half": (Change(
        "experts/products.cuh", "hopper::load(«scales_a + 8 * 4»)", "scales_a"),
        "products", "rows: "),
    "an expert's last block is taken for the next one's first": (Change(
        "experts/tiles.cuh", "blocks = is_expert ? «(end - begin + kBlock - 1)» / kBlock",
        "(end - begin)"), "products", "weights: "),
    "weights are written, not added": (Change(
        "experts/products.cuh", "if («adds») {  // no other", "false"), "products", "weights: "),
    "sums are overwritten before they are stored": (Change(
        "experts/products.cuh", "«hopper::wait_for_reads();»  // of what", ""),
        "products", "weights: "),
    "a block's scale is that of a part of it": (Change(
        "experts/fp8_tile.cuh", "own = «join_lanes(amax, hopper::larger)»;", "amax[0]"),
        "quantized", "rows, by rows: "),
    "rows after an expert's last one are not zeros": (Change(
        "experts/quantize.cuh",
        "load_rows(values, «block», from.values",
        "RowBlock{block.first_row, min(kBlock, from.offsets[from.num_experts] - block.first_row), "
        "block.number}"), "quantized", "rows, transposed: "),
    "a transposed row is not where it is looked for": (Change(
        "experts/fp8_tile.cuh", "if («swizzle % 2») bytes = uint4", "false"),
        "quantized", "rows, transposed: "),
    "a row has the scale of another one": (Change(
        "experts/fp8_tile.cuh", "own_scale, r / 2 * 8 + «r % 2»)", "0"),
        "quantized", "rows, by rows: "),
    "what is behind a packed row's scales stays": (Change(
        "experts/quantize.cuh", "«i < floats - to.columns / 4»", "false"),
        "quantized", "packed rows: "),
    "packed rows are as far apart as their values": (Change(
        "experts/quantize.cuh", "const int floats = «to.pitch / 4»", "to.columns / 4"),
        "quantized", "packed rows: "),
    "an unpacked row has the scale of its first block": (Change(
        "experts/quantize.cuh", "from.scales(row)[«at.column / kBlock»]", "0"),
        "quantized", "unpacked rows: "),
    "NaN is unpacked as a number": (Change(
        "experts/quantize.cuh", "return «(code & 0x7f) == 0x7f» ?", "false"),
        "quantized", "unpacked rows, transposed: "),
}
# fmt: on


@pytest.fixture(scope="module")
def program() -> Path:
    """The program with all mistakes: one is chosen when it runs."""
    compiler = str(COMPILER)
    changes = [change for change, _, _ in MISTAKES.values()]
    sources = [
        *sorted(HERE.glob("*.cpp")),
        *(MACHINE / f"{n}.cpp" for n in ("emulator", "visibility", "network")),
    ]
    inputs = [
        version_of(compiler),
        changes,
        *sorted(HERE.rglob("*.[hc]*")),
        *sorted(MACHINE.rglob("*.[hc]*")),
    ]

    def make(folder: Path) -> None:
        (folder / "experts").mkdir()
        for name in KERNELS:
            text = apply_changes(f"experts/{name}", (CSRC / "experts" / name).read_text(), changes)
            (folder / "experts" / name).write_text(text)
        options = ["-std=c++17", "-O2", "-w", "-include", "emulator.h", "-DNCCLEP_NCCL_HEADERS"]
        options += [f"-I{path}" for path in (HERE, MACHINE, MACHINE.parent, folder, CSRC)]
        objects = [folder / f"{source.stem}.o" for source in sources]
        run_all(
            [compiler, *options, "-c", source, "-o", made]
            for source, made in zip(sources, objects, strict=True)
        )
        run_all([[compiler, *objects, "-o", folder / "fp8"]])

    kernels = [CSRC / "experts" / name for name in KERNELS]
    return cached("fp8", [*inputs, *kernels, *sorted(CSRC.glob("n*/**/*.h"))], make) / "fp8"


def run(program: Path, check: str, mistake: int = -1) -> subprocess.CompletedProcess[str]:
    command = [program, check, SEED, str(mistake)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PROGRAM_S)


@pytest.mark.parametrize("check", ["products", "quantized"])
def test_results_are_their_definitions(program: Path, check: str) -> None:
    ended = run(program, check)
    assert (ended.returncode, ended.stdout) == (0, "OK\n"), ended.stdout + ended.stderr


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_noticed(program: Path, name: str) -> None:
    _, check, notice = MISTAKES[name]
    ended = run(program, check, list(MISTAKES).index(name))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert ended.stdout.startswith(f"FAILED: {notice}")
