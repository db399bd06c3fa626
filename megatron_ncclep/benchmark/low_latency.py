"""Low-latency mode of an engine: which engines have it, what must come out, and how it is timed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from megatron_ncclep.benchmark.check import difference
from megatron_ncclep.benchmark.names import LIBRARIES, LIBRARY, split_name
from megatron_ncclep.benchmark.subjects import PAIR, Setting, Subject, excused
from megatron_ncclep.benchmark.timing import Clock, Timer, Times, clock_of
from megatron_ncclep.benchmark.workload import WEIGHTS, Workload, X, Y, payload
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES, create_engine
from megatron_ncclep.engines.low_latency import create_low_latency
from megatron_ncclep.engines.low_latency_types import LowLatencyRows
from megatron_ncclep.errors import EngineUnavailableError, InputError
from megatron_ncclep.libraries import extension

# What an object is made for: as a server makes it, for its largest batch.
MAX_TOKENS = 128
# Pairs of a graph that count.  The one before them does not: ranks begin a replay apart.
PAIRS = 20


def default_names(device: str) -> list[str]:
    """What is measured unless something is asked for."""
    return [*engine_names(device), *([LIBRARY] if device == "cuda" else [])]


def known_names(device: str) -> list[str]:
    """What can be measured: engines, and NVIDIA's libraries in the one mode that they have here."""
    return [*engine_names(device), *(name for name, (_, modes) in LIBRARIES.items() if not modes)]


def engine_names(device: str) -> list[str]:
    """The engines that have the mode; on "cuda" those that a CUDA graph can be part of."""
    return [
        name
        for name, entry in ENGINES.items()
        if entry.caps.low_latency_tokens and (device != "cuda" or entry.caps.captures_static)
    ]


class LowLatencySubject(Subject):
    """See `Subject`: an object of an engine, whose operations are called in turns."""

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        super().__init__(name, setting, workload)
        case = workload.case
        self.max_tokens = max(MAX_TOKENS, *case.tokens)
        self._y = self._rows(self._rank).view(case.num_ranks, self.max_tokens, -1)
        self._on_gpu = setting.device == "cuda"
        self.passes = {"dispatch": self.dispatch, "combine": self.combine}
        self._open(setting)

    def _open(self, setting: Setting) -> None:
        """Make the engine, and the object for this workload."""
        engine, num_sms = split_name(self.name)
        case = self._workload.case
        with excused(EngineUnavailableError, InputError):
            config = EpConfig(
                engine=engine,
                num_sms=num_sms,
                timeout_s=setting.timeout_s,
                first_timeout_s=setting.timeout_s,
            )
            self._engine = create_engine(setting.new_group(), case.num_experts, config)
            self._object = create_low_latency(
                self._engine,
                max_tokens=self.max_tokens,
                hidden=case.hidden,
                top_k=case.top_k,
                dtype=case.dtype,
            )
        nbytes = getattr(self._object, "nbytes", None)
        self.window_bytes = nbytes() if nbytes is not None else None

    def clock(self, timer: Timer) -> Clock:
        """See `Subject.clock`."""
        if self._on_gpu:
            return Graphs(timer, self.dispatch, self.combine).round

        def pair() -> None:
            self.dispatch()
            self.combine()

        return clock_of(timer, {**self.passes, "pair": pair}, include_host=True)

    def dispatch(self) -> LowLatencyRows:
        """Dispatch this rank's tokens."""
        work = self._workload
        return self._object.dispatch(work.x, work.topk_idx, work.w)

    def combine(self) -> torch.Tensor:
        """Bring back a row for each place."""
        return self._object.combine(self._y)

    def problem(self) -> str | None:
        """See `Subject.problem`: all bits of rows, experts, weights and sums."""
        rows = self.dispatch()
        problem = self._dispatch_problem(rows)  # before the window is written to again
        out = self.combine()
        return problem or self._combine_problem(out)

    def close(self) -> None:
        """See `Subject.close`."""
        self._object.close()
        self._engine.close()

    def _here(self, source: int, rank: int) -> torch.Tensor:
        """bool [T, L]: which of `source`'s tokens go to which expert of `rank`."""
        work = self._workload
        here: torch.Tensor = work.tables[rank].slot[work.tokens_of(source)] >= 0
        return here

    def _dispatch_problem(self, rows: LowLatencyRows) -> str | None:
        work, rank, num_local = self._workload, self._rank, rows.num_local_experts
        for source in range(work.case.num_ranks):
            where = f"dispatch: rank {rank}, from rank {source}"
            token = self._here(source, rank).any(dim=1).nonzero().squeeze(1)
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
                if problem := difference(getattr(rows, name)[source, :count], what, name):
                    return f"{where}: {problem}"
            if bool((rows.topk_idx[source, count:] != -1).any()):
                return f"{where}: topk_idx behind row {count} is not -1 everywhere"
        return None

    def _combine_problem(self, out: torch.Tensor) -> str | None:
        """In the contract's order: ranks upwards, in fp32, what comes from others rounded."""
        case, rank = self._workload.case, self._rank
        total = torch.zeros(out.shape, device=out.device)
        for peer in range(case.num_ranks):
            here = self._here(rank, peer).any(dim=1)
            place = rank * self.max_tokens + here.cumsum(0)[here] - 1
            # A row for each place is its sum already: rounding it changes nothing.
            total[here] += self._rows(peer)[place].float()
        problem = self._sum_problem(out, total)
        return f"combine: rank {rank}: {problem}" if problem else None

    def _sum_problem(self, out: torch.Tensor, total: torch.Tensor) -> str | None:
        """Compare with the fp32 sums of the contract's order."""
        return difference(out, total.to(out.dtype), "out")

    def _rows(self, rank: int) -> torch.Tensor:
        """[R * max_tokens, H]: what `rank` combines."""
        case = self._workload.case
        return payload(case, Y, rank, case.num_ranks * self.max_tokens)


class Graphs:
    """Times operations in replays of two CUDA graphs; captures them when it is made.

    A graph holds pairs of dispatch and combine, one right after the other as in a model without
    experts, and between them kernels that write down the device's clock.  Those of one graph stand
    between all operations, those of the other between pairs only: a stamp takes half a microsecond.
    (An event in a graph takes five.)
    """

    def __init__(
        self, timer: Timer, dispatch: Callable[[], Any], combine: Callable[[], Any]
    ) -> None:
        self._timer = timer
        self._apart = _capture(dispatch, combine, apart=True)
        self._together = _capture(dispatch, combine, apart=False)

    def round(self) -> Times:
        """Replay each graph once; gives for each of PAIR the microseconds of every operation."""
        apart, pairs = self._replay(*self._apart), self._replay(*self._together)
        return dict(zip(PAIR, (apart[0::2], apart[1::2], pairs), strict=True))

    def _replay(self, graph: torch.cuda.CUDAGraph, stamps: torch.Tensor) -> list[float]:
        self._timer.sample(graph.replay, include_host=False)  # aligns the ranks, and waits
        return [(after - before) / 1e3 for before, after in pairwise(stamps.tolist())]


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
        dispatch()
        combine()
        mark()
        for _ in range(PAIRS):
            dispatch()
            if apart:
                mark()
            combine()
            mark()
    assert next(numbers, None) is None
    return graph, stamps
