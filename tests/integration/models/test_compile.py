"""torch.compile around our dispatcher: eager results, to the bit, and compiling comes to an end.

With torch's own compiler behind it: tests/gpu/test_gpu_memory.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from compile_case import assert_compiles
from rank_pool import RankContext
from timeouts import patient

from megatron_ncclep.config import FIRST_TIMEOUT_S, EpConfig

# What users have in the first step: a rank that compiles takes minutes where there is much else to
# do, and the others wait for it in every call.
TIME: dict[str, Any] = {"first_timeout_s": patient(FIRST_TIMEOUT_S)}
EXACT = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
EXACT |= {"ncclep": EpConfig(**TIME)}
STATIC = {"ncclep": EpConfig(experts="grouped", max_recv_rows="worst", **TIME)}


@pytest.mark.limit_s(600)
@pytest.mark.parametrize("options", [EXACT, STATIC], ids=["exact", "static"])
def test_compiled_layer(ctx: RankContext, options: dict[str, Any]) -> None:
    """torch went through the engine into the exchange of messages between hosts, and made 77 graphs
    of one layer, in a minute.
    """
    assert_compiles(ctx, options)
