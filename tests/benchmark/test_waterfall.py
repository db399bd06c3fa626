"""Where a step's time goes, from traces as torch's profiler writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import waterfall
from benchmarks.profiles import trace_path

GEMM = "nvjet_tst_256x128_64x4_1x2_h_bz_coopB_TNT"
DISPATCH = "void ncclep::native::(anonymous namespace)::dispatch_kernel<true>(ncclep::Rank)"
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ADAM = "void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(...)"
COPY = "void at::native::copy_kernel(...)"
MARK = (
    "void at::native::vectorized_elementwise_kernel<2, "
    "at::native::FillFunctor<c10::complex<double> >, std::array<char*, 1ul> >(int, ...)"
)
# Name, begin and end.  Rank 1 has 10 us more to do before the dispatch, its host is late by 5, and
# by 4 before the collective.
RANK_0 = [(COPY, 2, 3), (GEMM, 10, 20), (DISPATCH, 20, 50), (ADAM, 60, 70), (REDUCE, 70, 80)]
RANK_1 = [(COPY, 2, 3), (GEMM, 10, 30), (DISPATCH, 35, 50), (ADAM, 64, 74), (REDUCE, 74, 80)]
MARKS = (0, 5, 55, 90)  # the optimizer's, the passes, the optimizer's again


def write(folder: Path, rank: int, kernels: list[tuple[str, int, int]], **changes: Any) -> Path:
    """A trace of `rank`, whose times count from a moment of its own."""
    shift = 1000.0 * (1 + rank)
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "ts": shift + start, "dur": end - start}
        for name, start, end in [*kernels, *((MARK, at, at + 0.5) for at in MARKS)]
    ]
    events += [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": shift, "dur": 80.0},
        {"ph": "X", "cat": "kernel", "name": GEMM, "ts": shift + 95, "dur": 9.0},  # the next step's
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    content = {
        "traceEvents": events, "baseTimeNanoseconds": 5_000_000_000 - int(shift * 1000),
        "in_optimizer": [True, False, True], **changes,
    }  # fmt: skip
    path = trace_path(folder, "4096x2 train:ncclep:native", rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def test_waits_and_their_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [write(tmp_path, rank, kernels) for rank, kernels in enumerate((RANK_0, RANK_1))]
    steps = [waterfall.read(path) for path in paths]
    first, second = waterfall.with_waits(steps)
    assert [(k.kind, k.start, k.end) for k in first] == [
        ("optimizer", 2, 3), ("GEMM", 10, 20),
        (waterfall.LOAD, 20, 30), (waterfall.HOST, 30, 35), ("dispatch", 35, 50),
        ("optimizer", 60, 70), (waterfall.COLLECTIVES, 70, 74), ("collectives", 74, 80),
    ]  # fmt: skip
    assert [k.kind for k in second] == [
        "optimizer", "GEMM", "dispatch", "optimizer", "collectives",
    ]  # fmt: skip
    found = waterfall.totals(steps)
    assert found == pytest.approx({
        "GEMM": 15, "dispatch": 15, "optimizer": 11, "collectives": 6, waterfall.LOAD: 5,
        waterfall.HOST: 2.5, waterfall.COLLECTIVES: 2, "idle": 33.5,
    })  # fmt: skip
    assert sum(found.values()) == pytest.approx(MARKS[-1])
    folder = paths[0].parent
    assert waterfall.main([str(folder)]) == 0
    assert capsys.readouterr().out == f"drawn: {folder / 'waterfall.png'}\n"
    assert (folder / "waterfall.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "waterfall.json").read_text()) == found
    # Kernels that not all ranks call wait for none.
    write(tmp_path, 1, [kernel for kernel in RANK_1 if kernel[0] != DISPATCH])
    first, _ = waterfall.with_waits([waterfall.read(path) for path in paths])
    assert ("dispatch", 20, 50) in [(k.kind, k.start, k.end) for k in first]


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "4 marks around 1 phases"), ("{", "JSONDecodeError"), ("{}", "KeyError")],
)
def test_what_is_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    path = write(tmp_path, 0, RANK_0, in_optimizer=[False])
    if text is not None:
        path.write_text(text)
    assert waterfall.main([str(path.parent)]) == 2
    assert message in capsys.readouterr().err
    path.unlink()
    assert waterfall.main([str(path.parent)]) == 2
    assert "no rank0.json" in capsys.readouterr().err
