"""quack-kernels' products on GPUs: against fp64, bit by bit against themselves, and main_grad."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from experts_in_fp64 import distance, exact_experts, same
from rank_pool import RankContext
from torch import Tensor

from megatron_ncclep.integration.experts.fused_swiglu import swiglu_experts, unavailable_reason
from megatron_ncclep.integration.experts.main_grad import GradientTarget

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("quack") is None, reason="quack-kernels is not installed"
)

HIDDEN, FFN = 256, 192
# More and fewer rows than a tile has, none, and a last block that ends inside a tile.
SIZES = (16, 0, 400, 128, 0, 272, 48)
REST = 40  # rows after the last block, all NaN
INTO_MAIN_GRAD = GradientTarget(into_main_grad=True)
# bf16 moves a value by at most 2^-9 of itself, 1.1e-3 as a root mean square.  A result is rounded
# once; gate and up, activated rows and their gradients, which go into it, once or twice before.
TOLERANCE = 5e-3


class Experts:
    """Weights as Megatron lays them out, rows of one micro-batch, and main_grads in one buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        from megatron_ncclep.integration.experts.quack_products import QuackProducts

        generator = torch.Generator("cuda").manual_seed(5)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            values = scale * torch.randn(shape, generator=generator, device="cuda")
            return values.bfloat16()

        self.used = sum(SIZES)
        self.rows, self.grad = draw(self.used + REST, HIDDEN), draw(self.used + REST, HIDDEN)
        self.probs = draw(self.used + REST).abs().float()
        for tensor in (self.rows, self.grad, self.probs):
            tensor[self.used :] = torch.nan
        self.offsets = torch.tensor(SIZES, device="cuda").cumsum(0, dtype=torch.int32)
        number = len(SIZES)
        stacks = (draw(number, 2 * FFN, HIDDEN, scale=0.06), draw(number, HIDDEN, FFN, scale=0.07))
        self.fc1, self.fc2 = ([torch.nn.Parameter(weight) for weight in stack] for stack in stacks)
        self.main_grads = [torch.zeros(stack.shape, device="cuda", dtype=dtype) for stack in stacks]
        for weights, buffer in zip((self.fc1, self.fc2), self.main_grads, strict=True):
            for weight, main_grad in zip(weights, buffer, strict=True):
                weight.main_grad, weight.grad_added_to_main_grad = main_grad, False
        self.products = QuackProducts()

    def run(self, target: GradientTarget = INTO_MAIN_GRAD) -> list[Tensor]:
        """Output, and gradients of the rows and probabilities that belong to an expert."""
        for weight in (*self.fc1, *self.fc2):
            weight.grad = None
        rows, probs = self.rows.clone().requires_grad_(), self.probs.clone().requires_grad_()
        out = swiglu_experts(rows, probs, self.offsets, self.fc1, self.fc2, self.products, target)
        out.backward(self.grad)
        assert rows.grad is not None
        assert probs.grad is not None
        return [tensor[: self.used] for tensor in (out.detach(), rows.grad, probs.grad)]

    def everything(self) -> list[Tensor]:
        """The same and the main_grads, which begin at zero."""
        for buffer in self.main_grads:
            buffer.zero_()
        return [*self.run(), *(buffer.clone() for buffer in self.main_grads)]

    def exact(self) -> list[Tensor]:
        """All of `everything` in fp64."""
        operands = (self.rows, self.probs, SIZES, self.fc1, self.fc2)
        return exact_experts(*operands, self.grad)


def test_against_fp64(ctx: RankContext) -> None:
    assert unavailable_reason(torch.device("cuda"), torch.bfloat16) is None
    experts = Experts()
    for mine, exact in zip(experts.everything(), experts.exact(), strict=True):
        assert distance(mine, exact) < TOLERANCE
    for buffer in experts.main_grads:
        assert not buffer[1].any()  # of an expert without rows
        assert not buffer[4].any()
    experts.run(GradientTarget())  # no main_grad: bf16, rounded once
    for weights, buffer in zip((experts.fc1, experts.fc2), experts.main_grads, strict=True):
        for weight, main_grad in zip(weights, buffer, strict=True):
            assert torch.equal(weight.grad, main_grad.bfloat16())


def test_the_same_bits(ctx: RankContext) -> None:
    """Whatever else differs, the bits do not."""
    experts = Experts()
    expected = experts.everything()
    assert same(experts.everything(), expected) == [True] * 5
    with torch.no_grad():  # keeps nothing for backward: another kernel
        target = (experts.products, INTO_MAIN_GRAD)
        out = swiglu_experts(
            experts.rows, experts.probs, experts.offsets, experts.fc1, experts.fc2, *target
        )
    assert torch.equal(out[: experts.used], expected[0])
    experts.products = copy.deepcopy(experts.products)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = experts.everything()
    torch.cuda.current_stream().wait_stream(stream)
    assert same(on_stream, expected) == [True] * 5


def test_main_grads(ctx: RankContext) -> None:
    experts = Experts()
    *_, fc1, fc2 = experts.everything()
    # a + a is exact in fp32, so a rounding on the way would show.
    experts.run()
    assert same(experts.main_grads, [2 * fc1, 2 * fc2]) == [True, True]
    # A step's first micro-batch reads nothing, for experts without rows either.
    overwrites = GradientTarget(into_main_grad=True, may_overwrite=True)
    for weight in (*experts.fc1, *experts.fc2):
        weight.main_grad.fill_(torch.nan)
        weight.grad_added_to_main_grad = False
    experts.run(overwrites)
    assert same(experts.main_grads, [fc1, fc2]) == [True, True]
    experts.run(overwrites)
    assert same(experts.main_grads, [2 * fc1, 2 * fc2]) == [True, True]
    # In buckets, with gaps between: one product for each.
    for weight in (*experts.fc1, *experts.fc2):
        weight.main_grad = torch.zeros_like(weight.main_grad)
    experts.run()
    for weights, expected in ((experts.fc1, fc1), (experts.fc2, fc2)):
        assert same([weight.main_grad for weight in weights], expected) == [True] * len(SIZES)
    # grad_reduce_in_fp32=False.
    rounded = Experts(torch.bfloat16)
    *_, fc1_rounded, fc2_rounded = rounded.everything()
    assert same([fc1_rounded, fc2_rounded], [fc1.bfloat16(), fc2.bfloat16()]) == [True, True]


def test_no_rows(ctx: RankContext) -> None:
    """A rank to which no token goes, without any rows and with padding."""
    for rows in (0, 64):
        experts = Experts()
        experts.used = 0
        experts.offsets = torch.zeros_like(experts.offsets)
        for name in ("rows", "grad", "probs"):
            setattr(experts, name, getattr(experts, name)[-rows:] if rows else experts.rows[:0])
        experts.probs = experts.rows.new_empty(rows)
        for buffer in experts.main_grads:
            buffer.fill_(3.0)
        out, *_ = experts.run()
        assert out.shape == (0, HIDDEN)
        assert all(bool((buffer == 3).all()) for buffer in experts.main_grads)
        for weight in (*experts.fc1, *experts.fc2):
            weight.grad_added_to_main_grad = False
        experts.run(GradientTarget(into_main_grad=True, may_overwrite=True))
        assert not any(bool(buffer.any()) for buffer in experts.main_grads)
