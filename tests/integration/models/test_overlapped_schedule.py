"""Megatron's schedule that overlaps two micro-batches (overlap_moe_expert_parallel_comm): the bits
of its schedule without.

It frees the storage of what it takes for a part's own copy, on a CPU too: what backward still needs
would have no values then.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

import pytest
import torch
from megatron_setup import BATCH, HIDDEN, SEQUENCE, build_layer, initialize, make_config
from schedule_case import differences, train_on_schedule

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import IntegrationError
from megatron_ncclep.ranks.pool import RankContext, RankPool

pytestmark = pytest.mark.each_release

CASES: dict[str, dict[str, Any]] = {
    "several-experts": {"ep": 2},
    # It gets its rows as they come.
    "one-expert": {
        "ep": 4,
        "options": {"num_moe_experts": 4, "moe_shared_expert_intermediate_size": 32},
    },
    "grouped-static": {
        "ep": 2,
        "options": {"ncclep": EpConfig(experts="grouped", max_recv_rows="worst")},
    },
    "pipeline": {"ep": 2, "pp": 2, "num_micro_batches": 4},
}


def differences_on_rank(
    ctx: RankContext, options: dict[str, Any] | None = None, **how: Any
) -> list[str]:
    options = options or {}
    overlapped = {**options, "overlap_moe_expert_parallel_comm": True}
    eager = train_on_schedule(ctx, "ncclep", options=options, **how)
    return differences(train_on_schedule(ctx, "ncclep", options=overlapped, **how), eager)


@pytest.mark.supports(
    "overlap_moe_expert_parallel_comm",
    compared="losses and all gradients with those of the schedule without overlap, to the bit",
)
@pytest.mark.parametrize("name", CASES)
def test_overlap_changes_no_bits(megatron_pool: RankPool, name: str) -> None:
    found = megatron_pool.run(partial(differences_on_rank, **CASES[name]))
    assert found == [[]] * megatron_pool.size


def delayed_on_rank(ctx: RankContext) -> tuple[str, list[str], list[str]]:
    """Train a layer with overlap_dispatch_backward_with_experts_wgrad and without.

    Returns Megatron-Core's version, of which the oldest know nothing of it; what differs; and in
    which order things are queued.
    """
    initialize(ep=4)
    import megatron.core

    found: list[dict[str, torch.Tensor]] = []
    order: list[str] = []
    for is_delayed in (False, True):
        torch.manual_seed(1)
        config = make_config("ncclep", torch.float32, 4)
        # Set after validation, which wants TransformerEngine: its experts alone delay anything.
        config.overlap_dispatch_backward_with_experts_wgrad = is_delayed
        layer = build_layer(config)
        if is_delayed:
            engine = layer.token_dispatcher.engine
            for owner, name in ((engine, "dispatch"), (engine, "combine"), (layer, "backward_dw")):
                _log(order, owner, name)
        generator = torch.Generator().manual_seed(ctx.rank)
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator, requires_grad=True)
        out, _ = layer(hidden)
        out.square().sum().backward()
        results = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        found.append({**results, "output": out.detach(), "input": hidden.grad})
    return megatron.core.__version__, differences(*found), order


def _log(order: list[str], owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        order.append(name)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def test_weight_gradients_beside_the_backward_of_dispatch(megatron_pool: RankPool) -> None:
    """Megatron starts them on a stream of their own, once the combine of gradients is queued."""
    for version, problems, order in megatron_pool.run(delayed_on_rank):
        assert not problems
        steps = ["dispatch", "combine", "dispatch", "combine", "backward_dw"]
        assert order == (steps[:-1] if version.startswith(("0.16", "0.17")) else steps)


def hook_on_rank(ctx: RankContext) -> str:
    initialize(ep=4)
    from megatron_ncclep.integration.checks import schedule as schedule_support

    # Of other types, what is freed stays Megatron's choice.
    config = make_config("ncclep", torch.float32, 4)
    schedule_support.keep_inputs("ncclep")
    schedule_support.keep_inputs("ncclep")
    modules = [sys.modules.get(name) for name in schedule_support.PLACES]
    decides = next(m.should_free_input for m in modules if hasattr(m, "should_free_input"))
    rest = [2] if len(inspect.signature(decides).parameters) > 3 else []  # experts of a rank
    parts = ("moe_dispatch", "mlp", "moe_combine")
    assert [decides(name, True, config, *rest) for name in parts] == [False, False, True]
    config.moe_token_dispatcher_type = "alltoall"
    assert [decides(name, True, config, *rest) for name in parts] == [True, True, True]
    assert not decides("mlp", False, config, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_support, "PLACES", ("megatron.core.utils", "megatron.core.nowhere"))
        with pytest.raises(IntegrationError) as caught:
            schedule_support.keep_inputs("ncclep")
    return str(caught.value)


def test_what_is_kept(megatron_pool: RankPool) -> None:
    for text in megatron_pool.run(hook_on_rank):
        assert "megatron.core.utils nor megatron.core.nowhere has should_free_input()" in text
