"""NVIDIA's libnccl_ep called directly: the yardstick, without this package's checks and agreements.

Outputs are allocated once and the exact sizes are known beforehand, so that nothing but the
library's own calls is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ncclep.benchmark.check import results_problem
from megatron_ncclep.benchmark.engine_subject import DEFAULT_SMS
from megatron_ncclep.benchmark.names import LIBRARIES, split_name
from megatron_ncclep.benchmark.subjects import STEPS, Setting, Subject, check_limits, excused
from megatron_ncclep.benchmark.workload import Workload, X
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import choose_engine
from megatron_ncclep.engines.nccl_ep import engine as nccl_ep
from megatron_ncclep.engines.nccl_ep.staging import open_library
from megatron_ncclep.errors import EngineUnavailableError, InputError
from megatron_ncclep.libraries import extension
from megatron_ncclep.libraries.nccl_ep import CHOICE, FIXED_ORDER, PULL_PUSH, environment
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.testing.table_oracle import table_dispatch

# What a name can ask for -> the library's variable for it.
MODES = {"pull_push": PULL_PUSH, "fixed_order": FIXED_ORDER}
# The library's staging memory is made for a multiple of this many tokens.
TOKENS_MULTIPLE = 64
# Columns of a row that tell it from the other rows of an expert, or of a source rank.
KEY_COLUMNS = 8


class LibrarySubject(Subject):
    """See `Subject`.  Over a process group and a communicator of its own.

    With pull and push the library adds the ranks' parts in the order of a token's assignments,
    which is the contract's where they are sorted.
    """

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        super().__init__(name, setting, workload)
        check_limits(workload, nccl_ep.CAPS)
        tokens = -(-max(workload.case.tokens) // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
        self._group, self._staging, self.sms = open_group(name, setting, workload, tokens)
        self._allocate("pull_push" in LIBRARIES[split_name(name)[0]][1])

    def _allocate(self, adds_by_assignment: bool) -> None:
        """Make a handle and all outputs."""
        group, workload, native = self._group, self._workload, extension.load()
        case = workload.case
        topk_idx, w, self._order = workload.topk_idx, workload.w, None
        if adds_by_assignment:
            topk_idx, self._order = workload.topk_idx.sort(dim=1)
            w = workload.w.gather(1, self._order)
        device = group.device
        self._memory = torch.empty(
            self._staging.handle_bytes(case.alignment, case.top_k), dtype=torch.uint8, device=device
        )
        handle = native.NcclEpHandle(self._staging, case.alignment, case.top_k, self._memory)
        num_local = case.num_experts // case.num_ranks
        counts = torch.empty(num_local, dtype=torch.int64, device=device)
        total = torch.empty(1, dtype=torch.int64, device=device)
        num_rows = workload.tables[group.rank].num_rows
        self._rows = torch.empty(num_rows, case.hidden, dtype=case.dtype, device=device)
        self._row_w = torch.empty(num_rows, dtype=torch.float32, device=device)
        self._out = torch.empty_like(workload.x)
        self._home_w = torch.empty_like(workload.w)
        self._handle, work, stream = handle, workload, extension.current_stream
        calls: tuple[Callable[[], Any], ...] = (
            lambda: handle.update(topk_idx, counts, total, stream()),
            lambda: handle.dispatch(work.x, w, self._rows, self._row_w, stream()),
            lambda: self._combine(work.y),
            lambda: handle.dispatch(work.grad_out, None, self._rows, None, stream()),
            lambda: self._combine(work.grad_rows, work.grad_row_w),
        )
        self.passes = dict(zip(STEPS, calls, strict=True))

    def _combine(
        self, rows: torch.Tensor, w: torch.Tensor | None = None, place: torch.Tensor | None = None
    ) -> None:
        """Combine `rows`, and `w` beside them, of which number i lies at `place[i]`."""
        home_w = None if w is None else self._home_w
        self._handle.combine(
            put(rows, place), put(w, place), self._out, home_w, extension.current_stream()
        )

    def problem(self) -> str | None:
        """See `Subject.problem`: an expert's rows may be in any order.

        Outputs are overwritten with NaN first, and copied after.
        """
        work = self._workload
        for tensor in (self._rows, self._row_w, self._out, self._home_w):
            tensor.fill_(float("nan"))
        self.passes["plan"]()
        self.passes["dispatch"]()
        place = self._places()
        results: dict[str, tuple[Any, Any]] = {}
        results["dispatch"] = (self._rows[place], self._row_w[place])
        self._combine(work.y, place=place)
        results["combine"] = (self._out.clone(), None)
        self._rows.fill_(float("nan"))
        self.passes["bwd_dispatch"]()
        results["bwd_dispatch"] = (self._rows[place], None)
        self._out.fill_(float("nan"))
        self._combine(work.grad_rows, work.grad_row_w, place)
        topk_w = self._home_w.clone()
        if self._order is not None:
            topk_w = torch.empty_like(topk_w).scatter_(1, self._order, topk_w)
        results["bwd_combine"] = (self._out.clone(), topk_w)
        return results_problem(results, work, nccl_ep.CAPS.reduction)

    def _places(self) -> torch.Tensor:
        """Where the library put each row of the contract's order, int64 [num_rows].

        Its own order within an expert's rows may be one of the moment.  A row that lies in another
        expert's block, or is none that was sent, makes `results_problem` find a difference.
        """
        work, table = self._workload, self._workload.tables[self._group.rank]
        width = min(KEY_COLUMNS, self._rows.shape[1])
        sent = [work.rows(X, rank, width) for rank in range(work.case.num_ranks)]
        expected, _ = table_dispatch(table, sent)
        block = torch.repeat_interleave(table.padded)
        place = torch.empty_like(block)
        place[by_content(block, expected)] = by_content(block, self._rows[:, :width])
        return place

    def close(self) -> None:
        """See `Subject.close`."""
        torch.cuda.synchronize(self._group.device)
        self._handle.close()
        self._staging.close()


def open_group(
    name: str, setting: Setting, workload: Workload, max_tokens: int, low_latency: bool = False
) -> tuple[EpGroup, Any, str]:
    """Open the library that `name` means over a process group and a communicator of its own.

    Returns:
        the group of ranks, the library's group, and in words how many SMs its kernels have.

    Raises:
        UnavailableError: it cannot run here; raised on every rank that knows.
    """
    base, num_sms = split_name(name)
    package, on = LIBRARIES[base]
    choice = {CHOICE: package} if package else {}
    modes = {variable: str(int(mode in on)) for mode, variable in MODES.items()}
    group, case = EpGroup.of(setting.new_group()), workload.case
    config = EpConfig(
        engine="nccl_ep",
        alignment=case.alignment,
        num_sms=num_sms,
        timeout_s=setting.timeout_s,
        first_timeout_s=setting.timeout_s,
    )
    # Nothing may stand in the engine's way; it is never without its fixed order.
    with (
        excused(EngineUnavailableError, InputError),
        environment({**choice, **modes, FIXED_ORDER: "1"}),
    ):
        choose_engine(group, config, case.num_experts)
    with environment({**choice, **modes}):
        made = extension.load().NcclEpGroup(
            open_library().native,
            communicator_of(group, config.timeout_s),
            num_experts=case.num_experts,
            max_tokens=max_tokens,
            max_recv_rows=0,
            row_bytes=case.hidden * case.dtype.itemsize,
            top_k=case.top_k,
            num_sms=num_sms or 0,
            timeout_s=config.timeout_s,
            low_latency=low_latency,
        )
    return group, made, str(num_sms or DEFAULT_SMS["nccl_ep"])


def put(rows: torch.Tensor | None, place: torch.Tensor | None) -> torch.Tensor | None:
    """Return `rows` [n, ...], if any, with row i at `place[i]`; None: as they are."""
    if rows is None or place is None:
        return rows
    return torch.empty_like(rows).index_copy_(0, place, rows)


def by_content(block: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Sort rows by block and then by content; returns their numbers, int64 [n].

    Args:
        block: int64 [n], ascending.
        columns: [n, width] of a type of 2 or 4 bytes.
    """
    bits = columns.contiguous().view(torch.int16 if columns.element_size() == 2 else torch.int32)
    key = torch.zeros_like(block)
    for column in bits.unbind(dim=1):
        key = key * 1_000_003 + column
    order = key.argsort(stable=True)
    return order[block[order].argsort(stable=True)]
