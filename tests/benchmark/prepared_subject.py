"""Layers and experts made ready on a CPU, even those that are CUDA graphs, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from dispatcher_bugs import setting_of

from megatron_ncclep.benchmark import accumulating_subject, experts
from megatron_ncclep.benchmark import layer as layers
from megatron_ncclep.benchmark.accumulating_subject import Results
from megatron_ncclep.benchmark.run import make_subject
from megatron_ncclep.benchmark.workload import Workload
from megatron_ncclep.ranks.pool import RankContext
from megatron_ncclep.testing.cases import Case

CASES = {
    "bf16": Case("bf16", (20, 20), 8, top_k=3, hidden=32, dtype=torch.bfloat16),
    "fp32": Case("fp32", (20, 20), 8, top_k=3, hidden=32, alignment=16),
    "top-1": Case("top-1", (20, 20), 8, top_k=1, hidden=32, skew=0.5),
    "an expert without rows": Case("empty", (9, 9), 8, top_k=2, hidden=32, skew=100.0),
}
FFN = 48


def replayed_on_cpu(call: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
    """In place of a CUDA graph: every replay leaves its results where the first one has."""
    results = call()

    def replay() -> None:
        for name, value in call().items():
            kept = results[name]
            assert (kept is None) == (value is None)
            if kept is not None and value is not None:
                kept.copy_(value)

    return replay, results


def prepared_on(
    context: RankContext, name: str, workload: Workload, max_recv_rows: Any = "worst"
) -> Any:
    """Prepare a subject; a CUDA graph is played by `replayed_on_cpu`."""
    with (
        mock.patch.object(accumulating_subject, "captured", replayed_on_cpu),
        mock.patch.object(layers, "unavailable_reason", return_value=None),
        mock.patch.object(experts, "unavailable_reason", return_value=None),
    ):
        return make_subject(name, setting_of(context), workload, max_recv_rows=max_recv_rows)
