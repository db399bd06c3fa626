"""Steps in which rows did not fit are run again: every bit is that of a training in exact mode."""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from adam_training import Training
from megatron_setup import BATCH, HIDDEN, SEQUENCE, build_layer, initialize, make_config
from on_ranks import IS_RANK, gathered
from rank_pool import RankContext, RankError, RankPool
from trainer import ModelCase, Results, differences

from benchmarks import training_model
from megatron_ncclep.config import EpConfig
from megatron_ncclep.integration.rerun import limit
from megatron_ncclep.integration.rerun.limit import MOST_LOAD, FollowedLimit
from megatron_ncclep.integration.rerun.state import ModelState, Snapshot

pytestmark = pytest.mark.each_release

if IS_RANK:
    from megatron.core import full_cuda_graph, rerun_state_machine
    from megatron.core.transformer import cuda_graphs
    from megatron.core.transformer.moe import moe_utils

    from megatron_ncclep.integration.layer_engines import LayerEngines

EXACT = EpConfig(engine="reference", experts="grouped", metrics_interval=10**6)
RERUN = replace(EXACT, max_recv_rows="1.3x", on_overflow="rerun")
STEPS = 6
# In the first step Megatron makes what it keeps; the second one is captured in CUDA graphs.
COLLAPSED = (0, 1, 4)
ROUTER = {
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
# That of attention draws from Megatron's tracker of random states, the other one from torch's.
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
CASE = ModelCase(dtype=torch.float32, options=ROUTER, sizes=DROPOUT, sequence=24)
# No rank of the first stage has experts.
STAGES = replace(
    CASE,
    sizes={**DROPOUT, "pipeline_dtype": torch.float32, "moe_layer_freq": [0, 1, 0, 1]},
    pp=2,
)
WHOLE = replace(CASE, ep=4)
BF16 = replace(WHOLE, dtype=torch.bfloat16)
NOTHING = {True: [], False: ["no expert was trained"]}
KINDS = ["full_iteration", "local", "transformer_engine"]


class Collapsing(Training):
    """A training in which this rank's tokens all go to the same experts in some steps.

    Megatron's machine that validates results asks for each step and is told of each loss.
    """

    collapses = False

    def _change(self, chunk: Any) -> None:
        routers = [layer.mlp.router for layer in chunk.decoder.layers if is_moe(layer)]
        if routers:
            super()._change(chunk)
        for router in routers:
            router.register_forward_pre_hook(
                lambda router, args: collapse(router, args) if self.collapses else None
            )

    def _loss(self, padding: torch.Tensor | None, losses: torch.Tensor) -> tuple[Any, ...]:
        self.machine().validate_result(losses.mean(), torch.isnan, "loss")
        return super()._loss(padding, losses)

    def machine(self) -> Any:
        return rerun_state_machine.get_rerun_state_machine()

    def run(self, results: Results, step: int) -> None:
        """A step and an evaluation, with all that they leave behind."""
        machine = self.machine()
        while machine.should_run_forward_backward(None):
            results[f"losses {step}"] = self.gradients(step)
            calls = torch.tensor(list(machine.validation_counts.values()))
        results[f"calls {step}"] = calls
        self.optimizer.step()
        machine.set_mode(rerun_state_machine.RerunMode.DISABLED)
        results[f"evaluation {step}"] = self.evaluate(step)
        machine.set_mode(rerun_state_machine.RerunMode.VALIDATE_RESULTS)
        for part, chunk in enumerate(self.chunks):
            for name, buffer in chunk.named_buffers():
                results[f"{name} {part} {step}"] = buffer.clone()
        for name, entry in logged().items():
            values = entry["values"] if isinstance(entry, dict) else entry.values
            results[f"{name} {step}"] = values.clone()
            values.zero_()  # for the next step

    def everything(self) -> Results:
        """Also what our metrics have counted."""
        found = super().everything()
        for part, chunk in enumerate(self.chunks):
            for layer in filter(is_moe, chunk.decoder.layers):
                found[f"{part} {layer.layer_number}"] = layer.mlp.token_dispatcher._counts.take()
        return found


def collapse(router: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Let all tokens go to the same experts: the router sees zeros."""
    return (0 * args[0], *args[1:])


def replayed() -> Any:
    """Let calls be in static mode, as those of a CUDA graph that is replayed are."""
    return mock.patch.object(LayerEngines, "in_use", lambda engines: engines.engine)


def is_moe(layer: Any) -> bool:
    return hasattr(layer.mlp, "router")


def logged() -> dict[str, Any]:
    """What Megatron adds up for its log, by name."""
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        found: dict[str, Any] = moe_utils.get_moe_metrics_tracker().metrics
    else:
        found = moe_utils.get_moe_layer_wise_logging_tracker()
    return found


def results_of(
    ctx: RankContext, case: ModelCase, options: EpConfig, graphs: str = ""
) -> tuple[Results, Any, int]:
    """Train: all that the training leaves behind, the model's Reruns, and the number of replays."""
    case = replace(case, options={**case.options, "ncclep": options})
    validates = rerun_state_machine.RerunMode.VALIDATE_RESULTS
    rerun_state_machine.destroy_rerun_state_machine()  # another test's
    rerun_state_machine.initialize_rerun_state_machine(mode=validates)
    training = Collapsing(ctx, "ncclep", case)
    logged().clear()  # the next model may have more layers
    results: Results = {}
    with in_graphs(training, graphs) as captured:
        for step in range(STEPS):
            training.collapses = step in COLLAPSED and training.replica < case.ep
            training.run(results, step)
    rerun_state_machine.destroy_rerun_state_machine()
    reruns = getattr(training.wrapped[0], "_ncclep_reruns", None)
    return {**results, **training.everything()}, reruns, sum(g.replays for g in captured)


def watched_limits() -> Any:
    """Note each limit of the engines."""
    follow = LayerEngines.follow
    return mock.patch.object(LayerEngines, "follow", autospec=True, side_effect=follow)


class Graph:
    """Stands for a CUDA graph: a replay runs what was captured, in static mode whoever asks."""

    run: Callable[[], Any] | None = None
    replays = 0

    def register_generator_state(self, state: Any) -> None:
        """Random numbers of a CPU need no graph's."""

    def replay(self, *args: Any, **kwargs: Any) -> Any:
        self.replays += 1
        with replayed():
            return None if self.run is None else self.run(*args, **kwargs)


class Manager(cuda_graphs.CudaGraphManager if IS_RANK else object):  # type: ignore[misc]
    """Megatron's own graphs of a layer: the real one needs a GPU."""

    def __init__(self, graph: Graph) -> None:
        torch.nn.Module.__init__(self)
        self.func, self.graph = None, graph

    def __call__(self, module: Any, args: Any, kwargs: Any) -> Any:
        self.graph.run = partial(torch.nn.Module.__call__, module)
        return self.graph.replay(*args, **kwargs)


@contextmanager
def in_graphs(training: Collapsing, kind: str) -> Iterator[list[Graph]]:
    """Let stand-ins for CUDA graphs run the steps of a training, or its layers."""
    graphs: list[Graph] = []
    if kind == "full_iteration":
        with whole_iterations(training, graphs):
            yield graphs
        return
    for layer in training.chunks[0].decoder.layers if kind else ():
        graphs.append(Graph())
        if kind == "local":
            layer.cudagraph_manager = Manager(graphs[-1])
            continue
        layer.config = copy.copy(layer.config)
        layer.config.cuda_graph_impl = "transformer_engine"
        graphs[-1].run = layer.forward
        layer.cuda_graphs, layer._te_cuda_graph_replay = graphs[-1:], graphs[-1].replay
    yield graphs


@contextmanager
def whole_iterations(training: Collapsing, graphs: list[Graph]) -> Iterator[None]:
    """Let Megatron's wrapper capture the second step and the second evaluation."""
    full, original = full_cuda_graph.FullCudaGraphWrapper, training._schedule(False)

    def schedule(**arguments: Any) -> Any:
        if capturing:
            capturing.pop().run = partial(replayed, arguments, engines())
        return original(**arguments)

    def engines() -> list[Any]:
        return [layer.mlp.token_dispatcher.engine for layer in training.chunks[0].decoder.layers]

    def replayed(arguments: dict[str, Any], held: list[Any]) -> None:
        assert held == engines(), "a graph writes to memory of engines that were closed"
        stage = "validation" if arguments["forward_only"] else "training"
        if full.result[stage] is None or len(graphs) > len(done):  # the capture was a run
            done.append(stage)
            return
        batches = full_cuda_graph.StaticBufferLoader.static_buffers[stage]
        for kept, new in zip(
            full.result[stage],
            original(**{**arguments, "data_iterator": iter(batches)}),
            strict=True,
        ):
            kept["loss"].copy_(new["loss"])

    @contextmanager
    def capture(graph: Graph, **_: Any) -> Iterator[None]:
        graphs.append(graph)
        capturing.append(graph)
        yield

    capturing: list[Graph] = []
    done: list[str] = []
    training_model.clear_full_iteration()
    wrapper = full(schedule, cuda_graph_warmup_steps=1)
    stand_ins = {"CUDAGraph": Graph, "graph": capture, "graph_pool_handle": object}
    with mock.patch.multiple(torch.cuda, **stand_ins):
        training._schedule = lambda forward_only: wrapper
        yield
    training_model.clear_full_iteration()


@pytest.mark.supports(
    "--ncclep-on-overflow=rerun",
    "--ncclep-max-recv-rows=auto",
    "--ncclep-max-recv-gib",
    compared="losses, weights and all that steps leave behind with those of exact mode, to the bit",
)
@pytest.mark.parametrize(
    ("case", "kinds"),
    [(CASE, [""]), (STAGES, [""]), (BF16, [""]), (WHOLE, KINDS)],
    ids=["replicas", "stages", "bf16", "graphs"],
)
def test_bits(ctx: RankContext, case: ModelCase, kinds: list[str]) -> None:
    """Losses, weights, the optimizer's state, experts' biases, sums for the log, the counts of our
    metrics and those of Megatron's machine, where Megatron takes every path that it has.

    In bf16 the biases of experts were updated twice when the first step was run again: a router's
    first pass moves them to fp32, and only their old memory went back.
    """
    expected, _, _ = results_of(ctx, case, EXACT)
    for graphs in kinds:
        found, reruns, replays = results_of(ctx, case, RERUN, graphs)
        # Evaluations after such a step are collapsed too, and now and then one comes on its own.
        assert reruns.num_steps == 2 * STEPS
        assert 6 <= reruns.num_reruns <= 10, reruns.num_reruns
        assert bool(replays) == bool(graphs)
        trains = any("experts" in name for name in found)  # not in the first stage
        assert (problems := differences(found, expected)) == NOTHING[trains], (graphs, problems)
        assert gathered(ctx, reruns.num_reruns) == [reruns.num_reruns] * 4
    if kinds == KINDS:
        follow_the_limit(ctx, expected)


def follow_the_limit(ctx: RankContext, expected: Results) -> None:
    """Each limit has graphs of its own.  Steps whose tokens go to two ranks, twice a balanced load,
    raise it where there is memory for that, and four others lower it.
    """
    auto = replace(RERUN, max_recv_rows="auto")
    gib = 1.5 * 96 * 2 * HIDDEN * 4 / 2**30  # for 1.5 times a balanced load of an evaluation
    for options, kind in ((auto, "full_iteration"), (replace(auto, max_recv_gib=gib), "")):
        with mock.patch.object(limit, "WINDOW", 4), watched_limits() as follow:
            found, reruns, replays = results_of(ctx, WHOLE, options, kind)
        seen = [call.args[1] for call in follow.call_args_list]
        assert (problems := differences(found, expected)) == [], problems
        assert 3 <= reruns.num_reruns <= 12, reruns.num_reruns
        if kind:
            assert replays
            assert max(seen) > 2000 > min(seen)
        else:
            assert seen == [2300] * 2 + [1500] * 2, seen  # evaluations are longer, with less room
        assert gathered(ctx, seen) == [seen] * 4


def test_limit() -> None:
    """A limit is never more than 1.3 times the largest load of the last 100 steps, rows rarely do
    not fit, and graphs are rarely captured again.
    """
    follower, rng, loads, changes, reruns = FollowedLimit(), random.Random(1), [], 0, 0
    for step in range(5000):
        spike = rng.randrange(2000) if rng.random() < 0.002 else 0
        loads.append(int(1200 + 150 * math.sin(step / 500) + 50 * rng.random()) + spike)
        is_rerun, before = loads[-1] > follower.factor, follower.factor
        text = follower.after_step(loads[-1], is_rerun, MOST_LOAD, holds_graph=True)
        assert (text is not None) == (follower.factor != before)
        assert 1000 <= follower.factor <= 1.3 * max(loads[-100:])
        changes, reruns = changes + (text is not None), reruns + is_rerun
    assert changes <= 20
    assert reruns <= 20


def test_words_about_a_limit() -> None:
    for holds_graph, ceiling, factor in ((True, MOST_LOAD, 1840), (False, 1500, 1500)):
        follower = FollowedLimit()
        follower.after_step(1240, False, ceiling, holds_graph)
        if holds_graph:
            assert follower.after_step(1600, True, ceiling, holds_graph) is None
        text = follower.after_step(1600, True, ceiling, holds_graph)
        assert follower.factor == factor
        assert f"room for {factor / 1000:g} times a balanced load, after 1.25: the largest" in text
        assert ("max_recv_gib allows no more" in text) == (ceiling == 1500)
        assert ("is captured again" in text) == holds_graph
        texts = [follower.after_step(1200, False, ceiling, holds_graph) for _ in range(101)]
        assert follower.factor == (1380 if holds_graph else 1500)
        assert sum(text is not None for text in texts) == holds_graph


@pytest.mark.alone
def test_state(ctx: RankContext) -> None:
    """Everything goes back to its address: also scales of FP8, whose modules need a GPU, and what
    got other memory.  Only memory that cannot hold what was there is given up.
    """
    initialize(1)
    module = torch.nn.Linear(2, 2)
    module.register_buffer("steps", torch.ones(3))
    module.register_buffer("cache", None)
    meta = SimpleNamespace(scale=torch.ones(2), amax_history=torch.ones(4, 2))
    module.fp8_meta = {"scaling_fwd": meta, "recipe": object()}
    module.current_max_attn_logits = None
    module.register_buffer("expert_bias", torch.ones(2, dtype=torch.bfloat16))
    module.register_buffer("rounded", torch.full((2,), 1 + 2**-20))
    module.register_buffer("longer", torch.ones(2))
    tensors = [module.steps, meta.scale, meta.amax_history]
    snapshot = Snapshot(ModelState([module]))
    drawn = [torch.rand(1), random.random(), numpy.random.rand()]
    for tensor in tensors:
        tensor.mul_(2)
    for buffer, data in (
        (module.expert_bias, torch.zeros(2)),
        (module.rounded, torch.zeros(2, dtype=torch.bfloat16)),
        (module.longer, torch.zeros(3)),
    ):
        buffer.data = data
    fp32 = module.expert_bias.data_ptr()
    made = SimpleNamespace(scale=2 * torch.ones(2), amax_history=torch.ones(4, 2))
    module.fp8_meta["scaling_bwd"] = made
    module.steps, module.cache = torch.zeros(3), torch.zeros(3)
    module.current_max_attn_logits = torch.zeros(3)
    snapshot.restore()
    assert [torch.rand(1), random.random(), numpy.random.rand()] == drawn
    assert module.cache is module.current_max_attn_logits is None
    assert module.steps is tensors[0]
    assert all(bool((tensor == 1).all()) for tensor in (*tensors, made.scale, module.expert_bias))
    assert not made.amax_history.any()
    assert module.expert_bias.data_ptr() == fp32
    assert module.rounded.tolist() == [1 + 2**-20] * 2
    assert module.longer.tolist() == [1, 1]


@pytest.mark.alone
def test_loads(ctx: RankContext) -> None:
    """A load has the dropped assignments in it: a rank whose rows did not fit has more than any.
    The widest layer limits the room of all.
    """
    initialize(1)
    gib = 2**-20
    options = replace(RERUN, max_recv_rows="auto", max_recv_gib=gib)
    layers = [
        build_layer(make_config("ncclep", torch.float32, 1, hidden_size=hidden, ncclep=options))
        for hidden in (HIDDEN, 4 * HIDDEN, 2 * HIDDEN)
    ]
    for layer in layers:
        layer(torch.randn(SEQUENCE, BATCH, layer.config.hidden_size))
    state = ModelState(torch.nn.ModuleList(layers))
    balanced = SEQUENCE * BATCH * 2
    load, most = state.take_loads()
    assert (load, most) == (1000, int(1000 * gib * 2**30 / (balanced * 4 * HIDDEN * 4)))
    engines = state.engines[0]
    plan = SimpleNamespace(num_tokens=SEQUENCE * BATCH, top_k=2, counts=torch.tensor([4, 4, 30]))
    engines.record_load(plan, torch.zeros(1, HIDDEN))
    assert state.take_loads() == (math.ceil(1000 * 34 / balanced), most)
    assert state.take_loads() == (0, most)
    for each in state.engines:
        each.close()


def test_a_rank_that_dies_in_a_rerun(megatron_pool: RankPool) -> None:
    """The others raise a PeerError, as in any other step."""
    with pytest.raises(RankError, match=r"(?s)rank 1 .*PeerError: .*rank 1") as caught:
        megatron_pool.run(die_in_a_rerun, timeout=120)
    assert str(caught.value).count("PeerError: rank") == 3


def die_in_a_rerun(ctx: RankContext) -> None:
    # Without Megatron's own collectives before the layer's, whose deadlines are not ours.
    case = replace(WHOLE, options={"ncclep": RERUN})
    training = Collapsing(ctx, "ncclep", case, distributed=False)
    training.collapses = True
    if ctx.rank == 1:
        training.wrapped[0].zero_grad_buffer = partial(os._exit, 1)
    training._run(0, training.case.sequence, forward_only=False)
