"""An engine with the limits of a GPU engine, on the CPU: whatever exceeds one is refused.

With the limit's name, as `EngineBase` does for every engine.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import test_steps
import torch
from contract_cases import contract_cases
from rank_pool import RankContext, RankPool

from megatron_ncclep.benchmark.cases import Case, refusal
from megatron_ncclep.engines import ENGINES, EngineEntry
from megatron_ncclep.engines.engine import SOURCE_PART_UNROUNDED, EngineCaps
from megatron_ncclep.engines.reference.engine import ReferenceEngine

# A stand-in on the CPU for engines that need a GPU.
pytestmark = [pytest.mark.needs_ranks(2), pytest.mark.cpu_only]

CAPS = EngineCaps(
    name="restricted",
    reduction=SOURCE_PART_UNROUNDED,
    payload_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    row_bytes_multiple=16,
    options=frozenset({"alignment", "timeout_s"}),  # no max_recv_rows
    max_tokens=39,
    max_top_k=16,
    max_local_experts=32,
    min_ranks=2,
)


class RestrictedEngine(ReferenceEngine):
    """The reference engine with other caps, which its own checks enforce."""

    caps = CAPS


ENTRY = EngineEntry(CAPS, RestrictedEngine, lambda group, config, num_experts: None)


def know(ctx: RankContext, is_known: bool) -> None:
    """Put the engine into a rank's registry, or remove it."""
    ENGINES.update(restricted=ENTRY) if is_known else ENGINES.pop("restricted", None)


@pytest.fixture
def restricted(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    """A pool on whose ranks the registry knows the engine."""
    monkeypatch.setitem(ENGINES, "restricted", ENTRY)
    pool.run(know, True)
    yield pool
    pool.run(know, False)


# A case that breaks each limit.
BROKEN = {refusal(case, CAPS): case for ranks in (1, 2) for case in contract_cases(ranks)}
BROKEN["max_local_experts"] = Case("66-experts", (3, 4), num_experts=66, hidden=64)
del BROKEN[None]
assert len(BROKEN) == 7


@pytest.mark.parametrize("limit", BROKEN)
def test_what_exceeds_a_limit_is_refused(restricted: RankPool, limit: str) -> None:
    test_steps.test_all_steps_are_the_oracles(restricted, "restricted", BROKEN[limit])
