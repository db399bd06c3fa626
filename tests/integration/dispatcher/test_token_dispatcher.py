"""What the dispatcher hands on to its engine, and how its ranks agree: in a group of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_nodes_static import Far, InsideWithoutWaits, NoMethodReads, NoOperatorReads

from megatron_ncclep import engines
from megatron_ncclep.config import VARIABLES, EpConfig
from megatron_ncclep.engines.reference.engine import ReferenceEngine
from megatron_ncclep.errors import InputError, UnsupportedError
from megatron_ncclep.integration.checks.assignments import (
    require_columns_for_all_slices,
    require_order_of_ranks,
    require_usable_bound,
)
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.hosts import Hosts

NUM_EXPERTS, TOP_K = 4, 2
# Every option has another value than its default.
OPTIONS = EpConfig(
    engine="recording",
    alignment=16,
    max_recv_rows=64,
    max_tokens_per_rank=50,
    on_overflow="raise",
    num_sms=7,
    experts="grouped",
    timeout_s=5.0,
    first_timeout_s=6.0,
    check_calls=True,
    network_chunks=3,
    metrics_interval=9,
    inference_tokens=11,
    gradient_averaging="a2sgd",
    resync_interval=13,
)
EXACT = dataclasses.replace(
    OPTIONS, max_recv_rows=None, max_tokens_per_rank=None, on_overflow="drop"
)
STATIC = dataclasses.replace(OPTIONS, on_overflow="drop")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, process_group: dist.ProcessGroup) -> Callable[..., Any]:
    """Makes a dispatcher, in a registry with an engine that honours every option."""
    fields = frozenset(field.name for field in dataclasses.fields(EpConfig))
    caps = dataclasses.replace(engines.ENGINES["reference"].caps, options=fields)
    limits = {"few-assignments": NUM_EXPERTS - 1, "one-for-each": NUM_EXPERTS}

    def build(group: EpGroup, num_experts: int, config: EpConfig) -> ReferenceEngine:
        kind = InsideWithoutWaits if config.engine == "far" else ReferenceEngine
        engine = kind(group, num_experts, config)
        engine.caps = engines.ENGINES[config.engine].caps
        return engine

    for name in ("recording", "far", *limits):
        limited = dataclasses.replace(caps, name=name, max_top_k=limits.get(name, caps.max_top_k))
        entry = engines.EngineEntry(limited, build, lambda group, config, num_experts: None)
        monkeypatch.setitem(engines.ENGINES, name, entry)

    def make(
        ncclep: EpConfig | None = None, pads: bool = True, slices: int = 1, **counts: bool
    ) -> Any:
        from megatron_ncclep.integration.dispatcher import NcclEpTokenDispatcher

        group = process_group
        config = SimpleNamespace(
            num_moe_experts=NUM_EXPERTS,
            moe_router_topk=TOP_K,
            moe_pad_expert_input_to_capacity=pads,
            **({} if ncclep is None else {"ncclep": ncclep}),
        )
        expt_tp = SimpleNamespace(size=lambda: slices, rank=lambda: 0)
        groups = SimpleNamespace(ep=group, expt_tp=expt_tp, tp_ep=group)
        experts = list(range(NUM_EXPERTS))
        return NcclEpTokenDispatcher(NUM_EXPERTS, experts, config, groups, **counts)

    return make


@pytest.mark.parametrize("by_environment", [False, True])
def test_every_option_reaches_the_engine(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, by_environment: bool
) -> None:
    """No test noticed a dispatcher that ignored num_sms and timeout_s: results do not show them."""
    of_engine = dataclasses.replace(VARIABLES["NCCLEP_ENGINE"], choices=None)
    monkeypatch.setitem(VARIABLES, "NCCLEP_ENGINE", of_engine)
    for field in dataclasses.fields(EpConfig):
        if field.name == "max_recv_gib":  # the dispatcher's own
            continue
        value = getattr(OPTIONS, field.name)
        assert value != field.default
        if by_environment:
            monkeypatch.setenv(f"NCCLEP_{field.name.upper()}", str(value))
    assert make(None if by_environment else OPTIONS).engine.config == OPTIONS


def test_ranks_agree_on_a_larger_top_k_within_the_deadline(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With capacity padding a rank that had died left the others in an all-reduce of torch's own,
    for 10 or 30 minutes, and nothing said which rank was missing.
    """
    others = iter([1, 4, 0])
    gather = mock.Mock(side_effect=lambda mine, *_: torch.tensor([mine, [next(others)]]))
    monkeypatch.setattr(Hosts, "gather", gather)
    dispatcher = make(ncclep=EXACT)
    routing_map = torch.zeros(2, NUM_EXPERTS, dtype=torch.bool)
    routing_map[1, :3] = True
    for tokens, top_k in ((2, 3), (2, 4), (0, TOP_K)):
        assert dispatcher._top_k(routing_map[:tokens]) == top_k
    asked = [(mine, timeout_s) for mine, _, timeout_s in (call.args for call in gather.mock_calls)]
    assert asked == [([3], 6.0), ([3], 6.0), ([0], 6.0)]  # in the first step


@pytest.mark.parametrize("pads", [False, True], ids=["", "pads to capacity"])
@pytest.mark.parametrize("adds_up", [False, True], ids=["", "counts cover all rows"])
def test_no_hook_reads_the_device(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, pads: bool, adds_up: bool
) -> None:
    """In static mode a layer waited for the device three times: for the counts, for what was
    dropped, and with capacity padding for the number of assignments.  On a CPU nothing waits.
    """
    options = dataclasses.replace(STATIC, engine="far")
    counts = {"counts_on_device": True, "counts_cover_all_rows": adds_up}
    dispatcher = make(options, pads, **counts)
    hidden = torch.ones(3, 2, 8, requires_grad=True)
    probs = torch.ones(6, NUM_EXPERTS, requires_grad=True)
    routing_map = torch.ones(6, NUM_EXPERTS).tril() > 0 if pads else torch.eye(6, NUM_EXPERTS) > 0
    monkeypatch.setattr(Far, "is_on", True)
    with NoMethodReads(), NoOperatorReads():
        x, w = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
        rows, row_w = dispatcher.token_dispatch(x, w)
        assert dispatcher._plan.top_k == (NUM_EXPERTS if pads else TOP_K)
        rows, per_expert, row_w = dispatcher.dispatch_postprocess(rows, row_w)
        y = dispatcher.combine_preprocess(rows * row_w[:, None])
        out = dispatcher.combine_postprocess(dispatcher.token_combine(y))
        out.sum().backward()
    assert out.shape == hidden.shape
    assert per_expert.shape == (NUM_EXPERTS,)
    assert hidden.grad is not None
    assert probs.grad is not None


@pytest.mark.parametrize("options", [STATIC, EXACT], ids=["static", "exact"])
def test_how_experts_get_the_counts(make: Callable[..., Any], options: EpConfig) -> None:
    """Three tokens for expert 0, one for expert 2, alignment 16: 32 of 64 rows are used."""
    routing_map = torch.zeros(3, NUM_EXPERTS, dtype=torch.bool)
    routing_map[:, 0] = routing_map[1, 2] = True
    last = 32 if options is STATIC else 0
    for counts, expected in (
        ({}, [16, 0, 16, last]),
        ({"counts_on_device": True}, [16, 0, 16, 0]),
        ({"counts_on_device": True, "counts_cover_all_rows": True}, [16, 0, 16, last]),
    ):
        dispatcher = make(options, pads=False, **counts)
        _, w = dispatcher.dispatch_preprocess(torch.ones(3, 8), routing_map, routing_map.float())
        rows, per_expert, _ = dispatcher.dispatch_postprocess(
            *dispatcher.token_dispatch(torch.ones(3, 8), w)
        )
        assert per_expert.tolist() == expected
        assert len(rows) == (64 if options is STATIC else 32)
        # The plan is kept for backward, unchanged.
        assert dispatcher._plan.tokens_per_expert.tolist() == [16, 0, 16, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"engine": "few-assignments"},
            "all 4 experts, and engine 'few-assignments' takes at most 3 assignments",
        ),
        ({"max_recv_rows": "1.25x"}, "give a number of rows or 'worst'"),
    ],
    ids=["more experts than assignments", "factor"],
)
def test_capacity_padding_that_static_mode_has_no_room_for(
    make: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    """When a layer is built, and in a batch that is padded later, as Megatron pads while it decodes
    (the dispatcher asked its config once, and sent a full batch to a plan for top-k assignments).
    """
    words = f"moe_pad_expert_input_to_capacity with max_recv_rows=.*{message}"
    with pytest.raises(InputError, match=words):
        make(dataclasses.replace(STATIC, **changes))
    dispatcher = make(dataclasses.replace(STATIC, **changes), pads=False)
    dispatcher.config.moe_pad_expert_input_to_capacity = True
    routing_map = torch.ones(2, NUM_EXPERTS, dtype=torch.bool)
    dispatcher.dispatch_preprocess(torch.ones(2, 8), routing_map, routing_map.float())
    with pytest.raises(InputError, match=words):
        dispatcher.token_dispatch(torch.ones(2, 8), routing_map.float())


def test_groups_and_assignments_that_slices_of_experts_do_not_allow(
    make: Callable[..., Any], process_group: dist.ProcessGroup
) -> None:
    """2 ranks are said to share an expert, in a group of one; 2 x 2 assignments are more than 3.

    An engine in this group is refused before, because it has fewer ranks than slices.
    """
    config = SimpleNamespace(num_moe_experts=NUM_EXPERTS, moe_router_topk=TOP_K)

    def limited(name: str) -> Any:
        return SimpleNamespace(caps=engines.ENGINES[name].caps, config=STATIC)

    with pytest.raises(
        InputError,
        match=r"topk=2 with .* size 2: .* 4 assignments, and engine 'few-assignments' takes at "
        r"most 3: set expert_tensor_parallel_size to 1 or less, or choose engine 'reference'",
    ):
        require_columns_for_all_slices(config, limited("few-assignments"), 2)
    expt_tp = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(
        UnsupportedError, match=r"is rank 0 of 1 in tp_ep, but rank 0 of 2 in expt_tp and rank 0"
    ):
        require_order_of_ranks(EpGroup.of(process_group), process_group, expt_tp, 60.0)
    with pytest.raises(
        InputError,
        match="all 4 experts, each in 2 slices, and engine 'one-for-each' takes at most 4",
    ):
        require_usable_bound(config, limited("one-for-each"), 2)
    with pytest.raises(InputError, match="ranks_per_expert is 2"):
        make(EXACT, slices=2)
    make(dataclasses.replace(EXACT, engine="one-for-each", max_recv_rows=64))
