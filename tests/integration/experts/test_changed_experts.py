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
from changed_experts import CHANGES, THEIRS, Change, holder, train
from megatron_setup import SWIGLU, selective
from rank_pool import RankContext
from torch.nn.modules import module as global_hooks
from trainer import differences

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.experts.as_built import AsBuilt

pytestmark = pytest.mark.each_release


def trained(change: Change, ncclep: EpConfig, rank: int, **fields: Any) -> Any:
    """Results, what hooks saw, and the warnings that Megatron's experts compute."""
    results, seen, said = train(change, ncclep, "cpu", False, rank, **SWIGLU, **fields)
    return results, seen, [line for line in said if "Megatron's experts compute" in line]


def assert_refused(change: Change, words: str, rank: int, **fields: Any) -> None:
    with pytest.raises(UnsupportedError) as caught:
        trained(change, EpConfig(experts="grouped"), rank, **fields)
    assert words in str(caught.value)
    assert "with experts='auto'" in str(caught.value)


@pytest.mark.parametrize("name", CHANGES)
def test_what_users_put_on_experts(ctx: RankContext, name: str) -> None:
    change = CHANGES[name]
    fields = selective("moe") if "hook" in name else {}
    expected, seen, _ = trained(change, THEIRS, ctx.rank, **fields)
    for room in (None, 256):  # exact and static mode
        options = EpConfig(experts="auto", max_recv_rows=room)
        found, also_seen, warnings = trained(change, options, ctx.rank, **fields)
        is_rounded = change.words is None or room  # products of other numbers of rows
        problems = differences(found, expected, 1e-5 if is_rounded else 0.0)
        assert problems == (["no expert was trained"] if name.startswith("frozen") else []), room
        assert len(also_seen) == len(seen)
        if room is None:
            assert all(map(torch.equal, also_seen, seen))
        assert len(warnings) == (change.words is not None)
        assert all(str(change.words) in line for line in warnings)
    if change.words is None:
        trained(change, EpConfig(experts="grouped"), ctx.rank, **fields)
    else:
        assert_refused(change, change.words, ctx.rank, **fields)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("forward_hook", "a forward hook"),
        ("forward_pre_hook", "a forward pre-hook"),
        ("full_backward_hook", "a backward hook"),
        ("full_backward_pre_hook", "a backward pre-hook"),
    ],
)
def test_hooks_of_all_modules(ctx: RankContext, name: str, kind: str) -> None:
    """Profilers register them for the whole process, and saw no linear of grouped experts."""
    register = getattr(global_hooks, f"register_module_{name}")
    seen, handles = list[Any](), list[Any]()

    def make(layer: Any, _: Any) -> None:
        linear = holder(layer).linear_fc1
        handles.append(register(lambda module, *_: seen.append(module is linear) or None))

    change, words = Change(make), f"all modules have {kind}"
    try:
        _, _, warnings = trained(change, EpConfig(experts="auto"), ctx.rank)
        assert sum(seen) == 2, "micro-batches"
        assert words in str(warnings)
        handles.pop().remove()
        assert_refused(change, words, ctx.rank)
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
                hook.make(layer, seen)
            return rows

        layer.token_dispatcher.token_dispatch = token_dispatch

    hook = CHANGES["forward hook"]
    expected, _, _ = trained(hook, THEIRS, ctx.rank)
    for room in (None, 256):
        options = EpConfig(experts="auto", max_recv_rows=room)
        found, _, warnings = trained(Change(late), options, ctx.rank)
        assert differences(found, expected, 1e-5) == [], room
        assert str(hook.words) in str(warnings)
    assert_refused(Change(late), str(hook.words), ctx.rank)


def test_a_class_that_is_changed() -> None:
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
        trained(change, options, ctx.rank)
