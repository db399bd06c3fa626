"""Low-latency mode of engines and of NVIDIA's library: expected results, and timing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from megatron_ncclep.benchmark import PAIR, Setting, Subject, UnavailableError, engines, excused
from megatron_ncclep.benchmark.job import split_name
from megatron_ncclep.benchmark.ranks import Clock, Timer, Times
from megatron_ncclep.benchmark.shapes import WEIGHTS, Workload, X, Y, payload
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.low_latency import create_low_latency
from megatron_ncclep.engines.low_latency_types import LowLatencyRows
from megatron_ncclep.errors import EngineUnavailableError, InputError, LibraryError
from megatron_ncclep.libraries import extension

MAX_TOKENS = 128  # that an object is made for, as in a server, for its largest batch
# Timed pairs of a graph. The first pair is not timed, because ranks do not start a replay together.
PAIRS = 20


class LowLatencySubject(Subject):
    """See `Subject`: an object of an engine, whose operations alternate."""

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        super().__init__(name, setting, workload)
        case = workload.case
        self.max_tokens = max(MAX_TOKENS, *case.tokens)
        self._y = self._rows(self._rank).view(case.num_ranks, self.max_tokens, -1)
        self._on_gpu = setting.device == "cuda"
        self.passes = {"dispatch": self.dispatch, "combine": self.combine}
        self._open(setting)

    def _open(self, setting: Setting) -> None:
        engine, num_sms = split_name(self.name)
        case = self._workload.case
        with excused(EngineUnavailableError, InputError):
            config = EpConfig(**setting.options(engine=engine, num_sms=num_sms))
            self._engine = create_engine(setting.new_group(), case.num_experts, config)
            self._object = create_low_latency(
                self._engine, max_tokens=self.max_tokens, hidden=case.hidden, top_k=case.top_k,
                dtype=case.dtype,
            )  # fmt: skip
        self.nodes = getattr(self._engine, "nodes", None)
        if nbytes := getattr(self._object, "nbytes", None):
            self.window_bytes = nbytes()

    def clock(self, timer: Timer) -> Clock:
        if self._on_gpu:
            return graph_clock(timer, self.dispatch, self.combine)
        passes = {**self.passes, "pair": lambda: (self.dispatch(), self.combine())}
        return timer.clock(passes, include_host=True)

    def dispatch(self) -> LowLatencyRows:
        work = self._workload
        return self._object.dispatch(work.x, work.topk_idx, work.w)

    def combine(self) -> torch.Tensor:
        return self._object.combine(self._y)

    def problem(self) -> str | None:
        """See `Subject.problem`: all bits of rows, experts, weights and sums."""
        rows = self.dispatch()
        problem = self._dispatch_problem(rows)  # before the window is written to again
        out = self.combine()
        return problem or self._combine_problem(out)

    def close(self) -> None:
        self._object.close()
        self._engine.close()

    def _here(self, source: int, rank: int) -> torch.Tensor:
        """bool [T]: which of `source`'s tokens go to an expert of `rank`."""
        work = self._workload
        here: torch.Tensor = work.tables[rank].slot[work.tokens_of(source)] >= 0
        return here.any(dim=1)

    def _dispatch_problem(self, rows: LowLatencyRows) -> str | None:
        work, rank, num_local = self._workload, self._rank, rows.num_local_experts
        for source in range(work.case.num_ranks):
            where = f"dispatch: rank {rank}, from rank {source}"
            token = self._here(source, rank).nonzero().squeeze(1)
            count = int(rows.counts[source])
            if count != len(token):
                return f"{where}: {count} rows, expected {len(token)}"
            expert = work.case.topk_idx(source)[token] - rank * num_local
            here = (expert >= 0) & (expert < num_local)
            expected = {
                "rows": work.rows(X, source)[token],
                "topk_idx": torch.where(here, expert, -1).int(),
                "weights": torch.where(here, work.weights(WEIGHTS, source)[token], 0),
            }
            for name, what in expected.items():
                if problem := engines.difference(getattr(rows, name)[source, :count], what, name):
                    return f"{where}: {problem}"
            if bool((rows.topk_idx[source, count:] != -1).any()):
                return f"{where}: topk_idx behind row {count} is not -1 everywhere"
        return None

    def _combine_problem(self, out: torch.Tensor) -> str | None:
        """In the contract's order: ranks ascending, in fp32, others' and nodes' parts rounded."""
        R, rank = self._workload.case.num_ranks, self._rank
        nodes = getattr(self, "nodes", None)
        on_each = nodes.ranks_on_each if nodes else R
        total = torch.zeros(out.shape, device=out.device)
        for first in range(0, R, on_each):
            of_node = torch.zeros_like(total)
            for peer in range(first, first + on_each):
                here = self._here(rank, peer)
                place = rank * self.max_tokens + here.cumsum(0)[here] - 1
                # A row for each place is its sum already: rounding it changes nothing.
                of_node[here] += self._rows(peer)[place].float()
            total = of_node if on_each == R else total + of_node.to(out.dtype).float()
        problem = self._sum_problem(out, total)
        return f"combine: rank {rank}: {problem}" if problem else None

    def _sum_problem(self, out: torch.Tensor, total: torch.Tensor) -> str | None:
        return engines.difference(out, total.to(out.dtype), "out")

    def _rows(self, rank: int) -> torch.Tensor:
        """[R * max_tokens, H]: what `rank` combines."""
        case = self._workload.case
        return payload(case, Y, rank, case.num_ranks * self.max_tokens)


class LibraryLowLatencySubject(LowLatencySubject):
    """NVIDIA's library called directly: the baseline.

    Its rows are rank-major, like ours, in an order that may differ from call to call.  A dispatch
    takes new routes, like ours: it is the library's update of its handle, and its dispatch.
    """

    def _open(self, setting: Setting) -> None:
        work = self._workload
        case, module = work.case, extension.load()
        if case.dtype != torch.bfloat16:
            dtype = str(case.dtype).removeprefix("torch.")
            raise UnavailableError(f"{self.name} takes only rows of bfloat16, not of {dtype}")
        self._group, self._staging, self.sms = engines.open_group(
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
        out = self.combine(engines.put(self._y.flatten(0, 1), place).view_as(self._y))
        return problem or self._combine_problem(out)

    def _places(self, got: LowLatencyRows) -> torch.Tensor:
        """The library's place of the row at each place of the contract, int64 [R * max_tokens].

        If a row is not one of its source's, `_dispatch_problem` finds a difference.
        """
        place = torch.arange(got.rows.shape[0] * self.max_tokens, device=got.rows.device)
        width = min(engines.KEY_COLUMNS, got.rows.shape[2])
        for source, count in enumerate(got.counts.tolist()):
            token = self._here(source, self._rank).nonzero().squeeze(1)
            if count != len(token):
                continue
            sent, first = self._workload.rows(X, source, width)[token], source * self.max_tokens
            block = torch.full_like(token, first)
            came = first + engines.by_content(block, got.rows[source, :count, :width])
            place[first + engines.by_content(block, sent)] = came
        return place

    def _sum_problem(self, out: torch.Tensor, total: torch.Tensor) -> str | None:
        """Two ranks' sums have one order; for more ranks the library has its own, and rounds."""
        if self._workload.case.num_ranks <= 2:
            return super()._sum_problem(out, total)
        bound = torch.finfo(out.dtype).eps * (1 + total.abs())
        return engines.deviation(out.float(), total, bound, "another order of sums")

    def close(self) -> None:
        torch.cuda.synchronize(self._group.device)
        self._handle.close()
        self._staging.close()


def graph_clock(timer: Timer, dispatch: Callable[[], Any], combine: Callable[[], Any]) -> Clock:
    """Capture two CUDA graphs of both operations, and make a clock that replays them.

    A graph holds alternating dispatches and combines, back to back as in a model without experts,
    and between them kernels that record the device's clock: in one graph between all operations, in
    the other between pairs only, because a stamp takes half a microsecond.  (An event in a graph
    takes five.)
    """
    graphs = [_capture(dispatch, combine, apart) for apart in (True, False)]

    def clock() -> Times:
        for graph, _ in graphs:
            timer.sample(graph.replay, include_host=False)  # aligns the ranks, and waits
        apart, pairs = (
            [(after - before) / 1e3 for before, after in pairwise(stamps.tolist())]
            for _, stamps in graphs
        )
        return dict(zip(PAIR, (apart[0::2], apart[1::2], pairs), strict=True))

    return clock


def _capture(
    dispatch: Callable[[], Any], combine: Callable[[], Any], apart: bool
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of PAIRS + 1 pairs, and its stamps: before the second pair, and after each part.

    `apart`: also between a dispatch and its combine.
    """
    module = extension.load()
    stamps = torch.zeros(1 + PAIRS * (2 if apart else 1), dtype=torch.int64, device="cuda")
    numbers = iter(range(len(stamps)))

    def mark() -> None:
        module.stamp(stamps, next(numbers), extension.current_stream())

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for pair in range(PAIRS + 1):
            dispatch()
            if apart and pair > 0:
                mark()
            combine()
            mark()
    assert next(numbers, None) is None
    return graph, stamps
