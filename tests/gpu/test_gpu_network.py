"""Kernels put over a network: what NCCL's device functions and our waits do between hosts.

    pytest tests/gpu/test_gpu_network.py --backend nccl --engine native --ranks 4 --hosts 2 \
        --network loop
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loop import counters, set_fault
from named_rows import assert_both_steps, named_rows
from on_ranks import gathered
from rank_pool import RankContext

from benchmarks.network_model import NetworkModel, Puts
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.errors import PeerError
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.nodes import Nodes

pytestmark = [pytest.mark.needs_network, pytest.mark.limit_s(90)]
PLUGIN = os.environ.get("NCCL_RMA_PLUGIN", "")
START_S, DEADLINE_S = 60.0, 3.0


@contextmanager
def network(
    ctx: RankContext, fails: bool, fault: str = "", receives: int = 8
) -> Iterator[tuple[Any, Any]]:
    """Rails and a window of a group of their own.

    Args:
        fails: at the end this rank gives them up, as after a failure, without the other ranks.
        fault: of this rank's link (tests/network/link.h).
        receives: of the plugin, likewise.
    """
    set_fault(fault, receives)
    native, group = extension.load(), EpGroup.of(ctx.group)
    try:
        communicator = communicator_of(group, START_S)
        window = native.Window(communicator, 1 << 20, over_network=True)
        rails = native.Rails(communicator, START_S)
        yield rails, window
        if not fails:
            rails.close()
            window.close()
    finally:
        set_fault("")
        group.close(alone=fails)


def test_words_reach_the_rail_peers(ctx: RankContext, hosts: int) -> None:
    """One message of 8 bytes to each, and no other; the window's own peers are this host's."""
    with network(ctx, fails=False) as (rails, window):
        assert rails.num_domains == hosts
        assert rails.transport == "proxy"
        assert len(window.peers) == ctx.num_ranks // hosts
        before = counters(PLUGIN)
        gathered(ctx, None)  # before any rank puts
        for _ in range(20):
            rails.probe(window, DEADLINE_S)
        gathered(ctx, None)
        after = counters(PLUGIN)
        puts = 20 * (hosts - 1)
        moved = {name: after[name] - before[name] for name in after}
        expected = {"puts": puts, "bytes": 8 * puts, "bytes_in": 8 * puts}
        assert moved == expected | {"direct": 8 * puts, "refused": 0}
        gathered(ctx, None)


def test_auto_takes_native_where_a_word_arrives(ctx: RankContext, hosts: int) -> None:
    config = EpConfig(timeout_s=START_S)
    for _ in range(2):  # a model asks for each layer
        with closing(create_engine(ctx.group, 4 * ctx.num_ranks, config)) as engine:
            assert engine.caps.name == "native"
            assert getattr(engine, "nodes", None) == Nodes(hosts, ctx.num_ranks // hosts)


@pytest.mark.parametrize("fault", ["stop", "drop"])
def test_a_put_that_does_not_come_is_named_in_time(
    ctx: RankContext, hosts: int, fault: str
) -> None:
    """Rank 0's third put goes nowhere: the rail peer that it was for says so, and no other."""
    local_ranks = ctx.num_ranks // hosts
    # The counters go on from test to test.
    number = counters(PLUGIN)["puts"] + 2 * (hosts - 1) + 1
    mine = f"{fault}:{number}" if ctx.rank == 0 else ""
    with network(ctx, fails=True, fault=mine) as (rails, window):
        for _ in range(2):
            rails.probe(window, DEADLINE_S)
            gathered(ctx, None)
        start, text = time.monotonic(), ""
        try:
            rails.probe(window, DEADLINE_S)
        except PeerError as error:
            text = str(error)
        assert time.monotonic() - start < START_S
        texts = gathered(ctx, text)
    torch.cuda.synchronize()
    peers = [domain * local_ranks for domain in range(1, hosts)]
    missed = [rank for rank, text in enumerate(texts) if text]
    # With several peers it is open which of them is the first that a kernel puts to.
    assert set(missed) <= set(peers)
    assert len(missed) == (len(peers) if fault == "stop" else 1)
    for rank in missed:
        assert f"rank {rank} of {ctx.num_ranks}: put number 3 of rank 0" in texts[rank]


def test_a_put_into_a_full_queue_ends_in_time(ctx: RankContext, hosts: int) -> None:
    """What rank 0 puts is not sent, and it puts more than NCCL's queue to a peer has places.

    NCCL's own put waits for room without an end, and the rank hung until its launcher killed it.
    """
    is_peer = ctx.rank % (ctx.num_ranks // hosts) == 0
    mine = f"stop:{counters(PLUGIN)['puts'] + 1}" if ctx.rank == 0 else ""
    start, texts = time.monotonic(), []
    with network(ctx, fails=True, fault=mine, receives=1) as (rails, window):
        for number in range(34):
            # Short where nothing will come; elsewhere the machine may be busy.
            in_vain = number >= 32 if ctx.rank == 0 else is_peer
            try:
                rails.probe(window, DEADLINE_S / 30 if in_vain else START_S / 2)
                texts.append("")
            except PeerError as error:
                texts.append(str(error))
            gathered(ctx, None)
    torch.cuda.synchronize()
    assert time.monotonic() - start < START_S
    if ctx.rank == 0:
        assert texts[:32] == [""] * 32
        for text in texts[32:]:
            assert f"rank 0 of {ctx.num_ranks}: the network (proxy) has not taken put" in text
    elif is_peer:
        assert all("of rank 0, of domain 0, has not come" in text for text in texts)
    else:
        assert texts == [""] * 34


def counted(ctx: RankContext, call: Callable[[], Any]) -> tuple[Any, tuple[int, int], int]:
    """The result of a call, what this rank put in it (messages and bytes), and the bytes of these
    that went from GPU to GPU."""
    gathered(ctx, None)
    before = counters(PLUGIN)
    result = call()
    torch.cuda.synchronize()
    gathered(ctx, None)  # all ranks have what was put to them
    after = counters(PLUGIN)
    moved = {name: after[name] - before[name] for name in after}
    return result, (moved["puts"], moved["bytes"]), moved["direct"]


def routing(rank: int, num_tokens: int, num_experts: int, top_k: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k]


def test_messages_and_bytes_are_those_of_the_model(ctx: RankContext, hosts: int) -> None:
    num_tokens, top_k, hidden, on_rank = 1000, 3, 64, 4
    R, L = ctx.num_ranks, ctx.num_ranks // hosts
    routings = [routing(rank, num_tokens, on_rank * R, top_k) for rank in range(R)]
    native = extension.load()
    phases, chunk = native.num_phases_of(num_tokens, 2 * hidden), native.CHUNK

    def ranks_of(source: int, peer: int) -> torch.Tensor:
        """The ranks of `source`'s assignments in the domain of `peer`; -1 for the others."""
        ranks = routings[source] // on_rank
        return torch.where(ranks // L == peer // L, ranks, -1)

    expected = torch.zeros(4, 2, dtype=torch.int64)
    for peer in range(ctx.rank % L, R, L):
        if peer == ctx.rank:
            continue
        mine, theirs = (
            int((ranks_of(a, b) >= 0).any(dim=1).sum())
            for a, b in ((ctx.rank, peer), (peer, ctx.rank))
        )
        ranks = ranks_of(ctx.rank, peer)
        pairs = sum(len(set(row) - {-1}) for row in ranks.tolist())
        puts = [
            Puts.of_plan(L, on_rank, num_tokens, pairs, int((ranks >= 0).sum())),
            Puts.of_rows(mine, 2 * hidden, phases, num_tokens * top_k),
            Puts.of_rows(theirs, 2 * hidden, phases),
            Puts.of_rows(theirs, 2 * hidden, phases, -(-num_tokens // chunk) * chunk * top_k),
        ]
        expected += torch.tensor([[p.messages, int(p.num_bytes)] for p in puts])

    x = torch.ones(num_tokens, hidden, dtype=torch.bfloat16, device=ctx.device)
    topk_idx = routings[ctx.rank].to(ctx.device)
    w = torch.ones(num_tokens, top_k, device=ctx.device)
    config = EpConfig(engine="native", timeout_s=START_S)
    with closing(create_engine(ctx.group, on_rank * R, config)) as engine:
        engine.dispatch(engine.plan(topk_idx), x)  # makes windows
        plan, of_plan, _ = counted(ctx, lambda: engine.plan(topk_idx))
        (rows, row_w), of_dispatch, _ = counted(ctx, lambda: engine.dispatch(plan, x, w))
        _, of_combine, _ = counted(ctx, lambda: engine.combine(plan, rows))
        _, of_values, _ = counted(ctx, lambda: engine.combine(plan, rows, row_w))
    assert [of_plan, of_dispatch, of_combine, of_values] == [tuple(e) for e in expected.tolist()]


@pytest.mark.parametrize("crowds", [False, True], ids=["all-ranks", "one-rank"])
def test_large_batches_go_in_rounds(ctx: RankContext, hosts: int, crowds: bool) -> None:
    """Windows for all of their rows at once would be larger than kernels take.

    Every step of a training sends weights in rounds, and returns values: no test did.  Rows and
    weights name their assignment, so each row that arrives says which weight belongs to it.  A
    small batch follows, in windows made for rounds, and the large one once more.

    Args:
        crowds: all assignments are on the last rank, as an untrained router may have it.
    """
    sizes = {
        "num_tokens": 16384,
        "row_bytes": 2 * 7168,
        "top_k": 2,
        "num_experts": 4 * ctx.num_ranks,
    }
    model = NetworkModel(**sizes, ranks_on_each=ctx.num_ranks // hosts)
    rounds = model.rounds(hosts)
    assert rounds > 1
    native = extension.load()
    chunks = -(-model.num_tokens // native.CHUNK // rounds)
    phases = native.num_phases_of(chunks * native.CHUNK, model.row_bytes)
    phases = min(phases, chunks // 2 + 1)
    on_rank = model.num_experts // ctx.num_ranks
    # The rank that gets all rows has no room for those of more.
    num_tokens = 1024 if crowds and ctx.rank > 0 else model.num_tokens
    among = on_rank if crowds else model.num_experts
    topk_idx = routing(ctx.rank, num_tokens, among, model.top_k).to(ctx.device)
    topk_idx += model.num_experts - among
    config = EpConfig(engine="native", timeout_s=START_S)
    with closing(create_engine(ctx.group, model.num_experts, config)) as engine:
        assert_both_steps(engine, ctx, topk_idx, model.row_bytes // 2)
        assert_both_steps(engine, ctx, topk_idx[:37], model.row_bytes // 2)
        assert_both_steps(engine, ctx, topk_idx, model.row_bytes // 2)
        x = named_rows(ctx.rank, num_tokens, model.row_bytes // 2, ctx.device)
        plan = engine.plan(topk_idx)
        _, (messages, num_bytes), direct = counted(ctx, lambda: engine.dispatch(plan, x))
    assert messages == (hosts - 1) * Puts.of_rows(0, 0, phases, rounds=rounds).messages
    assert direct == num_bytes


@pytest.mark.parametrize("fault", ["drop", "stop", "silent", "error", "delay"])
def test_a_fault_in_a_dispatch_leaves_nan_or_the_right_rows(
    ctx: RankContext, hosts: int, fault: str
) -> None:
    """The first rows that rank 0 puts: no rank hangs, and who misses something says so in time."""
    process_group = dist.new_group(list(range(ctx.num_ranks)))
    group = EpGroup.of(process_group)
    num_tokens, num_experts = 200, 4 * ctx.num_ranks
    x = torch.rand(num_tokens, 64, generator=torch.Generator().manual_seed(ctx.rank))
    x, topk_idx = x.to(ctx.device), routing(ctx.rank, num_tokens, num_experts, 3).to(ctx.device)
    config = EpConfig(engine="native", timeout_s=DEADLINE_S, first_timeout_s=START_S)
    engine = create_engine(process_group, num_experts, config)
    expected, _ = engine.dispatch(engine.plan(topk_idx), x)
    plan = engine.plan(topk_idx)
    group.check()  # from here on the deadline is the short one
    gathered(ctx, None)
    if ctx.rank == 0:
        number = counters(PLUGIN)["puts"] + hosts  # its entry, to each rail peer, comes before
        set_fault(f"{fault}:{number}:200" if fault == "delay" else f"{fault}:{number}")
    start, text = time.monotonic(), ""
    rows, _ = engine.dispatch(plan, x)
    try:
        group.check()
    except PeerError as error:
        text = str(error)
    assert time.monotonic() - start < START_S / 2
    is_right = (rows == expected).all(dim=1)
    assert bool((is_right | rows.isnan().all(dim=1)).all())
    assert text or bool(is_right.all())
    texts = gathered(ctx, text)
    set_fault("")
    group.close(alone=True)
    torch.cuda.synchronize()
    gathered(ctx, None)
    dist.destroy_process_group(process_group)
    if fault == "delay":
        assert texts == [""] * ctx.num_ranks
        return
    assert any(texts[ctx.num_ranks // hosts :])  # a domain that has not got rank 0's rows
    for rank, text in enumerate(texts):
        assert not text or f"rank {rank} of {ctx.num_ranks}: rank " in text, text
        assert not text or " did not come in dispatch, operation " in text, text
