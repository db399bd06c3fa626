"""The engine for several machines: the process group's all-to-all between them, another one inside.

No network code of our own: between machines rows go the way that NCCL (on CPUs gloo) knows.  Inside
a machine `native` moves them, and where that cannot run `reference`.  `machines.py` has the grid.

    plan       home finds out which machines each of its tokens needs; each of these tokens goes, as
               its picks there, to the rank with home's local index on that machine (its rail).  The
               machine's engine plans what has come as if it were that rank's own batch.
    dispatch   a token's row crosses the network once for each other machine that needs it; then the
               machine's engine dispatches the rows of all machines' tokens among its ranks.
    combine    the other way round: the machine's engine adds up a token's rows at its rail's rank,
               one sum goes back over the network, and home adds the machines' sums, upwards.

A worked example.  Two machines with two ranks each, four experts (rank r has expert r), top-2:

    rank 0: token 0 -> experts 1, 2    crosses to rank 2, which has expert 2 itself
            token 1 -> experts 0, 1    stays on its machine
    rank 3: token 0 -> experts 3, 0    crosses to rank 1, which dispatches it to rank 0

    rank 0's rows, all of expert 0: (rank 0, token 1), (rank 3, token 0)

What a machine's engine gets from one rank is ordered by machine, then token: so the rows of an
expert come in the order of (local index, machine, token), BY_RAIL.  The order of ranks would cost a
pass over all rows.  In static mode the same order decides what is dropped.

A machine's part of a sum is the contract's for that machine, with the rail's rank for home: its own
part unrounded, the sum rounded to the payload's dtype.  Home adds these sums in fp32, its own
machine's like the others, and rounds once: MACHINE_SUMS_ROUNDED.

In exact mode only the tokens that a machine needs cross, and a plan exchanges how many they are.
In static mode all tokens cross to all machines, those without picks there for nothing: then sizes
follow from the batch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_ncclep.config import DROP, WORST, EpConfig
from megatron_ncclep.engines import native_obstacle
from megatron_ncclep.engines.agreement import agree_on_routes, agree_on_rows, on_all_ranks
from megatron_ncclep.engines.all_to_all import exchange, exchange_rows
from megatron_ncclep.engines.engine import (
    BY_RAIL,
    MACHINE_SUMS_ROUNDED,
    NOT_ROUTED,
    Engine,
    EngineCaps,
    RoutePlan,
)
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.engines.machines import Grid, grid_of
from megatron_ncclep.engines.native import CAPS as NATIVE_CAPS
from megatron_ncclep.engines.native import NativeEngine
from megatron_ncclep.engines.overflow import rows_needed
from megatron_ncclep.engines.overflow_report import Shortage
from megatron_ncclep.engines.reference import ReferenceEngine
from megatron_ncclep.engines.rows_limit import rows_limit
from megatron_ncclep.errors import EngineUnavailableError, GroupClosedError, PeerError

# Those of `native`, also where `reference` is inside: what runs on a CPU runs on GPUs.
CAPS = EngineCaps(
    name="hierarchical",
    reduction=MACHINE_SUMS_ROUNDED,
    slot_order=BY_RAIL,
    payload_dtypes=NATIVE_CAPS.payload_dtypes,
    row_bytes_multiple=NATIVE_CAPS.row_bytes_multiple,
    options=NATIVE_CAPS.options,
    moves_bytes=NATIVE_CAPS.moves_bytes,
    max_top_k=NATIVE_CAPS.max_top_k,
    max_local_experts=NATIVE_CAPS.max_local_experts,
)
INSIDE = {"native": NativeEngine, "reference": ReferenceEngine}


@dataclass(frozen=True)
class HierarchicalPlan(RoutePlan):
    """Which tokens cross to which machine, and the plan inside the machine.

    Attributes:
        inside: of the engine that `engine` is, for the tokens that came over this rank's rail.
        engine: which of the machine's engines made it.
        sent_token: int32 [tokens sent]: by machine, then token.
        pick_machine: int16 [num_tokens, top_k]: the machine of each pick; -1: not routed.
        tokens_sent: for each machine.
        tokens_received: from each machine.
    """

    inside: RoutePlan
    engine: Engine
    sent_token: torch.Tensor
    pick_machine: torch.Tensor
    tokens_sent: list[int]
    tokens_received: list[int]

    def nbytes(self) -> int:
        """See `RoutePlan.nbytes`; `counts` are the inner plan's."""
        return super().nbytes() - self.counts.nbytes + self.inside.nbytes()

    def tokens_per_expert_on_host(self) -> torch.Tensor:
        """See `RoutePlan.tokens_per_expert_on_host`."""
        return self.inside.tokens_per_expert_on_host()


class HierarchicalEngine:
    """See `Engine`.  Hosts agree in every call, and wait for what crosses the network."""

    ranks_per_expert = 1

    def __init__(self, group: EpGroup, num_experts: int, config: EpConfig) -> None:
        """Collective; finds the machines and makes the group of each one's ranks, if need be."""
        self.caps = CAPS
        self.group = group
        self.num_experts = num_experts
        self.config = config
        self._grid = grid_of(group, config.timeout_s)
        self.machines = self._grid.machines
        self._experts_of_machine = num_experts // self.machines.count
        self.inside, reason = engine_inside(group, self._grid, config, num_experts)
        # By their limit of rows: a factor of a balanced load means another one for each batch.
        self._engines: dict[int | str | None, Engine] = {}
        self._shortage = Shortage.shared(group, config)
        self._closed = False
        text = f"hierarchical: {self.machines}, {self.inside!r} inside a machine"
        if group.rank == 0:
            group.log_once(logging.INFO, text, f"{text}{reason and f' ({reason})'}")

    @torch.no_grad()
    def plan(self, topk_idx: torch.Tensor) -> HierarchicalPlan:
        """See `Engine.plan`."""
        self._require_open()
        agreement = agree_on_routes(self.group, topk_idx, self.num_experts, self.caps, self.config)
        num_tokens, top_k = topk_idx.shape
        pick_machine = topk_idx.div(self._experts_of_machine, rounding_mode="floor")
        machine, token = self._crossings(pick_machine).nonzero().unbind(1)
        tokens_sent, tokens_received = self._sizes(machine, agreement.told)

        picks = topk_idx[token] - (machine * self._experts_of_machine)[:, None]
        picks = picks.where(pick_machine[token] == machine[:, None], NOT_ROUTED)
        what = "plan, exchanging picks between machines"
        received = self._cross(picks.int(), tokens_sent, tokens_received, what)
        engine = self._engine_for(num_tokens, top_k)

        def plan_inside() -> RoutePlan:
            with self._inside():
                return engine.plan(received)

        what = "plan inside the machines"
        inside = on_all_ranks(self.group, what, plan_inside, self.config.timeout_s)
        self._note_shortage(topk_idx)
        return HierarchicalPlan(
            plan_id=agreement.call,
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=self.num_experts,
            num_rows=inside.num_rows,
            counts=inside.counts,
            inside=inside,
            engine=engine,
            sent_token=token.int(),
            pick_machine=pick_machine.short(),
            tokens_sent=tokens_sent,
            tokens_received=tokens_received,
        )

    @torch.no_grad()
    def dispatch(
        self, plan: RoutePlan, x: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.dispatch`."""
        plan = self._agree("dispatch", plan, x, w)
        sizes = (plan.tokens_sent, plan.tokens_received)
        # Packing: on GPUs a kernel could write rows and weights of all machines into one message.
        rows = self._cross_rows(x[plan.sent_token], *sizes, "dispatch between machines")
        row_w = None
        if w is not None:
            what = "dispatch between machines, weights"
            row_w = self._cross(w[plan.sent_token], *sizes, what)
        with self._inside():
            return plan.engine.dispatch(plan.inside, rows, row_w)

    @torch.no_grad()
    def combine(
        self, plan: RoutePlan, y: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.combine`.

        Sums start from +0 in fp32: inside a machine as its engine does, rounded; at home over the
        machines in ascending order, rounded once.
        """
        plan = self._agree("combine", plan, y, w)
        with self._inside():
            sums, row_w = plan.engine.combine(plan.inside, y, w)
        sizes = (plan.tokens_received, plan.tokens_sent)
        sums = self._cross_rows(sums, *sizes, "combine between machines")
        # Unpacking: on GPUs one kernel could add up a token's sums and write it once.
        tokens = plan.sent_token.split(plan.tokens_sent)
        out = y.new_zeros(plan.num_tokens, y.shape[1], dtype=torch.float32)
        for token, rows in zip(tokens, sums.split(plan.tokens_sent), strict=True):
            out[token] += rows.float()
        if row_w is None:
            return out.to(y.dtype), None

        values = self._cross(row_w, *sizes, "combine between machines, weights")
        home_w = values.new_zeros(plan.num_tokens, plan.top_k)
        parts = zip(tokens, values.split(plan.tokens_sent), strict=True)
        for machine, (token, value) in enumerate(parts):
            is_there = plan.pick_machine[token] == machine
            home_w[token] = torch.where(is_there, value, home_w[token])
        return out.to(y.dtype), home_w

    def close(self) -> None:
        """See `Engine.close`.  The grid stays, for other engines of the group."""
        if self._closed:
            return
        self._closed = True
        if not self.group.is_alive:
            return
        for engine in self._engines.values():
            engine.close()
        if self._shortage is not None:
            self.group.release(Shortage.name(self.config), self.config.timeout_s)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Say of a PeerError that it counts the ranks of this machine."""
        try:
            yield
        except PeerError as error:
            machine = self.machines.machine_of(self.group.rank)
            ranks = self.machines.ranks_of(machine)
            raise PeerError(
                f"inside machine {machine}, whose ranks 0 to {len(ranks) - 1} are ranks "
                f"{ranks[0]} to {ranks[-1]} of the group: {error}"
            ) from error

    def _crossings(self, pick_machine: torch.Tensor) -> torch.Tensor:
        """Which tokens go to which machine: bool [machines, num_tokens]."""
        every = torch.arange(self.machines.count, device=pick_machine.device)
        if self.config.max_recv_rows is not None:  # all, so that sizes do not depend on the routing
            return every.new_ones(len(every), len(pick_machine), dtype=torch.bool)
        return (pick_machine == every[:, None, None]).any(dim=2)

    def _sizes(self, machine: torch.Tensor, num_tokens: list[int]) -> tuple[list[int], list[int]]:
        """How many tokens cross to each machine, and from each machine to this rank.  Collective.

        Args:
            machine: to which this rank's tokens cross, one entry for each.
            num_tokens: of each rank.
        """
        rail, rank = self.machines.rail_of(self.group.rank), self.group.rank
        if self.config.max_recv_rows is not None:
            return [num_tokens[rank]] * len(rail), [num_tokens[other] for other in rail]
        sent = machine.bincount(minlength=len(rail)).cpu()
        what = "plan, exchanging how many tokens cross"
        counts = self.group.gather(sent, what, self.config.timeout_s)
        return sent.tolist(), counts[rail, self.machines.machine_of(rank)].tolist()

    def _engine_for(self, num_tokens: int, top_k: int) -> Engine:
        """The machine's engine with room for as many rows as a rank of the whole group has."""
        config = self.config
        # "worst" means the same inside, a factor does not.
        rows = WORST if config.max_recv_rows == WORST else self._limit(num_tokens, top_k)
        if rows not in self._engines:
            # Where not all fits, this engine tells, because all of its ranks must hear it.
            inside = dataclasses.replace(
                config, engine=self.inside, max_recv_rows=rows, on_overflow=DROP
            )
            kind, local = INSIDE[self.inside], self._grid.local
            self._engines[rows] = kind(local, self._experts_of_machine, inside)
            self._engines[rows].ranks_per_expert = self.ranks_per_expert
        return self._engines[rows]

    def _limit(self, num_tokens: int, top_k: int) -> int | None:
        """How many rows a rank's tensor has in static mode; None in exact mode."""
        num_ranks = self.group.size
        shape = (num_ranks, num_tokens, top_k, self.num_experts // num_ranks)
        return rows_limit(self.config, *shape, self.ranks_per_expert)

    def _note_shortage(self, topk_idx: torch.Tensor) -> None:
        """Write down how many rows each rank needs, for `on_overflow="raise"`.  Collective."""
        if self._shortage is None:
            return
        num_tokens, top_k = topk_idx.shape
        limit = self._limit(num_tokens, top_k)
        assert limit is not None  # or there would be no shortage
        picks = topk_idx[topk_idx != NOT_ROUTED].bincount(minlength=self.num_experts)
        what = "plan, exchanging how many rows each rank needs"
        counts = self.group.gather(picks.cpu(), what, self.config.timeout_s)
        self._shortage.note(rows_needed(counts, self.config.alignment), limit)

    def _cross(
        self, sent: torch.Tensor, tokens_sent: list[int], tokens_received: list[int], what: str
    ) -> torch.Tensor:
        """Send entries over this rank's rail, `tokens_sent` of them to each machine (its own too).

        Collective over the whole group, which has one all-to-all: off the rail it sends nothing.
        """
        splits = self._splits(tokens_sent), self._splits(tokens_received)
        return exchange(self.group, sent, *splits, what, self.config.timeout_s)

    def _cross_rows(
        self, sent: torch.Tensor, tokens_sent: list[int], tokens_received: list[int], what: str
    ) -> torch.Tensor:
        """Like `_cross`, for rows of any dtype."""
        splits = self._splits(tokens_sent), self._splits(tokens_received)
        return exchange_rows(self.group, sent, *splits, what, self.config.timeout_s)

    def _splits(self, for_machines: list[int]) -> list[int]:
        """What is for each machine, as what is for each rank: nothing off the rail."""
        splits = [0] * self.group.size
        for rank, number in zip(self.machines.rail_of(self.group.rank), for_machines, strict=True):
            splits[rank] = number
        return splits

    def _agree(
        self, phase: str, plan: RoutePlan, rows: torch.Tensor, w: torch.Tensor | None
    ) -> HierarchicalPlan:
        """Check the arguments of dispatch or combine on all ranks; return the plan, typed."""
        self._require_open()
        return agree_on_rows(
            phase,
            self.group,
            plan,
            HierarchicalPlan,
            rows,
            w,
            self.num_experts,
            self.caps,
            self.config.timeout_s,
        )

    def _require_open(self) -> None:
        if self._closed:
            raise GroupClosedError("the engine was closed: create a new one with create_engine()")


def engine_inside(
    group: EpGroup, grid: Grid, config: EpConfig, num_experts: int | None
) -> tuple[str, str]:
    """Choose the engine inside the machines, the same on all.  Collective.

    Args:
        group: the whole group.
        grid: its machines.
        config: options.
        num_experts: of the whole group; None: as many as any engine takes.

    Returns:
        "native" or "reference", and why not the former.
    """
    if group.device.type != "cuda":
        return "reference", "not native: there are no GPUs"
    inside = None if num_experts is None else num_experts // grid.machines.count
    obstacle = native_obstacle.obstacle(grid.local, config, inside)
    what = "open, choosing the engine inside a machine"
    if problems := group.gather_problems(obstacle, what, config.timeout_s):
        return "reference", f"not native: {problems}"
    return "native", ""


def obstacle(group: EpGroup, config: EpConfig, num_experts: int | None) -> str | None:
    """Say why the engine cannot run for `group`, or why "auto" does not take it.  Collective."""
    is_auto = config.engine != CAPS.name
    if is_auto and group.device.type != "cuda":
        return "it needs GPUs, unless it is asked for by name"
    try:
        grid = grid_of(group, config.timeout_s)
    except EngineUnavailableError as error:  # on all ranks
        return str(error)
    if is_auto and grid.machines.count == 1:
        return "all ranks are on one machine"
    name, reason = engine_inside(group, grid, config, num_experts)
    if name == "native":
        return None
    if is_auto:
        return f"inside a machine, {reason}"
    if config.num_sms is not None:
        return f"it would ignore num_sms, which 'native' has, and inside a machine, {reason}"
    return None
