"""`batch_invariant_mode`: a token's output depends on no other token (docs/contract.md).

The dispatcher keeps that promise by itself, in every mode that drops nothing.  What Megatron's
option adds is the rest of the model: from 0.16.1 on its products, norms and attention.  Until 0.19
it leaves TransformerEngine's grouped products out, whose kernel, and with it the order of their
sums, TransformerEngine chooses by the number of rows.
"""

from __future__ import annotations

import logging
from typing import Any

from packaging.version import Version

from megatron_ncclep.config import DROP, EpConfig
from megatron_ncclep.engines.overflow import can_drop
from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.inference.support import FIELD, is_wanted
from megatron_ncclep.integration.options.field import NAME
from megatron_ncclep.ranks.group import EpGroup

OPTION = "batch_invariant_mode"
# The release whose option replaces TransformerEngine's grouped products too.
GROUPED_SINCE = "0.20"


def check_invariance(config: Any, options: EpConfig) -> None:
    """Refuse static mode where a token may lose an expert because of other tokens.

    Args:
        config: TransformerConfig.
        options: of the dispatcher.

    Raises:
        UnsupportedError: names the option and the remedy.
    """
    if _is_on(config) and can_drop(options) and options.on_overflow == DROP:
        raise UnsupportedError(
            f"{OPTION}=True with max_recv_rows={options.max_recv_rows!r}: rows that do not fit are "
            "dropped, so that a token's output would depend on the other tokens: leave "
            "max_recv_rows out, set it to 'worst', or set on_overflow='raise'"
        )


def check_generation(config: Any) -> None:
    """Refuse our dispatcher for generating text.

    Args:
        config: TransformerConfig before its validation.

    Raises:
        UnsupportedError: names the options and the remedy.
    """
    if _is_on(config) and is_wanted(config):
        raise UnsupportedError(
            f"{FIELD}={NAME!r} with {OPTION}=True: the size of a batch decides whether low-latency "
            "mode takes it, which rounds a token's sums at other places than the engine: set "
            f"{FIELD} to a dispatcher of Megatron's"
        )


def warn_of_experts(config: Any, experts: Any, process_group: Any) -> None:
    """Log, once per group, that the experts break what the option promises.  Not collective."""
    group = EpGroup.of(process_group)
    if not _is_on(config) or group.rank or type(experts).__name__ != "TEGroupedMLP":
        return
    import megatron.core

    release = megatron.core.__version__
    if Version(Version(release).base_version) >= Version(GROUPED_SINCE):
        return
    text = (
        f"{OPTION}=True: TEGroupedMLP's products are not batch-invariant in Megatron-Core "
        f"{release}, which replaces those of single experts only: the same token may get other "
        "bits in a batch of another size. Take grouped experts (experts='grouped', "
        "--ncclep-experts grouped), or moe_grouped_gemm=False"
    )
    group.log_once(logging.WARNING, text, text)


def _is_on(config: Any) -> bool:
    return bool(getattr(config, OPTION, False))
