"""Metrics: numbers of rows, load and drops against a count by hand, in Megatron's own reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_setup import build_layer, initialize, make_config
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

RANKS, EXPERTS, LAYERS = 4, 8, 2
# Per rank, for about 48 that come on average: many are dropped.
ROWS = 32


class Writers:
    """Stands for both that Megatron's reports write to: a SummaryWriter and a run of W&B."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.logged: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        self.scalars[name, iteration] = float(value)

    def log(self, values: dict[str, float], iteration: int) -> None:
        self.logged.update({(name, iteration): float(v) for name, v in values.items()})


def report(iteration: int, writers: Writers | None) -> None:
    """What Megatron's training loop does after a step, in the release that is here."""
    given = {
        "loss_scale": 1.0,
        "iteration": iteration,
        "writer": writers,
        "wandb_writer": writers,
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


def report_on_rank(ctx: RankContext) -> tuple[list[list[list[list[int]]]], Writers]:
    """Four steps of two recomputed layers, with an evaluation in the second; returns the routing
    [step][layer][token][expert], and what was written.
    """
    initialize(RANKS, 1, "cpu")
    options = EpConfig(metrics_interval=2, max_recv_rows=ROWS, timeout_s=30)
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    config = make_config("ncclep", torch.float64, RANKS, ncclep=options, **recompute)
    layers = [build_layer(config) for _ in range(LAYERS)]
    seen: list[list[Any]] = []

    def keep(router: Any, inputs: Any, outputs: Any) -> None:
        if not torch._C._current_graph_task_id() + 1:  # not in backward
            seen[-1].append(outputs[1].int().tolist())

    for layer in layers:
        layer.router.register_forward_hook(keep)
    writers = Writers() if ctx.rank == RANKS - 1 else None
    generator = torch.Generator().manual_seed(ctx.rank)
    for step in range(4):
        seen.append([])
        for layer in layers:
            shape = (4 + ctx.rank, 4, config.hidden_size)
            x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
            out = layer.train()(x)[0]
            out.sum().backward()
            if step == 1:
                with torch.no_grad():
                    layer.eval()(x)
        report(step + 1, writers)
    for layer in layers:
        layer.token_dispatcher.engine.close()
    return seen, writers or Writers()


def counted(routing: list[list[Any]], steps: range) -> tuple[list[list[int]], float, int]:
    """Rows from rank to rank, the worst imbalance, and what was dropped, by hand.

    The imbalance was that of what was left after drops: the busier a rank, the more even it looked.

    Args:
        routing: [rank][step][pass of a layer][token][expert], 1 where an assignment is.
        steps: which.
    """
    rows = [[0] * RANKS for _ in range(RANKS)]
    asked = [[0] * RANKS for _ in range(LAYERS)]
    dropped, per_rank = 0, EXPERTS // RANKS
    for step in steps:
        passes = len(routing[0][step])
        for number in range(passes):
            layer = number * LAYERS // passes
            arrived = [0] * RANKS
            for source in range(RANKS):
                for token in routing[source][step][number]:
                    here = [sum(token[r * per_rank : (r + 1) * per_rank]) for r in range(RANKS)]
                    for rank, assignments in enumerate(here):
                        rows[source][rank] += assignments > 0
                        arrived[rank] += assignments
            for rank in range(RANKS):
                asked[layer][rank] += arrived[rank]
                dropped += max(arrived[rank] - ROWS, 0)
    return rows, max(RANKS * max(each) / sum(each) for each in asked), dropped


@pytest.mark.each_release
def test_megatrons_reports_have_the_metrics(megatron_pool: RankPool) -> None:
    results = megatron_pool.run(report_on_rank)
    routing, writers = [seen for seen, _ in results], results[-1][1]
    assert {iteration for _, iteration in writers.scalars} >= {2, 4}
    ours = {key: v for key, v in writers.scalars.items() if key[0].startswith("ncclep/")}
    assert {iteration for _, iteration in ours} == {2, 4}, "every second step"
    assert {key: v for key, v in writers.logged.items() if key[0].startswith("ncclep/")} == ours
    num_dropped = 0
    for iteration, steps in ((2, range(2)), (4, range(2, 4))):
        rows, imbalance, dropped = counted(routing, steps)
        num_dropped += dropped
        assert ours["ncclep/imbalance", iteration] == pytest.approx(imbalance, rel=1e-12)
        assert ours["ncclep/assignments dropped", iteration] == dropped
        for rank in range(RANKS):
            assert ours[f"ncclep/rows sent/rank {rank}", iteration] == sum(rows[rank])
            received = sum(row[rank] for row in rows)
            assert ours[f"ncclep/rows received/rank {rank}", iteration] == received
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
