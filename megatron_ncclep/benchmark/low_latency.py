"""Low-latency mode of engines: expected results, and timing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from megatron_ncclep.benchmark import PAIR, Setting, Subject, engines, excused
from megatron_ncclep.benchmark.engines import split_name
from megatron_ncclep.benchmark.ranks import Clock, Timer, Times
from megatron_ncclep.benchmark.shapes import WEIGHTS, Workload, X, Y, payload
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.low_latency import create_low_latency
from megatron_ncclep.engines.low_latency_types import LowLatencyRows
from megatron_ncclep.errors import EngineUnavailableError, InputError
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
                row_index = rank * self.max_tokens + here.cumsum(0)[here] - 1
                # A row for each place is its sum already: rounding it changes nothing.
                of_node[here] += self._rows(peer)[row_index].float()
            total = of_node if on_each == R else total + of_node.to(out.dtype).float()
        problem = self._sum_problem(out, total)
        return f"combine: rank {rank}: {problem}" if problem else None

    def _sum_problem(self, out: torch.Tensor, total: torch.Tensor) -> str | None:
        return engines.difference(out, total.to(out.dtype), "out")

    def _rows(self, rank: int) -> torch.Tensor:
        """[R * max_tokens, H]: what `rank` combines."""
        case = self._workload.case
        return payload(case, Y, rank, case.num_ranks * self.max_tokens)


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
