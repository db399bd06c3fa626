"""Megatron-Bridge: one override selects our dispatcher in its recipes.

Some tests call stand-ins for the functions that we patch.  Where Megatron-Bridge is installed (`pip
install --no-deps megatron-bridge`, hydra-core), another uses its own modules that do not need
TransformerEngine, without any `__init__`.  tests/gpu/test_gpu_bridge.py trains recipes.
"""

from __future__ import annotations

import importlib
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from installed_bridge import PACKAGE, needs_bridge, without_init
from megatron_setup import initialize, moe_submodules
from rank_pool import RankContext
from test_field import OPTIONS

from megatron_ncclep.errors import InputError
from megatron_ncclep.integration import hooks
from megatron_ncclep.ranks.group import EpGroup

pytestmark = pytest.mark.alone


class CommOverlapConfig:
    """Checks the dispatcher's type as Megatron-Bridge's class does."""

    def setup(self, model_config: Any, optimizer_config: Any = None) -> None:
        model_config.seen = model_config.moe_token_dispatcher_type
        assert model_config.seen in ["alltoall", "flex"]


def apply_moe_token_drop(model_provider: Any, moe_expert_capacity_factor: float = 1.0) -> Any:
    assert model_provider.moe_token_dispatcher_type in ("alltoall", "alltoall_seq")
    return model_provider


def parse_hydra_overrides(cfg: Any, overrides: list[str]) -> list[str]:
    return overrides


def config_of(kind: str) -> Any:
    return SimpleNamespace(moe_token_dispatcher_type=kind)


def changed(name: str, **contents: Any) -> Any:
    """A module of that name with our patches, which are applied twice."""
    module = ModuleType(f"{PACKAGE}.{name}")
    vars(module).update(contents)
    for _ in range(2):
        hooks.change_module(module)
    return module


def test_the_places() -> None:
    """`CommOverlapConfig(overlap_moe_expert_parallel_comm=True)` and token drop asserted that the
    type is one of Megatron's; users had to give up these features or our dispatcher.
    """
    overlap = changed(
        "training.comm_overlap", CommOverlapConfig=type("C", (CommOverlapConfig,), {})
    )
    drop = changed("training.utils.moe_token_drop", apply_moe_token_drop=apply_moe_token_drop)
    for wanted, shown in (("ncclep", "alltoall"), ("flex", "flex")):
        config = config_of(wanted)
        overlap.CommOverlapConfig().setup(config, None)
        assert (config.seen, config.moe_token_dispatcher_type) == (shown, wanted)
    with pytest.raises(AssertionError):
        overlap.CommOverlapConfig().setup(model_config=config_of("allgather"))
    config = config_of("ncclep")
    assert drop.apply_moe_token_drop(model_provider=config) is config
    assert config.moe_token_dispatcher_type == "ncclep"
    with pytest.raises(AssertionError):
        drop.apply_moe_token_drop(config_of("flex"))
    for name in ("training.comm_overlap", "training.utils.moe_token_drop"):
        changed(name)  # a release without the function: nothing to patch


def test_overrides_of_single_options() -> None:
    """`model.ncclep.engine=native` was refused, because the config had no options to override."""
    name = "training.utils.omegaconf_utils"
    module = changed(name, parse_hydra_overrides=parse_hydra_overrides)
    given = ["model.ncclep.engine=native", "+model.ncclep.alignment=16", "train.train_iters=2"]
    given += ["model.ncclep={engine:native}", "model.moe_token_dispatcher_type=ncclep"]
    assert module.parse_hydra_overrides(None, given) == [f"++{given[0]}", *given[1:]]


@needs_bridge
def test_one_override_of_a_recipe(ctx: RankContext) -> None:
    """The settings of a recipe for HybridEP, then one override; then single options of ours."""
    initialize(ep=1)
    with pytest.MonkeyPatch.context() as patch:
        without_init(patch)
        config_class = importlib.import_module(f"{PACKAGE}.models.transformer_config")
        flex = importlib.import_module(f"{PACKAGE}.training.flex_dispatcher_backend")
        drop = importlib.import_module(f"{PACKAGE}.training.utils.moe_token_drop")
        overrides = importlib.import_module(f"{PACKAGE}.training.utils.omegaconf_utils")
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.moe.moe_layer import MoELayer

        Container = make_dataclass("Container", ["model"])

        def recipe(*given: str) -> Any:
            model = config_class.TransformerConfig(**OPTIONS, use_cpu_initialization=True)
            model.moe_hybridep_num_sms = 32
            flex.apply_flex_dispatcher_backend(model, "hybridep")
            assert model.moe_token_dispatcher_type == "flex"
            overrides.process_config_with_overrides(Container(model), cli_overrides=[*given])
            model.finalize()
            return model

        def layer_of(model: Any) -> Any:
            spec = get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False)
            return MoELayer(model, submodules=moe_submodules(spec), layer_number=1)

        ours = "model.moe_token_dispatcher_type=ncclep"
        said: list[str] = []
        patch.setattr(EpGroup, "log_once", lambda group, level, subject, text: said.append(text))
        layer = layer_of(recipe(ours))
        unused = "moe_flex_dispatcher_backend='hybridep', moe_hybridep_num_sms=32"
        assert f"options for Megatron's flex dispatcher are not used: {unused}" in said
        assert type(layer.token_dispatcher).__name__ == "NcclEpTokenDispatcher"
        model = recipe(ours, "model.ncclep.engine=reference", "model.ncclep.alignment=32")
        engine = layer_of(drop.apply_moe_token_drop(model)).token_dispatcher.engine
        assert (engine.config.engine, engine.config.alignment) == ("reference", 32)
        with pytest.raises(InputError, match="unknown option 'engin'"):
            layer_of(recipe(ours, "model.ncclep.engin=reference"))
