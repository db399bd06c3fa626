"""NVIDIA's libnccl_ep called directly: the baseline, in both modes.

It runs without this package's checks and agreements: its outputs are allocated once and exact sizes
are known, so only its own calls are timed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from benchmarks.catalogue import LIBRARIES
from megatron_ncclep.benchmark import Setting, Subject, UnavailableError, excused, shapes
from megatron_ncclep.benchmark.engines import (
    BITS,
    DEFAULT_SMS,
    check_limits,
    deviation,
    results_problem,
    split_name,
)
from megatron_ncclep.benchmark.low_latency import LowLatencySubject
from megatron_ncclep.benchmark.shapes import Workload, X
from megatron_ncclep.benchmark.table_oracle import table_dispatch
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import choose_engine
from megatron_ncclep.engines.low_latency_types import LowLatencyRows
from megatron_ncclep.engines.nccl_ep import engine as nccl_ep
from megatron_ncclep.engines.nccl_ep.staging import open_library
from megatron_ncclep.errors import EngineUnavailableError, InputError, LibraryError
from megatron_ncclep.libraries import extension
from megatron_ncclep.libraries.nccl_ep import CHOICE, FIXED_ORDER, PULL_PUSH, environment
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup

# Mode in a library's name -> the library's variable for it.
MODES = {"pull_push": PULL_PUSH, "fixed_order": FIXED_ORDER}
TOKENS_MULTIPLE = 64  # the library's staging memory is made for a multiple of this many tokens
KEY_COLUMNS = 8  # of a row: they differ from those of an expert's, or source rank's, other rows


class LibrarySubject(Subject):
    """See `Subject`.  The library over its own process group and communicator.

    With pull and push the library adds the ranks' parts in the order of a token's assignments,
    which is the contract's if they are sorted.
    """

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        super().__init__(name, setting, workload)
        check_limits(workload, nccl_ep.CAPS)
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
            open_library()[0], communicator_of(group, setting.timeout_s),
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
    bits = columns.contiguous().view(BITS[columns.element_size()])
    key = torch.zeros_like(block)
    for column in bits.unbind(dim=1):
        key = key * 1_000_003 + column
    order = key.argsort(stable=True)
    return order[block[order].argsort(stable=True)]


class LibraryLowLatencySubject(LowLatencySubject):
    """The library's low-latency mode.

    Its rows are rank-major, like ours, in an order that may differ from call to call.  A dispatch
    takes new routes, like ours: it is the library's update of its handle, and its dispatch.
    """

    def _open(self, setting: Setting) -> None:
        work = self._workload
        case, module = work.case, extension.load()
        if case.dtype != torch.bfloat16:
            dtype = str(case.dtype).removeprefix("torch.")
            raise UnavailableError(f"{self.name} takes only rows of bfloat16, not of {dtype}")
        self._group, self._staging, self.sms = open_group(
            self.name, setting, work, self.max_tokens, low_latency=True
        )
        with excused(LibraryError):
            self._handle = module.NcclEpLowLatencyHandle(self._staging, case.top_k)
        places = (case.num_ranks, self.max_tokens)
        new = work.x.new_empty
        self._received = LowLatencyRows(
            rows=new(*places, case.hidden), topk_idx=new(*places, case.top_k, dtype=torch.int32),
            weights=new(*places, case.top_k, dtype=torch.float32),
            counts=new(case.num_ranks, dtype=torch.int32),
            num_local_experts=case.num_experts // case.num_ranks,
        )  # fmt: skip
        self._out = torch.empty_like(work.x)

    def dispatch(self) -> LowLatencyRows:
        work, got = self._workload, self._received
        self._handle.dispatch(
            work.x, work.topk_idx, work.w,
            got.rows, got.topk_idx, got.weights, got.counts, extension.current_stream(),
        )  # fmt: skip
        return got

    def combine(self, y: torch.Tensor | None = None) -> torch.Tensor:
        self._handle.combine(self._y if y is None else y, self._out, extension.current_stream())
        return self._out

    def problem(self) -> str | None:
        """See `Subject.problem`: a source's rows may be in any order."""
        for tensor in (self._received.rows, self._received.weights, self._out):
            tensor.fill_(float("nan"))
        got = self.dispatch()
        place = self._places(got)

        def in_order(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.flatten(0, 1)[place].view_as(tensor)

        experts = in_order(got.topk_idx)
        for source, count in enumerate(got.counts.tolist()):
            experts[source, count:] = -1  # only ours marks places without rows
        received = dataclasses.replace(
            got, rows=in_order(got.rows), topk_idx=experts, counts=got.counts.clone(),
            weights=torch.where(experts >= 0, in_order(got.weights), 0),
        )  # fmt: skip
        problem = self._dispatch_problem(received)
        out = self.combine(put(self._y.flatten(0, 1), place).view_as(self._y))
        return problem or self._combine_problem(out)

    def _places(self, got: LowLatencyRows) -> torch.Tensor:
        """The library's place of the row at each place of the contract, int64 [R * max_tokens].

        If a row is not one of its source's, `_dispatch_problem` finds a difference.
        """
        place = torch.arange(got.rows.shape[0] * self.max_tokens, device=got.rows.device)
        width = min(KEY_COLUMNS, got.rows.shape[2])
        for source, count in enumerate(got.counts.tolist()):
            token = self._here(source, self._rank).nonzero().squeeze(1)
            if count != len(token):
                continue
            sent, first = self._workload.rows(X, source, width)[token], source * self.max_tokens
            block = torch.full_like(token, first)
            came = first + by_content(block, got.rows[source, :count, :width])
            place[first + by_content(block, sent)] = came
        return place

    def _sum_problem(self, out: torch.Tensor, total: torch.Tensor) -> str | None:
        """Two ranks' sums have one order; for more ranks the library has its own, and rounds."""
        if self._workload.case.num_ranks <= 2:
            return super()._sum_problem(out, total)
        bound = torch.finfo(out.dtype).eps * (1 + total.abs())
        return deviation(out.float(), total, bound, "another order of sums")

    def close(self) -> None:
        torch.cuda.synchronize(self._group.device)
        self._handle.close()
        self._staging.close()
