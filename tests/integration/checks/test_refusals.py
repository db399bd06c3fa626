"""What the dispatcher does not support is refused when the model is built, never ignored."""

from __future__ import annotations

import dataclasses
import gc
import re
import traceback
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_setup import BATCH, HIDDEN, SEQUENCE, build_layer, initialize, make_config
from rank_pool import RankContext

from megatron_ncclep import error_reporting as failures
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import (
    EngineUnavailableError,
    InputError,
    IntegrationError,
    UnsupportedError,
)
from megatron_ncclep.integration.checks.unsupported import REFUSALS, check_supported

pytestmark = pytest.mark.each_release

# Of options that are no switches; numbers of SMs and blocks are 24.
VALUES = {
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_dispatch_fwd_dtype": "mxfp8",
    "moe_combine_bwd_dtype": "mxfp8",
}
# Fields that an older Megatron-Core does not have yet.
NEWER = {
    "moe_paged_stash",
    "moe_expert_rank_capacity_factor",
    "moe_ncclep_static_shape",
    "moe_ncclep_zero_copy",
    "moe_dispatch_fwd_dtype",
    "moe_combine_bwd_dtype",
    "moe_flex_dispatcher_num_sms",
    "moe_hybridep_num_sms_preprocessing",
    "moe_hybridep_num_blocks_permute",
    "moe_hybridep_num_blocks_unpermute",
    "moe_permute_fusion_into_hybridep",
    "moe_hybridep_pad_uneven_dispatch_inputs",
}


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(option, marks=pytest.mark.refuses(option, words=remedy))
        for option, (_, remedy) in REFUSALS.items()
    ],
)
def test_every_refusal_refuses(ctx: RankContext, option: str) -> None:
    initialize(ep=4)
    remedy = REFUSALS[option][1]
    config = make_config("ncclep", torch.float32, 4)
    if not hasattr(config, option):
        assert option in NEWER
        return
    check_supported(config)
    value = VALUES.get(option, 24 if "_num_" in option else True)
    text = re.escape(f"does not support {option}={value!r}: {remedy}")
    # As it is made: before Megatron has checked the value, whose words are not for this dispatcher.
    with pytest.raises(UnsupportedError, match=text):
        make_config("ncclep", torch.float32, 4, **{option: value})
    setattr(config, option, value)
    with pytest.raises(UnsupportedError, match=text):
        build_layer(config)
    assert config.moe_token_dispatcher_type == "ncclep"


def test_what_nobody_asked_for_is_not_refused(ctx: RankContext) -> None:
    """Recipes of Megatron-Bridge with `alltoall` have moe_hybridep_num_sms=16, and 0.19 copies it
    to moe_flex_dispatcher_num_sms: whoever changes nothing but their dispatcher has to get it.
    """
    initialize(ep=4)
    from megatron.core.transformer.transformer_config import TransformerConfig

    @dataclasses.dataclass
    class Provider(TransformerConfig):
        moe_flex_dispatcher_backend: str = "hybridep"
        moe_hybridep_num_sms: int = 32

    usual = make_config("ncclep", torch.float32, 4)
    others = re.compile("deepep|hybridep|flex_dispatcher|moe_ncclep")
    named = {f.name for f in dataclasses.fields(usual) if others.search(f.name)}
    assert named <= REFUSALS.keys()

    given = {f.name: getattr(usual, f.name) for f in dataclasses.fields(usual) if f.init}
    del given["moe_flex_dispatcher_backend"], given["moe_hybridep_num_sms"]
    build_layer(Provider(**given))
    with pytest.raises(UnsupportedError, match="moe_hybridep_num_sms=31"):
        Provider(**given, moe_hybridep_num_sms=31)
    for options in ({"moe_hybridep_num_sms": 16}, {"moe_deepep_num_sms": 20}):
        build_layer(make_config("ncclep", torch.float32, 4, **options))


def test_building_a_layer(ctx: RankContext) -> None:
    """The layer's config is the user's own object, and says what the user asked for, also after an
    error of Megatron's, here in the middle of its constructor.
    """
    initialize(ep=4)
    from megatron.core.transformer.moe import moe_layer

    config = make_config("ncclep", torch.float32, 4)
    layer = build_layer(config)
    assert layer.config is layer.token_dispatcher.config is config
    assert failures.install_excepthook.cache_info().currsize == 1
    with pytest.raises(AttributeError, match="Mock object has no attribute"):
        moe_layer.MoELayer(config, submodules=mock.Mock(spec=[]))
    assert config.moe_token_dispatcher_type == "ncclep"


def test_a_newer_megatron(ctx: RankContext) -> None:
    """It works with a warning as long as the places are those that are known."""
    initialize(ep=4)
    import megatron.core
    from megatron.core.transformer.moe.moe_layer import MoETokenDispatcher

    config = make_config("ncclep", torch.float32, 4)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN)
    known = build_layer(config)

    def more(self: Any, tokens: Any, routing_map: Any, probs: Any, shared: Any = None) -> None:
        """What a branch of Megatron's has after 0.19."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron.core, "__version__", "0.21.0")
        with pytest.warns(UserWarning, match=r"0\.16\.1 to 0\.20\.0; this is 0\.21\.0$"):
            layer = build_layer(config)
        layer.load_state_dict(known.state_dict())
        assert torch.equal(layer(hidden)[0], known(hidden)[0])
        for name, found in (("dispatch_preprocess", more), ("token_combine", None)):
            words = rf"MoETokenDispatcher\.{name} is not a method of .*: this Megatron-Core is not"
            with patch.context() as planted:
                planted.setattr(MoETokenDispatcher, name, found)
                with (
                    pytest.warns(UserWarning, match="this is"),
                    pytest.raises(IntegrationError, match=words),
                ):
                    build_layer(config)


def test_install_after_a_model_was_built(ctx: RankContext) -> None:
    """A model that was dropped, and lies in a cycle that nobody has collected, is none: in a
    notebook the second install was refused at random.
    """
    initialize(ep=4)
    import megatron_ncclep

    megatron_ncclep.install()  # nothing new to set: harmless at any time
    # Its traceback holds a layer that is half built.
    with pytest.raises(InputError, match="6 experts cannot be divided over 4 expert-p") as refused:
        build_layer(make_config("ncclep", torch.float32, 4, num_moe_experts=6))
    megatron_ncclep.install(alignment=1)
    assert refused.value
    layer = build_layer(make_config("ncclep", torch.float32, 4))
    megatron_ncclep.install()
    with pytest.raises(IntegrationError, match=r"after a model was built.*NcclEpTokenDispatcher"):
        megatron_ncclep.install(alignment=16)
    dropped: list[Any] = [layer]
    dropped.append(dropped)
    gc.disable()
    del layer, dropped
    from megatron.core.transformer.transformer_config import TransformerConfig

    megatron_ncclep.install(alignment=16)
    gc.enable()
    layer = build_layer(make_config("ncclep", torch.float32, 4))
    assert layer.token_dispatcher.engine.config.alignment == 16
    TransformerConfig.ncclep = None


@pytest.mark.alone
@pytest.mark.parametrize("engine", [None, "native"])
def test_the_text_of_an_error_of_a_model(ctx: RankContext, engine: str | None) -> None:
    """Megatron's build_module made two errors of one, and ended it with "leave it out: ... when
    instantiating TransformerLayer".  An error of an engine that cannot run was shown twice too.
    """
    initialize(ep=1)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    ncclep = EpConfig(engine=engine) if engine else None
    config = make_config("ncclep", torch.float32, 1, ncclep=ncclep)
    config.moe_paged_stash = engine is None
    spec = get_gpt_layer_local_spec(config.num_moe_experts, moe_grouped_gemm=False)
    kind: type[Exception] = EngineUnavailableError if engine else UnsupportedError
    with pytest.raises(kind) as caught:
        GPTModel(config, spec, vocab_size=16, max_sequence_length=8)
    text = str(caught.value)
    assert re.search(r" \(while building (MoELayer in )?TransformerLayer\)$", text)
    printed = "".join(traceback.format_exception(caught.value))
    assert "another exception" not in printed
    if engine:
        assert printed.count("needs GPUs") == 1
    else:
        assert re.search(r"=True: leave it out[\w ,:'-]+ \(while", text)
        quoted = printed.count('f"moe_token_dispatcher_type=')  # in a line of the source
        assert printed.count("does not support") == 1 + quoted
