"""NVIDIA's libnccl_ep called directly: the yardstick, without this package's checks and agreements.

Outputs are allocated once and the exact sizes are known beforehand, so that nothing but the
library's own calls is timed.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_ncclep.benchmark import payload
from megatron_ncclep.benchmark.check import rows_of
from megatron_ncclep.benchmark.engine_subject import DEFAULT_SMS, results_problem
from megatron_ncclep.benchmark.subjects import (
    Setting,
    UnavailableError,
    Workload,
    limits_problem,
)
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import choose_engine, extension, nccl_ep
from megatron_ncclep.engines.communicator import communicator_of
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.engines.nccl_ep_library import CHOICE, FIXED_ORDER, PULL_PUSH, environment
from megatron_ncclep.engines.nccl_ep_staging import open_library
from megatron_ncclep.errors import EngineUnavailableError, InputError

# What a name can ask for -> the library's variable for it.
MODES = {"pull_push": PULL_PUSH, "fixed_order": FIXED_ORDER}
# The library's staging memory is made for a multiple of this many tokens.
TOKENS_MULTIPLE = 64
# Columns of a row that tell it from the other rows of an expert.
KEY_COLUMNS = 8


class LibrarySubject:
    """See `Subject`.

    Args:
        name: as on the command line.
        num_sms: SMs that the library's communication kernels may use; None: its own choice.
        package: that brought the library; None: of the one that the engine `nccl_ep` takes.
        modes: of MODES, those that are on; the others are off.
    """

    kind = "library"
    checked = "bits of all rows, weights and sums, with an expert's rows in any order"

    def __init__(
        self,
        name: str,
        num_sms: int | None,
        package: str | None = None,
        modes: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self._num_sms = num_sms
        self._choice = {CHOICE: package} if package else {}
        self._modes = {variable: str(int(mode in modes)) for mode, variable in MODES.items()}

    def prepare(self, setting: Setting, workload: Workload) -> PreparedLibrary:
        """See `Subject.prepare`.  Over a process group and a communicator of its own."""
        case = workload.case
        group = EpGroup.of(setting.new_group())
        config = EpConfig(
            engine="nccl_ep",
            alignment=case.alignment,
            num_sms=self._num_sms,
            timeout_s=setting.timeout_s,
        )
        if reason := limits_problem(case, nccl_ep.CAPS):
            raise UnavailableError(reason)
        # The engine is never without its fixed order.
        asked = {PULL_PUSH: self._modes[PULL_PUSH], FIXED_ORDER: "1"}
        try:
            with environment({**self._choice, **asked}):
                choose_engine(group, config, case.num_experts)  # nothing stands in its way
        except (EngineUnavailableError, InputError) as error:
            raise UnavailableError(str(error)) from error
        with environment({**self._choice, **self._modes}):
            return PreparedLibrary(group, workload, config, self._modes[PULL_PUSH] == "1")


class PreparedLibrary:
    """See `Prepared`.

    Args:
        group: of all ranks.
        workload: what is moved.
        config: of the engine `nccl_ep`.
        adds_by_pick: the library adds the ranks' parts in the order of a token's picks, which is
            the contract's where they are sorted.
    """

    shared_bytes = 0

    def __init__(
        self, group: EpGroup, workload: Workload, config: EpConfig, adds_by_pick: bool
    ) -> None:
        self._group = group
        self._workload = workload
        self.sms = str(config.num_sms or DEFAULT_SMS["nccl_ep"])
        case, routes = workload.case, workload.routes
        native = extension.load()
        library = open_library()
        communicator = communicator_of(group, config.timeout_s)
        tokens = -(-max(case.tokens) // TOKENS_MULTIPLE) * TOKENS_MULTIPLE
        self._staging = native.NcclEpGroup(
            library.native,
            communicator,
            num_experts=case.num_experts,
            max_tokens=tokens,
            max_recv_rows=0,
            row_bytes=case.hidden * case.dtype.itemsize,
            top_k=case.top_k,
            num_sms=config.num_sms or 0,
            timeout_s=config.timeout_s,
        )
        self._topk_idx, self._w, self._order = workload.topk_idx, workload.w, None
        if adds_by_pick:
            self._topk_idx, self._order = workload.topk_idx.sort(dim=1)
            self._w = workload.w.gather(1, self._order)
        device = group.device
        self._memory = torch.empty(
            self._staging.handle_bytes(case.alignment, case.top_k), dtype=torch.uint8, device=device
        )
        self._handle = native.NcclEpHandle(self._staging, case.alignment, case.top_k, self._memory)
        self._counts = torch.empty(
            case.num_experts // case.num_ranks, dtype=torch.int64, device=device
        )
        self._total = torch.empty(1, dtype=torch.int64, device=device)
        num_rows = routes.num_rows(group.rank)
        self._rows = torch.empty(num_rows, case.hidden, dtype=case.dtype, device=device)
        self._row_w = torch.empty(num_rows, dtype=torch.float32, device=device)
        self._out = torch.empty_like(workload.x)
        self._home_w = torch.empty_like(workload.w)
        self.passes = {
            "plan": self._plan,
            "dispatch": self._dispatch,
            "combine": self._combine,
            "bwd_dispatch": self._backward_dispatch,
            "bwd_combine": self._backward_combine,
        }

    def _plan(self) -> None:
        self._handle.update(self._topk_idx, self._counts, self._total, extension.current_stream())

    def _dispatch(self) -> None:
        self._handle.dispatch(
            self._workload.x, self._w, self._rows, self._row_w, extension.current_stream()
        )

    def _combine(self, place: torch.Tensor | None = None) -> None:
        y = self._workload.y
        self._handle.combine(put(y, place), None, self._out, None, extension.current_stream())

    def _backward_dispatch(self) -> None:
        self._handle.dispatch(
            self._workload.grad_out, None, self._rows, None, extension.current_stream()
        )

    def _backward_combine(self, place: torch.Tensor | None = None) -> None:
        work = self._workload
        self._handle.combine(
            put(work.grad_rows, place),
            put(work.grad_row_w, place),
            self._out,
            self._home_w,
            extension.current_stream(),
        )

    def problem(self) -> str | None:
        """See `Prepared.problem`.  Outputs are overwritten with NaN first, and copied after."""
        for tensor in (self._rows, self._row_w, self._out, self._home_w):
            tensor.fill_(float("nan"))
        self._plan()
        self._dispatch()
        place = self._places()
        results: dict[str, tuple[Any, Any]] = {}
        results["dispatch"] = (self._rows[place], self._row_w[place])
        self._combine(place)
        results["combine"] = (self._out.clone(), None)
        self._rows.fill_(float("nan"))
        self._backward_dispatch()
        results["bwd_dispatch"] = (self._rows[place], None)
        self._out.fill_(float("nan"))
        self._backward_combine(place)
        home_w = self._home_w.clone()
        if self._order is not None:
            home_w = torch.empty_like(home_w).scatter_(1, self._order, home_w)
        results["bwd_combine"] = (self._out.clone(), home_w)
        return results_problem(results, self._workload, self._group.rank, nccl_ep.CAPS.reduction)

    def _places(self) -> torch.Tensor:
        """Where the library put each row of the contract's order, int64 [num_rows].

        Its own order within an expert's rows may be one of the moment.  A row that lies in another
        expert's block, or is none that was sent, makes `results_problem` find a difference.
        """
        routes, rank = self._workload.routes, self._group.rank
        picks = routes.picks_on(rank)
        width = min(KEY_COLUMNS, self._rows.shape[1])
        token = picks.clamp(min=0) // routes.expert.shape[1]
        expected = rows_of(routes, payload.X, token, width, self._rows.dtype)
        expected[picks < 0] = 0
        block = torch.repeat_interleave(routes.padded[rank].to(picks.device))
        place = torch.empty_like(picks)
        place[_by_content(block, expected)] = _by_content(block, self._rows[:, :width])
        return place

    def close(self) -> None:
        """See `Prepared.close`."""
        torch.cuda.synchronize(self._group.device)
        self._handle.close()
        self._staging.close()


def put(rows: torch.Tensor, place: torch.Tensor | None) -> torch.Tensor:
    """Return `rows` [n, ...] with row i at `place[i]`; None: as they are."""
    return rows if place is None else torch.empty_like(rows).index_copy_(0, place, rows)


def _by_content(block: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
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
