"""Low-latency mode of NVIDIA's libnccl_ep called directly: the yardstick of ours."""

from __future__ import annotations

import dataclasses

import torch

from megatron_ncclep.benchmark.check import deviation
from megatron_ncclep.benchmark.library_subject import KEY_COLUMNS, by_content, open_group, put
from megatron_ncclep.benchmark.low_latency import LowLatencySubject
from megatron_ncclep.benchmark.subjects import Setting, UnavailableError, excused
from megatron_ncclep.benchmark.workload import X
from megatron_ncclep.engines.low_latency_types import LowLatencyRows
from megatron_ncclep.errors import LibraryError
from megatron_ncclep.libraries import extension


class LibraryLowLatencySubject(LowLatencySubject):
    """See `Subject`.  Its rows are rank-major, as ours are, and in an order of the moment.

    A dispatch takes new routes, as ours does: it is the library's update of its handle, and its
    dispatch.
    """

    def _open(self, setting: Setting) -> None:
        """Open the library and allocate all outputs."""
        work = self._workload
        case, module = work.case, extension.load()
        if case.dtype != torch.bfloat16:
            dtype = str(case.dtype).removeprefix("torch.")
            raise UnavailableError(
                f"{self.name} is measured with rows of bfloat16 only, not of {dtype}"
            )
        self._group, self._staging, self.sms = open_group(
            self.name, setting, work, self.max_tokens, low_latency=True
        )
        with excused(LibraryError):
            self._handle = module.NcclEpLowLatencyHandle(self._staging, case.top_k)
        places = (case.num_ranks, self.max_tokens)
        new = work.x.new_empty
        self._received = LowLatencyRows(
            rows=new(*places, case.hidden),
            topk_idx=new(*places, case.top_k, dtype=torch.int32),
            weights=new(*places, case.top_k, dtype=torch.float32),
            counts=new(case.num_ranks, dtype=torch.int32),
            num_local_experts=case.num_experts // case.num_ranks,
        )
        self._out = torch.empty_like(work.x)

    def dispatch(self) -> LowLatencyRows:
        """Dispatch this rank's tokens."""
        work, got = self._workload, self._received
        self._handle.dispatch(
            work.x, work.topk_idx, work.w,
            got.rows, got.topk_idx, got.weights, got.counts, extension.current_stream(),
        )  # fmt: skip
        return got

    def combine(self) -> torch.Tensor:
        """Bring back a row for each place."""
        self._handle.combine(self._y, self._out, extension.current_stream())
        return self._out

    def problem(self) -> str | None:
        """See `Subject.problem`: a source's rows may be in any order."""
        for tensor in (self._received.rows, self._received.weights, self._out):
            tensor.fill_(float("nan"))
        got = self.dispatch()
        place = self._places(got)
        experts = got.topk_idx.flatten(0, 1)[place].view_as(got.topk_idx)
        for source, count in enumerate(got.counts.tolist()):
            experts[source, count:] = -1  # only ours says that nothing is there
        weights = got.weights.flatten(0, 1)[place].view_as(got.weights)
        in_order = dataclasses.replace(
            got,
            rows=got.rows.flatten(0, 1)[place].view_as(got.rows),
            topk_idx=experts,
            weights=torch.where(experts >= 0, weights, 0),
            counts=got.counts.clone(),
        )
        problem = self._dispatch_problem(in_order)
        y = put(self._y.flatten(0, 1), place)
        assert y is not None
        self._handle.combine(y.view_as(self._y), self._out, extension.current_stream())
        return problem or self._combine_problem(self._out)

    def _places(self, got: LowLatencyRows) -> torch.Tensor:
        """Where the library put the row of each place of the contract, int64 [R * max_tokens].

        A row that is none of its source's makes `_dispatch_problem` find a difference.
        """
        place = torch.arange(got.rows.shape[0] * self.max_tokens, device=got.rows.device)
        width = min(KEY_COLUMNS, got.rows.shape[2])
        for source, count in enumerate(got.counts.tolist()):
            token = self._here(source, self._rank).any(dim=1).nonzero().squeeze(1)
            if count != len(token):
                continue
            one_block = torch.zeros_like(token)
            sent = self._workload.rows(X, source, width)[token]
            to = by_content(one_block, sent)
            first = source * self.max_tokens
            place[first + to] = first + by_content(one_block, got.rows[source, :count, :width])
        return place

    def _sum_problem(self, out: torch.Tensor, total: torch.Tensor) -> str | None:
        """Sums of two ranks have one order; of more, the library has its own, and rounds so."""
        if self._workload.case.num_ranks <= 2:
            return super()._sum_problem(out, total)
        bound = torch.finfo(out.dtype).eps * (1 + total.abs())
        return deviation(out.float(), total, bound, "another order of sums")

    def close(self) -> None:
        """See `Subject.close`."""
        torch.cuda.synchronize(self._group.device)
        self._handle.close()
        self._staging.close()
