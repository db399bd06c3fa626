"""Rows and gradients that cross in FP8: the bits of quantising them where they arrive.

Kernels in plain torch (torch_fp8_kernels.py) stand in for the extension's; whole layers train over
the engine `reference`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron_setup import build_layer, drawn, initialize
from rank_pool import RankContext
from te_autocast import State, autocast
from test_fp8_recipe import GROUPED, IN_FP8, WIDTH, a_pass, config_with
from torch import Tensor
from torch_fp8_kernels import TorchFp8Kernels, stand_in

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.reference.engine import ReferenceEngine
from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.experts import grouped

TOKENS = 24
# Columns of tokens and gradients that are far below the others: e4m3's smallest normal number is
# 2^-14.8 of its largest, and a row's largest value becomes more than half of that one.
SMALL = slice(None, None, 3)
STATIC = EpConfig(engine="reference", experts="grouped", max_recv_rows=256)


class Passes:
    """Layers in FP8 on this rank, and what they did.

    Attributes:
        kernels: those that stand in for the extension's.
        sent: the dtypes of all rows that were dispatched.
    """

    def __init__(self, patch: pytest.MonkeyPatch, ep: int) -> None:
        initialize(ep=ep)
        self._ep, self._patch = ep, patch
        self.kernels: TorchFp8Kernels = stand_in(patch)
        self.sent: list[torch.dtype] = []
        patch.setattr(grouped, "fp8_unavailable", lambda *_: None)
        dispatch = ReferenceEngine.dispatch

        def watched(engine: Any, plan: Any, x: Tensor, w: Tensor | None = None) -> Any:
            self.sent.append(x.dtype)
            return dispatch(engine, plan, x, w)

        patch.setattr(ReferenceEngine, "dispatch", watched)

    def layer(self, ncclep: EpConfig = GROUPED, **options: Any) -> Any:
        layer = build_layer(config_with(ncclep, self._ep, **{**IN_FP8, **options}))
        for parameter in layer.experts.parameters():
            torch.nn.init.normal_(parameter, std=0.06)
        return layer

    @contextmanager
    def in_bf16(self) -> Iterator[None]:
        """Rows cross as they are."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grouped.GroupedExperts, "rows_cross", lambda *_: None)
            yield

    def taken(self) -> tuple[list[torch.dtype], list[str]]:
        """What was sent, and how rows were quantised, since this was last asked."""
        names = [n for n in self.kernels.calls if n.endswith("_rows") and "multiply" not in n]
        sent = list(self.sent)
        self.sent.clear()
        self.kernels.calls.clear()
        return sent, names


@contextmanager
def passes(ep: int = 1) -> Iterator[Passes]:
    with pytest.MonkeyPatch.context() as patch, autocast(State()):
        yield Passes(patch, ep)


def inputs(rank: int = 0, small: float = 1.0) -> tuple[Tensor, Tensor]:
    """Tokens, and gradients of the results: from 1 to 2 but in the small columns."""
    both = drawn(5 + rank, 2, TOKENS + 7 * rank, 1, WIDTH)
    both = both.sign() * (1 + both.abs().frac())
    both[..., SMALL] *= small
    return both[0].bfloat16(), both[1]


BF16, BYTES = torch.bfloat16, torch.uint8
CROSSED = ([BYTES, BYTES], ["fp8_pack_rows", "fp8_unpack_rows"] * 2)
AS_THEY_ARE = ([BF16, BF16], ["fp8_quantize_rows"] * 2)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], *names: str) -> None:
    assert found.keys() == expected.keys()
    for name in names or found:
        assert expected[name].any(), name
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.each_release
@pytest.mark.parametrize("ncclep", [GROUPED, STATIC], ids=["exact", "static"])
def test_the_same_bits(ctx: RankContext, ncclep: EpConfig) -> None:
    """Where nothing is below e4m3's range, quantising twice is quantising once."""
    with passes(ctx.num_ranks) as run:
        layer, (hidden, probe) = run.layer(ncclep), inputs(ctx.rank)
        found = a_pass(layer, hidden, probe)
        assert run.taken() == CROSSED
        with run.in_bf16():
            expected = a_pass(layer, hidden, probe)
        assert run.taken() == AS_THEY_ARE
        assert_same(found, expected)
        layer.eval()
        with torch.no_grad():
            out = layer(hidden)[0]
        assert run.taken() == (CROSSED[0][:1], CROSSED[1][:2])
        assert torch.equal(out, found["output"])


def test_values_below_the_range(ctx: RankContext) -> None:
    """Only weight gradients change, and of these only columns with such values.

    From 2^-14 to 2^-13 beside 2, they become multiples of 2^-16, which moves them by 2^-4.4 (root
    mean square); the rounding by columns that this is compared with, by 2^-5.2.  Both together are
    2^-4.1.
    """
    with passes(ctx.num_ranks) as run:
        layer, (hidden, probe) = run.layer(), inputs(ctx.rank, 2**-14)
        found = a_pass(layer, hidden, probe)
        with run.in_bf16():
            expected = a_pass(layer, hidden, probe)
    assert_same(found, expected, "output", "input", "router.weight")
    for name in found.keys() - {"output", "input", "router.weight"}:
        # Weights [..., hidden] of fc1, [hidden, ...] of fc2.
        mine, other = (t[name] if "fc1" in name else t[name].t() for t in (found, expected))
        is_small = torch.zeros(WIDTH, dtype=torch.bool)
        is_small[SMALL] = True
        assert torch.equal(mine[:, ~is_small], other[:, ~is_small]), name
        off = (mine - other)[:, is_small].norm() / other[:, is_small].norm()
        assert 0 < off < 2**-3, (name, off)


@pytest.mark.alone
def test_when_rows_cross_in_fp8(ctx: RankContext) -> None:
    with passes() as run:
        layer, batch = run.layer(), inputs()
        a_pass(layer, *batch)
        assert run.taken() == CROSSED
        with autocast(State(is_on=False)):
            a_pass(layer, *batch)
        assert run.taken() == ([BF16, BF16], [])
        with autocast(State(powers=(False,) * 3)):  # by columns, other values would come out
            a_pass(layer, *batch)
        assert run.taken() == AS_THEY_ARE
        with mock.patch.object(type(layer.token_dispatcher), "engine") as engine:
            engine.caps.moves_bytes = False
            a_pass(layer, *batch)
        assert run.taken() == AS_THEY_ARE
        with torch.autograd.set_detect_anomaly(True):  # to which a stand-in would be an error
            a_pass(layer, *batch)
        assert run.taken()[0] == [BYTES, BYTES]
        on_input = run.layer(
            moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True
        )
        a_pass(on_input, *batch)
        assert run.taken() == AS_THEY_ARE


def dispatched(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and their probabilities, as in the layer's forward pass."""
    probs, routing_map = layer.router(hidden)
    dispatcher = layer.token_dispatcher
    tokens = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    found: tuple[Tensor, Tensor] = dispatcher.token_dispatch(*tokens)
    return found


def computed(layer: Any, rows: Tensor, row_probs: Tensor) -> Tensor:
    """The experts' output, ready for combine."""
    y, _ = layer.experts(*layer.token_dispatcher.dispatch_postprocess(rows, row_probs))
    found: Tensor = layer.token_dispatcher.combine_preprocess(y)
    return found


@pytest.mark.each_release
@pytest.mark.alone
def test_a_graph_that_is_cut(ctx: RankContext) -> None:
    """As overlap_moe_expert_parallel_comm does; the experts get numbers, with the same bits."""
    with passes() as run:
        layer, (hidden, probe) = run.layer(), inputs()
        expected = a_pass(layer, hidden, probe)
        run.taken()
        for parameter in layer.parameters():
            parameter.grad = None
        x = hidden.clone().requires_grad_()
        received = dispatched(layer, x)
        leaves = [tensor.detach().requires_grad_() for tensor in received]
        y = computed(layer, *leaves)
        leaf = y.detach().requires_grad_()
        out = layer.token_dispatcher.token_combine(leaf)
        (out.float() * probe).sum().backward()
        y.backward(leaf.grad)
        torch.autograd.backward(received, [each.grad for each in leaves])
        found = {"output": out.detach(), "input": x.grad}
        found |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
        assert run.taken()[0] == [BYTES, BYTES]
        assert_same(found, expected)


@pytest.mark.alone
def test_passes_in_one_graph(ctx: RankContext) -> None:
    """Two micro-batches, one of them recomputed, and a copy of the experts."""
    with passes() as run:
        layer, batches = run.layer(), (inputs(0), inputs(1))
        apart = [a_pass(layer, *batch)["input"] for batch in batches]
        shared: Any = {dist.ProcessGroup: lambda group, memo: group}
        with mock.patch.dict(copy._deepcopy_dispatch, shared):  # type: ignore[attr-defined]
            layer.experts = copy.deepcopy(layer.experts)
        leaves = [hidden.clone().requires_grad_() for hidden, _ in batches]
        outs = [
            layer(leaves[0])[0],
            torch.utils.checkpoint.checkpoint(lambda x: layer(x)[0], leaves[1], use_reentrant=True),
        ]
        losses = [
            (out.float() * probe).sum() for out, (_, probe) in zip(outs, batches, strict=True)
        ]
        torch.autograd.backward(losses)
        for leaf, expected in zip(leaves, apart, strict=True):
            assert torch.equal(leaf.grad, expected)


MISSED = "did not get what crossed in FP8: {}. Leave nothing between dispatch, experts and combine"
OTHERS, GONE = MISSED.format("others arrived"), MISSED.format("their bytes are gone")


@pytest.mark.alone
def test_what_comes_between(ctx: RankContext) -> None:
    """Nobody computes with a stand-in, or with the rows of another one."""
    with passes() as run:
        layer, (hidden, _) = run.layer(), inputs()
        dispatcher, x = layer.token_dispatcher, hidden.clone().requires_grad_()
        received = dispatched(layer, x)
        rows, counts, row_probs = dispatcher.dispatch_postprocess(*received)
        assert (rows.shape[1], rows.dtype, rows.stride()) == (WIDTH, BF16, (0, 0))
        assert len(rows) == counts.sum()
        assert rows.untyped_storage().nbytes() == rows.element_size()
        assert rows.isnan().all()
        with pytest.raises(UnsupportedError, match=OTHERS):
            layer.experts(rows * 1, counts, row_probs)
        received = dispatched(layer, x)
        computed(layer, *received)
        with pytest.raises(UnsupportedError, match=GONE):
            computed(layer, *received)

        y = computed(layer, *dispatched(layer, x))
        y.register_hook(lambda grad: grad * 1)
        with pytest.raises(UnsupportedError, match=OTHERS):
            dispatcher.token_combine(y).sum().backward()
        received = dispatched(layer, x)
        with (
            autocast(State(is_on=False)),
            pytest.raises(UnsupportedError, match="fp8_autocast that ends between a layer's"),
        ):
            computed(layer, *received)

        received = dispatched(layer, x)
        dispatcher._grouped._is_asked_for = False
        layer.experts.register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedError, match=r"would compute them: .*hook"):
            computed(layer, *received)
        y = computed(layer, *dispatched(layer, x))
        y.sum().backward()  # an expanded number, but a real one


def test_a_hook_on_one_rank(ctx: RankContext) -> None:
    """There Megatron's experts compute, with the numbers of what crossed; all ranks send bytes."""
    with passes(ctx.num_ranks) as run:
        layer, batch = run.layer(), inputs(ctx.rank)
        expected = a_pass(layer, *batch)
        run.taken()
        layer.token_dispatcher._grouped._is_asked_for = False
        if ctx.rank == 0:
            layer.experts.register_forward_hook(lambda *_: None)
        found = a_pass(layer, *batch)
        assert run.taken()[0] == [BYTES, BYTES]
        for name in ("output", "input"):
            mine, other = found[name].float(), expected[name].float()
            assert 0 < (mine - other).norm() / other.norm() < 2**-3, name
