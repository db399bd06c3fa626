"""`batch_invariant_mode`: a token's output depends on no other token (docs/contract.md).

The dispatcher guarantees this without the option, in every mode that drops no rows.  Megatron's
option covers the rest of the model: GEMMs, norms and attention from 0.16.1 on.  Up to 0.19 it does
not cover TransformerEngine's grouped GEMMs.  TransformerEngine chooses their kernel by the number
of rows, and the kernel determines the order of additions.
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
# The first release in which the option also covers TransformerEngine's grouped GEMMs.
GROUPED_SINCE = "0.20"


def check_invariance(config: Any, options: EpConfig) -> None:
    """Refuse static mode if other tokens can cause a token's rows to be dropped.

    Raises:
        UnsupportedError: names the option and the remedy.
    """
    if _is_on(config) and can_drop(options) and options.on_overflow == DROP:
        raise UnsupportedError(
            f"{OPTION}=True with max_recv_rows={options.max_recv_rows!r}: rows that do not fit are "
            "dropped, and a token's output would depend on the other tokens: leave max_recv_rows "
            "out, set it to 'worst', or set on_overflow='rerun' or 'raise'"
        )


def check_generation(config: Any) -> None:
    """Refuse text generation with our dispatcher.

    Raises:
        UnsupportedError: names the options and the remedy.
    """
    if _is_on(config) and is_wanted(config):
        raise UnsupportedError(
            f"{FIELD}={NAME!r} with {OPTION}=True: the size of a batch decides whether it goes "
            "through low-latency mode, which rounds a token's sums at other points than the engine "
            f"does: set {FIELD} to one of Megatron's dispatchers"
        )


def warn_of_experts(config: Any, experts: Any, process_group: Any) -> None:
    """Warn once per group about experts that are not batch-invariant.  Not collective."""
    if not _is_on(config) or type(experts).__name__ != "TEGroupedMLP":
        return
    import megatron.core

    release = megatron.core.__version__
    if Version(Version(release).base_version) >= Version(GROUPED_SINCE):
        return
    text = (
        f"{OPTION}=True: TEGroupedMLP's GEMMs are not batch-invariant in Megatron-Core "
        f"{release}, which replaces only those of experts computed one by one: the bits of a "
        "token's output may change with the size of the batch. Use grouped experts "
        "(experts='grouped', --ncclep-experts grouped) or moe_grouped_gemm=False"
    )
    EpGroup.of(process_group).announce(text, logging.WARNING)


def _is_on(config: Any) -> bool:
    return bool(getattr(config, OPTION, False))
