"""An engine inside an ordinary module of torch: the module is compiled, copied, averaged, saved."""

from __future__ import annotations

import copy
import io
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch._dynamo
from rank_pool import RankContext
from timeouts import patient
from torch import nn
from torch.optim.swa_utils import AveragedModel

from megatron_ncclep import combine, create_engine, dispatch
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.engine import Engine
from megatron_ncclep.engines.low_latency import create_low_latency
from megatron_ncclep.errors import GroupClosedError, UnsupportedError

pytestmark = [pytest.mark.needs_ranks(2), pytest.mark.cpu_only, pytest.mark.ranks(2)]

HIDDEN, EXPERTS = 8, 4


class Experts(nn.Module):
    """A router and, on each rank, one factor for each of its experts."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.factors = nn.Parameter(torch.arange(1.0, 1 + engine.num_local_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, topk_idx = self.router(x).softmax(dim=-1).topk(2)
        plan = self.engine.plan(topk_idx)
        rows, row_w = dispatch(self.engine, plan, x, w)
        factors = self.factors.repeat_interleave(plan.tokens_per_expert, output_size=len(rows))
        return combine(self.engine, plan, rows * (factors * row_w)[:, None])


def new_engine(ctx: RankContext) -> Engine:
    deadline = patient(60.0)  # a rank compiles
    config = EpConfig(engine="reference", timeout_s=deadline, first_timeout_s=10 * deadline)
    return create_engine(ctx.group, EXPERTS, config)


def batch(ctx: RankContext) -> torch.Tensor:
    return torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(ctx.rank))


@pytest.mark.limit_s(600)
def test_a_compiled_module_is_traced_around_the_calls(ctx: RankContext) -> None:
    """torch went through the engine into the exchange between hosts: 30 graphs of one layer."""
    with closing(new_engine(ctx)) as engine, torch._dynamo.config.patch(disable=False):
        module = Experts(engine)
        expected = module(batch(ctx))
        found = torch._dynamo.explain(module)(batch(ctx))
        lines = Path(__file__).read_text(encoding="utf-8").splitlines()
        where = [reason.user_stack[-1] for reason in found.break_reasons]
        assert where, "nothing was compiled"
        assert {frame.filename for frame in where} == {__file__}
        calls = {lines[frame.lineno - 1].partition("= ")[2] for frame in where}
        assert all(call.startswith(("self.engine.plan(", "dispatch(")) for call in calls - {""})
        # Before plan, between the others, and after combine.
        assert found.graph_count <= 4
        compiled = torch.compile(module, backend="eager")
        assert torch.equal(compiled(batch(ctx)), expected)


def test_copies_use_the_same_engine(ctx: RankContext) -> None:
    """A copy ended in "cannot pickle HostExchange": so did averages of weights."""
    engine = new_engine(ctx)
    low_latency = create_low_latency(engine, max_tokens=2, hidden=HIDDEN, top_k=2)
    module = Experts(engine)
    module.kept = (engine.plan(torch.tensor([[0, 3]])), low_latency)  # type: ignore[assignment]
    expected = module(batch(ctx))
    for copied in (copy.deepcopy(module), copy.copy(module), AveragedModel(module).module):
        assert copied.engine is engine
        assert copied.kept == module.kept
        assert torch.equal(copied(batch(ctx)), expected)
    with pytest.raises(UnsupportedError, match=r"pickled, .* save model\.state_dict\(\) in place"):
        torch.save(module, io.BytesIO())
    low_latency.close()
    engine.close()
    with pytest.raises(GroupClosedError, match="create a new one"):
        copied(batch(ctx))
