"""The cases that random tests draw; test_random.py draws rounds."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megatron_ncclep.benchmark.cases import Case

# The same examples everywhere; no timing assertions.
SAME_EXAMPLES = settings(
    derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)


@st.composite
def cases(draw: st.DrawFn, most_ranks: int = 4) -> Case:
    """A small case, exact or static, with any alignment."""
    tokens = draw(st.lists(st.integers(0, 20), min_size=1, max_size=most_ranks))
    num_experts = draw(st.integers(1, 4)) * len(tokens)
    alignment = draw(st.sampled_from([1, 2, 16]))
    blocks = draw(st.none() | st.integers(1, 40))
    return Case(
        "random",
        tuple(tokens),
        num_experts,
        top_k=draw(st.integers(1, min(4, num_experts))),
        hidden=3,
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float32])),
        alignment=alignment,
        max_recv_rows=None if blocks is None else alignment * blocks,
        skew=draw(st.sampled_from([0.0, 0.7, 100.0])),
        dropped=draw(st.sampled_from([0.0, 0.3])),
        seed=draw(st.integers(0, 100)),
    )
