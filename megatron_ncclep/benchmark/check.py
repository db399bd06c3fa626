"""Check: compare what dispatch and combine gave on this rank with what they must give, bit by bit.

What they must give is the table oracle's answer to the workload's payload.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_ncclep.benchmark.workload import (
    GRAD_OUT,
    GRAD_ROWS,
    GRAD_WEIGHTS,
    WEIGHTS,
    Workload,
    X,
    Y,
    tables_of_case,
)
from megatron_ncclep.engines.engine import EVERY_PART_ROUNDED
from megatron_ncclep.ranks.nodes import Nodes
from megatron_ncclep.testing.table_oracle import table_combine, table_dispatch

_BITS = {2: torch.int16, 4: torch.int32}
# Pass -> what goes in: rows, and the weights beside them if it has any.
DISPATCHES = {"dispatch": (X, WEIGHTS), "bwd_dispatch": (GRAD_OUT, None)}
COMBINES = {"combine": (Y, None), "bwd_combine": (GRAD_ROWS, GRAD_WEIGHTS)}


def results_problem(
    results: dict[str, tuple[Any, Any]],
    work: Workload,
    reduction: str,
    nodes: Nodes | None = None,
) -> str | None:
    """Say what is wrong with the results of the four passes on this rank, if anything is.

    Args:
        results: pass -> (rows, weights or None), as the engine interface returns them.
        work: what went in.
        reduction: how combine rounds, one of engine.REDUCTIONS.
        nodes: the grid of an engine whose rows stand BY_RAIL.
    """
    case, rank = work.case, work.rank
    tables, on_node = work.tables, None
    if nodes is not None:
        on_node = nodes.ranks_on_each
        tables = tables_of_case(case, on_node)
    for name, (actual, actual_w) in results.items():
        kind, kind_w = {**DISPATCHES, **COMBINES}[name]
        sent, sent_w = work.every(kind), None if kind_w is None else work.every(kind_w)
        if name in DISPATCHES:
            rows, w = table_dispatch(tables[rank], sent, sent_w, ranks_on_node=on_node)
        else:
            rows, w = table_combine(
                tables, list(case.tokens), rank, case.top_k, sent, sent_w,
                reduction == EVERY_PART_ROUNDED, on_node,
            )  # fmt: skip
        problem = difference(actual, rows)
        if problem is None and w is not None:
            problem = difference(actual_w, w, "weights")
        if problem is not None:
            return f"{name}: rank {rank}, {problem}"
    return None


def difference(actual: torch.Tensor, expected: torch.Tensor, what: str = "rows") -> str | None:
    """Say in which bits two tensors, [n, width] or [n], first differ, if in any."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return (
            f"{what}: {actual.dtype} {list(actual.shape)}, expected {expected.dtype} "
            f"{list(expected.shape)}"
        )
    if actual.dim() == 1:
        actual, expected = actual[:, None], expected[:, None]
    bits = _BITS[actual.element_size()]
    different = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    return _first(what, actual, expected, different)


def deviation(
    actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | float, within: str
) -> str | None:
    """Say where two [n, width] tensors first differ by more than `bound`.

    Args:
        actual, expected: of a dtype in which they can be subtracted from each other.
        bound: one number, or [n, width].
        within: what the bound is, in words.
    """
    # Not `>`: a NaN is within nothing.
    return _first("", actual, expected, ~((actual - expected).abs() <= bound), f" within {within}")


def _first(
    what: str, actual: torch.Tensor, expected: torch.Tensor, far: torch.Tensor, within: str = ""
) -> str | None:
    if not bool(far.any()):
        return None
    row, column = (int(i) for i in far.nonzero()[0])
    return (
        f"{what}[{row}, {column}] is {actual[row, column].item()!r}, expected "
        f"{expected[row, column].item()!r}{within}; {int(far.any(dim=1).sum())} of {len(far)} rows "
        "differ"
    )
