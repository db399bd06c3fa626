"""The field `ncclep` of TransformerConfig, and the value `ncclep` of the dispatcher's type."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle

import pytest
from on_ranks import IS_RANK
from rank_pool import RankContext

import megatron_ncclep
from megatron_ncclep import EpConfig
from megatron_ncclep.errors import InputError
from megatron_ncclep.integration import hooks

pytestmark = [pytest.mark.alone, pytest.mark.each_release]

OPTIONS = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "num_moe_experts": 2,
    "add_bias_linear": False,
}

if IS_RANK:
    hooks.install()
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    @dataclasses.dataclass
    class LaterConfig(TransformerConfig):
        """A user's own, with a generated constructor and a __post_init__ of its own."""

        extra: int = 3

        def __post_init__(self):
            super().__post_init__()
            self.extra += 1


def test_a_copy_keeps_its_options(ctx: RankContext) -> None:
    """However the copy is made; nothing else about configs changes."""
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
        # Positional arguments are the same as before.
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
    with pytest.raises(TypeError, match="frozen"):  # so every config can take options later
        dataclasses.dataclass(frozen=True)(type("Frozen", (TransformerConfig,), {}))


def test_options_of_install(ctx: RankContext) -> None:
    """They show through where a config has none, copies included, also later.

    A copy that takes the process's options for its own keeps them for ever, and a notebook's second
    `install` has no effect on it: that mistake passed all tests when it was planted.
    """
    gc.collect()  # the models of earlier tests, after which `install` would come too late
    kinds = (TransformerConfig, MLATransformerConfig, LaterConfig)
    configs = [kind(**OPTIONS) for kind in kinds]
    for alignment in (16, 32):
        megatron_ncclep.install(alignment=alignment)
        configs += [kind(**OPTIONS) for kind in kinds]
        for made in list(configs):
            for config in (made, dataclasses.replace(made), copy.copy(made), copy.deepcopy(made)):
                assert hooks.resolve_options(config).alignment == alignment
                assert config.ncclep.alignment == alignment
                configs += [config] * (alignment == 16)
    own = dataclasses.replace(TransformerConfig(ncclep=EpConfig(alignment=64), **OPTIONS))
    assert own.ncclep.alignment == 64
    TransformerConfig.ncclep = None
