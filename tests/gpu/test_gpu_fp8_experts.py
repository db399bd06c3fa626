"""FP8 products on a Hopper GPU: bit by bit against the format, and the whole layer against fp64.

tests/fp8_format.py is the format, and runs on the host; what needs TransformerEngine compares its
quantiser and its experts, and is skipped, by name, where it is not installed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import fp8_format as fp8
import pytest
import torch
import torch.nn.functional as F
from deselect import needs_te
from experts_in_fp64 import distance, exact_experts, same
from fp8_rows import BF16, FFN, HIDDEN, REST, SIZES, draw, ends_of, same_codes, special_rows
from rank_pool import RankContext
from torch import Tensor
from torch_fp8_kernels import stand_in

from megatron_ncclep.integration.experts.expert_stack import lay_out
from megatron_ncclep.integration.experts.fp8_products import BLOCK, Fp8Products, Fp8Rows, Fp8Weights
from megatron_ncclep.integration.experts.fp8_recipe import unavailable_reason
from megatron_ncclep.integration.experts.fp8_swiglu import Fp8Layer, fp8_swiglu_experts
from megatron_ncclep.integration.experts.main_grad import GradientTarget

INTO_MAIN_GRAD = GradientTarget(into_main_grad=True)
NAMES = ("output", "rows", "probs", "fc1", "fc2")
# Within a product of 32 values the tensor cores keep 13 bits below the largest term, which moved a
# sum by up to 5.4e-4 of its terms' magnitudes (2026-11-28-1xH200-fp8-experts.txt).
SUM_BITS = 1e-3
# e4m3 moves a value by 2^-5.2 (root mean square).  A product has two such factors; gate and up,
# activated rows and their gradients pass one or two products before they are quantised.
FP8_DISTANCE = 2**-3
# Another order of sums moves a few values to the next bf16, and of these a few to the next e4m3.
SAME_FORMAT = 2e-2


def assert_quantised(
    found: Fp8Rows, values: Tensor, ends: list[int], powers_of_two: bool = True, most: float = 0.0
) -> None:
    """`found` is what `values` become, both ways; at most this share of the codes may differ."""
    used, values = ends[-1], values.cpu()
    codes, scales = fp8.by_rows(values[:used], powers_of_two)
    assert same_codes(found.rows[:used], codes) <= most
    differ = (found.scales[:, :used].cpu() != scales).double().mean()
    assert differ <= most, f"scales of rows: {differ}"
    codes, scales = fp8.transposed(values, ends, powers_of_two)
    assert same_codes(found.transposed[: len(codes)], codes) <= most
    differ = (found.scales_transposed[: len(scales)].cpu() != scales).double().mean()
    assert differ <= most, f"scales of columns: {differ}"


@pytest.mark.parametrize("powers_of_two", [True, False])
def test_rows(ctx: RankContext, powers_of_two: bool) -> None:
    assert unavailable_reason(torch.device("cuda"), BF16) is None
    products = Fp8Products(powers_of_two)
    for sizes in (SIZES, (1,), (129,), (0, 0, 512)):
        ends = ends_of(sizes)
        on_gpu = torch.tensor(ends, device="cuda", dtype=torch.int32)
        rows = special_rows(SIZES, HIDDEN)[: ends[-1] + REST]
        found = products.quantize_rows(rows, on_gpu)
        assert_quantised(found, rows, ends, powers_of_two)
        # One way alone, and rows that begin anywhere.
        one = products.quantize_rows(rows, on_gpu, transposed=False)
        other = products.quantize_rows(rows, on_gpu, by_rows=False)
        assert_quantised(Fp8Rows(*one[:2], *other[2:]), rows, ends, powers_of_two)
        odd = torch.empty(rows.numel() + 1, device="cuda", dtype=BF16)[1:].view_as(rows)
        assert_quantised(products.quantize_rows(odd.copy_(rows), on_gpu), rows, ends, powers_of_two)


@pytest.mark.parametrize("powers_of_two", [True, False])
def test_weights(ctx: RankContext, powers_of_two: bool) -> None:
    stack = draw(4, 3, 2 * FFN, HIDDEN, scale=0.06)
    stack[0, :128, :128] = 0
    stack[0, 128:256, :128] = 2.0**-133
    stack[1, 200, 300] = torch.inf
    stack[1, 0, 1] = torch.nan
    stack[2, :128, 128:256] = 1.5
    codes, scales = fp8.of_weights(stack.cpu(), powers_of_two)
    for weights in (list(stack), [weight.clone() for weight in stack]):
        found = Fp8Products(powers_of_two).quantize_weights(weights)
        assert same_codes(found.weights, codes) == 0
        assert same_codes(found.transposed, codes.mT) == 0
        assert torch.equal(found.scales.cpu(), scales)
        assert torch.equal(found.scales_transposed.cpu(), scales.mT)


def swiglu_in_fp64(gate_up: Tensor, probs: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The result, and gradients of both inputs."""
    inputs = [tensor.double().requires_grad_() for tensor in (gate_up, probs)]
    gate, up = inputs[0].chunk(2, 1)
    out = F.silu(gate) * up * inputs[1][:, None]
    return out.detach(), *torch.autograd.grad(out, inputs, grad.double())


def test_swiglu(ctx: RankContext) -> None:
    """The bits of quantising what a SwiGLU in bf16 returns, but where it is rounded the other way:
    its exponential is not torch's, by about 2^-21.
    """
    ends = ends_of(SIZES)
    on_gpu, used = torch.tensor(ends, device="cuda", dtype=torch.int32), ends[-1]
    gate_up, grad = draw(5, used + REST, 2 * FFN, scale=2.0), draw(6, used + REST, FFN)
    probs = draw(7, used + REST).abs().float()
    gate_up[4], gate_up[5, :FFN], grad[6] = 0, -200.0, 0
    gate_up[7, :FFN] = 200.0
    for tensor in (gate_up, grad, probs):
        tensor[used:] = torch.nan
    products = Fp8Products()
    of_used = (tensor[:used] for tensor in (gate_up, probs, grad))
    out, of_gate_up, of_probs = swiglu_in_fp64(*of_used)
    assert_quantised(products.swiglu(gate_up, probs, on_gpu), out.bfloat16(), ends, most=1e-3)
    found, found_probs = products.swiglu_gradients(gate_up, probs, grad, on_gpu)
    assert_quantised(found, of_gate_up.bfloat16(), ends, most=1e-3)
    assert distance(found_probs[:used], of_probs) < 1e-5


@pytest.mark.parametrize("sizes", [SIZES, (1,), (0, 3)])
def test_products(ctx: RankContext, sizes: tuple[int, ...]) -> None:
    """Of any e4m3 numbers, beside fp64 sums of the same."""
    ends = ends_of(sizes)
    on_gpu, used, products = torch.tensor(ends, device="cuda").int(), ends[-1], Fp8Products()
    rows, grad = draw(8, used + REST, HIDDEN), draw(9, used + REST, FFN)
    weights = products.quantize_weights(list(draw(10, len(sizes), FFN, HIDDEN, scale=0.05)))
    values, of_grad = (products.quantize_rows(t, on_gpu) for t in (rows, grad))
    for operand, matrix, scales in (
        (values, weights.weights, weights.scales),
        (of_grad, weights.transposed, weights.scales_transposed),
    ):
        out = products.multiply(operand, matrix, scales, on_gpu)[:used].double()
        a = fp8.rows_again(operand.rows[:used], operand.scales)
        b = fp8.weights_again(matrix, scales)
        for g, (begin, end) in enumerate(pairwise(ends)):
            want = a[begin:end] @ b[g].t()
            magnitude = a[begin:end].abs() @ b[g].t().abs()
            bound = want.abs() / 256 + SUM_BITS * magnitude + 1e-30
            assert bool(((out[begin:end] - want).abs() <= bound).all()), f"expert {g}"
    a, b = (
        fp8.transposed_again(each.transposed, each.scales_transposed, ends)
        for each in (of_grad, values)
    )
    for adds in (False, True):
        out = torch.full((len(sizes), FFN, HIDDEN), 3.0, device="cuda")
        products.weight_gradients(of_grad, values, on_gpu, BF16, out, adds)
        for g, (begin, end) in enumerate(pairwise(ends)):
            want = a[begin:end].t() @ b[begin:end] + 3.0 * adds
            bound = SUM_BITS * (a[begin:end].t().abs() @ b[begin:end].abs() + 3.0 * adds)
            assert bool(((out[g] - want).abs() <= bound).all()), f"expert {g}, {adds}"


# ---- the layer


class Experts:
    """Weights as Megatron lays them out, rows of one micro-batch, and main_grads in one buffer."""

    def __init__(self, sizes: Sequence[int] = SIZES, rest: int = REST) -> None:
        self.sizes, self.used = sizes, sum(sizes)
        number, total = len(sizes), self.used + rest
        self.rows, self.grad = draw(11, total, HIDDEN), draw(12, total, HIDDEN)
        self.probs = draw(13, total).abs().float()
        for tensor in (self.rows, self.grad, self.probs):
            tensor[self.used :] = torch.nan
        self.offsets = torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)
        shapes = ((number, 2 * FFN, HIDDEN), (number, HIDDEN, FFN))
        stacks = [draw(14 + i, *shape, scale=0.06) for i, shape in enumerate(shapes)]
        self.fc1, self.fc2 = ([torch.nn.Parameter(weight) for weight in stack] for stack in stacks)
        for weights in (self.fc1, self.fc2):
            lay_out(weights)
        self.main_grads = [torch.zeros(stack.shape, device="cuda") for stack in stacks]
        for weights, buffer in zip((self.fc1, self.fc2), self.main_grads, strict=True):
            for weight, main_grad in zip(weights, buffer, strict=True):
                weight.main_grad, weight.grad_added_to_main_grad = main_grad, False
        self.products = Fp8Products()
        self.weights = self.quantised()

    def quantised(self) -> tuple[Fp8Weights, Fp8Weights]:
        return self.products.quantize_weights(self.fc1), self.products.quantize_weights(self.fc2)

    def passes(
        self, rows: Tensor, probs: Tensor, target: GradientTarget, recomputes: bool = False
    ) -> Tensor:
        """Forward and backward; the output."""
        for weight in (*self.fc1, *self.fc2):
            weight.grad = None
        layer = Fp8Layer(self.products, *self.weights, target, recomputes)
        out = fp8_swiglu_experts(rows, probs, self.offsets, self.fc1, self.fc2, layer)
        out.backward(self.grad)
        return out.detach()

    def run(self, target: GradientTarget = INTO_MAIN_GRAD, recomputes: bool = False) -> list[Any]:
        """Output, and gradients of the rows and probabilities that belong to an expert."""
        rows, probs = self.rows.clone().requires_grad_(), self.probs.clone().requires_grad_()
        out = self.passes(rows, probs, target, recomputes)
        return [tensor[: self.used] for tensor in (out, rows.grad, probs.grad)]

    def everything(self, **options: Any) -> list[Tensor]:
        """The same and the main_grads, which begin at zero."""
        for buffer in self.main_grads:
            buffer.zero_()
        return [*self.run(**options), *(buffer.clone() for buffer in self.main_grads)]

    def exact(self) -> list[Tensor]:
        """All of `everything` in fp64, of the same bf16 numbers."""
        operands = (self.rows, self.probs, self.sizes, self.fc1, self.fc2)
        return exact_experts(*operands, self.grad)


def test_the_layer(ctx: RankContext) -> None:
    """Near fp64, and nearer to the format's own results."""
    experts = Experts()
    found = experts.everything()
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        experts.weights = experts.quantised()
        in_format = experts.everything()
    for name, mine, other, exact in zip(NAMES, found, in_format, experts.exact(), strict=True):
        assert 2**-8 < distance(mine, exact) < FP8_DISTANCE, name
        assert distance(mine, other) < SAME_FORMAT, name
    for buffer in found[3:]:
        assert not buffer[1].any()  # of experts without rows
        assert not buffer[6].any()


def test_the_same_bits(ctx: RankContext) -> None:
    """Whatever else differs, the bits do not."""
    experts = Experts()
    expected = experts.everything()
    assert same(experts.everything(recomputes=True), expected) == [True] * 5
    with torch.no_grad():
        layer = Fp8Layer(experts.products, *experts.quantised(), INTO_MAIN_GRAD)
        state = (experts.offsets, experts.fc1, experts.fc2, layer)
        out = fp8_swiglu_experts(experts.rows, experts.probs, *state)
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
    # a + a is exact in fp32.
    experts.run()
    assert same(experts.main_grads, [2 * fc1, 2 * fc2]) == [True, True]
    # A step's first micro-batch reads nothing, for experts without rows either.
    overwrites = GradientTarget(into_main_grad=True, may_overwrite=True)
    weights = (*experts.fc1, *experts.fc2)
    for weight in weights:
        weight.main_grad.fill_(torch.nan)
        weight.grad_added_to_main_grad = False
    experts.run(overwrites)
    assert same(experts.main_grads, [fc1, fc2]) == [True, True]
    # In buckets, with gaps between.
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight.main_grad)
    experts.run()
    for part, expected in ((experts.fc1, fc1), (experts.fc2, fc2)):
        assert same([weight.main_grad for weight in part], expected) == [True] * len(SIZES)
    experts.run(GradientTarget())  # through autograd: bf16, rounded once
    for part, expected in ((experts.fc1, fc1), (experts.fc2, fc2)):
        gradients: list[Any] = [weight.grad for weight in part]
        assert same(gradients, expected.bfloat16()) == [True] * len(SIZES)


def test_no_rows(ctx: RankContext) -> None:
    """A rank to which no token goes, without any rows and with padding."""
    for rest in (0, 64):
        experts = Experts((0, 0), rest)
        for buffer in experts.main_grads:
            buffer.fill_(3.0)
        out, *_ = experts.run()
        assert out.shape == (0, HIDDEN)
        assert all(bool((buffer == 3).all()) for buffer in experts.main_grads)
        for weight in (*experts.fc1, *experts.fc2):
            weight.grad_added_to_main_grad = False
        experts.run(GradientTarget(into_main_grad=True, may_overwrite=True))
        assert not any(bool(buffer.any()) for buffer in experts.main_grads)


def test_in_a_graph(ctx: RankContext) -> None:
    """The host waits for nothing, so one graph serves any sizes of blocks."""
    experts = Experts()
    rows, probs = experts.rows.clone().requires_grad_(), experts.probs.clone().requires_grad_()

    def everything() -> list[Any]:
        rows.grad = probs.grad = None
        for buffer in experts.main_grads:
            buffer.zero_()
        experts.weights = experts.quantised()
        return [experts.passes(rows, probs, INTO_MAIN_GRAD), rows.grad, probs.grad]

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything()
    for sizes in ((0, 200, 7, 129, 0, 1, 128, 100), SIZES):
        assert sum(sizes) <= sum(SIZES)
        experts.offsets.copy_(torch.tensor(sizes).cumsum(0))
        graph.replay()
        replayed = [t[: sum(sizes)].clone() for t in captured]
        replayed += [buffer.clone() for buffer in experts.main_grads]
        eager = [t[: sum(sizes)] for t in everything()] + experts.main_grads
        assert same(replayed, eager) == [True] * 5


# ---- beside TransformerEngine


def theirs(rows: Tensor, dims: int) -> Any:
    """TransformerEngine's quantiser, both ways."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantiser = Float8BlockQuantizer(
        fp8_dtype=tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dims
    )
    return quantiser(rows.contiguous())


@needs_te
def test_transformer_engines_quantiser(ctx: RankContext) -> None:
    """The same bits for rows of one expert after the other, and for weights."""
    sizes = (128, 16, 144, 256)
    ends, products = ends_of(sizes), Fp8Products()
    rows = special_rows(SIZES, HIDDEN)[: ends[-1]]
    found = products.quantize_rows(rows, torch.tensor(ends, device="cuda").int())
    first = 0
    for begin, end in pairwise(ends):
        want, blocks = theirs(rows[begin:end], 1), -(-(end - begin) // BLOCK)
        assert same_codes(found.rows[begin:end], want._rowwise_data.view(torch.uint8)) == 0
        of_rows = want._rowwise_scale_inv[:, : end - begin]
        assert torch.equal(found.scales[:, begin:end], of_rows)
        columns = found.transposed[first : first + blocks].transpose(0, 1).flatten(1)
        assert same_codes(columns[:, : end - begin], want._columnwise_data.view(torch.uint8)) == 0
        of_blocks = want._columnwise_scale_inv[:, :HIDDEN]
        assert torch.equal(found.scales_transposed[first : first + blocks], of_blocks)
        first += blocks
    weight = special_rows(SIZES, HIDDEN)[:512]
    found_weights, want = products.quantize_weights([weight]), theirs(weight, 2)
    assert same_codes(found_weights.weights[0], want._rowwise_data.view(torch.uint8)) == 0
    scales = want._rowwise_scale_inv[:, : HIDDEN // BLOCK]
    assert torch.equal(found_weights.scales[0], scales)
    assert torch.equal(found_weights.scales_transposed[0], scales.t())
    assert same_codes(found_weights.transposed[0], want._columnwise_data.view(torch.uint8)) == 0


@needs_te
def test_no_further_from_fp64_than_transformer_engine(ctx: RankContext) -> None:
    """Its GroupedLinear with the same recipe, with a SwiGLU between as Megatron has it."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    sizes = (144, 16, 304, 128, 0, 64)  # of what its products take
    experts = Experts(sizes, 0)
    mine, exact = experts.everything(), experts.exact()
    number = len(sizes)
    linears = [
        te.GroupedLinear(number, *shape, bias=False, params_dtype=BF16, device="cuda")
        for shape in ((HIDDEN, 2 * FFN), (FFN, HIDDEN))
    ]
    for linear, weights in zip(linears, (experts.fc1, experts.fc2), strict=True):
        for g, weight in enumerate(weights):
            getattr(linear, f"weight{g}").data.copy_(weight)
    rows, probs = experts.rows.clone().requires_grad_(), experts.probs.clone().requires_grad_()
    with te.fp8_autocast(enabled=True, fp8_recipe=Float8BlockScaling()):
        gate, up = linears[0](rows, list(sizes)).float().chunk(2, 1)
        activated = (F.silu(gate) * up * probs[:, None]).bfloat16()
        out = linears[1](activated, list(sizes))
    out.backward(experts.grad)
    of_weights = [
        torch.stack([getattr(linear, f"weight{g}").grad for g in range(number)])
        for linear in linears
    ]
    other = [out, rows.grad, probs.grad, *of_weights]
    for name, ours, their, want in zip(NAMES, mine, other, exact, strict=True):
        # 2 %: theirs and ours differ in the order of sums.
        assert distance(ours, want) <= 1.02 * distance(their, want), name
