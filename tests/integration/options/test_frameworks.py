"""Frameworks that make Megatron's configs in ways of their own.

Stand-ins follow what Megatron-Bridge and NeMo do with a TransformerConfig: classes derived from it
that validate late, copies made from their fields, files, and overrides.  Where Megatron-Core has
such code itself, that is used.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import pickle
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import yaml
from megatron_setup import has, initialize, moe_submodules
from on_ranks import IS_RANK
from rank_pool import RankContext
from test_field import OPTIONS

from megatron_ncclep import EpConfig
from megatron_ncclep.errors import InputError, UnsupportedError
from megatron_ncclep.integration.options.field import resolve_options

pytestmark = [pytest.mark.alone, pytest.mark.each_release]

OWN = EpConfig(
    experts="megatron", alignment=32, max_recv_rows="1.25x", timeout_s=7.5, on_overflow="raise"
)
MOE = {**OPTIONS, "moe_token_dispatcher_type": "ncclep", "use_cpu_initialization": True}


if IS_RANK:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.heterogeneous.heterogeneous_config import (
        HeterogeneousTransformerConfig,
    )
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclasses.dataclass
    class Provider(TransformerConfig):
        """Validates when its user has set all, and builds the model itself, as Megatron-Bridge's
        do; redefines some fields of the base class.
        """

        vocab_size: int | None = None
        # From a time when Megatron had only these three.
        moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
        num_layers: int = 1

        def __post_init__(self) -> None:
            """Not yet."""

        def finalize(self) -> None:
            TransformerConfig.__post_init__(self)

        def provide(self) -> Any:
            initialize(ep=1)
            self.finalize()  # however often that has been done
            spec = get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False)
            return MoELayer(self, submodules=moe_submodules(spec), layer_number=1)


def override(config: Any, **values: Any) -> None:
    """Lay values over a config's options, inside a dataclass one by one."""
    if not dataclasses.is_dataclass(config.ncclep):
        config.ncclep = values
        return
    for name, value in {**dataclasses.asdict(config.ncclep), **values}.items():
        setattr(config.ncclep, name, value)


def made_from(data: Any) -> Any:
    """Build the objects that a file describes: `_target_` names what is called with the rest."""
    if not isinstance(data, dict):
        return data
    values = {name: made_from(value) for name, value in data.items() if name != "_target_"}
    if "_target_" not in data:
        return values
    module, _, name = data["_target_"].rpartition(".")
    target = getattr(importlib.import_module(module), name)
    assert set(values) <= set(inspect.signature(target).parameters)  # others are left out
    return target(**values)


def test_late_validation(ctx: RankContext) -> None:
    """Options set before `finalize`, or after it, are those of the layer."""
    for late in (False, True):
        provider = Provider(hidden_size=8, num_attention_heads=1)
        provider.num_moe_experts, provider.add_bias_linear = 2, False
        provider.use_cpu_initialization = True
        provider.moe_token_dispatcher_type = "ncclep"
        for finalize in (not late, late):
            if finalize:
                provider.finalize()
            else:
                provider.ncclep = OWN
        assert provider.moe_token_dispatcher_type == "ncclep"
        layer = provider.provide()
        assert type(layer.token_dispatcher).__name__ == "NcclEpTokenDispatcher"
        assert layer.token_dispatcher.engine.config == OWN
        layer.token_dispatcher.engine.close()
    # What Megatron refuses is refused then, and in the words for `alltoall`.
    provider = Provider(hidden_size=8, num_attention_heads=1, num_moe_experts=2)
    provider.moe_token_dispatcher_type = "ncclep"
    provider.moe_pad_expert_input_to_capacity = True
    with pytest.raises(ValueError, match="moe_expert_capacity_factor"):
        provider.finalize()
    assert provider.moe_token_dispatcher_type == "ncclep"


def test_configs_of_layers(ctx: RankContext) -> None:
    """Megatron's own config of one layer of a heterogeneous model is made of a dictionary."""
    block = {
        "attention": {"no_op": False, "num_query_groups": 1},
        "mlp": {"no_op": False, "ffn_mult": 2.0},
    }
    blocks = json.dumps({"block_configs": [block]})
    made = HeterogeneousTransformerConfig(
        **MOE, ncclep=OWN, heterogeneous_layers_config_encoded_json=blocks
    )
    of_layer = made.get_config_for_layer(1)
    assert type(of_layer) is TransformerConfig
    assert resolve_options(of_layer) == of_layer.ncclep == OWN


def test_overrides(ctx: RankContext) -> None:
    """Overrides change a config's options; a wrong one is refused when the layer is built.

    Ours could not be set one by one: Megatron-Bridge wrote a warning for each, and trained with the
    previous options.
    """
    made = Provider(**{**MOE, "ncclep": copy.copy(OWN)})
    override(made, alignment=64, engine="reference")
    expected = dataclasses.replace(OWN, alignment=64, engine="reference")
    assert resolve_options(made) == made.ncclep == expected
    made.ncclep.alignment = 7
    with pytest.raises(InputError, match="alignment 7: must be one of"):
        made.provide()

    without = Provider(**MOE)
    override(without, alignment=16)
    assert resolve_options(without) == without.ncclep == EpConfig(alignment=16)
    without.ncclep = as_file(OWN)  # a file that was not made into objects
    assert resolve_options(without) == without.ncclep == OWN
    without.ncclep = {"alignment": 16, "alingment": 32}
    with pytest.raises(InputError, match=r"unknown option 'alingment': .*'alignment'"):
        without.provide()
    # With another dispatcher, a mapping is refused as an EpConfig is.
    without.ncclep, without.moe_token_dispatcher_type = {"experts": "grouped"}, "alltoall"
    with pytest.raises(UnsupportedError, match="dispatcher is 'alltoall', which would ignore it"):
        without.provide()


def test_files(ctx: RankContext) -> None:
    """A config that was written to a file and read again has the same options."""
    converters = [as_file]
    if has("training/config/container.py"):  # from 0.18 on; Megatron-Bridge uses it too
        container = importlib.import_module("megatron.training.config.container")
        converters.append(container.ConfigContainerBase._convert_value_to_dict)
    for own in (OWN, EpConfig(max_recv_rows=64, experts="grouped"), None):
        made = Provider(**{**MOE, "ncclep": own})
        for convert in converters:
            data = convert(made)
            # Functions and dtypes are the frameworks' business.
            kinds = bool | int | float | str | list | None
            plain = {key: value for key, value in data.items() if isinstance(value, kinds)}
            plain["ncclep"] = data["ncclep"]
            again = made_from(yaml.safe_load(yaml.safe_dump(plain)))
            assert type(again) is Provider
            assert resolve_options(again) == (own or EpConfig())
            assert again.ncclep == own
    # Files may name only classes on a list of Megatron's, which has none of ours.
    assert "_target_" not in OWN.to_cfg_dict()


def as_file(value: Any) -> Any:
    """What the first versions of Megatron-Bridge write, with the names of all classes."""
    if not dataclasses.is_dataclass(value):
        return value
    kind = type(value)
    fields = {f.name: as_file(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **fields}


def test_arguments_reach_ranks_that_have_not_parsed_them(ctx: RankContext) -> None:
    """slime parses the command line in one process and trains in others, Ray's: those ran with the
    defaults, whatever --ncclep- options its users had given.
    """
    if not has("training"):
        return  # this release's wheel has no command line
    from megatron.training.arguments import core_transformer_config_from_args, parse_args

    given = "train --moe-token-dispatcher-type ncclep --ncclep-alignment 32 --ncclep-timeout-s 7.5"
    sizes = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --num-experts 2"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerConfig, "ncclep", None)
        patch.setattr(
            "sys.argv", f"{given} {sizes} --disable-bias-linear --swiglu --no-rope-fusion".split()
        )
        args = pickle.dumps(parse_args())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerConfig, "ncclep", None)  # as in the other process
        args = pickle.loads(args)
        args.params_dtype = torch.float32  # Megatron's validation sets it
        config = core_transformer_config_from_args(args)
        assert resolve_options(config) == EpConfig(alignment=32, timeout_s=7.5)


def test_megatrons_yaml(ctx: RankContext) -> None:
    """`--yaml-cfg` wants every field of the config in the file: users had "Missing argument ncclep"
    with any dispatcher, as soon as this package was installed.
    """
    if not has("training"):
        return  # this release's wheel has no command line
    from megatron.training.yaml_arguments import core_config_from_args

    base = {f.name: None for f in dataclasses.fields(TransformerConfig) if f.name != "ncclep"}
    assert core_config_from_args(SimpleNamespace(**base)) == base
    del base["num_layers"]
    with pytest.raises(Exception, match="Missing argument num_layers"):
        core_config_from_args(SimpleNamespace(**base))
    base["num_layers"] = None
    # As Megatron reads files: every mapping becomes an object.
    given = SimpleNamespace(alignment=32, max_recv_rows="worst")
    found = core_config_from_args(SimpleNamespace(**base, ncclep=given))
    made = TransformerConfig(**{**MOE, "ncclep": found["ncclep"]})
    assert resolve_options(made) == made.ncclep == EpConfig(alignment=32, max_recv_rows="worst")
    assert "ncclep" in TransformerConfig.__dataclass_fields__
