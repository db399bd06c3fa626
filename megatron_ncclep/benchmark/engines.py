"""Engines of this package: plan and the four passes, and their check.

Results are compared bit by bit with those of the table oracle.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from megatron_ncclep.benchmark import STEPS, Setting, Subject, UnavailableError, excused, shapes
from megatron_ncclep.benchmark.cases import refusal
from megatron_ncclep.benchmark.shapes import Workload
from megatron_ncclep.benchmark.table_oracle import table_combine, table_dispatch
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES, create_engine
from megatron_ncclep.engines.engine import BY_RAIL, EVERY_PART_ROUNDED, EngineCaps
from megatron_ncclep.errors import EngineUnavailableError, InputError
from megatron_ncclep.ranks.nodes import Nodes

# The engines' documented SMs if their number is not set.
DEFAULT_SMS = {"reference": "NCCL's", "nccl_ep": "16"}
BITS = {2: torch.int16, 4: torch.int32}
Results = dict[str, tuple[Any, Any]]
# Pass -> its input: rows, and their weights if it has any.
DISPATCHES = {"dispatch": (shapes.X, shapes.WEIGHTS), "bwd_dispatch": (shapes.GRAD_OUT, None)}
COMBINES = {"combine": (shapes.Y, None), "bwd_combine": (shapes.GRAD_ROWS, shapes.GRAD_WEIGHTS)}


def split_name(name: str) -> tuple[str, int | None]:
    """Split the name of a subject, `BASE@N`, into BASE and the number of SMs.

    Raises:
        InputError: what is behind the @ is no number.
    """
    base, at, sms = name.partition("@")
    if at and not re.fullmatch("[1-9][0-9]*", sms):
        raise InputError(f"subject {name!r}: write a number of SMs after the @, such as {base}@24")
    return base, int(sms) if at else None


def results_problem(
    results: Results, work: Workload, caps: EngineCaps, nodes: Nodes | None = None,
    roundings: int = 0,
) -> str | None:  # fmt: skip
    """Say what is wrong with the results of the four passes on this rank, if anything is.

    Args:
        results: pass -> (rows, weights or None), as the engine interface returns them.
        work: the input.
        caps, nodes: of the engine: the order of rows and of sums.
        roundings: of a sum whose order the library chooses, and whose terms are positive; 0: sums
            are compared to the bit, as everything else is.
    """
    case, rank = work.case, work.rank
    of_sums = None if nodes is None else nodes.ranks_on_each
    of_rows = of_sums if caps.slot_order == BY_RAIL else None
    tables = work.tables if of_rows is None else shapes.tables_of_case(case, of_rows)
    for name, (actual, actual_w) in results.items():
        kind, kind_w = {**DISPATCHES, **COMBINES}[name]
        sent, sent_w = work.every(kind), None if kind_w is None else work.every(kind_w)
        if name in DISPATCHES:
            rows, w = table_dispatch(tables[rank], sent, sent_w)
        else:
            rows, w = table_combine(
                tables, list(case.tokens), rank, case.top_k,
                [part.float() for part in sent] if roundings else sent, sent_w,
                caps.reduction == EVERY_PART_ROUNDED and not roundings, of_sums,
            )  # fmt: skip
        if name in DISPATCHES or not roundings:
            problem = difference(actual, rows)
        elif actual.shape != rows.shape or actual.dtype != case.dtype:
            problem = f"rows: {actual.dtype} {list(actual.shape)}"
        else:
            bound = roundings * torch.finfo(case.dtype).eps / 2
            problem = deviation(actual.float(), rows, bound * rows, f"{bound:.2%}")
        if w is not None:
            problem = problem or difference(actual_w, w, "weights")
        if problem:
            return f"{name}: rank {rank}, {problem}"
    return None


def difference(actual: torch.Tensor, expected: torch.Tensor, what: str = "rows") -> str | None:
    """Say where two tensors, [n, width] or [n], first differ in their bits, if anywhere."""
    forms = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (actual, expected)]
    if forms[0] != forms[1]:
        return f"{what}: {forms[0]}, expected {forms[1]}"
    if actual.dim() == 1:
        actual, expected = actual[:, None], expected[:, None]
    bits = BITS[actual.element_size()]
    different = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    return _first(what, actual, expected, different)


def deviation(
    actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | float, within: str
) -> str | None:
    """Say where two [n, width] tensors first differ by more than `bound`, as text `within`."""
    # Not `>`, which a NaN would pass.
    return _first("", actual, expected, ~((actual - expected).abs() <= bound), f" within {within}")


def _first(
    what: str, actual: torch.Tensor, expected: torch.Tensor, far: torch.Tensor, within: str = ""
) -> str | None:
    if not bool(far.any()):
        return None
    at = tuple(far.nonzero()[0].tolist())
    said = f"is {actual[at].item()!r}, expected {expected[at].item()!r}{within}"
    return f"{what}{[*at]} {said}; {int(far.any(dim=1).sum())} of {len(far)} rows differ"


def check_limits(workload: Workload, caps: EngineCaps) -> None:
    """Raise an UnavailableError that names the limit of an engine that a workload exceeds."""
    if limit := refusal(workload.case, caps):
        beyond = f"the shape is beyond the limits of {caps.name}"
        raise UnavailableError(f"{beyond}: {limit} {getattr(caps, limit)}")


class EngineSubject(Subject):
    """See `Subject`.  An engine through the engine interface, over its own process group."""

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        super().__init__(name, setting, workload)
        base, num_sms = split_name(name)
        case, work = workload.case, workload
        check_limits(workload, ENGINES[base].caps)
        with excused(EngineUnavailableError, InputError):
            # All options are set, so that the environment does not affect the measurement.
            options = setting.options(engine=base, alignment=case.alignment, num_sms=num_sms)
            options["max_recv_rows"] = case.max_recv_rows
            engine = create_engine(setting.new_group(), case.num_experts, EpConfig(**options))
        self._engine = engine
        self.sms = str(getattr(engine, "num_sms", None) or num_sms or DEFAULT_SMS.get(base, "-"))
        self.nodes: Nodes | None = getattr(engine, "nodes", None)
        self._plan = engine.plan(work.topk_idx)
        self.passes = {
            "plan": lambda: engine.plan(work.topk_idx),
            "dispatch": lambda: engine.dispatch(self._plan, work.x, work.w),
            "combine": lambda: engine.combine(self._plan, work.y),
            "bwd_dispatch": lambda: engine.dispatch(self._plan, work.grad_out),
            "bwd_combine": lambda: engine.combine(self._plan, work.grad_rows, work.grad_row_w),
        }

    def problem(self) -> str | None:
        """See `Subject.problem`.  Uses a new plan; all passes run before a comparison."""
        self._plan = self.passes["plan"]()
        results = {name: self.passes[name]() for name in STEPS[1:]}
        return results_problem(results, self._workload, self._engine.caps, self.nodes)

    def close(self) -> None:
        self._engine.close()
