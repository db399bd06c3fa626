"""Grouped GEMMs against one product for each expert, and where the weights' gradients go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ncclep.integration.experts import grouped_gemm
from megatron_ncclep.integration.experts.expert_stack import lay_out, stack_of, view_of
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
# fp64 has no operator of torch's: there the loop runs.
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Problem:
    """A layer's tensors; every row, weight and gradient has values of its own."""

    def __init__(self, sizes: tuple[int, ...], rest: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.ends = torch.tensor(sizes).cumsum(0).tolist()
        self.blocks = list(zip([0, *self.ends[:-1]], self.ends, strict=True))
        self.offsets = torch.tensor(self.ends, dtype=torch.int32)
        self.rows, self.grad = draw(sum(sizes) + rest, IN), draw(sum(sizes) + rest, OUT)
        self.weights = [torch.nn.Parameter(draw(OUT, IN)) for _ in sizes]

    def run(self, into_main_grad: bool = False, **more: Any) -> tuple[Tensor, Tensor]:
        """Output and input gradient; the weights' gradients are where they belong."""
        rows = self.rows.clone().requires_grad_()
        output = grouped_linear(
            rows, self.offsets, self.weights, GradientTarget(into_main_grad), **more
        )
        output.backward(self.grad)
        assert rows.grad is not None
        return output.detach(), rows.grad

    def expected_weight_grads(self) -> list[Tensor]:
        return [self.grad[b:e].t() @ self.rows[b:e] for b, e in self.blocks]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_one_product_for_each_expert(name: str, dtype: torch.dtype) -> None:
    """The same bits: each block is one matrix product, in both."""
    problem = Problem(*SIZES[name], dtype)
    output, rows_grad = problem.run()
    assert output.dtype == dtype
    for (begin, end), weight in zip(problem.blocks, problem.weights, strict=True):
        torch.testing.assert_close(
            output[begin:end], problem.rows[begin:end] @ weight.detach().t(), rtol=0, atol=0
        )
        torch.testing.assert_close(
            rows_grad[begin:end], problem.grad[begin:end] @ weight.detach(), rtol=0, atol=0
        )
    for weight, expected in zip(problem.weights, problem.expected_weight_grads(), strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_after_the_last_block_are_not_read(dtype: torch.dtype) -> None:
    """0 x NaN is NaN: whatever reads such a row spoils every weight of an expert."""
    clean = Problem((16, 0, 32), 16, dtype)
    expected = clean.run()
    spoilt = Problem((16, 0, 32), 16, dtype)
    spoilt.rows[48:] = torch.nan
    spoilt.grad[48:] = torch.nan
    for result, other in zip(spoilt.run(), expected, strict=True):
        assert torch.equal(result[:48], other[:48])
    for weight, other_weight in zip(spoilt.weights, clean.weights, strict=True):
        assert torch.equal(weight.grad, other_weight.grad)


def test_rows_made_again() -> None:
    """The rows are let go after forward, and made once in backward."""
    kept, again = (Problem((16, 0, 32), 16, torch.float32) for _ in range(2))
    kept.run()
    made = []

    def make() -> Tensor:
        made.append(1)
        return again.rows

    rows = again.rows.clone().requires_grad_()
    output = grouped_linear(rows, again.offsets, again.weights, GradientTarget(), make)
    assert made == []
    assert output.grad_fn.saved_tensors[0] is None
    output.backward(again.grad)
    assert made == [1]
    for weight, other in zip(again.weights, kept.weights, strict=True):
        assert torch.equal(weight.grad, other.grad)


# ---- main_grad


def with_main_grads(problem: Problem, descending: bool = False) -> Tensor:
    """Give the weights main_grads in one buffer, as Megatron's DDP does; return it."""
    number = len(problem.weights)
    buffer = torch.full((number, OUT, IN), 0.5, dtype=torch.float32)
    for i, weight in enumerate(problem.weights):
        weight.main_grad = buffer[number - 1 - i if descending else i]
        weight.grad_added_to_main_grad = False
    return buffer


@pytest.mark.parametrize("descending", [False, True])
def test_gradients_are_added_to_main_grads(descending: bool) -> None:
    """In fp32, on top of what is there, once for each micro-batch; DDP is told so."""
    problem = Problem((16, 0, 32), 16, torch.bfloat16)
    with_main_grads(problem, descending)
    expected = [0.5 + 2 * gradient.float() for gradient in problem.expected_weight_grads()]
    for _ in range(2):
        problem.run(into_main_grad=True)
        for weight in problem.weights:
            assert weight.grad_added_to_main_grad
            assert weight.grad is not None  # DDP's hook wants one, with overlap_grad_reduce
            weight.grad = None
    for weight, main_grad in zip(problem.weights, expected, strict=True):
        assert torch.equal(weight.main_grad, main_grad)


def test_one_kernel_adds_to_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many adds as experts took longer than the GEMM: every one is a kernel of its own."""
    problem = Problem((16, 16, 32), 0, torch.float32)
    buffer = with_main_grads(problem)
    adds: list[tuple[int, ...]] = []
    original = Tensor.add_

    def add_(self: Tensor, other: Tensor) -> Tensor:
        adds.append(tuple(self.shape))
        return original(self, other)

    monkeypatch.setattr(Tensor, "add_", add_)
    problem.run(into_main_grad=True)
    assert adds == [tuple(buffer.shape)]


def test_zeros_where_megatron_wants_them() -> None:
    problem = Problem((16, 32), 0, torch.float32)
    with_main_grads(problem)
    problem.weights[1].zero_out_wgrad = True
    problem.run(into_main_grad=True)
    assert not problem.weights[1].grad.any()
    assert problem.weights[0].grad_added_to_main_grad


def test_main_grads_that_nobody_asked_for() -> None:
    """Without gradient_accumulation_fusion DDP adds .grad up itself, and only it."""
    problem = Problem((16, 32), 0, torch.float32)
    buffer = with_main_grads(problem)
    problem.run()
    assert (buffer == 0.5).all()
    for weight, expected in zip(problem.weights, problem.expected_weight_grads(), strict=True):
        assert not weight.grad_added_to_main_grad
        assert torch.equal(weight.grad, expected)


def test_frozen_experts() -> None:
    problem = Problem((16, 32), 0, torch.float32)
    problem.weights[0].requires_grad_(False)
    problem.run(into_main_grad=True)
    assert problem.weights[0].grad is None
    assert torch.equal(problem.weights[1].grad, problem.expected_weight_grads()[1])


# ---- experts in one tensor


def buffer_views(order: list[int], gap: int = 0, begin: int = 0) -> list[Tensor]:
    """Tensors of 2 x 8 in one storage, in this order, with a gap before the last place."""
    storage = torch.arange(200, dtype=torch.float32)
    places = [begin + 16 * i + (gap if i == max(order) else 0) for i in order]
    return [storage[place : place + 16].view(2, 8) for place in places]


def test_a_view_shares_memory() -> None:
    tensors = buffer_views([1, 2, 3])
    view = view_of(tensors)
    assert view is not None
    assert view.data_ptr() == tensors[0].data_ptr()
    assert torch.equal(view, torch.stack(tensors))
    apart = [torch.arange(200.0)[40 * i : 40 * i + 16].view(2, 8) for i in range(1)]
    assert view_of(apart) is not None
    strided = view_of([tensors[0], tensors[2]])  # with other parameters between the experts'
    assert strided is not None
    assert torch.equal(strided, torch.stack([tensors[0], tensors[2]]))


@pytest.mark.parametrize(
    "tensors",
    [
        buffer_views([3, 2, 1]),  # torch has no negative strides
        buffer_views([1, 2, 3], gap=16),  # a bucket ends there
        buffer_views([1, 2, 3], begin=1),  # no address of a multiple of 16 bytes
        buffer_views([1, 1, 1]),
        [torch.randn(2, 8) for _ in range(3)],
        [tensor.t() for tensor in buffer_views([1, 2, 3])],
    ],
    ids=["descending", "gap", "misaligned", "same", "apart", "transposed"],
)
def test_no_view(tensors: list[Tensor]) -> None:
    assert view_of(tensors) is None
    assert torch.equal(stack_of(tensors), torch.stack(tensors))


def test_storages_that_happen_to_be_neighbours() -> None:
    """A view must not reach into another storage, whose memory may be given back."""
    memory = torch.arange(32, dtype=torch.float32).numpy()
    neighbours = [torch.from_numpy(memory[16 * i : 16 * i + 16]).view(2, 8) for i in range(2)]
    assert neighbours[1].data_ptr() - neighbours[0].data_ptr() == 64
    assert view_of(neighbours) is None


def test_laying_out() -> None:
    parameters = [torch.nn.Parameter(torch.randn(2, 8)) for _ in range(3)]
    values = [parameter.detach().clone() for parameter in parameters]
    lay_out(parameters)
    assert all(torch.equal(p, value) for p, value in zip(parameters, values, strict=True))
    assert view_of(parameters) is not None
    lay_out([torch.nn.Parameter(torch.empty(2, 8, device="meta"))])


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


def test_without_torchs_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.10 a CPU has none."""
    with_it, without = (Problem((16, 0, 32), 16, torch.float32) for _ in range(2))
    expected = with_it.run()
    monkeypatch.delattr(torch.nn.functional, "grouped_mm", raising=False)
    for result, other in zip(without.run(), expected, strict=True):
        assert torch.equal(result[:48], other[:48])
