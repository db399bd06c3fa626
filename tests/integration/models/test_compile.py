"""torch.compile around our dispatcher: eager results, to the bit or, with inductor's own kernels,
up to their rounding; and compiling comes to an end.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compile_case import AS_IT_IS, Compiler, assert_compiles
from megatron_setup import selective
from rank_pool import RankContext
from timeouts import patient

from megatron_ncclep.config import FIRST_TIMEOUT_S, EpConfig

# What users have in the first step: a rank that compiles takes minutes where there is much else to
# do, and the others wait for it in every call.
TIME: dict[str, Any] = {"first_timeout_s": patient(FIRST_TIMEOUT_S)}
EXACT = {**selective("moe"), "ncclep": EpConfig(**TIME)}
STATIC = {"ncclep": EpConfig(experts="grouped", max_recv_rows="worst", **TIME)}
# Its kernels add in other orders and have exponentials of their own.  Megatron's router takes its
# in fp32 whatever the model's dtype: off by some 1e-7; a wrong row by 0.1 and more.
INDUCTOR = Compiler(inductor=True, dtype=torch.float64, bound=1e-5)
NEW_PYTHON = pytest.mark.any_python("it compiles C++; the others show what torch traces")


@pytest.mark.limit_s(600)
@pytest.mark.parametrize(
    ("options", "compiler"),
    [
        pytest.param(EXACT, AS_IT_IS, id="exact"),
        pytest.param(STATIC, AS_IT_IS, id="static"),
        pytest.param(EXACT, INDUCTOR, id="exact-inductor", marks=NEW_PYTHON),
    ],
)
def test_compiled_layer(ctx: RankContext, options: dict[str, Any], compiler: Compiler) -> None:
    """torch went through the engine into the exchange of messages between hosts, and made 77 graphs
    of one layer, in a minute.
    """
    assert_compiles(ctx, options, compiler)
