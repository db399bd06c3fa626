"""CUDA graphs: which are refused, and that those that are accepted can be replayed.

Refusals need no GPU.  A replay runs none of the Python code; neither does `Replayed`, on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_setup import initialize
from megatron_setup import make_config as small_config
from on_ranks import IS_RANK
from rank_pool import RankContext

import megatron_ncclep
from benchmarks import training_model
from megatron_ncclep import EpConfig, engines
from megatron_ncclep.engines.reference.engine import ReferenceEngine
from megatron_ncclep.errors import GroupClosedError, RowsDroppedError, UnsupportedError
from megatron_ncclep.integration.checks.cuda_graphs import flags_tell_of_the_step
from megatron_ncclep.integration.experts.layer_experts import need_no_host
from megatron_ncclep.ranks.group import EpGroup

pytestmark = [pytest.mark.alone, pytest.mark.each_release]

if IS_RANK:
    import megatron.core
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import cuda_graphs
    from megatron.core.transformer.module import GraphableMegatronModule
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

    OLD = megatron.core.__version__.startswith(("0.16", "0.17"))
    MODULES = "cuda_graph_scope" if OLD else "cuda_graph_modules"
    FULL_ITERATION = (
        {"cuda_graph_impl": "local", MODULES: ["full_iteration"]}
        if OLD
        else {"cuda_graph_impl": "full_iteration", MODULES: []}
    )

# To the bit.
assert_close = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
PARTS = ["attn", "moe_router", "moe_preprocess"]
EXACT = EpConfig(engine="reference", experts="megatron")
STATIC = dataclasses.replace(EXACT, max_recv_rows=64)
CAPTURABLE = EpConfig(engine="capturable", experts="grouped", max_recv_rows=64)
FOLLOWING = dataclasses.replace(CAPTURABLE, max_recv_rows="auto", on_overflow="rerun")
MADE: list[ReferenceEngine] = []
CAPACITY = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}


def made(group: EpGroup, num_experts: int, config: EpConfig) -> ReferenceEngine:
    """An engine, "capturable" or not, that says whether a CUDA graph can hold its calls."""
    engine = ReferenceEngine(group, num_experts, config)
    captures = config.engine == "capturable"
    engine.caps = dataclasses.replace(engine.caps, name=config.engine, captures_static=captures)
    MADE.append(engine)
    return engine


@contextmanager
def engines_with_graphs() -> Iterator[None]:
    """Set Megatron up with two more engines, and a manager of graphs that needs no GPU."""
    initialize(1)
    entry = dataclasses.replace(engines.ENGINES["reference"], build=made)
    more = dict.fromkeys(("capturable", "uncapturable"), entry)
    manager = mock.patch.object(cuda_graphs, "CudaGraphManager", Manager)
    with mock.patch.dict(engines.ENGINES, more), manager:
        yield
        EpGroup.of(parallel_state.get_expert_model_parallel_group()).close()


class Manager(torch.nn.Module):
    """Stands for CudaGraphManager: a GPU is what that one needs first."""

    def __init__(self, config: Any, base_module: Any = None, function_name: str | None = None):
        super().__init__()
        if base_module is not None and function_name is not None:
            setattr(base_module, function_name, Replayed(base_module, function_name))


class Replayed:
    """Calls a method of a layer, and leaves no trace in Python of what its dispatcher did.

    So it is when a CUDA graph of that method is replayed: only its results are new, and tensors
    into which it copies.
    """

    def __init__(self, layer: Any, method: str, *, capturing: bool = False) -> None:
        self.layer, self.method, self.capturing = layer, getattr(layer, method), capturing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dispatcher = self.layer.mlp.token_dispatcher
        before = dict(vars(dispatcher))
        if self.capturing:
            kwargs.pop("is_first_microbatch")  # TransformerEngine's
            cuda_graphs._set_capture_start()
        try:
            return self.method(*args, **kwargs)
        finally:
            if self.capturing:
                cuda_graphs._set_capture_end()
            names = dispatcher.valid_cudagraph_attrs  # kept when the graph is captured
            vars(dispatcher).clear()
            vars(dispatcher).update(before, valid_cudagraph_attrs=names)


def make_config(graphs: dict[str, Any], ncclep: EpConfig | None, **options: Any) -> Any:
    """A config of one layer with `graphs`."""
    sizes = {"num_layers": 1, "num_moe_experts": 4, "moe_shared_expert_intermediate_size": 16}
    dispatcher = "alltoall" if ncclep is None else "ncclep"
    return small_config(dispatcher, torch.float32, 1, ncclep=ncclep, **sizes, **graphs, **options)


def build(config: Any, kind: type | None = None) -> Any:
    """One layer over this process alone, all experts different."""
    spec = get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False)
    torch.manual_seed(1)
    spec = dataclasses.replace(spec, module=kind or TransformerLayer)
    layer = build_module(spec, config=config, layer_number=1)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.3 * torch.randn(parameter.shape))
    return layer


def te(*modules: str) -> dict[str, Any]:
    return {"cuda_graph_impl": "transformer_engine", MODULES: list(modules)}


def local(*modules: str) -> dict[str, Any]:
    return {"cuda_graph_impl": "local", MODULES: list(modules)}


EXACT_MODE = "set max_recv_rows .* or capture attn, moe_router and moe_preprocess only"
HOST_EXPERTS = "SequentialMLP reads on the host .*--ncclep-experts grouped"
UNCAPTURABLE = "engine 'uncapturable' cannot be captured; choose engine 'native'"
AGREED = "the ranks' hosts agree on .* set it .*, or capture attn and moe_router only"
Rule = tuple[dict[str, Any], EpConfig, dict[str, Any], Any, "str | None"]


def rules() -> list[Rule]:
    """Graphs, options of ours, of Megatron's, class of the layer, and the refusal, or None where
    they work.
    """
    return [
        (te(*PARTS), EXACT, {}, TransformerLayer, None),
        (te("attn"), EXACT, {}, TransformerLayer, None),
        (te("attn", "moe_router"), EXACT, CAPACITY, TransformerLayer, None),
        (te(*PARTS), STATIC, {}, TransformerLayer, None),
        (te(), CAPTURABLE, {}, TransformerLayer, None),
        (FULL_ITERATION, CAPTURABLE, {}, TransformerLayer, None),
        (local(), CAPTURABLE, {}, TransformerLayer, None),
        (local("attn"), CAPTURABLE, {}, TransformerLayer, None),
        (te(*PARTS), STATIC, CAPACITY, TransformerLayer, None),
        (te("attn", "moe"), CAPTURABLE, CAPACITY, TransformerLayer, None),
        (local("moe"), CAPTURABLE, CAPACITY, MoETransformerLayer, None),
        (local(*PARTS), EXACT, {}, MoETransformerLayer, None),
        (te(), EXACT, {}, TransformerLayer, EXACT_MODE),
        (te(), FOLLOWING, {}, TransformerLayer, "would keep the limit .* set a factor, or capture"),
        (te(), STATIC, {}, TransformerLayer, HOST_EXPERTS),
        (FULL_ITERATION, EXACT, {}, TransformerLayer, EXACT_MODE),
        (local(), STATIC, {}, TransformerLayer, HOST_EXPERTS),
        (local(), EXACT, {}, MoETransformerLayer, EXACT_MODE),
        # Of a TransformerLayer Megatron captures all with attn, and nothing else changes that.
        (local("attn"), EXACT, {}, TransformerLayer, EXACT_MODE),
        (local(*PARTS), EXACT, {}, TransformerLayer, EXACT_MODE),
        (te("attn", "moe"), EXACT, CAPACITY, TransformerLayer, EXACT_MODE),
        (te("attn", "moe"), STATIC, CAPACITY, TransformerLayer, HOST_EXPERTS),
        (te(*PARTS), EXACT, CAPACITY, TransformerLayer, AGREED),
        (local("moe_router"), EXACT, CAPACITY, MoETransformerLayer, AGREED),
    ]


@engines_with_graphs()
def test_rules(ctx: RankContext) -> None:
    """Each combination is accepted, or refused when the layer is built, with the way out."""
    for graphs, ncclep, options, kind, refusal in rules():
        what = f"{graphs} {ncclep.engine} {ncclep.max_recv_rows} {options} {kind.__name__}"
        config = make_config(graphs, ncclep, **options)
        if refusal is None:
            assert build(config, kind).mlp.token_dispatcher.engine.config == ncclep, what
            continue
        impl = f"cuda_graph_impl={graphs['cuda_graph_impl']!r} with {MODULES}="
        with pytest.raises(UnsupportedError, match=refusal) as caught:
            build(config, kind)
        assert impl in str(caught.value), what
        assert all(repr(name) in str(caught.value) for name in graphs[MODULES]), what
    # The last thing to be asked for: an engine.  The one made for the layer is not kept.
    ncclep = dataclasses.replace(CAPTURABLE, engine="uncapturable")
    for graphs in (te(), FULL_ITERATION, local()):
        with pytest.raises(UnsupportedError, match=UNCAPTURABLE):
            build(make_config(graphs, ncclep))
        with pytest.raises(GroupClosedError):
            MADE[-1].plan(torch.zeros(1, 1, dtype=torch.int64))


def train(layer: Any, lengths: tuple[int, ...] = (6, 9, 6)) -> list[torch.Tensor]:
    """Micro-batches of 6 tokens with other sizes evaluated between them; outputs and gradients."""
    results = []
    for seed, length in enumerate(lengths):
        layer.train(length == 6)
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(length, 2, 16, generator=generator, requires_grad=True)
        mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
        with torch.set_grad_enabled(layer.training):
            out, _ = layer(hidden_states=hidden, attention_mask=mask)
        results.append(out.detach())
        if layer.training:
            (out * torch.randn(out.shape, generator=generator)).sum().backward()
            results.append(hidden.grad)
    return [*results, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize(
    ("attribute", "place", "question"),
    [
        ("_with_fused_impl", "ops.basic", "is_op_fuser_grouped_tensor_path_supported"),
        ("_use_grouped_tensor", "module", "is_module_grouped_tensor_path_supported"),
    ],
)
def test_kernels_that_read_counts(
    ctx: RankContext, attribute: str, place: str, question: str
) -> None:
    """TransformerEngine's op fuser reads the counts where TransformerEngine says so, if it does;
    and so do its grouped tensors.
    """
    experts = SimpleNamespace(**{attribute: True})
    config = SimpleNamespace(
        params_dtype=torch.bfloat16, add_bias_linear=False, moe_single_grouped_bias=True
    )
    name = f"transformer_engine.pytorch.{place}.grouped_linear"
    with pytest.MonkeyPatch.context() as patch:
        has_kernels = {question: lambda recipe, dtype: dtype == torch.bfloat16}
        patch.setitem(sys.modules, name, SimpleNamespace(**has_kernels))
        assert need_no_host(experts, config)
        config.params_dtype = torch.float32
        assert not need_no_host(experts, config)
        config.params_dtype = torch.bfloat16
        config.add_bias_linear, config.moe_single_grouped_bias = True, False
        # Grouped tensors add a bias for each expert to rows split on the host.
        assert need_no_host(experts, config) == (place != "module")
        patch.setitem(sys.modules, name, SimpleNamespace())  # of older releases
        assert not need_no_host(experts, config)


@engines_with_graphs()
def test_rules_of_configs(ctx: RankContext) -> None:
    """What Megatron would refuse when a config is made, with reasons that are `alltoall`'s."""
    leave_empty, training = "'moe'.*leave .* empty", "this dispatcher is for training"
    refused: list[tuple[dict[str, Any], str]] = [
        (local("moe"), leave_empty),
        ({**te(), MODULES: "attn,moe"}, leave_empty),
        ({"external_cuda_graph": True, MODULES: ["moe"]}, leave_empty),
        ({**te(*PARTS), "moe_expert_capacity_factor": 2.0}, "factor=2.0.*leave the factor out"),
    ]
    if not megatron.core.__version__.startswith("0.16"):
        refused.append((local("full_iteration_inference"), training))
    if not OLD:
        refused.append(({**local(), "inference_cuda_graph_scope": "block"}, training))
        refused.append(({"cuda_graph_impl": "local", "cuda_graph_scope": "moe"}, leave_empty))
    for graphs, reason in refused:
        with pytest.raises(UnsupportedError, match=reason):
            make_config(graphs, EXACT)
    # Without graphs the modules mean nothing, and other dispatchers have Megatron's own rules.
    make_config({"cuda_graph_impl": "none", MODULES: ["moe"]}, EXACT)
    make_config({**te("attn", "moe"), **CAPACITY}, None)
    # Where DDP does not reset a gradient's flags, they do not tell of the step.
    for graphs, tell in (({}, True), (FULL_ITERATION, True), (local("attn"), False), (te(), False)):
        assert flags_tell_of_the_step(make_config(graphs, EXACT)) is tell


@pytest.mark.supports(
    *(f"cuda_graph_modules={name}" for name in PARTS),
    compared="outputs and all gradients with those without graphs, to the bit, where stand-ins for "
    "graphs leave out what a replay leaves out",
)
@engines_with_graphs()
def test_replays(ctx: RankContext) -> None:
    """What the dispatcher keeps between its hooks comes through a graph that ends between them.

    The shape of the hidden states was kept when `dispatch_preprocess` ran.  In a replay it does
    not, and after an evaluation of another size the shape was that one's.
    """
    for recompute in ({}, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}):
        expected = train(build(make_config({}, EXACT, **recompute)))
        assert any(bool(value.any()) for value in expected)
        for modules in (["attn"], ["moe_router"], ["attn", "moe_router"], PARTS, PARTS[1:]):
            if recompute and "moe_router" in modules:
                continue  # Megatron's own rule
            layer = build(make_config(te(*modules), EXACT, **recompute))
            layer.cuda_graphs = [Replayed(layer, "_te_cuda_graph_capture", capturing=True)]
            # The layer's own asks for TransformerEngine, to make up a mask where there is none.
            arguments = GraphableMegatronModule._get_te_cuda_graph_replay_args
            layer._get_te_cuda_graph_replay_args = functools.partial(arguments, layer)
            assert_close(train(layer), expected, msg=f"{modules} {recompute}")
        # Its evaluations are replays too, so all sizes must be the same.
        layer = build(make_config(local("moe_router"), EXACT, **recompute), MoETransformerLayer)
        eager = build(make_config({}, EXACT, **recompute))
        same = (6, 6, 6)
        assert_close(train(layer, same), train(eager, same), msg=f"local {recompute}")


@engines_with_graphs()
def test_warmups(ctx: RankContext) -> None:
    """Dropped rows are counted, except when a layer runs before it is captured in a CUDA graph.

    TransformerEngine captures layers with ones for hidden states, so that all tokens go to the same
    experts.  With on_overflow="raise" no optimizer would have stepped after that.
    """
    for on_overflow in ("drop", "raise"):
        options = EpConfig(engine="reference", max_recv_rows=16, on_overflow=on_overflow)
        layer = build(make_config({}, options)).mlp
        hidden = torch.ones(12, 1, 16)
        cuda_graphs._set_capture_start()
        layer(hidden)
        cuda_graphs._set_capture_end()
        megatron_ncclep.check()
        assert layer.token_dispatcher.num_dropped == 0
        layer(hidden)
        assert layer.token_dispatcher.num_dropped == 8
        with pytest.raises(RowsDroppedError) if on_overflow == "raise" else nullcontext():
            megatron_ncclep.check()
        layer.token_dispatcher.engine.close()


def test_graphs_of_the_benchmark(ctx: RankContext) -> None:
    """`ncclep bench` asks for CUDA graphs by names that change, and clears what classes keep."""
    initialize(1)
    from megatron.core import full_cuda_graph
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    whole = make_config(training_model.graph_fields("full_iteration"), None)
    parts = make_config(training_model.graph_fields("partial_graphs"), None)
    assert parts.cuda_graph_impl == "transformer_engine"
    assert [part.name for part in getattr(parts, MODULES)] == list(training_model.PARTS)
    asked = [whole.cuda_graph_impl, *(part.name for part in getattr(whole, MODULES))]
    assert asked in (["full_iteration"], ["local", "full_iteration"])
    wanted = {"model", "config", "seq_length", "micro_batch_size", "optimizers"}
    assert wanted <= set(inspect.signature(TECudaGraphHelper).parameters)
    for name in ("create_cudagraphs", "delete_cuda_graphs"):
        assert callable(getattr(TECudaGraphHelper, name))

    wrapper, loader = full_cuda_graph.FullCudaGraphWrapper, full_cuda_graph.StaticBufferLoader
    loader()({"tokens": torch.zeros(2)}, "training", 0)
    wrapper.cuda_graph["training"] = wrapper.result["training"] = object()
    wrapper.curr_iteration["training"] = 3
    training_model.clear_full_iteration()
    assert loader.static_buffers == {"training": [], "validation": []}
    assert wrapper.cuda_graph == wrapper.result == {"training": None, "validation": None}
    assert wrapper.curr_iteration == {"training": 0, "validation": 0}
