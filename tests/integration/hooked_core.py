"""What test_hook_points.py checks in a process of its own, with a Megatron-Core of its choice.

The hooks are in place before this is imported, and the CPU is enabled.  Every check is an assert.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import inspect
import pickle
import re
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import megatron.core.transformer.moe.moe_layer as layer_module
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from schedule_case import differences, train_on_schedule
from torch.optim import optimizer as torch_optimizer

import megatron_ncclep
from megatron_ncclep import EpConfig
from megatron_ncclep.benchmark import train_graphs
from megatron_ncclep.errors import (
    EngineUnavailableError,
    GroupClosedError,
    InputError,
    PeerError,
    UnsupportedError,
)
from megatron_ncclep.integration import hooks
from megatron_ncclep.integration.patching import is_changed
from megatron_ncclep.ranks.group import EpGroup

OPTIONS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_moe_experts": 2,
    "add_bias_linear": False,
}


@dataclasses.dataclass
class LaterConfig(TransformerConfig):
    """A user's own, with a constructor that dataclasses makes, and a __post_init__ of its own."""

    extra: int = 3

    def __post_init__(self):
        super().__post_init__()
        self.extra += 1


def has(name):
    """Whether this release has megatron/`name`: what can be imported may be of one beside it."""
    return (Path(megatron.core.__file__).parents[1] / name).exists()


def check_places():
    """The places are changed; the value is accepted and stays."""
    assert is_changed(layer_module.MoELayer.__init__)
    assert is_changed(TransformerConfig.__post_init__)
    assert is_changed(parallel_state.destroy_model_parallel)
    made = TransformerConfig(moe_token_dispatcher_type="ncclep", **OPTIONS)
    assert made.moe_token_dispatcher_type == "ncclep"
    hooks.install()


def check_options_field():
    """A copy keeps its options, whoever makes it; nothing else about configs changes."""
    own = EpConfig(alignment=16)
    for kind in (TransformerConfig, MLATransformerConfig, LaterConfig):
        made = kind(moe_token_dispatcher_type="ncclep", **OPTIONS)
        assert made.ncclep is None
        same = copy.copy(made)
        made.ncclep = own
        assert made == same
        assert repr(made) == repr(same)
        for copied in (
            dataclasses.replace(made),
            dataclasses.replace(dataclasses.replace(made, num_layers=2), layernorm_epsilon=1e-3),
            copy.copy(made),
            copy.deepcopy(made),
            pickle.loads(pickle.dumps(made)),
        ):
            assert type(copied) is kind
            assert copied.ncclep == own
            assert copied.moe_token_dispatcher_type == "ncclep"
        # By position the constructors take what they always took.
        *others, last = inspect.signature(kind).parameters.values()
        assert (last.name, last.kind) == ("ncclep", inspect.Parameter.KEYWORD_ONLY)
        assert kind(*(getattr(made, other.name) for other in others)).num_moe_experts == 2
        assert dataclasses.replace(made, ncclep=EpConfig(alignment=32)).ncclep.alignment == 32
        assert kind(ncclep=own, **OPTIONS).ncclep is own
        from_dict = kind(**{**OPTIONS, "ncclep": dataclasses.asdict(made)["ncclep"]})
        hooks.resolve_options(from_dict)
        assert from_dict.ncclep == own
        from_dict.ncclep = "reference"
        with pytest.raises(InputError, match=r"'reference': give it a megatron_ncclep\.EpConfig"):
            hooks.resolve_options(from_dict)
    assert LaterConfig(extra=5, **OPTIONS).extra == 6


def check_options_of_the_process():
    """Those of `install` show through where a config has none, copies included, also later."""
    kinds = (TransformerConfig, MLATransformerConfig, LaterConfig)
    before = [kind(**OPTIONS) for kind in kinds]
    for alignment in (16, 32):
        megatron_ncclep.install(alignment=alignment)
        for made in [*before, *(kind(**OPTIONS) for kind in kinds)]:
            for config in (made, dataclasses.replace(made), copy.deepcopy(made)):
                hooks.resolve_options(config)
                assert config.ncclep.alignment == alignment
    own = dataclasses.replace(TransformerConfig(ncclep=EpConfig(alignment=64), **OPTIONS))
    assert own.ncclep.alignment == 64
    TransformerConfig.ncclep = None


def check_command_line():
    """The options are offered, each once; the field is not turned into an argument."""
    import megatron.training.arguments as arguments

    assert is_changed(arguments.parse_args)
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    action = next(a for a in parser._actions if a.dest == "moe_token_dispatcher_type")
    assert {"ncclep", "alltoall"} <= set(action.choices)
    assert "--ncclep-num-sms" in parser.format_help()
    assert not any(action.dest == "ncclep" for action in parser._actions)
    assert "ncclep" in TransformerConfig.__dataclass_fields__


def build_layer(dispatcher):
    """One MoELayer over this process alone."""
    config = TransformerConfig(
        moe_token_dispatcher_type=dispatcher, use_cpu_initialization=True, **OPTIONS
    )
    spec = get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False).submodules.mlp
    # A ModuleSpec in old versions, a functools.partial of MoELayer in new ones.
    submodules = spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]
    return layer_module.MoELayer(config, submodules=submodules, layer_number=1)


def check_text_of_a_refusal():
    """Megatron's build_module made two errors of one, and ended it with "leave it out: shared
    experts run before the dispatch, with the same result when instantiating TransformerLayer".
    Users saw it; the tests of refusals built a layer without a model around it.
    """
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        moe_token_dispatcher_type="ncclep", use_cpu_initialization=True, **OPTIONS
    )
    config.moe_paged_stash = True
    spec = get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False)
    with pytest.raises(UnsupportedError) as caught:
        GPTModel(config, spec, vocab_size=16, max_sequence_length=8)
    assert re.search(
        r"=True: leave it out[\w ,:'-]+ \(while building (MoELayer in )?"
        r"TransformerLayer\)$",
        str(caught.value),
    )
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("does not support") == 1 + printed.count('f"moe_token_dispatcher_type=')
    assert "another exception" not in printed


def check_text_of_an_engine_that_cannot_run():
    """The same of an engine that cannot run, which users saw twice too."""
    config = TransformerConfig(
        moe_token_dispatcher_type="ncclep",
        use_cpu_initialization=True,
        ncclep=EpConfig(engine="native"),
        **OPTIONS,
    )
    spec = get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False)
    with pytest.raises(EngineUnavailableError) as caught:
        GPTModel(config, spec, vocab_size=16, max_sequence_length=8)
    printed = "".join(traceback.format_exception(caught.value))
    assert printed.count("needs GPUs") == 1
    assert re.search(r" \(while building (MoELayer in )?TransformerLayer\)\n$", printed)
    assert "another exception" not in printed


def check_counts_of_experts():
    """Experts get the numbers of their rows where they take them."""
    from megatron.core.transformer.moe import experts

    for attribute, wanted in (
        (None, (False, True)),
        ("takes_counts_on_device", (True, False)),
        ("_with_fused_impl", (True, True)),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if attribute is not None:
                patch.setattr(experts.SequentialMLP, attribute, True, raising=False)
            dispatcher = build_layer("ncclep").token_dispatcher
        assert (dispatcher._counts_on_device, dispatcher._counts_add_up) == wanted
    # Where Megatron's own experts take them on the device, they say so with this attribute.
    source = inspect.getsource(experts.TEGroupedMLP.forward)
    has_fuser = "use_transformer_engine_op_fuser" in TransformerConfig.__dataclass_fields__
    assert ("if self._with_fused_impl:" in source) == has_fuser


def check_overlapped_schedule():
    """Two micro-batches overlapped give the bits of one after the other."""
    rank = SimpleNamespace(device="cpu", rank=0)
    eager = train_on_schedule(rank, "ncclep", 1, {})
    # Megatron wants it to be more than one.
    overlapped = {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2}
    found = train_on_schedule(rank, "ncclep", 1, overlapped)
    assert differences(found, eager) == []


class Planted:
    """What engines share, with a failure on the device that no call has raised yet."""

    failed = False
    times_asked = 0

    def check(self):
        self.times_asked += 1
        if self.failed:
            raise PeerError("rank 0 of 1: rank 1 did not come (planted)")

    def close(self):
        """Nothing to give back."""


def check_before_steps():
    """No optimizer steps after a failure; no hook where no layer has our dispatcher."""
    build_layer("alltoall")
    assert not torch_optimizer._global_optimizer_pre_hooks
    build_layer("ncclep")
    layer = build_layer("ncclep")
    assert len(torch_optimizer._global_optimizer_pre_hooks) == 1
    planted = EpGroup.of(layer.token_dispatcher.ep_group).share("planted", Planted)
    for distributed in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            model = DistributedDataParallel(
                layer.config,
                DistributedDataParallelConfig(use_distributed_optimizer=distributed),
                build_layer("ncclep").to(dtype),
            )
            config = OptimizerConfig(
                optimizer="adam",
                lr=0.1,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=distributed,
            )
            optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=False)
            check_optimizer(optimizer, model, planted)
            if (distributed, dtype) == (False, torch.float32):
                groups = ProcessGroupCollection.use_mpu_process_groups()
                chained = list(optimizer.chained_optimizers)
                layer_wise = LayerWiseDistributedOptimizer(chained, config, groups)
                check_optimizer(layer_wise, model, planted)
    model = torch.nn.Linear(2, 2)
    check_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, planted)


def check_optimizer(optimizer, model, planted):
    """A step with a failure raises it and changes no weight; one without does."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.fill_(1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    planted.failed = True
    with pytest.raises(PeerError, match="planted"):
        optimizer.step()
    after = list(model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    planted.failed = False
    asked = planted.times_asked
    optimizer.step()
    # A chained optimizer holds one for the experts and one for the rest.
    assert 1 <= planted.times_asked - asked <= 2
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def check_optimizer_graphs():
    """The wrapper of a captured step asks too."""
    from megatron.core.optimizer import optimizer_cuda_graph

    assert is_changed(optimizer_cuda_graph.OptimizerCudaGraphWrapper.__call__)
    planted = EpGroup.of(parallel_state.get_expert_model_parallel_group()).share("planted", Planted)
    steps = []
    step = optimizer_cuda_graph.OptimizerCudaGraphWrapper(
        lambda: steps.append(1), cuda_graph_warmup_steps=99
    )
    planted.failed = True
    with pytest.raises(PeerError, match="planted"):
        step()
    assert not steps
    planted.failed = False
    step()
    assert steps


def check_graphs_of_the_benchmark():
    """`ncclep bench` asks for CUDA graphs by names that change, and clears what classes keep."""
    from megatron.core import full_cuda_graph
    from megatron.core.num_microbatches_calculator import (  # noqa: F401
        init_num_microbatches_calculator,
        unset_num_microbatches_calculator,
    )
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    moe = {**OPTIONS, "moe_token_dispatcher_type": "alltoall"}
    whole = TransformerConfig(**moe, **train_graphs.graph_fields("full_iteration"))
    parts = TransformerConfig(**moe, **train_graphs.graph_fields("partial_graphs"))
    assert parts.cuda_graph_impl == "transformer_engine"
    held = "cuda_graph_modules" if hasattr(parts, "cuda_graph_modules") else "cuda_graph_scope"
    assert [part.name for part in getattr(parts, held)] == list(train_graphs.PARTS)
    asked = [whole.cuda_graph_impl, *(part.name for part in getattr(whole, held))]
    assert asked in (["full_iteration"], ["local", "full_iteration"])
    wanted = {"model", "config", "seq_length", "micro_batch_size", "optimizers"}
    assert wanted <= set(inspect.signature(TECudaGraphHelper).parameters)
    for name in ("create_cudagraphs", "delete_cuda_graphs"):
        assert callable(getattr(TECudaGraphHelper, name))

    wrapper, loader = full_cuda_graph.FullCudaGraphWrapper, full_cuda_graph.StaticBufferLoader
    loader()({"tokens": torch.zeros(2)}, "training", 0)
    wrapper.cuda_graph["training"] = wrapper.result["training"] = object()
    wrapper.curr_iteration["training"] = 3
    train_graphs.clear_full_iteration()
    assert loader.static_buffers == {"training": [], "validation": []}
    assert wrapper.cuda_graph == wrapper.result == {"training": None, "validation": None}
    assert wrapper.curr_iteration == {"training": 0, "validation": 0}


class Ending:
    """What engines share; notes whether Megatron still has its groups when it goes, and how."""

    def __init__(self, ended):
        self.ended = ended

    def close(self, how="close"):
        self.ended.append((how, parallel_state.model_parallel_is_initialized()))

    def abort(self):
        self.close("abort")


def check_rebuilding():
    """Our groups are closed before Megatron forgets its own; after an error, without waiting."""
    for how in ("close", "abort"):
        layer, ended = build_layer("ncclep"), []
        other = torch.distributed.new_group([0])
        for process_group in (
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_and_model_parallel_group(),
            other,
        ):
            EpGroup.of(process_group).share("ending", lambda ended=ended: Ending(ended))
        if how == "close":
            parallel_state.destroy_model_parallel()
        else:
            try:
                raise ZeroDivisionError
            except ZeroDivisionError:
                parallel_state.destroy_model_parallel()
        assert ended == [(how, True)] * 2, "and the one that is not Megatron's stays"
        with pytest.raises(GroupClosedError, match=r"build the model\) again"):
            layer(torch.zeros(1, 1, 8))
        parallel_state.destroy_model_parallel()  # there is nothing any more
        megatron_ncclep.close(other)
        assert ended[2:] == [("close", False)]
        parallel_state.initialize_model_parallel()


def check_all():
    """Check what this version has."""
    check_places()
    check_options_field()
    check_options_of_the_process()
    if has("training"):
        check_command_line()
    check_text_of_a_refusal()
    check_before_steps()
    check_text_of_an_engine_that_cannot_run()
    check_counts_of_experts()
    check_graphs_of_the_benchmark()
    name = "megatron.core.optimizer.optimizer_cuda_graph"
    assert (find_spec(name) is None) == megatron.core.__version__.startswith("0.16")
    if find_spec(name) is not None:
        check_optimizer_graphs()
    check_rebuilding()
    check_overlapped_schedule()
