"""Engines of this package and NVIDIA's libnccl_ep: plan and the four passes, and their check.

The library is the baseline and is called directly, without this package's checks and agreements:
its outputs are allocated once and exact sizes are known, so only its own calls are timed.  Results
are compared bit by bit with those of the table oracle.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_ncclep.benchmark import STEPS, Setting, Subject, UnavailableError, excused, shapes
from megatron_ncclep.benchmark.job import LIBRARIES, split_name
from megatron_ncclep.benchmark.shapes import Workload
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES, choose_engine, create_engine
from megatron_ncclep.engines.engine import BY_RAIL, EVERY_PART_ROUNDED, EngineCaps
from megatron_ncclep.engines.nccl_ep import engine as nccl_ep
from megatron_ncclep.engines.nccl_ep.staging import open_library
from megatron_ncclep.errors import EngineUnavailableError, InputError
from megatron_ncclep.libraries import extension
from megatron_ncclep.libraries.nccl_ep import CHOICE, FIXED_ORDER, PULL_PUSH, environment
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.nodes import Nodes
from megatron_ncclep.testing.cases import refusal
from megatron_ncclep.testing.table_oracle import table_combine, table_dispatch

# The engines' documented SMs if their number is not set.
DEFAULT_SMS = {"reference": "NCCL's", "nccl_ep": "16"}
# Mode in a library's name -> the library's variable for it.
MODES = {"pull_push": PULL_PUSH, "fixed_order": FIXED_ORDER}
TOKENS_MULTIPLE = 64  # the library's staging memory is made for a multiple of this many tokens
KEY_COLUMNS = 8  # of a row: they differ from those of an expert's, or source rank's, other rows
_BITS = {2: torch.int16, 4: torch.int32}
Results = dict[str, tuple[Any, Any]]
# Pass -> its input: rows, and their weights if it has any.
DISPATCHES = {"dispatch": (shapes.X, shapes.WEIGHTS), "bwd_dispatch": (shapes.GRAD_OUT, None)}
COMBINES = {"combine": (shapes.Y, None), "bwd_combine": (shapes.GRAD_ROWS, shapes.GRAD_WEIGHTS)}


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
    bits = _BITS[actual.element_size()]
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


def _check_limits(workload: Workload, caps: EngineCaps) -> None:
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
        _check_limits(workload, ENGINES[base].caps)
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


class LibrarySubject(Subject):
    """See `Subject`.  The library over its own process group and communicator.

    With pull and push the library adds the ranks' parts in the order of a token's assignments,
    which is the contract's if they are sorted.
    """

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        super().__init__(name, setting, workload)
        _check_limits(workload, nccl_ep.CAPS)
        tokens = -(-max(workload.case.tokens) // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
        self._group, self._staging, self.sms = open_group(name, setting, workload, tokens)
        self._allocate("pull_push" in LIBRARIES[split_name(name)[0]][1])

    def _allocate(self, adds_by_assignment: bool) -> None:
        group, work, native = self._group, self._workload, extension.load()
        case, device, stream = work.case, group.device, extension.current_stream
        topk_idx, w, grad_out, self._order = work.topk_idx, work.w, work.grad_out, None
        if adds_by_assignment:
            topk_idx, self._order = work.topk_idx.sort(dim=1)
            w = work.w.gather(1, self._order)
        num_bytes = self._staging.handle_bytes(case.alignment, case.top_k)
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        handle = native.NcclEpHandle(self._staging, case.alignment, case.top_k, self._memory)
        self._handle = handle
        num_local = case.num_experts // case.num_ranks
        counts = torch.empty(num_local, dtype=torch.int64, device=device)
        total = torch.empty(1, dtype=torch.int64, device=device)
        self._rows, self._row_w = torch.empty_like(work.y), torch.empty_like(work.grad_row_w)
        self._out, self._home_w = torch.empty_like(work.x), torch.empty_like(work.w)
        self.passes = {
            "plan": lambda: handle.update(topk_idx, counts, total, stream()),
            "dispatch": lambda: handle.dispatch(work.x, w, self._rows, self._row_w, stream()),
            "combine": lambda: self._combine(work.y),
            "bwd_dispatch": lambda: handle.dispatch(grad_out, None, self._rows, None, stream()),
            "bwd_combine": lambda: self._combine(work.grad_rows, work.grad_row_w),
        }

    def _combine(
        self, rows: torch.Tensor, w: torch.Tensor | None = None, place: torch.Tensor | None = None
    ) -> None:
        """Combine `rows`, and their weights `w`; row i is at `place[i]`."""
        outputs = (self._out, None if w is None else self._home_w)
        self._handle.combine(put(rows, place), put(w, place), *outputs, extension.current_stream())

    def problem(self) -> str | None:
        """See `Subject.problem`: an expert's rows may be in any order.

        Outputs are overwritten with NaN before, and copied after.
        """
        work = self._workload
        for tensor in (self._rows, self._row_w, self._out, self._home_w):
            tensor.fill_(float("nan"))
        self.passes["plan"]()
        self.passes["dispatch"]()
        place = places(work, self._group.rank, self._rows)
        results: dict[str, tuple[Any, Any]] = {"dispatch": (self._rows[place], self._row_w[place])}
        self._combine(work.y, place=place)
        results["combine"] = (self._out.clone(), None)
        self._rows.fill_(float("nan"))
        self.passes["bwd_dispatch"]()
        results["bwd_dispatch"] = (self._rows[place], None)
        self._out.fill_(float("nan"))
        self._combine(work.grad_rows, work.grad_row_w, place)
        topk_w = self._home_w
        if self._order is not None:
            topk_w = torch.empty_like(topk_w).scatter_(1, self._order, topk_w)
        results["bwd_combine"] = (self._out, topk_w)
        return results_problem(results, work, nccl_ep.CAPS)

    def close(self) -> None:
        torch.cuda.synchronize(self._group.device)
        self._handle.close()
        self._staging.close()


def open_group(
    name: str, setting: Setting, workload: Workload, max_tokens: int, low_latency: bool = False
) -> tuple[EpGroup, Any, str]:
    """Open the library called `name` over its own process group and communicator.

    Returns the group of ranks, the library's group, and its kernels' number of SMs as text.
    An UnavailableError is raised on every rank that knows why the library cannot run here.
    """
    base, num_sms = split_name(name)
    package, on = LIBRARIES[base]
    variables = {CHOICE: package} if package else {}
    variables |= {variable: str(int(mode in on)) for mode, variable in MODES.items()}
    group, case = EpGroup.of(setting.new_group()), workload.case
    options = setting.options(engine="nccl_ep", alignment=case.alignment, num_sms=num_sms)
    # The engine requires its fixed order; nothing else may make it unavailable.
    with excused(EngineUnavailableError, InputError), environment(variables | {FIXED_ORDER: "1"}):
        choose_engine(group, EpConfig(**options), case.num_experts)
    with environment(variables):
        made = extension.load().NcclEpGroup(
            open_library().native, communicator_of(group, setting.timeout_s),
            num_experts=case.num_experts, max_tokens=max_tokens, max_recv_rows=0,
            row_bytes=case.hidden * case.dtype.itemsize, top_k=case.top_k, num_sms=num_sms or 0,
            timeout_s=setting.timeout_s, low_latency=low_latency,
        )  # fmt: skip
    return group, made, str(num_sms or DEFAULT_SMS["nccl_ep"])


def places(workload: Workload, rank: int, rows: torch.Tensor) -> torch.Tensor:
    """A library's place of each row of `rank` in the contract's order, int64 [num_rows].

    `rows` [num_rows, H] are what it dispatched of `X`.  Within an expert's rows their order may
    differ from call to call.  If a row is in another expert's block, or was never sent,
    `results_problem` finds a difference.
    """
    table, width = workload.tables[rank], min(KEY_COLUMNS, rows.shape[1])
    sent = [workload.rows(shapes.X, source, width) for source in range(workload.case.num_ranks)]
    expected, _ = table_dispatch(table, sent)
    block = torch.repeat_interleave(table.padded)
    place = torch.empty_like(block)
    place[by_content(block, expected)] = by_content(block, rows[:, :width])
    return place


def put(rows: Any, place: torch.Tensor | None) -> Any:
    """Return `rows` [n, ...], if any, with row i at `place[i]`; None: unchanged."""
    if rows is None or place is None:
        return rows
    return torch.empty_like(rows).index_copy_(0, place, rows)


def by_content(block: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Sort rows by block and then by content; returns their numbers, int64 [n]."""
    bits = columns.contiguous().view(_BITS[columns.element_size()])
    key = torch.zeros_like(block)
    for column in bits.unbind(dim=1):
        key = key * 1_000_003 + column
    order = key.argsort(stable=True)
    return order[block[order].argsort(stable=True)]
