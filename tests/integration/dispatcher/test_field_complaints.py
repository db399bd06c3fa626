"""Complaints of other dispatchers' users, one test each, by the number of their thread.

A layer of EP 4 with two assignments a token, in fp32: a sum of two terms has the same bits in
either order, so a difference from `alltoall` is a difference in the terms, not in rounding.
"""

from __future__ import annotations

import pytest
import torch
from layer_case import take_empty_batches
from megatron_setup import BATCH, HIDDEN, build_layer, initialize, make_config
from on_ranks import gathered
from trainer import Results, differences

from megatron_ncclep.ranks.pool import RankContext

pytestmark = pytest.mark.each_release

RANKS, TOP_K = 4, 2
# Sequence lengths of the ranks, and what their tokens have chosen.
Step = tuple[tuple[int, int, int, int], str]
EVEN: Step = ((6, 6, 6, 6), "any experts")
ONE_RANK: Step = ((6, 6, 6, 6), "experts 0 and 1")  # both are rank 0's


def train_on_rank(ctx: RankContext, dispatcher: str, steps: list[Step]) -> Results:
    """Forward and backward of each step, without optimizer; everything that comes out, by name."""
    initialize(ep=RANKS)
    layer = build_layer(make_config(dispatcher, torch.float32, RANKS))
    assert ("NcclEp" in type(layer.token_dispatcher).__name__) == (dispatcher == "ncclep")
    results: Results = {}
    rows: list[int] = []
    layer.experts.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    drawn = layer.router.weight.detach().clone()
    to_one_rank = torch.zeros_like(drawn)
    to_one_rank[:2, 0] = torch.tensor([3.0, 2.0])  # of a component that is 1
    take_empty_batches(layer)
    for index, (sequences, chosen) in enumerate(steps):
        with torch.no_grad():
            layer.router.weight.copy_(drawn if chosen == "any experts" else to_one_rank)
        generator = torch.Generator().manual_seed(97 * index + ctx.rank)
        shape = (sequences[ctx.rank], BATCH, HIDDEN)
        hidden, probe = (torch.randn(shape, generator=generator) for _ in range(2))
        hidden[..., 0] = 1
        out, _ = layer(hidden.requires_grad_())
        (out * probe).sum().backward()
        results[f"output {index}"] = out.detach()
        results[f"input gradient {index}"] = hidden.grad
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        # An expert without rows has no gradient, or one of zeros.
        results[f"gradient of {name}"] = torch.zeros_like(parameter) if grad is None else grad
    results["rows"] = torch.tensor(rows)
    return results


def both(ctx: RankContext, steps: list[Step]) -> tuple[Results, list[int]]:
    """Train with our dispatcher and with `alltoall`: the same bits; and the experts' rows."""
    ours, theirs = (train_on_rank(ctx, kind, steps) for kind in ("ncclep", "alltoall"))
    rows = ours["rows"].tolist()
    assert differences(ours, theirs) == ([] if any(rows) else ["no expert was trained"])
    return ours, rows


def test_the_same_bits_as_alltoall_run_after_run(ctx: RankContext) -> None:
    """Megatron-LM 1603 and 2369: dispatchers disagree, and results vary between runs of one; what
    came out depended on the order in which rows had arrived, and no test compares bits.
    """
    ours, _ = both(ctx, [EVEN])
    for _ in range(2):
        assert differences(train_on_rank(ctx, "ncclep", [EVEN]), ours) == []


def test_nothing_is_dropped(ctx: RankContext) -> None:
    """Megatron-LM 1756: "dropless" dispatchers with a capacity drop what exceeds it when routing is
    uneven.  Here it is as uneven as can be: all assignments of all ranks are for the experts of
    one.
    """
    ours, rows = both(ctx, [ONE_RANK])
    assert rows == [0 if ctx.rank else sum(ONE_RANK[0]) * BATCH * TOP_K]
    assert ours["output 0"].any(dim=-1).all(), "a token came back without its experts' rows"


def test_token_counts_that_vary_from_step_to_step(ctx: RankContext) -> None:
    """Megatron-LM 7578: the first batch fixes the largest number of tokens, and a longer one traps;
    users train with sequences of any length.  Larger, smaller, other ranks' turn, larger again.
    """
    lengths = [(2, 2, 2, 2), (9, 9, 9, 9), (1, 7, 3, 5), (13, 1, 1, 2), (5, 31, 8, 1)]
    _, mine = both(ctx, [(each, "any experts") for each in lengths])
    rows = [sum(step) for step in zip(*gathered(ctx, mine), strict=True)]
    assert rows == [sum(each) * BATCH * TOP_K for each in lengths]


def test_a_rank_without_tokens(ctx: RankContext) -> None:
    """Megatron-LM 1877: a rank that gets no token crashes, or hangs the others.  One that brings
    none, one whose experts get none, both at once, and then a usual step.
    """
    some_empty = (6, 0, 3, 9)
    steps = [(some_empty, "any experts"), ONE_RANK, ((0, 0, 0, 4), "experts 0 and 1"), EVEN]
    ours, rows = both(ctx, steps)
    assert len(ours["output 0"]) == some_empty[ctx.rank]
    assert rows[2] == (0 if ctx.rank else 4 * BATCH * TOP_K)
    assert rows[3], "no rank is without tokens any more"
