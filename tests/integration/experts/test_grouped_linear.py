"""Grouped GEMMs against one product for each expert, where the weights' gradients go, and the
products of adapters.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from adapter_libraries import TEGroupedLinear, _GroupedExpertAdapterWeight, each_expert, random
from torch import Tensor, nn
from torch_products import TorchProducts

from megatron_ncclep.integration.experts import grouped_gemm, main_grad
from megatron_ncclep.integration.experts.adapter_product import _stack, add_adapter
from megatron_ncclep.integration.experts.adapters import Adapter, weights_in
from megatron_ncclep.integration.experts.expert_stack import stack_of, view_of
from megatron_ncclep.integration.experts.fused_swiglu import swiglu_experts
from megatron_ncclep.integration.experts.grouped_linear import grouped_linear
from megatron_ncclep.integration.experts.main_grad import GradientTarget

IN, OUT = 16, 24
# Sizes of the experts' blocks, and rows after the last one.
SIZES = {
    "full": ((16, 32, 16), 0),
    "empty-first": ((0, 16, 32), 0),
    "empty-between": ((16, 0, 0, 32), 16),
    "empty-last": ((16, 0), 48),
    "one": ((48,), 3),
    "all-empty": ((0, 0), 16),
    "no-rows": ((0, 0, 0), 0),
}
# fp64 has no operator of torch's: there the loop runs, as for all before torch 2.10 on a CPU.
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Problem:
    """A layer's tensors; every row, weight and gradient has values of its own.  Rows after the last
    block are NaN: whatever reads one spoils every weight of an expert, as 0 x NaN is NaN.
    """

    def __init__(self, sizes: tuple[int, ...], rest: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.sizes = sizes
        self.ends = torch.tensor(sizes).cumsum(0).tolist()
        self.blocks = list(zip([0, *self.ends[:-1]], self.ends, strict=True))
        self.offsets = torch.tensor(self.ends, dtype=torch.int32)
        self.rows, self.grad = draw(sum(sizes) + rest, IN), draw(sum(sizes) + rest, OUT)
        self.rows[sum(sizes) :] = self.grad[sum(sizes) :] = torch.nan
        self.weights = [torch.nn.Parameter(draw(OUT, IN)) for _ in sizes]

    def run(self, target: GradientTarget = GradientTarget()) -> tuple[Tensor, Tensor]:  # noqa: B008
        """Output and input gradient; the weights' gradients are where they belong."""
        rows = self.rows.clone().requires_grad_()
        output = grouped_linear(rows, self.offsets, self.weights, target)
        output.backward(self.grad)
        assert rows.grad is not None
        return output.detach(), rows.grad

    def expected_weight_grads(self) -> list[Tensor]:
        return [self.grad[b:e].t() @ self.rows[b:e] for b, e in self.blocks]


@pytest.mark.parametrize(
    ("dtype", "has_operator"), [*((dtype, True) for dtype in DTYPES), (torch.float32, False)]
)
@pytest.mark.parametrize("name", SIZES)
def test_one_product_for_each_expert(
    name: str, dtype: torch.dtype, has_operator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits: each block is one matrix product, in both."""
    if not has_operator:
        monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    problem = Problem(*SIZES[name], dtype)
    output, rows_grad = problem.run()
    assert output.dtype == dtype
    for (begin, end), weight in zip(problem.blocks, problem.weights, strict=True):
        assert torch.equal(output[begin:end], problem.rows[begin:end] @ weight.detach().t())
        assert torch.equal(rows_grad[begin:end], problem.grad[begin:end] @ weight.detach())
    for weight, expected in zip(problem.weights, problem.expected_weight_grads(), strict=True):
        assert torch.equal(weight.grad, expected)


# ---- main_grad


ADDS = GradientTarget(into_main_grad=True)
OVERWRITES = GradientTarget(into_main_grad=True, may_overwrite=True)
ITERATION = GradientTarget(into_main_grad=True, may_overwrite=True, holds_iteration=True)


def with_main_grads(problem: Problem, descending: bool = False) -> Tensor:
    """Give the weights main_grads in one buffer, as Megatron's DDP does; return it."""
    number = len(problem.weights)
    buffer = torch.full((number, OUT, IN), 0.5, dtype=torch.float32)
    for i, weight in enumerate(problem.weights):
        weight.main_grad = buffer[number - 1 - i if descending else i]
        weight.grad_added_to_main_grad = False
    return buffer


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    ("target", "is_captured", "has_flag", "before"),
    [
        pytest.param(ADDS, False, True, 0.5, id="adds"),
        pytest.param(OVERWRITES, False, True, 0.0, id="overwrites"),
        pytest.param(ITERATION, True, True, 0.0, id="graph of an iteration"),
        # It is replayed for all micro-batches: storing would replace the others'.
        pytest.param(OVERWRITES, True, True, 0.5, id="graph of a micro-batch"),
        # Without DDP's flag nothing says when a step begins.
        pytest.param(OVERWRITES, False, False, 0.5, id="no flag"),
    ],
)
def test_gradients_are_added_to_main_grads(
    target: GradientTarget, is_captured: bool, has_flag: bool, before: float, descending: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In fp32, on top of what is there, once for each micro-batch; DDP is told so.  A step's first
    micro-batch replaces what is there, where it may.
    """
    monkeypatch.setattr(main_grad, "_is_captured", lambda weights: is_captured)
    problem = Problem((16, 0, 32), 16, torch.bfloat16)
    buffer = with_main_grads(problem, descending)
    gradients = [gradient.float() for gradient in problem.expected_weight_grads()]
    for _ in range(2):  # steps
        buffer.fill_(0.5)  # zero in Megatron; here it shows what was read
        for weight in problem.weights:
            weight.grad_added_to_main_grad = False
            if not has_flag:
                del weight.grad_added_to_main_grad
        for number in (1, 2):  # micro-batches
            problem.run(target)
            for weight, gradient in zip(problem.weights, gradients, strict=True):
                assert torch.equal(weight.main_grad, before + number * gradient)
                assert getattr(weight, "grad_added_to_main_grad", False) == has_flag
                # DDP's hook wants one, with overlap_grad_reduce.
                assert (weight.grad is not None) == has_flag
                weight.grad = None


@pytest.mark.parametrize("after_ddp", [True, False])
def test_frozen_experts_and_zeros_where_megatron_wants_them(after_ddp: bool) -> None:
    """Experts that were frozen after DDP had wrapped them were trained."""
    problem = Problem((16, 32, 16), 0, torch.float32)
    buffer = with_main_grads(problem)
    frozen, zeroed, other = problem.weights
    frozen.requires_grad_(False)
    zeroed.zero_out_wgrad = True
    if not after_ddp:
        del frozen.main_grad, frozen.grad_added_to_main_grad
    problem.run(ADDS)
    assert frozen.grad is None
    assert torch.equal(buffer[0], torch.full((OUT, IN), 0.5))
    assert not getattr(frozen, "grad_added_to_main_grad", False)
    assert not zeroed.grad.any()
    assert torch.equal(other.main_grad, 0.5 + problem.expected_weight_grads()[2])


def test_a_weight_that_experts_share() -> None:
    """Two experts with one parameter: in a step's first micro-batch the gradient of one of them
    replaced that of the other.
    """
    problem = Problem((16, 32, 16), 0, torch.float32)
    problem.weights[2] = problem.weights[0]
    buffer = with_main_grads(problem).zero_()
    first, alone, last = problem.expected_weight_grads()
    for number in (1, 2):  # micro-batches
        problem.run(OVERWRITES)
        torch.testing.assert_close(problem.weights[0].main_grad, number * (first + last))
        assert torch.equal(buffer[1], number * alone)


# ---- experts in one tensor


def buffer_views(order: list[int], gap: int = 0, begin: int = 0) -> list[Tensor]:
    """Tensors of 2 x 8 in one storage, in this order, with a gap before the last place."""
    storage = torch.arange(200, dtype=torch.float32)
    places = [begin + 16 * i + (gap if i == max(order) else 0) for i in order]
    return [storage[place : place + 16].view(2, 8) for place in places]


def test_a_view_shares_memory() -> None:
    tensors = buffer_views([1, 2, 3])
    # The last ones have other parameters between the experts'.
    for part in (tensors, tensors[:1], tensors[::2]):
        view = view_of(part)
        assert view is not None
        assert view.data_ptr() == tensors[0].data_ptr()
        assert torch.equal(view, torch.stack(part))


MEMORY = torch.arange(32, dtype=torch.float32).numpy()


@pytest.mark.parametrize(
    "tensors",
    [
        buffer_views([3, 2, 1]),  # torch has no negative strides
        buffer_views([1, 2, 3], gap=16),  # a bucket ends there
        buffer_views([1, 2, 3], begin=1),  # no address of a multiple of 16 bytes
        buffer_views([1, 1, 1]),
        [torch.randn(2, 8) for _ in range(3)],
        [tensor.t() for tensor in buffer_views([1, 2, 3])],
        # Storages that happen to be neighbours: the memory of one may be given back.
        [torch.from_numpy(MEMORY[16 * i : 16 * i + 16]).view(2, 8) for i in range(2)],
    ],
    ids=["descending", "gap", "misaligned", "same", "apart", "transposed", "neighbours"],
)
def test_no_view(tensors: list[Tensor]) -> None:
    assert view_of(tensors) is None
    assert torch.equal(stack_of(tensors), torch.stack(tensors))


def test_no_view_over_far_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of which the last one was in another part of the address space, as after threads have
    allocated them, made the host count from one to the other in a list: a MemoryError, or seconds.
    """
    addresses = iter([2**12, 2**13, 2**50])
    monkeypatch.setattr(Tensor, "data_ptr", lambda self: next(addresses))
    assert view_of(buffer_views([1, 2, 3])) is None


# ---- devices


def test_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, bf16 = torch.device("cuda"), torch.bfloat16
    assert grouped_gemm.unavailable_reason(torch.device("cpu"), torch.float64) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for capability, dtype, problem in [
        ((9, 0), bf16, None),
        ((10, 3), bf16, None),
        ((8, 0), bf16, "9.x and 10.x, and NVIDIA A100 has 8.0"),
        ((12, 0), bf16, "has 12.0"),
        ((9, 0), torch.float32, "for bf16, and the experts compute in torch.float32"),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        found = grouped_gemm.unavailable_reason(gpu, dtype)
        assert found is None if problem is None else problem in found
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    monkeypatch.delattr(torch, "_grouped_mm", raising=False)
    assert "use torch 2.10 or newer" in grouped_gemm.unavailable_reason(gpu, bf16)


# ---- adapters


RANK, SCALE = 5, 0.75  # a rank that no grouped GEMM on a GPU accepts
SHAPES = ((RANK, IN), (OUT, RANK))
# Of the largest value: sums of at most 48 terms, and a product of two such sums.
CLOSE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def factor(kind: str, number: int, out: int, into: int, like: Tensor) -> list[Any]:
    """The modules with one factor: "apart" one for each expert, or one for all."""
    if kind == "shared":
        return [_GroupedExpertAdapterWeight(random(out, into, like=like))]
    if kind == "packed":
        return [_GroupedExpertAdapterWeight(random(number, out, into, like=like))]
    config = mock.Mock(params_dtype=like.dtype)
    if kind == "listed":
        return [TEGroupedLinear(number, into, out, config=config)]
    return [TEGroupedLinear(1, into, out, config=config) for _ in range(number)]


def of_blocks(modules: list[nn.Module], number: int, last_first: bool) -> list[Tensor]:
    """The factors of the experts in fp64, in the order of their blocks."""
    weights = weights_in(modules)
    each = [w for weight in weights for w in (weight if weight.dim() == 3 else [weight])]
    each = each * number if len(each) == 1 else each
    return [weight.double() for weight in (each[::-1] if last_first else each)]


def assert_near(found: Tensor, expected: Tensor, close: float) -> None:
    largest = expected.detach().abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=close * largest)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize(
    ("a", "b"), [("shared", "shared"), ("packed", "shared"), ("shared", "listed"), ("apart",) * 2]
)
@pytest.mark.parametrize("name", SIZES)
def test_against_fp64(name: str, a: str, b: str, last_first: bool, dtype: torch.dtype) -> None:
    """Rows after the last block are NaN, and neither they nor experts without rows matter."""
    check(Problem(*SIZES[name], dtype), a, b, last_first, dtype)


def test_factors_in_fp32_beside_weights_in_bf16() -> None:
    check(Problem(*SIZES["empty-between"], torch.bfloat16), "listed", "listed", True, torch.float32)


def test_factors_within_a_larger_tensor() -> None:
    """torch.nn.utils.vector_to_parameters puts them anywhere, and the next forward pass ended in
    "self.storage_offset() must be divisible by 4 to view BFloat16 as Long".
    """
    factor = _GroupedExpertAdapterWeight(random(3, RANK, 8, like=torch.empty(0).bfloat16()))
    vector = torch.cat([torch.zeros(1).bfloat16(), factor.weight.detach().flatten()])
    factor.weight.data = vector[1:].view_as(factor.weight)
    stack = _stack([factor], 3, reverse_local_experts=True)
    assert torch.equal(stack, factor.weight.flip(0))
    stack.backward(stack.detach())
    assert torch.equal(factor.weight.grad, factor.weight)


def check(problem: Problem, a: str, b: str, last_first: bool, dtype: torch.dtype) -> None:
    number, like = len(problem.weights), torch.empty(0, dtype=dtype)
    torch.manual_seed(3)
    factors = factor(a, number, RANK, IN, like), factor(b, number, OUT, RANK, like)
    rows = problem.rows.clone().requires_grad_()
    plain = torch.zeros(len(rows), OUT, dtype=rows.dtype)
    out = add_adapter(
        plain, rows, problem.offsets, Adapter(*factors, SCALE, 0.0, False), last_first
    )
    out.backward(problem.grad)
    assert out is plain

    used, close = problem.ends[-1], max(CLOSE[dtype], CLOSE[rows.dtype])
    exact, sizes = problem.rows[:used].double().requires_grad_(), problem.sizes
    expected = SCALE * exact
    for modules in factors:
        expected = each_expert(expected, sizes, of_blocks(modules, number, last_first))
    assert_near(out[:used], expected, close)
    weights = [*weights_in(factors[0]), *weights_in(factors[1])]
    grad = problem.grad[:used].double()
    leaves = torch.autograd.grad(expected, [exact, *weights], grad, materialize_grads=True)
    assert_near(rows.grad[:used], leaves[0], close)
    for weight, gradient in zip(weights, leaves[1:], strict=True):
        assert weight.grad.dtype == dtype
        assert_near(weight.grad, gradient.double(), close)


def test_rows_are_kept_for_who_needs_them() -> None:
    """Frozen weights kept the rows of every layer of experts until backward, with quack-kernels
    too.  Rows that are made again are freed after forward, and made once in backward.
    """
    problem = Problem((16, 0, 32), 0, torch.float32)
    rows, offsets, target = problem.rows.requires_grad_(), problem.offsets, GradientTarget()
    adapter = Adapter(*(factor("packed", 3, *shape, rows) for shape in SHAPES), SCALE, 0.0, False)
    fc2 = [nn.Parameter(torch.zeros(IN, OUT // 2)) for _ in problem.weights]

    def linear(make: Any) -> Tensor:
        return grouped_linear(rows, offsets, problem.weights, target, make)

    def adapted(make: Any) -> Tensor:
        return add_adapter(torch.zeros(len(rows), OUT), rows, offsets, adapter, False, make)

    def fused(make: Any) -> Tensor:
        layer = (rows, torch.ones(len(rows)), offsets, problem.weights, fc2)
        return swiglu_experts(*layer, TorchProducts(), target)  # type: ignore[arg-type]

    def run(call: Any, make: Any = None) -> tuple[Tensor, bool]:
        """The result, and whether the rows are kept."""
        kept: list[int] = []
        keep = lambda tensor: kept.append(tensor.data_ptr()) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return call(make), rows.data_ptr() in kept

    for call, weights in (
        (linear, problem.weights),
        (adapted, weights_in([*adapter.a, *adapter.b])),
    ):
        make = mock.Mock(side_effect=problem.rows.detach)
        (plain, is_kept), (again, also_kept) = run(call), run(call, make)
        assert (is_kept, also_kept, make.call_count) == (True, False, 0)
        of_plain, of_again = (
            torch.autograd.grad(out, weights, problem.grad) for out in (plain, again)
        )
        assert all(map(torch.equal, of_plain, of_again))
        assert make.call_count == 1
    for is_trained in (True, False):
        for weight in problem.weights:
            weight.requires_grad_(is_trained)
        assert [run(call)[1] for call in (linear, fused)] == [is_trained] * 2
