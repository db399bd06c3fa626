"""Which Megatron options the dispatcher refuses, and what to do instead.

A Megatron option that the dispatcher would get wrong or ignore is refused when the model is built.
docs/support.md shows the same table to users.  Of CUDA graphs: graph_support.py; of FP8 and FP4:
fp8_support.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from megatron_ncclep.errors import UnsupportedError

# Versions of Megatron-Core that the tests run with.
OLDEST, NEWEST = "0.16.1", "0.19.2"


def is_tested(version: str) -> bool:
    """Say whether a version of Megatron-Core is in the range that the tests run with.

    What follows a `+` does not count: Megatron-Core 0.18 and later add the commit of whatever git
    checkout they happen to be installed under.
    """
    return Version(OLDEST) <= Version(Version(version).public) <= Version(NEWEST)


@dataclass(frozen=True)
class Refusal:
    """One unsupported setting.

    Attributes:
        option: name of the TransformerConfig field.
        is_set: says whether a value of it is refused.
        remedy: what the user can do, as the rest of a sentence.
    """

    option: str
    is_set: Callable[[Any], bool]
    remedy: str


def _is_on(value: Any) -> bool:
    return bool(value)


REFUSALS = (
    Refusal(
        "moe_paged_stash", _is_on, "leave it out: it needs the flex dispatcher's over-budget report"
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
)


def check_supported(config: Any) -> None:
    """Refuse a TransformerConfig that the dispatcher would get wrong or ignore.

    Args:
        config: TransformerConfig; a field that this Megatron-Core does not have counts as not set.

    Raises:
        UnsupportedError: names the option, its value and the remedy.
    """
    for refusal in REFUSALS:
        value = getattr(config, refusal.option, None)
        if refusal.is_set(value):
            raise UnsupportedError(
                f"moe_token_dispatcher_type='ncclep' does not support {refusal.option}={value!r}: "
                f"{refusal.remedy}"
            )
