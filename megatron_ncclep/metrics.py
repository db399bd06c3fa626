"""Metrics of the routing and of the ranks: counted on the device, read later.

A layer's dispatcher counts in every forward pass, including in replayed CUDA graphs.  Every
`metrics_interval` steps the ranks of a group exchange their counts, and a later step reads the
result: on a GPU no host waits for it, on a CPU the exchange itself waits.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.errors import InputError
from megatron_ncclep.ranks import group as groups
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource

_NAME = "metrics"


@dataclass(frozen=True)
class Interval:
    """A group's counts between two exchanges; the same on every rank.

    Only forward passes count, including evaluation, and each only once: recomputation does not.
    All counts are of what the router asked for; `dropped` says how much of it had no room.

    Attributes:
        steps: the number of steps counted; the first one includes everything before it.
        rows: [num_ranks] lists of [num_ranks]: rows that the routing sends from each rank (first
            index) to each rank (second index), itself included, in all layers.  A token goes to a
            rank once, however many of its experts are there.
        assignments: [num_ranks]: top-k assignments whose experts are on each rank, in all layers.
        imbalance: assignments of the busiest rank over the mean of the ranks, in the worst layer;
            1 is even, num_ranks is all assignments on one rank.
        dropped: dropped assignments on all ranks (static mode).
        wait_s: [num_ranks]: seconds that each rank's host and device have waited for others to
            enter the same call.  A rank that waits far less than the others is the one that they
            wait for.
    """

    steps: int
    rows: list[list[int]]
    assignments: list[int]
    imbalance: float
    dropped: int
    wait_s: list[float]

    def as_dict(self) -> dict[str, Any]:
        """For the log of `ncclep train`."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """For metrics writers: name -> value."""
        values = {
            "imbalance": self.imbalance,
            "assignments dropped": float(self.dropped),
        }
        for rank, sent in enumerate(self.rows):
            received = sum(row[rank] for row in self.rows)
            values[f"rows sent/rank {rank}"] = float(sum(sent))
            values[f"rows received/rank {rank}"] = float(received)
            values[f"seconds waited/rank {rank}"] = self.wait_s[rank]
        return values


class LayerCounts:
    """The counts of one layer's dispatcher since the last exchange, on the group's device.

    Attributes:
        sent: int64 [num_ranks]: tokens that went to each rank.
        received: int64, the sum of the plans' `counts`.
    """

    def __init__(self, group: EpGroup, num_local_experts: int) -> None:
        self._num_local_experts = num_local_experts
        self._ranks = torch.arange(group.size, device=group.device)
        self.sent = torch.zeros(group.size, dtype=torch.int64, device=group.device)
        self.received = torch.zeros(
            2 * num_local_experts + 1, dtype=torch.int64, device=group.device
        )

    def count(self, topk_idx: torch.Tensor, plan: RoutePlan) -> None:
        """Add one micro-batch.  Waits for nothing.

        Args:
            topk_idx: [num_tokens, top_k], the argument of the engine's `plan`.
            plan: its result.
        """
        destinations = topk_idx.div(self._num_local_experts, rounding_mode="floor")
        self.sent += (destinations.unsqueeze(2) == self._ranks).any(dim=1).sum(dim=0)
        self.received += plan.counts

    def tensors(self) -> list[torch.Tensor]:
        """The counters themselves."""
        return [self.sent, self.received]

    def take(self) -> torch.Tensor:
        """int64 [num_ranks + 2]: `sent`, assignments for this rank's experts, and those of them
        that were dropped; resets all.
        """
        routed = self.received[self._num_local_experts :].sum(dim=0, keepdim=True)
        taken = torch.cat([self.sent, routed, self.received[-1:]])
        self.sent.zero_()
        self.received.zero_()
        return taken


@dataclass
class _Exchanged:
    """An exchange whose result may still be on its way.

    Attributes:
        everything: int64 [num_ranks, num_layers * (num_ranks + 2) + 1], on the CPU.
        done: recorded after the copy to the CPU; None on a CPU.
    """

    everything: torch.Tensor
    done: torch.cuda.Event | None


class Metrics(Resource):
    """The counters of a group's layers, and their exchange."""

    def __init__(self, group: EpGroup, interval: int, timeout_s: float) -> None:
        """Not collective."""
        self._group, self._interval, self._timeout_s = group, interval, timeout_s
        # Counters with weak references to their owners.  Every rank always has equally many.
        self._layers: list[tuple[weakref.ref[Any], LayerCounts]] = []
        self._num_steps = 0
        self._under_way: deque[_Exchanged] = deque()
        self._waited_ns = group.waited_ns()

    @classmethod
    def of(cls, group: EpGroup, interval: int, timeout_s: float) -> Metrics:
        """The metrics of the group.

        Raises:
            InputError: on every rank, when another layer of the group has another interval.
        """
        metrics = group.resources.share(_NAME, lambda: cls(group, interval, timeout_s))
        if metrics._interval != interval:
            raise InputError(
                f"metrics_interval {interval}: other layers of the expert-parallel group have "
                f"{metrics._interval}, and all are counted together: give all the same, or close "
                "the group of an earlier model with megatron_ncclep.close()"
            )
        return metrics

    def add_layer(self, owner: Any, num_local_experts: int) -> LayerCounts:
        """Make the counters of one more layer.  Collective: every rank has the same layers.

        This is the only place that removes the counters of layers that no longer exist.  Ranks
        collect garbage at different times, so they tell each other: a layer that is gone on one
        rank makes no more calls on the others either.

        Args:
            owner: the layer ends when this object is garbage-collected.
            num_local_experts: experts of each rank.

        Raises:
            PeerError: a rank did not come in time.
        """
        if self._layers:
            here = [owner() is not None for owner, _ in self._layers]
            what = "open, exchanging the list of layers"
            everywhere = self._group.hosts.gather(here, what, self._timeout_s).all(dim=0).tolist()
            self._layers = [
                layer for layer, stays in zip(self._layers, everywhere, strict=True) if stays
            ]
        counts = LayerCounts(self._group, num_local_experts)
        self._layers.append((weakref.ref(owner), counts))
        return counts

    def after_step(self) -> list[Interval]:
        """Count a step and exchange what is due.  Collective; on GPUs no host waits.

        Returns:
            intervals that are now complete, rarely more than one; on a GPU those of earlier
            steps.

        Raises:
            PeerError: on a CPU, when a rank did not come in time.
            GroupClosedError: the process group was destroyed.
        """
        self._num_steps += 1
        if self._num_steps == self._interval:
            self._num_steps = 0
            self._under_way.append(self._exchange())
        known = []
        while self._under_way and _has_arrived(self._under_way[0]):
            known.append(self._interval_of(self._under_way.popleft()))
        return known

    def _exchange(self) -> _Exchanged:
        group, before = self._group, self._waited_ns
        self._waited_ns = group.waited_ns()
        mine = torch.cat([*(counts.take() for _, counts in self._layers), self._waited_ns - before])
        all_ranks = mine.new_empty(group.size, len(mine))
        into = list(all_ranks.unbind())
        if not mine.is_cuda:
            group.torch.wait(
                lambda torch_group: dist.all_gather(into, mine, group=torch_group, async_op=True),
                "exchanging metrics",
                self._timeout_s,
            )
            return _Exchanged(all_ranks, None)
        dist.all_gather(
            into, mine, group=group.torch.process_group
        )  # the stream waits, not the host
        on_host = torch.empty_like(all_ranks, device="cpu", pin_memory=True)
        on_host.copy_(all_ranks, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return _Exchanged(on_host, done)

    def _interval_of(self, exchanged: _Exchanged) -> Interval:
        new, size = exchanged.everything, self._group.size
        # [rank, layer, count]; the list of layers may have changed since.
        layers = new[:, :-1].view(size, -1, size + 2)
        assignments = layers[:, :, size].double()
        mean = assignments.mean(dim=0)
        worst = torch.where(mean > 0, assignments.amax(dim=0) / mean, 1.0).max()
        return Interval(
            steps=self._interval,
            rows=layers[:, :, :size].sum(dim=1).tolist(),
            assignments=layers[:, :, size].sum(dim=1).tolist(),
            imbalance=float(worst),
            dropped=int(layers[:, :, size + 1].sum()),
            wait_s=(new[:, -1] / 1e9).tolist(),
        )


def count_layer(engine: Engine, owner: Any) -> LayerCounts:
    """Make the counters of one layer, for a training loop without Megatron.  Collective.

    The layer calls the result's `count` in each forward pass.

    Args:
        engine: the layer's engine, made with the option `metrics_interval`.
        owner: the layer; its counts are dropped when it is garbage-collected.

    Raises:
        InputError: the engine has no `metrics_interval`; or on every rank, when another layer of
            the group has another one.
        PeerError: a rank did not come in time.
    """
    config = engine.config
    if not config.metrics_interval:
        raise InputError(
            "metrics_interval is 0: nothing would read the counters; make the engine with "
            "EpConfig(metrics_interval=N), N steps between two reports"
        )
    metrics = Metrics.of(engine.group, config.metrics_interval, config.timeout_s)
    return metrics.add_layer(owner, engine.num_local_experts)


def after_step() -> list[Interval]:
    """Count a step for all groups of this process that have metrics.  Collective over each.

    A training loop without Megatron calls it once per step on every rank; with Megatron, its own
    reports do.

    Returns:
        the intervals that are now complete, see `Metrics.after_step`.
    """
    return [known for metrics in groups.all_shared(_NAME) for known in metrics.after_step()]


def _has_arrived(exchanged: _Exchanged) -> bool:
    return exchanged.done is None or exchanged.done.query()
