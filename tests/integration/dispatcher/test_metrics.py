"""Metrics: numbers of rows, load and drops against a count by hand, in Megatron's own reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron_setup import EXPERTS, HIDDEN, drawn, new_layer, selective
from rank_pool import RankContext, RankPool

from megatron_ncclep import metrics
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.errors import InputError
from megatron_ncclep.metrics import Interval
from megatron_ncclep.ops.combine import combine
from megatron_ncclep.ops.dispatch import dispatch
from megatron_ncclep.ops.nvtx import step_range
from megatron_ncclep.ranks.group import EpGroup

RANKS, LAYERS = 4, 2
# Per rank, for about 48 that come on average: many are dropped.
ROWS = 32


def report(iteration: int, writer: Any) -> None:
    """What Megatron's training loop does after a step, in the release that is here."""
    given = {
        "loss_scale": 1.0,
        "iteration": iteration,
        "writer": writer,
        "wandb_writer": writer,
        "num_layers": LAYERS,
        "track_names": [],
    }
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:
        from megatron.core.transformer.moe.moe_utils import track_moe_metrics

        track_moe_metrics(**given)
    else:
        get_moe_metrics_tracker().report(**given)


# What Megatron's report wrote: (name, iteration) -> value.
Written = dict[tuple[str, int], float]


def report_on_rank(ctx: RankContext) -> tuple[list[list[Any]], list[Written]]:
    """Four steps of two recomputed layers, with an evaluation in the second; returns the routing
    [step][pass of a layer][token][expert], and what was written, to a SummaryWriter
    and to a run of W&B.
    """
    options = EpConfig(metrics_interval=2, max_recv_rows=ROWS, timeout_s=30)
    fields = {"ncclep": options, **selective("moe")}
    layers = [new_layer(RANKS, torch.float64, **fields) for _ in range(LAYERS)]
    seen: list[list[Any]] = []

    def keep(router: Any, inputs: Any, outputs: Any) -> None:
        if not torch._C._current_graph_task_id() + 1:  # not in backward
            seen[-1].append(outputs[1].tolist())

    for layer in layers:
        layer.router.register_forward_hook(keep)
    writer = mock.Mock() if ctx.rank == RANKS - 1 else None
    for step in range(4):
        seen.append([])
        for number, layer in enumerate(layers):
            x = drawn(10 * ctx.rank + 2 * step + number, 4 + ctx.rank, 4, HIDDEN).double()
            layer.train()(x.requires_grad_())[0].sum().backward()
            if step == 1:
                with torch.no_grad():
                    layer.eval()(x)
        report(step + 1, writer)
    for layer in layers:
        layer.token_dispatcher.engine.close()
    if writer is None:
        return seen, []
    scalars, logged = {}, {}
    for name, value, iteration in (call.args for call in writer.add_scalar.call_args_list):
        scalars[name, iteration] = float(value)
    for values, iteration in (call.args for call in writer.log.call_args_list):
        logged |= {(name, iteration): float(value) for name, value in values.items()}
    return seen, [scalars, logged]


def counted(routing: tuple[list[list[Any]], ...], steps: range) -> tuple[torch.Tensor, float, int]:
    """Rows from rank to rank, the worst imbalance, and what was dropped, by hand.

    The imbalance was that of what was left after drops: the busier a rank, the more even it looked.

    Args:
        routing: [rank][step][pass of a layer][token][expert], true where an assignment is.
        steps: which.
    """
    rows, asked, dropped = torch.zeros(RANKS, RANKS), torch.zeros(LAYERS, RANKS), 0
    for step in steps:
        passes = len(routing[0][step])
        for number in range(passes):
            # Assignments of each token to each rank, by source.
            maps = (torch.tensor(of_rank[step][number]) for of_rank in routing)
            chosen = [map_.reshape(-1, RANKS, EXPERTS // RANKS).sum(dim=2) for map_ in maps]
            rows += torch.stack([(tokens > 0).sum(dim=0) for tokens in chosen])
            arrived = torch.cat(chosen).sum(dim=0)
            asked[number * LAYERS // passes] += arrived
            dropped += int((arrived - ROWS).clamp(min=0).sum())
    return rows, float((RANKS * asked.amax(dim=1) / asked.sum(dim=1)).max()), dropped


@pytest.mark.each_release
def test_megatrons_reports_have_the_metrics(megatron_pool: RankPool) -> None:
    routing, written = zip(*megatron_pool.run(report_on_rank), strict=True)
    assert {iteration for _, iteration in written[-1][0]} >= {2, 4}
    ours, also_ours = (
        {key: value for key, value in values.items() if key[0].startswith("ncclep/")}
        for values in written[-1]
    )
    assert {iteration for _, iteration in ours} == {2, 4}, "every second step"
    assert also_ours == ours
    num_dropped = 0
    for iteration, steps in ((2, range(2)), (4, range(2, 4))):
        rows, imbalance, dropped = counted(routing, steps)
        num_dropped += dropped
        assert ours["ncclep/imbalance", iteration] == pytest.approx(imbalance, rel=1e-6)
        assert ours["ncclep/assignments dropped", iteration] == dropped
        for rank in range(RANKS):
            assert ours[f"ncclep/rows sent/rank {rank}", iteration] == rows[rank].sum()
            assert ours[f"ncclep/rows received/rank {rank}", iteration] == rows[:, rank].sum()
            assert ours[f"ncclep/seconds waited/rank {rank}", iteration] > 0
    assert num_dropped > 0, "or the case shows nothing of it"


def test_an_even_load_and_no_load_at_all(single: EpGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second model's layers may come while an exchange is under way."""
    metered = metrics.Metrics.of(single, 1, 5.0)
    metered.add_layer(single, 4)
    (nothing,) = metrics.after_step()
    assert nothing == Interval(1, [[0]], [0], 1.0, 0, nothing.wait_s)
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "_has_arrived", lambda exchanged: False)
        assert metrics.after_step() == []
    metered.add_layer(single, 2)
    assert len(metrics.after_step()) == 2
    with pytest.raises(InputError, match=r"metrics_interval 2: other layers .* have 1"):
        metrics.Metrics.of(single, 2, 5.0)
    engine: Any = SimpleNamespace(config=EpConfig())
    with pytest.raises(InputError, match=r"metrics_interval is 0: .* EpConfig"):
        metrics.count_layer(engine, engine)


def test_ranges_have_the_names_of_the_steps(
    single: EpGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu: Any = SimpleNamespace(is_cuda=True)
    pushed: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("end"))
    with step_range("no GPU takes part", torch.empty(0)):
        pass
    for module in ("dispatch", "combine"):
        monkeypatch.setattr(
            f"megatron_ncclep.ops.{module}.step_range", lambda name, tensor: step_range(name, gpu)
        )
    engine = create_engine(single.torch.process_group, 4, EpConfig(engine="reference", timeout_s=5))
    plan = engine.plan(torch.tensor([[0, 1]]))
    x, w = torch.ones(1, 8, requires_grad=True), torch.ones(1, 2, requires_grad=True)
    rows, row_w = dispatch(engine, plan, x, w)
    combine(engine, plan, rows * row_w[:, None]).sum().backward()
    assert pushed[::2] == [
        f"ncclep {name}"
        for name in ("dispatch", "combine", "combine backward", "dispatch backward")
    ]
    with pytest.raises(ValueError, match="wrong"), step_range("plan", gpu):
        raise ValueError("wrong")
    assert pushed[1::2] == ["end"] * 5


@pytest.fixture
def single(process_group: dist.ProcessGroup) -> EpGroup:
    return EpGroup.of(process_group)
