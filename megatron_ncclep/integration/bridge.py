"""Patches for three functions of Megatron-Bridge that know only Megatron's own dispatcher types.

    CommOverlapConfig.setup    checks overlap_moe_expert_parallel_comm as for `alltoall`
    apply_moe_token_drop       checks capacity factors as for `alltoall`
    parse_hydra_overrides      accepts model.ncclep.NAME=VALUE before the config has any options

A Megatron-Bridge that lacks one of these functions is not patched there; its own errors then say
what it does not support.
"""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext
from typing import Any

from megatron_ncclep.integration.import_hook import Change
from megatron_ncclep.integration.options.field import NAME, TYPE_FIELD, as_alltoall
from megatron_ncclep.integration.patching import replaces

# An option of this package in Hydra's syntax, without a + or ++, which would already add it.
_OPTION = re.compile(rf"([A-Za-z_][\w.]*\.)?{NAME}\.\w+=")


def _checks_as_alltoall(place: str, parameter: str) -> Change:
    """A change that makes `place` treat our type as `alltoall` in its argument, a config."""

    def checking(original: Any) -> Any:
        signature = inspect.signature(original)

        def checked(*args: Any, **kwargs: Any) -> Any:
            config = signature.bind(*args, **kwargs).arguments[parameter]
            is_ours = getattr(config, TYPE_FIELD, None) == NAME
            with as_alltoall(config) if is_ours else nullcontext():
                return original(*args, **kwargs)

        return checked

    return replaces(place, [parameter], optional=True)(checking)


@replaces("parse_hydra_overrides", ["cfg", "overrides"], optional=True)
def _change_overrides(original: Any) -> Any:
    """Let `model.ncclep.engine=native` create the options if the config has none yet.

    Hydra refuses to set a field inside None unless the override starts with `++`.  An unknown name
    is refused when the layer is built, as in every mapping of options.
    """

    def parse_hydra_overrides(cfg: Any, overrides: list[str]) -> Any:
        return original(cfg, [f"++{text}" if _OPTION.match(text) else text for text in overrides])

    return parse_hydra_overrides


# Module -> the patches for it.
HOOKS: dict[str, tuple[Change, ...]] = {
    "megatron.bridge.training.comm_overlap": (
        _checks_as_alltoall("CommOverlapConfig.setup", "model_config"),
    ),
    "megatron.bridge.training.utils.moe_token_drop": (
        _checks_as_alltoall("apply_moe_token_drop", "model_provider"),
    ),
    "megatron.bridge.training.utils.omegaconf_utils": (_change_overrides,),
}
