"""What the dispatcher hands on to its engine, and how its ranks agree: in a group of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ncclep import engines
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.engines.reference import ReferenceEngine

NUM_EXPERTS, TOP_K = 4, 2
# Every option has another value than its default.
OPTIONS = EpConfig(engine="recording", alignment=16, max_recv_rows=64, num_sms=7, timeout_s=5.0)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes a dispatcher, in a registry with an engine that honours every option."""
    caps = dataclasses.replace(
        engines.ENGINES["reference"].caps,
        options=frozenset(field.name for field in dataclasses.fields(EpConfig)),
    )
    entry = engines.EngineEntry(caps, ReferenceEngine, lambda group, config, num_experts: None)
    monkeypatch.setitem(engines.ENGINES, "recording", entry)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def make(**options: Any) -> Any:
        from megatron_ncclep.token_dispatcher import NcclEpTokenDispatcher

        group = dist.group.WORLD
        config = SimpleNamespace(
            num_moe_experts=NUM_EXPERTS,
            moe_router_topk=TOP_K,
            moe_pad_expert_input_to_capacity=True,
            **options,
        )
        groups = SimpleNamespace(ep=group, expt_tp=group, tp_ep=group)
        return NcclEpTokenDispatcher(NUM_EXPERTS, list(range(NUM_EXPERTS)), config, groups)

    try:
        yield make
    finally:
        dist.destroy_process_group()


def test_every_option_reaches_the_engine(make: Callable[..., Any]) -> None:
    """Of a dispatcher that ignored num_sms and timeout_s no test knew: results do not show them."""
    assert all(
        getattr(OPTIONS, field.name) != field.default for field in dataclasses.fields(EpConfig)
    )
    assert make(ncclep=OPTIONS).engine.config == OPTIONS


def test_options_of_the_environment_reach_the_engine(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for field in dataclasses.fields(EpConfig):
        monkeypatch.setenv(f"NCCLEP_{field.name.upper()}", str(getattr(OPTIONS, field.name)))
    assert make().engine.config == OPTIONS


def test_ranks_agree_on_a_larger_top_k_within_the_deadline(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With capacity padding a rank that had died left the others in an all-reduce of torch's own.

    It had torch's own deadline, 10 or 30 minutes, and no word of which rank was missing.
    """
    asked, others = [], iter([1, 4, 0])

    def gather(group: EpGroup, mine: torch.Tensor, what: str, timeout_s: float) -> torch.Tensor:
        asked.append((mine.tolist(), timeout_s))
        return torch.stack([mine, torch.tensor([next(others)])])

    monkeypatch.setattr(EpGroup, "gather", gather)
    dispatcher = make(ncclep=OPTIONS)
    routing_map = torch.zeros(2, NUM_EXPERTS, dtype=torch.bool)
    routing_map[1, :3] = True
    probs = routing_map.float()
    for tokens, top_k in ((2, 3), (2, 4), (0, TOP_K)):
        _, weights = dispatcher.dispatch_preprocess(
            torch.zeros(tokens, 8), routing_map[:tokens], probs[:tokens]
        )
        assert weights.shape == (tokens, top_k)
    assert asked == [([3], 5.0), ([3], 5.0), ([0], 5.0)]
