"""What the dispatcher does not support is refused when the model is built, never ignored."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from megatron_setup import build_layer, initialize, make_config

from megatron_ncclep.errors import InputError, IntegrationError, UnsupportedError
from megatron_ncclep.support import REFUSALS, check_supported
from megatron_ncclep.testing.launcher import RankContext, RankPool

BUILDS = {
    "paged-stash": (
        {"moe_paged_stash": True},
        "moe_paged_stash=True: leave it out: it needs the flex dispatcher's over-budget report",
    ),
}


def build_error(ctx: RankContext, options: dict[str, Any]) -> str:
    initialize(ep=4)
    config = make_config("ncclep", torch.float32, 4)
    # Set after validation: Megatron's own checks want other options beside some of them.
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(UnsupportedError) as caught:
        build_layer(config)
    assert config.moe_token_dispatcher_type == "ncclep"
    return str(caught.value)


@pytest.mark.parametrize("name", BUILDS)
def test_unsupported_options_are_refused_at_build(megatron_pool: RankPool, name: str) -> None:
    options, message = BUILDS[name]
    for text in megatron_pool.run(build_error, options):
        assert message in text


def refused_on_rank(ctx: RankContext, index: int) -> bool:
    """Ask for one refused option; False: this Megatron-Core does not have it."""
    initialize(ep=4)
    refusal = REFUSALS[index]
    config = make_config("ncclep", torch.float32, 4)
    if not hasattr(config, refusal.option):
        return False
    check_supported(config)
    is_factor = refusal.option == "moe_expert_rank_capacity_factor"
    setattr(config, refusal.option, 1.5 if is_factor else True)
    with pytest.raises(UnsupportedError, match=refusal.option):
        check_supported(config)
    return True


# Fields that an older Megatron-Core does not have yet.
NEWER = {
    "moe_paged_stash",
    "moe_expert_rank_capacity_factor",
    "moe_ncclep_static_shape",
    "moe_ncclep_zero_copy",
}


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(
            index,
            id=refusal.option,
            marks=pytest.mark.refuses(refusal.option, words=refusal.remedy),
        )
        for index, refusal in enumerate(REFUSALS)
    ],
)
def test_every_refusal_refuses(megatron_pool: RankPool, index: int) -> None:
    for has_it in megatron_pool.run(refused_on_rank, index):
        assert has_it or REFUSALS[index].option in NEWER


def layers_on_rank(ctx: RankContext) -> None:
    """What stands around the building of a layer, each as a mistake there would show."""
    initialize(ep=4)
    import megatron.core
    from megatron.core.transformer.moe import moe_layer

    # The layer's config is the user's own object, and says what the user asked for.
    config = make_config("ncclep", torch.float32, 4)
    layer = build_layer(config)
    assert layer.config is config
    assert layer.token_dispatcher.config is config
    assert config.moe_token_dispatcher_type == "ncclep"

    # So it does after an error of Megatron's, here in the middle of its constructor.
    with pytest.raises(AttributeError, match="no_such"):
        moe_layer.MoELayer(config, submodules=Planted())
    assert config.moe_token_dispatcher_type == "ncclep"

    # Other types are Megatron's as ever.
    other = build_layer(make_config("allgather", torch.float32, 4))
    assert type(other.token_dispatcher) is moe_layer.MoEAllGatherTokenDispatcher
    assert other.config.moe_token_dispatcher_type == "allgather"

    version = megatron.core.__version__
    megatron.core.__version__ = "0.99.0"
    try:
        with pytest.warns(UserWarning, match="this is 0.99.0"):
            build_layer(config)
    finally:
        megatron.core.__version__ = version


class Planted:
    """Submodules in which the constructor of MoELayer fails."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError("no_such")


def test_building_a_layer(megatron_pool: RankPool) -> None:
    """Five mistakes in what we wrap around MoELayer's constructor were noticed by no test."""
    megatron_pool.run(layers_on_rank)


def indivisible_on_rank(ctx: RankContext) -> str:
    initialize(ep=4)
    config = make_config("ncclep", torch.float32, 4)
    config.num_moe_experts = 6
    with pytest.raises(InputError) as caught:
        build_layer(config)
    return str(caught.value)


def test_experts_that_cannot_be_divided(megatron_pool: RankPool) -> None:
    for text in megatron_pool.run(indivisible_on_rank):
        assert "6 experts cannot be divided over 4 expert-parallel ranks" in text


def install_too_late(ctx: RankContext) -> None:
    initialize(ep=4)
    import megatron_ncclep

    megatron_ncclep.install()  # nothing new to set: harmless at any time
    layer = build_layer(make_config("ncclep", torch.float32, 4))
    megatron_ncclep.install()
    with pytest.raises(IntegrationError, match=r"after a model was built.*NcclEpTokenDispatcher"):
        megatron_ncclep.install(alignment=16)
    del layer
    gc.collect()
    from megatron.core.transformer.transformer_config import TransformerConfig

    megatron_ncclep.install(alignment=16)
    layer = build_layer(make_config("ncclep", torch.float32, 4))
    assert layer.token_dispatcher.engine.config.alignment == 16
    TransformerConfig.ncclep = None


def test_install_after_a_model_was_built(megatron_pool: RankPool) -> None:
    megatron_pool.run(install_too_late)
