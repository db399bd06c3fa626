"""The Megatron options that the dispatcher refuses, and the remedy for each.

When the model is built, the dispatcher refuses options that it would get wrong or ignore.
docs/support.md shows the same table to users.  For CUDA graphs see cuda_graphs.py, for FP8 and FP4
fp8.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ncclep.errors import UnsupportedError


def is_on(value: Any) -> bool:
    """Whether a flag is set."""
    return bool(value)


def other_than(*defaults: Any) -> Callable[[Any], bool]:
    """Whether a value is set and differs from every release's default."""
    return lambda value: value is not None and value not in defaults


_DEEPEP_NUM_SMS, _HYBRIDEP_NUM_SMS = "moe_deepep_num_sms", "moe_hybridep_num_sms"
_NUM_SMS = "moe_flex_dispatcher_num_sms"
_OUR_NUM_SMS = "set the option num_sms (--ncclep-num-sms) instead"
_OUR_ENGINE = (
    "leave it out: it is for Megatron's flex dispatcher; to choose an engine, set the option "
    "engine (--ncclep-engine)"
)
_TUNES_HYBRIDEP = "leave it out: it tunes HybridEP, a backend of Megatron's flex dispatcher"

# Option -> whether a value is refused, and what the user can do instead, as the end of a sentence.
Refusals = dict[str, tuple[Callable[[Any], bool], str]]
# Options that only affect other dispatchers.
TUNES_OTHERS: Refusals = {
    "moe_flex_dispatcher_backend": (other_than("deepep"), _OUR_ENGINE),
    _DEEPEP_NUM_SMS: (other_than(20), f"it is for DeepEP: {_OUR_NUM_SMS}"),
    _HYBRIDEP_NUM_SMS: (other_than(16), f"it is for HybridEP: {_OUR_NUM_SMS}"),
    _NUM_SMS: (other_than(), f"it is for Megatron's flex dispatcher: {_OUR_NUM_SMS}"),
    "moe_hybridep_num_sms_preprocessing": (other_than(108), _TUNES_HYBRIDEP),
    "moe_hybridep_num_blocks_permute": (other_than(), _TUNES_HYBRIDEP),
    "moe_hybridep_num_blocks_unpermute": (other_than(), _TUNES_HYBRIDEP),
    "moe_permute_fusion_into_hybridep": (is_on, _TUNES_HYBRIDEP),
    "moe_hybridep_pad_uneven_dispatch_inputs": (is_on, _TUNES_HYBRIDEP),
}
_OUR_ROWS = "set the option max_recv_rows"
_OF_FLEX = "it belongs to Megatron's flex dispatcher"
_OUR_DTYPE = f"leave it out: {_OF_FLEX}; here the experts' recipe decides how rows cross"
REFUSALS: Refusals = {
    "moe_paged_stash": (
        is_on,
        "leave it out: it needs Megatron's flex dispatcher, which reports a rank with too many "
        "rows so that the step can be repeated",
    ),
    "moe_expert_rank_capacity_factor": (
        other_than(),
        f"{_OUR_ROWS} (--ncclep-max-recv-rows) instead",
    ),
    "moe_ncclep_static_shape": (is_on, f"{_OF_FLEX}; {_OUR_ROWS} instead"),
    "moe_ncclep_zero_copy": (is_on, _OF_FLEX),
    "moe_dispatch_fwd_dtype": (other_than("bf16"), _OUR_DTYPE),
    "moe_combine_bwd_dtype": (other_than("bf16"), _OUR_DTYPE),
    "moe_enable_deepep": (is_on, _OUR_ENGINE),
    **TUNES_OTHERS,
}


def check_supported(config: Any) -> None:
    """Refuse a TransformerConfig that the dispatcher would get wrong or ignore.

    Args:
        config: TransformerConfig, before or after its validation; a field that this release of
            Megatron-Core does not have counts as not set.

    Raises:
        UnsupportedError: names the option, its value and the remedy.
    """
    for option, (is_set, remedy) in REFUSALS.items():
        value = getattr(config, option, None)
        is_unused = option in TUNES_OTHERS and (
            _is_default(config, option, value) or _is_of_a_recipe(config)
        )
        if is_set(value) and not is_unused:
            raise UnsupportedError(
                f"moe_token_dispatcher_type='ncclep' does not support {option}={value!r}: {remedy}"
            )


def _is_default(config: Any, option: str, value: Any) -> bool:
    """Whether a value comes from a default and not from the user.

    Such a value is the default of the config's own class, which may be a framework's or a newer
    release's; or, from 0.19 on, Megatron's validation copied it from an option's older name.

    The default of another release does not count as set either (`other_than`): Megatron-Bridge's
    recipes set 16 SMs for HybridEP in every model, even with `alltoall`.
    """
    older = (getattr(config, name, None) for name in (_DEEPEP_NUM_SMS, _HYBRIDEP_NUM_SMS))
    if option == _NUM_SMS and value in older:
        return True
    field = getattr(type(config), "__dataclass_fields__", {}).get(option)
    return field is not None and bool(value == field.default)


def _is_of_a_recipe(config: Any) -> bool:
    """Whether the config is Megatron-Bridge's, whose recipes set options of the flex dispatcher.

    The recipes set them in every MoE model, even with another dispatcher, and a user who overrides
    the dispatcher's type cannot leave them out.
    """
    return any(kind.__module__.startswith("megatron.bridge.") for kind in type(config).__mro__)


def unused_options(config: Any) -> str:
    """Say which options of a recipe are not used; empty if there are none."""
    unused = [
        f"{option}={value!r}"
        for option, (is_set, _) in TUNES_OTHERS.items()
        if is_set(value := getattr(config, option, None)) and not _is_default(config, option, value)
    ]
    if not unused:
        return ""
    return f"options for Megatron's flex dispatcher are not used: {', '.join(unused)}"
