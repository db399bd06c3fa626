"""Grouped experts silently ignored what users had put on Megatron's modules: LoRA failed, hooks and
quantisers had no effect, and frozen experts were trained, for people who had asked for nothing.
"""

from __future__ import annotations

from functools import wraps
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from changed_experts import CHANGES, Change, holder, train
from rank_pool import RankContext
from torch.nn.modules import module as global_hooks

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import UnsupportedError

pytestmark = pytest.mark.each_release

FIELDS = {"gated_linear_unit": True, "activation_func": F.silu, "bias_activation_fusion": True}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
# The same padding, so that Megatron's experts multiply the same rows.
THEIRS = EpConfig(experts="megatron", alignment=16)


@pytest.mark.parametrize("name", CHANGES)
def test_what_users_put_on_experts(ctx: RankContext, name: str) -> None:
    change = CHANGES[name]
    fields = {**FIELDS, **(RECOMPUTED if "hook" in name else {})}
    expected, seen, _ = train(change, THEIRS, "cpu", False, ctx.rank, **fields)
    for room in (None, 256):  # exact and static mode
        options = EpConfig(experts="auto", max_recv_rows=room)
        found, also_seen, said = train(change, options, "cpu", False, ctx.rank, **fields)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if value is None or found[key] is None:
                assert value is found[key] is None, key
            elif change.words is None or room:  # products of other numbers of rows
                torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5, msg=key)
            else:
                assert torch.equal(found[key], value), key
        assert len(also_seen) == len(seen)
        if room is None:
            assert all(map(torch.equal, also_seen, seen))
        warnings = [line for line in said if "Megatron's experts compute" in line]
        assert len(warnings) == (change.words is not None)
        assert all(str(change.words) in line for line in warnings)
    if change.words is None:
        train(change, EpConfig(experts="grouped"), "cpu", False, ctx.rank, **fields)
    else:
        with pytest.raises(UnsupportedError) as caught:
            train(change, EpConfig(experts="grouped"), "cpu", False, ctx.rank, **fields)
        assert change.words in str(caught.value)
        assert "with experts='auto'" in str(caught.value)


@pytest.mark.parametrize(
    ("register", "kind"),
    [
        (global_hooks.register_module_forward_hook, "a forward hook"),
        (global_hooks.register_module_forward_pre_hook, "a forward pre-hook"),
        (global_hooks.register_module_full_backward_hook, "a backward hook"),
        (global_hooks.register_module_full_backward_pre_hook, "a backward pre-hook"),
    ],
)
def test_hooks_of_all_modules(ctx: RankContext, register: Any, kind: str) -> None:
    """Profilers register them for the whole process, and saw no linear of grouped experts."""
    seen, handles = list[Any](), list[Any]()

    def make(layer: Any, _: Any) -> None:
        linear = holder(layer).linear_fc1
        handles.append(register(lambda module, *_: seen.append(module is linear) or None))

    change, words = Change(make), f"all modules have {kind}"
    try:
        _, _, said = train(change, EpConfig(experts="auto"), "cpu", False, ctx.rank, **FIELDS)
        assert sum(seen) == 2, "micro-batches"
        assert any("Megatron's experts compute" in line and words in line for line in said)
        handles.pop().remove()
        with pytest.raises(UnsupportedError, match=words):
            train(change, EpConfig(experts="grouped"), "cpu", False, ctx.rank, **FIELDS)
    finally:
        handles.pop().remove()


def test_what_changes_while_rows_are_on_their_way(ctx: RankContext) -> None:
    """The dispatcher looked at the experts before it dispatched, and no more after that: a hook put
    on them in between was never called, in a pass whose unused rows hold anything.
    """
    from megatron_ncclep.integration.dispatcher import NcclEpTokenDispatcher

    dispatch = NcclEpTokenDispatcher.token_dispatch

    def late(layer: Any, seen: Any) -> None:
        def token_dispatch(*args: Any) -> Any:
            rows = dispatch(layer.token_dispatcher, *args)
            if not holder(layer).linear_fc1._forward_hooks:
                CHANGES["forward hook"].make(layer, seen)
            return rows

        layer.token_dispatcher.token_dispatch = token_dispatch

    words = "has a forward hook"
    expected, _, _ = train(CHANGES["forward hook"], THEIRS, "cpu", False, ctx.rank, **FIELDS)
    for room in (None, 256):
        options = EpConfig(experts="auto", max_recv_rows=room)
        found, _, said = train(Change(late), options, "cpu", False, ctx.rank, **FIELDS)
        for key, value in expected.items():
            if value is not None:
                torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-5, msg=key)
        assert any("Megatron's experts compute" in line and words in line for line in said)
    with pytest.raises(UnsupportedError, match=words):
        train(Change(late), EpConfig(experts="grouped"), "cpu", False, ctx.rank, **FIELDS)


def test_a_class_that_is_changed() -> None:
    from megatron_ncclep.integration.experts.as_built import AsBuilt

    class Linear(torch.nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return super().forward(rows)

    built = AsBuilt(torch.nn.Sequential(Linear(2, 2)))
    assert built.change() is None
    Linear.forward = lambda self, rows: rows  # type: ignore[method-assign]
    assert built.change() == "0 (Linear) has another forward"


def test_the_hooks_of_a_capture() -> None:
    """TransformerEngine hooks every module of a layer that it captures, and grouped experts refused
    to be in its graphs, which Megatron calls cuda_graph_impl="transformer_engine".
    """
    from megatron_ncclep.integration.experts.as_built import AsBuilt

    experts = torch.nn.Sequential(torch.nn.Linear(2, 2))
    built = AsBuilt(experts)
    names = {"__name__": "transformer_engine.pytorch.graph"}
    hook_fn = FunctionType((lambda module, inputs, outputs: None).__code__, names)
    for module in experts.modules():
        module.register_forward_hook(hook_fn)
    assert built.change() is None
    # A user's, which looks like it.
    experts[0].register_forward_hook(wraps(hook_fn)(lambda *_: None))
    assert built.change() == "0 (Linear) has a forward hook"


def test_a_graph_is_not_captured(ctx: RankContext) -> None:
    from megatron_ncclep.integration import dispatcher

    change, options = CHANGES["LoRA on linear_fc1"], EpConfig(experts="auto", max_recv_rows=256)
    with (
        mock.patch.object(dispatcher, "is_graph_capturing", return_value=True),
        pytest.raises(UnsupportedError, match="a CUDA graph holds the experts, and Megatron's"),
    ):
        train(change, options, "cpu", False, ctx.rank, **FIELDS)
