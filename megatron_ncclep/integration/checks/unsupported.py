"""Which Megatron options the dispatcher refuses, and what to do instead.

A Megatron option that the dispatcher would get wrong or ignore is refused when the model is built.
docs/support.md shows the same table to users.  For CUDA graphs see cuda_graphs.py, for FP8 and FP4
fp8.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.ranks.group import EpGroup

# Versions of Megatron-Core that the tests run with.
OLDEST, NEWEST = "0.16.1", "0.20.0"


def is_tested(version: str) -> bool:
    """Say whether a version of Megatron-Core is in the range that the tests run with.

    The part after a `+` does not count: Megatron-Core 0.18 and later add the commit of any git
    checkout that they happen to be installed under.
    """
    return Version(OLDEST) <= Version(Version(version).public) <= Version(NEWEST)


@dataclass(frozen=True)
class Refusal:
    """One unsupported setting.

    Attributes:
        option: name of the TransformerConfig field.
        is_set: whether a value of it is refused.
        remedy: what the user can do, as the rest of a sentence.
    """

    option: str
    is_set: Callable[[Any], bool]
    remedy: str


def _is_on(value: Any) -> bool:
    return bool(value)


def _other_than(*defaults: Any) -> Callable[[Any], bool]:
    """Whether a value is set and differs from every release's default."""
    return lambda value: value is not None and value not in defaults


_DEEPEP_NUM_SMS, _HYBRIDEP_NUM_SMS = "moe_deepep_num_sms", "moe_hybridep_num_sms"
_NUM_SMS = "moe_flex_dispatcher_num_sms"
_OUR_NUM_SMS = "set the option num_sms (--ncclep-num-sms) instead"
_OUR_ENGINE = (
    "leave it out: it is for Megatron's flex dispatcher; here the option engine (--ncclep-engine) "
    "chooses what moves the tokens"
)
_TUNES_HYBRIDEP = "leave it out: it tunes HybridEP, which Megatron's flex dispatcher runs on"

# Options that only affect other dispatchers.
TUNES_OTHERS = (
    Refusal("moe_flex_dispatcher_backend", _other_than("deepep"), _OUR_ENGINE),
    Refusal(_DEEPEP_NUM_SMS, _other_than(20), f"it is for DeepEP: {_OUR_NUM_SMS}"),
    Refusal(_HYBRIDEP_NUM_SMS, _other_than(16), f"it is for HybridEP: {_OUR_NUM_SMS}"),
    Refusal(_NUM_SMS, _other_than(), f"it is for Megatron's flex dispatcher: {_OUR_NUM_SMS}"),
    Refusal("moe_hybridep_num_sms_preprocessing", _other_than(108), _TUNES_HYBRIDEP),
    Refusal("moe_hybridep_num_blocks_permute", _other_than(), _TUNES_HYBRIDEP),
    Refusal("moe_hybridep_num_blocks_unpermute", _other_than(), _TUNES_HYBRIDEP),
    Refusal("moe_permute_fusion_into_hybridep", _is_on, _TUNES_HYBRIDEP),
    Refusal("moe_hybridep_pad_uneven_dispatch_inputs", _is_on, _TUNES_HYBRIDEP),
)
REFUSALS = (
    Refusal(
        "moe_paged_stash",
        _is_on,
        "leave it out: it needs Megatron's flex dispatcher, which says that a rank got too many "
        "rows and lets the step be repeated",
    ),
    Refusal(
        "moe_expert_rank_capacity_factor",
        lambda value: value is not None,
        "set the option max_recv_rows (--ncclep-max-recv-rows) instead",
    ),
    Refusal(
        "moe_ncclep_static_shape",
        _is_on,
        "it belongs to Megatron's flex dispatcher; set the option max_recv_rows instead",
    ),
    Refusal("moe_ncclep_zero_copy", _is_on, "it belongs to Megatron's flex dispatcher"),
    *(
        Refusal(
            option,
            _other_than("bf16"),
            "leave it out: it belongs to Megatron's flex dispatcher; here rows cross in the "
            "model's dtype",
        )
        for option in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype")
    ),
    Refusal("moe_enable_deepep", _is_on, _OUR_ENGINE),
    *TUNES_OTHERS,
)


def check_supported(config: Any) -> None:
    """Refuse a TransformerConfig that the dispatcher would get wrong or ignore.

    Args:
        config: TransformerConfig, before or after its validation; a field that this Megatron-Core
            does not have counts as not set.

    Raises:
        UnsupportedError: names the option, its value and the remedy.
    """
    for refusal in REFUSALS:
        value = getattr(config, refusal.option, None)
        if not refusal.is_set(value):
            continue
        if refusal in TUNES_OTHERS and (
            _is_default(config, refusal.option, value) or _is_of_a_recipe(config)
        ):
            continue
        raise UnsupportedError(
            f"moe_token_dispatcher_type='ncclep' does not support {refusal.option}={value!r}: "
            f"{refusal.remedy}"
        )


def _is_default(config: Any, option: str, value: Any) -> bool:
    """Whether the user did not set this value.

    It is then the default of a config class, such as a framework's or a newer release's; or, from
    0.19 on, a value that Megatron's validation copied from an older name.

    Another release's default does not count as set either (`_other_than`): Megatron-Bridge's
    recipes set HybridEP's 16 SMs in every model, including those with `alltoall`.
    """
    older = (getattr(config, name, None) for name in (_DEEPEP_NUM_SMS, _HYBRIDEP_NUM_SMS))
    if option == _NUM_SMS and value in older:
        return True
    field = getattr(type(config), "__dataclass_fields__", {}).get(option)
    return field is not None and bool(value == field.default)


def _is_of_a_recipe(config: Any) -> bool:
    """Whether the config is Megatron-Bridge's, whose recipes set options of the flex dispatcher.

    They do in every MoE model, also in those that use another one, and whoever overrides the
    dispatcher's type cannot leave them out.
    """
    return any(kind.__module__.startswith("megatron.bridge.") for kind in type(config).__mro__)


def announce_unused(config: Any, process_group: Any) -> None:
    """Log which of a recipe's options are not used, once per group and on its first rank only."""
    group = EpGroup.of(process_group)
    unused = [
        f"{refusal.option}={value!r}"
        for refusal in TUNES_OTHERS
        if refusal.is_set(value := getattr(config, refusal.option, None))
        and not _is_default(config, refusal.option, value)
    ]
    if unused and group.rank == 0:
        text = f"not used, because it is for Megatron's flex dispatcher: {', '.join(unused)}"
        group.log_once(logging.INFO, text, text)
