"""The C example runs to its end: dispatch and combine between processes, without Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from c_program import build_example, run

from megatron_ncclep.libraries.search import find_nccl


@pytest.mark.parametrize("experts", [4, 16])
def test_every_number_is_right(experts: int, tmp_path: Path) -> None:
    program = build_example(tmp_path / "example")
    library = find_nccl()
    assert library is not None
    # Ranks may share a GPU, for tests.
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if torch.cuda.device_count() < 2 else {}
    ran = run(program, 2, experts, NCCLEP_NCCL_LIBRARY=str(library.path), **shared)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count(" 0 of 40 numbers are wrong") == 2
    assert ran.stdout.splitlines()[-1] == "all ranks: right"
