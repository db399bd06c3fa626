"""Low-latency mode: what every rank gets, to the last bit, in rounds whose routings change.

The oracle is that of the other steps, of routings that name each rank of a token once, or its
experts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from contract_cases import deadline_s
from oracle import oracle_combine, oracle_dispatch, oracle_plan
from rank_pool import RankContext, RankPool
from run_case import Sums

from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine
from megatron_ncclep.engines.low_latency import LowLatency, create_low_latency
from megatron_ncclep.errors import GroupClosedError

HAS_MODE = pytest.mark.needs_caps(test=lambda caps: caps.low_latency_tokens > 0)

# What the experts do: nothing; a row for each place; a row for each of a place's experts, in blocks
# of one size or right behind each other.
NOTHING, ROWS, BY_EXPERT, PACKED = range(4)


@dataclass(frozen=True)
class LowLatencyCase:
    """Rounds of one object.  Round n of rank r is made from the numbers n and r alone."""

    name: str
    num_ranks: int
    num_local: int
    max_tokens: int
    top_k: int
    hidden: int = 64
    dtype: torch.dtype = torch.bfloat16
    payload: torch.dtype | None = None
    num_scales: int = 0
    num_rounds: int = 6

    def batch(self, number: int) -> Case:
        """Every third round tokens crowd on few ranks; tokens of all sizes, none and most too."""
        sizes = (0, self.max_tokens, 1, self.max_tokens // 2 + 1)
        tokens = tuple(min(sizes[(number + r) % 4], self.max_tokens) for r in range(self.num_ranks))
        E, skew = self.num_local * self.num_ranks, 2.0 * (number % 3 == 2)
        top_k = min(self.top_k, E)
        return Case(
            "", tokens, E, top_k, self.hidden, self.dtype, skew=skew, dropped=0.2, seed=number
        )

    def topk_idx(self, number: int, rank: int) -> torch.Tensor:
        assignments = self.batch(number).topk_idx(rank)
        missing = self.top_k - assignments.shape[1]
        assignments = torch.nn.functional.pad(assignments, (0, missing), value=-1)
        return assignments.int() if number % 2 else assignments

    def x(self, number: int, rank: int) -> torch.Tensor:
        batch = self.batch(number)
        return batch.rows(rank, batch.tokens[rank], salt=2).to(self.payload or self.dtype)

    def weights(self, number: int, rank: int) -> torch.Tensor:
        return dataclasses.replace(self.batch(number), top_k=self.top_k).weights(rank)

    def scales(self, number: int, rank: int) -> torch.Tensor | None:
        if not self.num_scales:
            return None
        batch = self.batch(number)
        return batch.rows(rank, batch.tokens[rank], salt=4)[:, : self.num_scales].float()

    def y(self, number: int, rank: int, kind: int) -> torch.Tensor:
        """Rows of the experts, [num_rows, hidden]."""
        of_place = {BY_EXPERT: self.num_local, PACKED: min(self.top_k, self.num_local)}
        num_rows = self.num_ranks * self.max_tokens * of_place.get(kind, 1)
        return self.batch(number).rows(rank, num_rows, salt=5)

    def kind(self, number: int) -> int:
        kind = PACKED if number % 6 == 5 else number % 3
        return ROWS if kind == NOTHING and self.payload is not None else kind

    def __str__(self) -> str:
        return f"{self.name}-{self.num_ranks}ranks"


def cases(num_ranks: int) -> list[LowLatencyCase]:
    return [
        LowLatencyCase("bf16", num_ranks, 4, 9, 3),
        LowLatencyCase("many-experts", num_ranks, 33, 40, 8, hidden=1032, dtype=torch.float16),
        # More assignments than a rank has experts; sums of three numbers that round in every order.
        LowLatencyCase("fp32", num_ranks, 3, 17, 4, dtype=torch.float32),
        LowLatencyCase(
            "fp8", num_ranks, 2, 33, 2, 256, payload=torch.float8_e4m3fn, num_scales=4
        ),
    ]  # fmt: skip


def object_for(engine: Engine, case: LowLatencyCase) -> LowLatency:
    return create_low_latency(
        engine,
        max_tokens=case.max_tokens,
        hidden=case.hidden,
        top_k=case.top_k,
        dtype=case.dtype,
        payload=case.payload,
        num_scales=case.num_scales,
    )


def engine_of(
    ctx: RankContext, engine_name: str, num_experts: int, timeout_s: float | None = None
) -> Engine:
    timeout_s = timeout_s or deadline_s(engine_name, ctx.device)
    return create_engine(ctx.group, num_experts, EpConfig(engine=engine_name, timeout_s=timeout_s))


def round_on_rank(ll: LowLatency, case: LowLatencyCase, number: int, rank: int) -> dict[str, Any]:
    """A round of a rank."""
    device = ll.group.device
    scales = case.scales(number, rank)
    arguments = (
        case.x(number, rank).to(device),
        case.topk_idx(number, rank).to(device),
        case.weights(number, rank).to(device),
        None if scales is None else scales.to(device),
    )
    if number % 4 == 3:
        ll.send_dispatch(*arguments)
        rows = ll.complete_dispatch()
    else:
        rows = ll.dispatch(*arguments)
    kept = {name: value for name, value in vars(rows).items() if isinstance(value, torch.Tensor)}
    kept["rows"] = rows.rows.view(torch.uint8)
    kept = {name: value.cpu().clone() for name, value in kept.items()}
    kind = case.kind(number)
    y, rows_of = rows.rows, None
    if kind == ROWS:
        y = case.y(number, rank, kind).to(device).view(case.num_ranks, case.max_tokens, -1)
        # Rows after the counted ones must not be read.
        behind = torch.arange(case.max_tokens, device=device) >= rows.counts.view(-1, 1)
        y = y.masked_fill(behind[:, :, None], float("nan"))
    elif kind in (BY_EXPERT, PACKED):
        blocks = rows.by_expert() if kind == BY_EXPERT else rows.packed_by_expert()
        rows_of = blocks.rows_of
        kept["blocks"] = blocks.rows.view(torch.uint8).cpu()
        kept["block_counts"] = blocks.counts.cpu()
        y = case.y(number, rank, kind).to(device).view(*blocks.rows.shape)
    if number % 4 == 2:
        ll.send_combine(y, rows_of)
        out = ll.complete_combine()
    else:
        out = ll.combine(y, rows_of)
    return {**kept, "out": out.cpu()}


def rounds_on_rank(
    ctx: RankContext, engine_name: str, case: LowLatencyCase
) -> list[dict[str, Any]]:
    engine = engine_of(ctx, engine_name, case.num_local * case.num_ranks)
    ll = object_for(engine, case)
    results = [round_on_rank(ll, case, number, ctx.rank) for number in range(case.num_rounds)]
    ll.close()
    ll.close()
    with pytest.raises(GroupClosedError):
        ll.complete_dispatch()
    engine.close()
    return results


def once_for_each_rank(topk_idx: torch.Tensor, num_local: int) -> torch.Tensor:
    """The ranks of each token's experts, each once; -1 where one has come before."""
    ranks = [[expert // num_local for expert in token] for token in topk_idx.tolist()]
    firsts = [[r if r not in token[:k] else -1 for k, r in enumerate(token)] for token in ranks]
    return torch.tensor(firsts, dtype=torch.int64).view(topk_idx.shape)


class Oracle:
    """One round of all ranks."""

    def __init__(self, case: LowLatencyCase, number: int) -> None:
        self.case, self.number, self.ranks = case, number, range(case.num_ranks)
        self.topk = [case.topk_idx(number, rank).long() for rank in self.ranks]
        once = [once_for_each_rank(topk, case.num_local) for topk in self.topk]
        # Rows at their places, and rows of experts.
        self.by_rank = oracle_plan(once, case.num_ranks)
        self.by_expert = oracle_plan(self.topk, case.num_local * case.num_ranks)
        self.x = [case.x(number, rank) for rank in self.ranks]

    def rows_of_slots(self, rank: int, kind: int) -> list[int]:
        """Where the rows are that the plan of this kind gives slots on a rank."""
        most = self.case.max_tokens
        if kind == PACKED:
            return list(range(len(self.by_expert.slots[rank])))
        if kind == BY_EXPERT:
            lengths, block = self.by_expert.routed[rank], self.case.num_ranks * most
        else:
            lengths, block = [len(self.tokens(rank, source)) for source in self.ranks], most
        return [number * block + i for number, length in enumerate(lengths) for i in range(length)]

    def tokens(self, rank: int, source: int) -> list[int]:
        """The tokens of a source that have an expert on a rank, in order."""
        slots = [slot for slot in self.by_rank.slots[rank] if slot]
        return [slot.token for slot in slots if slot.source == source]

    def check_received(self, rank: int, result: dict[str, Any]) -> None:
        case, x = self.case, [x.view(torch.uint8) for x in self.x]
        for source in self.ranks:
            tokens = self.tokens(rank, source)
            n, where = len(tokens), f"rank {rank}, round {self.number}, from rank {source}"
            assert result["counts"][source] == n, where
            local = self.topk[source][tokens] - rank * case.num_local
            local = torch.where((local >= 0) & (local < case.num_local), local, -1)
            experts = torch.full((case.max_tokens, case.top_k), -1)
            experts[:n] = local
            assert torch.equal(result["topk_idx"][source].long(), experts), where
            weights = torch.where(local >= 0, case.weights(self.number, source)[tokens], 0)
            assert_same_bits(result["weights"][source, :n], weights, f"weights, {where}")
            assert_same_bits(result["rows"][source, :n], x[source][tokens], f"rows, {where}")
            scales = case.scales(self.number, source)
            if scales is not None:
                assert_same_bits(result["scales"][source, :n], scales[tokens], f"scales, {where}")
        kind = case.kind(self.number)
        if kind in (BY_EXPERT, PACKED):
            where = f"rank {rank}, round {self.number}"
            assert result["block_counts"].tolist() == self.by_expert.routed[rank], where
            blocks = result["blocks"].flatten(0, -2)[self.rows_of_slots(rank, kind)]
            slots = [slot for slot in self.by_expert.slots[rank] if slot]
            for row, slot in zip(blocks, slots, strict=True):
                assert_same_bits(row, x[slot.source][slot.token], f"{slot}, {where}")

    def out(self, kind: int, ranks_on_node: int | None) -> list[torch.Tensor]:
        """The sums of each rank."""
        plan = self.by_expert if kind in (BY_EXPERT, PACKED) else self.by_rank
        if kind == NOTHING:
            y, _ = oracle_dispatch(plan, self.x, [torch.zeros(t.shape) for t in self.topk])
        else:
            y = [
                self.case.y(self.number, rank, kind)[self.rows_of_slots(rank, kind)]
                for rank in self.ranks
            ]
        values = [torch.zeros(len(rows)) for rows in y]
        return oracle_combine(plan, y, values, ranks_on_node=ranks_on_node)[0]


@HAS_MODE
@pytest.mark.parametrize("name", [case.name for case in cases(1)])
def test_rounds_are_the_oracles(
    pool: RankPool, rank_counts: list[int], engine_name: str, name: str
) -> None:
    for num_ranks in {rank_counts[0], rank_counts[-1]}:
        (case,) = [case for case in cases(num_ranks) if case.name == name]
        on_node = Sums.of(engine_name, num_ranks).ranks_on_node
        results = pool.run(rounds_on_rank, engine_name, case, ranks=num_ranks)
        for number in range(case.num_rounds):
            oracle = Oracle(case, number)
            outs = oracle.out(case.kind(number), on_node)
            for rank, result in enumerate(results):
                oracle.check_received(rank, result[number])
                what = f"out of rank {rank} of {num_ranks}, round {number}"
                assert_same_bits(result[number]["out"], outs[rank], what)


@HAS_MODE
def test_two_micro_batches_at_a_time(ctx: RankContext, engine_name: str) -> None:
    """Each one's halves lie between the other's."""
    case = LowLatencyCase("two", ctx.num_ranks, 3, 12, 2)
    engine = engine_of(ctx, engine_name, case.num_local * case.num_ranks)
    pair = [object_for(engine, case), object_for(engine, case)]
    outs = []
    for number in (1, 4):
        rounds = [(ll, number + i) for i, ll in enumerate(pair)]
        device = pair[0].group.device
        for ll, n in rounds:
            arguments = (case.x(n, ctx.rank), case.topk_idx(n, ctx.rank), case.weights(n, ctx.rank))
            ll.send_dispatch(*(argument.to(device) for argument in arguments))
        for ll, _ in rounds:
            ll.send_combine(ll.complete_dispatch().rows)
        outs += [ll.complete_combine().cpu() for ll, _ in rounds]
    for ll in pair:
        ll.close()
    engine.close()
    on_node = Sums.of(engine_name, ctx.num_ranks).ranks_on_node
    for number, out in zip((1, 2, 4, 5), outs, strict=True):
        expected = Oracle(case, number).out(NOTHING, on_node)[ctx.rank]
        assert_same_bits(out, expected, f"out of rank {ctx.rank}, {number}")
