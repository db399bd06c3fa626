"""Patches for three functions of Megatron-Bridge that know only Megatron's own dispatcher types.

    CommOverlapConfig.setup    checks overlap_moe_expert_parallel_comm as for `alltoall`
    apply_moe_token_drop       checks capacity factors as for `alltoall`
    parse_hydra_overrides      accepts model.ncclep.NAME=VALUE before the config has any options

A Megatron-Bridge that lacks one of these functions is not patched there; its own errors then say
what it does not support.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from megatron_ncclep.integration.options.command_line import TYPE_FIELD
from megatron_ncclep.integration.options.field import NAME
from megatron_ncclep.integration.patching import is_changed, mark_patched, validated_as

_VALIDATED_AS = "alltoall"
# An option of this package in Hydra's syntax, without a + or ++, which would already add it.
_OPTION = re.compile(rf"([A-Za-z_][\w.]*\.)?{NAME}\.\w+=")


def _change_comm_overlap(module: ModuleType) -> None:
    _check_as_alltoall(getattr(module, "CommOverlapConfig", None), "setup", "model_config")


def _change_token_drop(module: ModuleType) -> None:
    _check_as_alltoall(module, "apply_moe_token_drop", "model_provider")


def _check_as_alltoall(owner: Any, name: str, parameter: str) -> None:
    """Make `owner.name` treat our type as `alltoall` in its argument `parameter`, a config."""
    original = getattr(owner, name, None)
    if original is None or is_changed(original):
        return
    signature = inspect.signature(original)
    if parameter not in signature.parameters:
        return

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        config = signature.bind(*args, **kwargs).arguments[parameter]
        is_ours = getattr(config, TYPE_FIELD, None) == NAME
        with validated_as(config, TYPE_FIELD, _VALIDATED_AS) if is_ours else nullcontext():
            return original(*args, **kwargs)

    setattr(owner, name, mark_patched(checked))


def _change_overrides(module: Any) -> None:
    """Let `model.ncclep.engine=native` create the options if the config has none yet.

    Hydra refuses to set a field inside None unless the override starts with `++`.  An unknown name
    is refused when the layer is built, as in every mapping of options.
    """
    original = getattr(module, "parse_hydra_overrides", None)
    if original is None or is_changed(original):
        return

    @functools.wraps(original)
    def parse_hydra_overrides(cfg: Any, overrides: list[str]) -> Any:
        return original(cfg, [f"++{text}" if _OPTION.match(text) else text for text in overrides])

    module.parse_hydra_overrides = mark_patched(parse_hydra_overrides)


# Module -> the patches for it.
HOOKS: dict[str, tuple[Callable[[ModuleType], None], ...]] = {
    "megatron.bridge.training.comm_overlap": (_change_comm_overlap,),
    "megatron.bridge.training.utils.moe_token_drop": (_change_token_drop,),
    "megatron.bridge.training.utils.omegaconf_utils": (_change_overrides,),
}
