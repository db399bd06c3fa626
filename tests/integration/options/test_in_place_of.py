"""NCCLEP_IN_PLACE_OF: our dispatcher where a framework sets another type itself.

AReaL writes `alltoall` over its user's setting, so its users could not have `ncclep` without a
change of AReaL's source.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from megatron_setup import build_layer, initialize, make_config
from rank_pool import RankContext
from test_field import OPTIONS

from megatron_ncclep.errors import EngineUnavailableError, InputError, UnsupportedError
from megatron_ncclep.ranks.group import EpGroup

pytestmark = pytest.mark.each_release

VARIABLE = "NCCLEP_IN_PLACE_OF"
NAME = "NcclEpTokenDispatcher"


@pytest.mark.alone
def test_a_type_that_a_framework_sets(ctx: RankContext) -> None:
    """At any time; configs of other types and of models without experts keep what they have."""
    from test_frameworks import Provider

    def made(kind: str, finalize: bool = True, **fields: Any) -> Any:
        provider = Provider(**OPTIONS, use_cpu_initialization=True)
        for name, value in {"moe_token_dispatcher_type": kind, **fields}.items():
            setattr(provider, name, value)
        if finalize:
            provider.finalize()
        return provider

    initialize(ep=1)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EpGroup, "log_once", lambda group, level, subject, text: said.append(text))
        for kind in ("alltoall", "flex"):
            patch.setenv(VARIABLE, kind)
            provider = made(kind)
            assert provider.moe_token_dispatcher_type == "ncclep"
            provider.moe_token_dispatcher_type = kind
            assert type(provider.provide().token_dispatcher).__name__ == NAME
            text = (
                f"{VARIABLE}={kind}: configs with moe_token_dispatcher_type='{kind}' get 'ncclep'"
            )
            assert text in said
            other = "allgather" if kind == "alltoall" else "alltoall"
            for kept in (made(other), made(kind, num_moe_experts=None)):
                assert kept.moe_token_dispatcher_type != "ncclep"
            assert type(made(other).provide().token_dispatcher).__name__ != NAME
        words = f"does not support moe_enable_deepep=True.*unset {VARIABLE}=flex"
        with pytest.raises(UnsupportedError, match=words):
            made("flex", moe_enable_deepep=True)
        patch.setenv(VARIABLE, "allgather")
        words = f"{VARIABLE}='allgather': not one of alltoall, flex"
        with pytest.raises(InputError, match=words):
            made("alltoall", finalize=False)


@pytest.mark.alone
def test_errors_of_a_layer_name_the_variable(ctx: RankContext) -> None:
    """Whoever had set it in a job script found no word of it in what the layer refused."""
    initialize(ep=1)
    for options, kind, words in (
        ({"engine": "native"}, EngineUnavailableError, "engine 'native'"),
        ({"experts": "grouped"}, UnsupportedError, "moe_ffn_hidden_size=12: it must be a multiple"),
        ({"alignment": 7}, InputError, "alignment 7"),
    ):
        for dispatcher in ("alltoall", "ncclep"):
            config = make_config(dispatcher, torch.float32, 1, moe_ffn_hidden_size=12)
            config.ncclep = options
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(VARIABLE, "alltoall")
                config.__post_init__()
                with pytest.raises(kind) as caught:
                    build_layer(copy.deepcopy(config))
            assert words in str(caught.value)
            named = f"unset {VARIABLE}=alltoall, which asks for 'ncclep' here" in str(caught.value)
            assert named == (dispatcher == "alltoall")
