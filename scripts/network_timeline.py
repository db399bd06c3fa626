"""One rank of a dispatch and a combine over the test network, with what has arrived when.

    python scripts/network_timeline.py FOLDER

`scripts/over_network.py timeline` starts it on every rank, with the shape in `shapes.yaml` of
FOLDER.  While the kernels of rank 0 run, a kernel on one more SM counts the rows of their result
that are in place, and the host samples that number together with the bytes that the test network
has brought.  FOLDER gets `timeline.json`, which `figures.network_timeline` draws.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from loop import COUNTERS

from megatron_ncclep.benchmark import shapes
from megatron_ncclep.benchmark.shapes import Workload
from megatron_ncclep.cli.network_model import Puts
from megatron_ncclep.config import EpConfig
from megatron_ncclep.doctor.machine import machine, versions
from megatron_ncclep.engines import create_engine
from megatron_ncclep.ranks import place
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.nodes import Nodes

WATCHED = 0  # the rank
UNTOUCHED = -1  # the word that a result is filled with: two NaNs, which no row has
TIMED, RUNS = 9, 5  # calls that nobody watches, and watched ones
TIMEOUT_S, BEGIN_S, SEEN_S = 30.0, 0.01, 5.0
MOST_SAMPLES = 400  # of a run that are kept
# The watching kernel looks at so many rows at a time, and ends by itself after so many looks.
LOOKED, MOST_LOOKS = 4096, 200_000
NEAR, FAR = 1, 2  # kinds of rows: from this rank's domain, from others; 0: none


@triton.jit
def watch(rows, kinds, found, stop, num_rows, row_words, most_looks, LOOKED: tl.constexpr):
    """Count the rows that are in place, again and again, until `stop` is set.

    A row is in place when neither its first nor its last word is `UNTOUCHED` (-1).

    Args:
        rows: int32 [num_rows, row_words], which other kernels write.
        kinds: int32 [num_rows].
        found: int64 [1] in pinned memory: rows of kind 1, and 2^32 for each row of kind 2.
        stop: int32 [1] in pinned memory.
        num_rows, row_words: sizes.
        most_looks: after so many looks it ends anyway.
        LOOKED: rows that are looked at together.
    """
    looks = 0
    while looks < most_looks:
        near = 0
        far = 0
        for first in range(0, num_rows, LOOKED):
            row = first + tl.arange(0, LOOKED)
            is_row = row < num_rows
            kind = tl.load(kinds + row, mask=is_row, other=0)
            at = rows + row.to(tl.int64) * row_words
            begin = tl.load(at, mask=is_row, other=-1, volatile=True)
            end = tl.load(at + row_words - 1, mask=is_row, other=-1, volatile=True)
            is_there = (begin != -1) & (end != -1)
            near += tl.sum((is_there & (kind == 1)).to(tl.int32))
            far += tl.sum((is_there & (kind == 2)).to(tl.int32))
        tl.store(found, near.to(tl.int64) + (far.to(tl.int64) << 32))
        looks += 1
        # One thread reads the flag for all: they have to leave the loop together.
        flag = tl.arange(0, LOOKED)
        is_set = tl.load(stop + flag, mask=flag == 0, other=0, volatile=True)
        if tl.max(is_set) != 0:
            looks = most_looks


class Watch:
    """The watching kernel on this rank, and the samples.

    Args:
        plugin: path of the test network, whose counters are sampled.
    """

    def __init__(self, plugin: str) -> None:
        self._stream = torch.cuda.Stream()
        self._found = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._stop = torch.zeros(1, dtype=torch.int32).pin_memory()
        names = ctypes.c_uint64 * len(COUNTERS)
        self._counters = names.in_dll(ctypes.CDLL(plugin), "rma_loop_counters")
        self._places = COUNTERS.index("bytes_in"), COUNTERS.index("bytes")

    def moved(self) -> tuple[int, int]:
        """Bytes that the network has brought to this process, and that it was given to put."""
        come, put = self._places
        return self._counters[come], self._counters[put]

    def begin(self, rows: torch.Tensor, kinds: torch.Tensor, most_looks: int = MOST_LOOKS) -> None:
        """Start the kernel on `rows`, [n, width], of `kinds`, int32 [n]; returns once it looks."""
        torch.cuda.synchronize()
        self._found[0], self._stop[0] = -1, 0
        words = rows.view(torch.int32)
        with torch.cuda.stream(self._stream):
            arguments = (words, kinds, self._found, self._stop, *words.shape, most_looks)
            watch[(1,)](*arguments, LOOKED, num_warps=32)
        until = time.monotonic() + TIMEOUT_S
        while int(self._found[0]) < 0:
            assert time.monotonic() < until, "the watching kernel has not begun"

    def sample(self, start_ns: int, done: torch.cuda.Event, total: int) -> list[list[int]]:
        """Sample until `done` has happened and all `total` rows are in place.

        Returns:
            [ns since start_ns, bytes that have come, rows of kind NEAR, rows of kind FAR, bytes
            given to the network] each time that something has changed.
        """
        found, samples, last = self._found.numpy(), list[list[int]](), None
        until = time.monotonic() + SEEN_S
        while True:
            (come, put), count = self.moved(), int(found[0])
            rows = [count & 0xFFFFFFFF, count >> 32]
            if (state := [come, *rows, put]) != last:
                samples.append([time.monotonic_ns() - start_ns, *state])
                last = state
            if done.query() and (sum(rows) == total or time.monotonic() > until):
                return samples

    def end(self) -> None:
        """Let the kernel end."""
        self._stop[0] = 1
        self._stream.synchronize()


class Runs:
    """Calls that all ranks make together, of which `WATCHED` watches some.  Collective."""

    def __init__(self, rank: int) -> None:
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * TIMEOUT_S))
        self._watch = Watch(os.environ["NCCL_RMA_PLUGIN"]) if rank == WATCHED else None

    def start_ns(self) -> int:
        """Wait for all ranks; the time at which all of them go on."""
        dist.barrier(self._control)
        start = [time.monotonic_ns() + int(BEGIN_S * 1e9)]
        dist.broadcast_object_list(start, WATCHED, group=self._control)
        while time.monotonic_ns() < start[0]:
            pass
        return start[0]

    def alone_us(self, call: Callable[[], Any]) -> float:
        """The median of calls that nobody watches, each on the slowest rank, from the host."""
        times: list[float] = []
        for _ in range(TIMED):
            torch.cuda.synchronize()
            start, every = self.start_ns(), [0.0] * dist.get_world_size()
            call()
            torch.cuda.synchronize()
            took = (time.monotonic_ns() - start) / 1e3
            dist.all_gather_object(every, took, group=self._control)
            times.append(max(every))
        return statistics.median(times)

    def watched(self, call: Callable[[], torch.Tensor], kinds: torch.Tensor) -> list[list[int]]:
        """The samples of a call whose result has rows of `kinds`; [] on ranks that do not watch.

        [] also where the result does not lie where the last one lay, which the caching allocator
        nearly always provides.
        """
        rows, total = call(), int((kinds > 0).sum())
        torch.cuda.synchronize()
        address, samples, done = rows.data_ptr(), list[list[int]](), torch.cuda.Event()
        done.record()
        come, put = 0, 0
        if self._watch:
            rows.view(torch.int32).fill_(UNTOUCHED)
            self._watch.begin(rows, kinds)
            come, put = self._watch.moved()
        del rows
        start = self.start_ns()
        rows = call()
        done.record()
        if self._watch:
            if rows.data_ptr() == address:
                found = self._watch.sample(start, done, total)
                samples = [[ns, a - come, near, far, b - put] for ns, a, near, far, b in found]
            self._watch.end()
        torch.cuda.synchronize()
        return samples


def kinds_of(work: Workload, nodes: Nodes) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [N] and [T]: kinds of the rows of a dispatch on this rank, and of a combine.

    A sum is FAR where any of its token's experts is in another domain.
    """
    tokens, domain = work.case.tokens[0], nodes.node_of(work.rank)
    token = work.tables[work.rank].token_of_row
    is_near = token // tokens // nodes.ranks_on_each == domain
    of_rows = torch.where(token < 0, 0, torch.where(is_near, NEAR, FAR))
    is_far = (domains_of(work, work.rank, nodes) != domain).any(dim=1)
    return of_rows.int(), torch.where(is_far, FAR, NEAR).int()


def domains_of(work: Workload, rank: int, nodes: Nodes) -> torch.Tensor:
    """[T, K]: the domains of the assignments of `rank`'s tokens."""
    case = work.case
    return case.topk_idx(rank) // (case.num_experts // case.num_ranks) // nodes.ranks_on_each


def bytes_to_come(work: Workload, nodes: Nodes) -> dict[str, int]:
    """What is put to this rank in a dispatch with weights and in a combine without values."""
    case, dispatched, combined = work.case, 0.0, 0.0
    for peer in nodes.rail_of(work.rank):
        if peer == work.rank:
            continue
        here, there = (
            int((domains_of(work, one, nodes) == nodes.node_of(other)).any(dim=1).sum())
            for one, other in ((peer, work.rank), (work.rank, peer))
        )
        row_bytes = case.hidden * case.dtype.itemsize
        weights = case.tokens[peer] * case.top_k
        dispatched += Puts.of_rows(here, row_bytes, weights=weights).num_bytes
        combined += Puts.of_rows(there, row_bytes).num_bytes
    return {"dispatch": int(dispatched), "combine": int(combined)}


def best(runs: list[list[list[int]]]) -> list[list[int]]:
    """The samples of the run of median length, and at most `MOST_SAMPLES` of them."""
    seen = sorted((run for run in runs if run), key=lambda run: run[-1][0])
    if not seen:
        return []
    samples = seen[len(seen) // 2]
    step = -(-len(samples) // MOST_SAMPLES)
    return [*samples[:-1:step], samples[-1]]


def measure(folder: Path) -> dict[str, Any]:
    """Time and watch a dispatch and a combine.  Collective; the result is rank `WATCHED`'s."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    (shape,) = shapes.load(str(folder / "shapes.yaml")).shapes
    work, runs = Workload(shape.case(num_ranks, "cuda"), rank), Runs(rank)
    config = EpConfig(
        engine="native",
        max_recv_rows=shape.max_recv_rows,
        timeout_s=TIMEOUT_S,
        first_timeout_s=TIMEOUT_S,
    )
    group = dist.group.WORLD
    assert group is not None  # just made
    with closing(create_engine(group, shape.experts, config)) as engine:
        nodes, plan = engine.nodes, engine.plan(work.topk_idx)
        calls = {
            "dispatch": lambda: engine.dispatch(plan, work.x, work.w)[0],
            "combine": lambda: engine.combine(plan, work.y)[0],
        }
        of_rows, of_sums = kinds_of(work, nodes)
        model, found = bytes_to_come(work, nodes), dict[str, Any]()
        for (name, call), kinds in zip(calls.items(), (of_rows, of_sums), strict=True):
            alone_us = runs.alone_us(call)
            samples = best([runs.watched(call, kinds) for _ in range(RUNS)])
            found[name] = {
                "near": int((kinds == NEAR).sum()),
                "far": int((kinds == FAR).sum()),
                "model_bytes": model[name],
                "alone_us": alone_us,
                "samples": samples,  # [ns, bytes that have come, rows near, rows far, bytes put]
            }
    EpGroup.of(group).close()
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine("cuda", num_ranks),
        "versions": versions("cuda"),
        "shape": {"name": shape.name, "tokens": shape.tokens, "row_bytes": shape.row_bytes},
        "hosts": nodes.count,
        "ranks_on_each": nodes.ranks_on_each,
        "gb_per_s": float(os.environ["RMA_LOOP_GBPS"]),
        "latency_us": float(os.environ["RMA_LOOP_LATENCY_US"]),
        "operations": found,
    }


def summary(result: dict[str, Any]) -> dict[str, str]:
    """What the samples say, in a line for each operation."""
    lines = {}
    for name, of in result["operations"].items():
        if not of["samples"]:
            lines[name] = "nothing was seen: each result lay elsewhere"
            continue
        end = of["samples"][-1]
        whole = {"bytes": end[1], "near": of["near"], "far": of["far"]}
        last = {
            what: next((s[0] for s in of["samples"] if s[at] >= whole[what]), None)
            for at, what in enumerate(whole, start=1)
        }
        said = [f"{what} by {ns / 1e3:.0f} us" for what, ns in last.items() if ns is not None]
        counted = "as in the model" if end[1] == of["model_bytes"] else "NOT as in the model"
        lines[name] = (
            f"{end[0] / 1e3:.0f} us watched, {of['alone_us']:.0f} us alone; all {', '.join(said)}; "
            f"{end[1]} bytes came, {counted} ({of['model_bytes']})"
        )
    return lines


def main() -> None:
    """Be a rank."""
    folder = Path(sys.argv[1])
    place.use_gpu(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=2 * TIMEOUT_S))
    try:
        result = measure(folder)
    finally:
        dist.destroy_process_group()
    if int(os.environ["RANK"]) == WATCHED:
        result["summary"] = summary(result)
        (folder / "timeline.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
