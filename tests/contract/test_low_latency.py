"""Low-latency mode: what every rank gets, to the last bit, in rounds whose routings change.

The oracle is made of loops over tokens, and shares nothing with any engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import assert_same_bits
from contract_cases import deadline_s
from rank_pool import RankContext, RankPool
from run_case import Sums

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

    def num_tokens(self, number: int, rank: int) -> int:
        """Of all sizes, none and the largest among them."""
        return ((0, self.max_tokens, 1, self.max_tokens // 2 + 1)[(number + rank) % 4]) % (
            self.max_tokens + 1
        )

    def topk_idx(self, number: int, rank: int) -> torch.Tensor:
        """Distinct experts; every third round they crowd on few ranks, and some are left out."""
        generator = self._generator(number, rank, 1)
        T, E = self.num_tokens(number, rank), self.num_local * self.num_ranks
        scores = torch.rand(T, E, generator=generator)
        if number % 3 == 2:
            scores -= torch.linspace(0, 2, E)
        assignments = scores.argsort(dim=1, descending=True)[:, : self.top_k]
        assignments = torch.nn.functional.pad(
            assignments, (0, self.top_k - assignments.shape[1]), value=-1
        )
        gone = torch.rand(T, self.top_k, generator=generator) < 0.2
        assignments = assignments.masked_fill(gone, -1)
        return assignments.int() if number % 2 else assignments

    def x(self, number: int, rank: int) -> torch.Tensor:
        if self.payload is not None:
            shape = (self.num_tokens(number, rank), self.hidden)
            bits = torch.randint(0, 120, shape, generator=self._generator(number, rank, 2))
            return bits.to(torch.uint8).view(self.payload)
        return self._numbers(self.num_tokens(number, rank), number, rank, 2)

    def weights(self, number: int, rank: int) -> torch.Tensor:
        shape = (self.num_tokens(number, rank), self.top_k)
        return torch.rand(shape, generator=self._generator(number, rank, 3))

    def scales(self, number: int, rank: int) -> torch.Tensor | None:
        if not self.num_scales:
            return None
        shape = (self.num_tokens(number, rank), self.num_scales)
        return torch.rand(shape, generator=self._generator(number, rank, 4))

    def y(self, number: int, rank: int, kind: int) -> torch.Tensor:
        """Rows whose sums round differently in every order."""
        places = self.num_ranks * self.max_tokens
        num_rows = places * {BY_EXPERT: self.num_local, PACKED: self.most_rows}.get(kind, 1)
        return self._numbers(num_rows, number, rank, 5)

    def kind(self, number: int) -> int:
        kind = PACKED if number % 6 == 5 else number % 3
        return ROWS if kind == NOTHING and self.payload is not None else kind

    @property
    def most_rows(self) -> int:
        """Rows per place when they are packed."""
        return min(self.top_k, self.num_local)

    def _numbers(self, num_rows: int, number: int, rank: int, salt: int) -> torch.Tensor:
        noise = torch.rand(num_rows, self.hidden, generator=self._generator(number, rank, salt))
        row = torch.arange(num_rows).view(-1, 1)
        sign = torch.where(row % 3 == 1, -1.0, 1.0)
        return ((noise + rank + 1) * sign * (1 + row % 7)).to(self.dtype)

    def _generator(self, number: int, rank: int, salt: int) -> torch.Generator:
        return torch.Generator().manual_seed(10007 * number + 101 * rank + salt)

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
    kept = {
        "rows": rows.rows.view(torch.uint8).cpu().clone().view(rows.rows.dtype),
        "topk_idx": rows.topk_idx.cpu().clone(),
        "weights": rows.weights.cpu().clone(),
        "counts": rows.counts.cpu().clone(),
        "scales": None if rows.scales is None else rows.scales.cpu().clone(),
    }
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
        kept["blocks"] = blocks.rows.view(torch.uint8).cpu().view(blocks.rows.dtype)
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


class Oracle:
    """One round of all ranks."""

    def __init__(self, case: LowLatencyCase, number: int) -> None:
        self.case, self.number = case, number
        ranks = range(case.num_ranks)
        self.topk = [case.topk_idx(number, rank).tolist() for rank in ranks]
        self.x = [case.x(number, rank) for rank in ranks]
        self.weights = [case.weights(number, rank) for rank in ranks]
        self.scales = [case.scales(number, rank) for rank in ranks]
        self.y = [case.y(number, rank, case.kind(number)) for rank in ranks]

        # Tokens of each source that have an expert on each rank, in order.
        self.tokens = [
            [
                [t for t in range(len(self.topk[s])) if max(self.local(s, t, rank)) >= 0]
                for rank in ranks
            ]
            for s in ranks
        ]
        # (source, token) of each row of each local expert of each rank.
        self.blocks: list[list[list[tuple[int, int]]]] = [
            [
                [(s, t) for s in ranks for t in self.tokens[s][rank] if e in self.local(s, t, rank)]
                for e in range(case.num_local)
            ]
            for rank in ranks
        ]

    def local(self, source: int, token: int, rank: int) -> list[int]:
        """The token's experts, as `rank` numbers its own; -1 for others."""
        first = rank * self.case.num_local
        return [
            assignment - first if first <= assignment < first + self.case.num_local else -1
            for assignment in self.topk[source][token]
        ]

    def check_received(self, rank: int, result: dict[str, Any]) -> None:
        case = self.case
        for source in range(case.num_ranks):
            tokens = self.tokens[source][rank]
            where = f"rank {rank}, round {self.number}, from rank {source}"
            assert result["counts"][source] == len(tokens), where
            experts = [self.local(source, token, rank) for token in tokens]
            experts += [[-1] * case.top_k] * (case.max_tokens - len(tokens))
            assert result["topk_idx"][source].tolist() == experts, where
            is_valid = torch.tensor(experts).view(-1, case.top_k)[: len(tokens)] >= 0
            weights = torch.where(is_valid, self.weights[source][tokens], 0)
            n = len(tokens)
            assert_same_bits(result["weights"][source, :n], weights, f"weights, {where}")
            rows = self.x[source].view(torch.uint8)[tokens].view(self.x[source].dtype)
            assert_rows(result["rows"][source, :n], rows, f"rows, {where}")
            scales = self.scales[source]
            if scales is not None:
                assert_same_bits(result["scales"][source, :n], scales[tokens], f"scales, {where}")
        if case.kind(self.number) in (BY_EXPERT, PACKED):
            self.check_blocks(rank, result)

    def check_blocks(self, rank: int, result: dict[str, Any]) -> None:
        rows = result["blocks"].flatten(0, -2)
        for expert, pairs in enumerate(self.blocks[rank]):
            where = f"rank {rank}, round {self.number}, expert {expert}"
            assert result["block_counts"][expert] == len(pairs), where
            first = self.first_row(rank, expert)
            for row, (source, token) in enumerate(pairs):
                actual = rows[first + row]
                assert_rows(actual[None], self.x[source][token][None], f"row {row}, {where}")

    def first_row(self, rank: int, expert: int) -> int:
        """Where an expert's block begins."""
        if self.case.kind(self.number) == PACKED:
            return sum(len(pairs) for pairs in self.blocks[rank][:expert])
        return expert * self.case.num_ranks * self.case.max_tokens

    def part(self, rank: int, source_rank: int, token: int) -> torch.Tensor:
        """What `rank` adds up for a token, in fp32."""
        kind, case = self.case.kind(self.number), self.case
        if kind == NOTHING:
            return self.x[source_rank][token].float()
        if kind == ROWS:
            place = source_rank * case.max_tokens + self.tokens[source_rank][rank].index(token)
            return self.y[rank][place].float()
        total = torch.zeros(case.hidden)
        for expert, pairs in enumerate(self.blocks[rank]):
            if (source_rank, token) in pairs:
                first = self.first_row(rank, expert)
                total += self.y[rank][first + pairs.index((source_rank, token))].float()
        return total

    def out(self, source_rank: int, ranks_on_node: int | None) -> torch.Tensor:
        """The sums; with nodes, sums of their ranks' sums are rounded, too (`oracle_combine`)."""
        case, most = self.case, ranks_on_node or self.case.num_ranks
        out = torch.zeros(len(self.topk[source_rank]), case.hidden)
        of_node = torch.zeros_like(out)
        for rank in range(case.num_ranks):
            for token in self.tokens[source_rank][rank]:
                part = self.part(rank, source_rank, token)
                is_exact = rank % most == source_rank % most
                of_node[token] += part if is_exact else part.to(case.dtype).float()
            if rank % most == most - 1:
                out += of_node if ranks_on_node is None else of_node.to(case.dtype).float()
                of_node.zero_()
        return out.to(case.dtype)


def assert_rows(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Same bits; of numbers of one byte, the bytes."""
    if expected.dtype.itemsize == 1:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    assert_same_bits(actual, expected, what)


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
            for rank, result in enumerate(results):
                oracle.check_received(rank, result[number])
                what = f"out of rank {rank} of {num_ranks}, round {number}"
                assert_same_bits(result[number]["out"], oracle.out(rank, on_node), what)


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
    on_node = Sums.of(engine_name, ctx.num_ranks).ranks_on_node or ctx.num_ranks
    for number, out in zip((1, 2, 4, 5), outs, strict=True):
        oracle = Oracle(case, number)
        # Sums start from +0, also where there is none.
        expected = torch.zeros(out.shape)
        for first in range(0, ctx.num_ranks, on_node):
            tokens = oracle.tokens[ctx.rank][first : first + on_node]
            num_parts = [sum(t in of_rank for of_rank in tokens) for t in range(len(out))]
            of_node = oracle.x[ctx.rank].float() * torch.tensor(num_parts).view(-1, 1)
            expected += of_node.to(case.dtype).float()
        assert_same_bits(out, expected.to(case.dtype), f"out of rank {ctx.rank}, {number}")
