"""The products of adapters on grouped experts, against one expert after the other in fp64."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from adapter_libraries import TEGroupedLinear, _GroupedExpertAdapterWeight, random
from test_grouped_linear import IN, OUT, SIZES, Problem
from torch import Tensor, nn

from megatron_ncclep.integration.experts.adapter_product import _stack, add_adapter
from megatron_ncclep.integration.experts.adapters import Adapter, weights_in
from megatron_ncclep.integration.experts.grouped_linear import grouped_linear
from megatron_ncclep.integration.experts.main_grad import GradientTarget

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


def each(modules: list[nn.Module], expert: int) -> Tensor:
    """One expert's factor in fp64."""
    weights = weights_in(modules)
    weight: Tensor = weights[expert if len(weights) > 1 else 0]
    return (weight[expert] if weight.dim() == 3 else weight).double()


def far(found: Tensor, expected: Tensor) -> float:
    expected = expected.detach()
    largest = expected.abs().max() if expected.numel() else 0
    return float((found.detach().double() - expected).abs().max() / largest) if largest else 0.0


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
    weights = [*weights_in(factors[0]), *weights_in(factors[1])]
    rows = problem.rows.clone().requires_grad_()
    plain = torch.zeros(len(rows), OUT, dtype=rows.dtype)
    adapter = Adapter(*factors, SCALE, 0.0, False)
    out = add_adapter(plain, rows, problem.offsets, adapter, last_first)
    out.backward(problem.grad)
    assert out is plain
    assert rows.grad is not None

    exact = problem.rows.double().requires_grad_()
    parts = []
    for block, (begin, end) in enumerate(problem.blocks):
        expert = number - 1 - block if last_first else block
        low = exact[begin:end] @ each(factors[0], expert).t()
        parts.append(SCALE * low @ each(factors[1], expert).t())
    expected, used = torch.cat(parts), problem.ends[-1]
    close = max(CLOSE[dtype], CLOSE[rows.dtype])
    assert far(out[:used], expected) <= close
    leaves = torch.autograd.grad(
        expected, [exact, *weights], problem.grad[:used].double(), materialize_grads=True
    )
    assert far(rows.grad[:used], leaves[0][:used]) <= close
    for weight, gradient in zip(weights, leaves[1:], strict=True):
        assert weight.grad is not None
        assert weight.grad.dtype == dtype
        assert far(weight.grad, gradient) <= close


def test_rows_are_kept_for_who_needs_them() -> None:
    """Frozen weights kept the rows of every layer of experts until backward.  Rows that are made
    again are freed after forward, and made once in backward.
    """
    problem = Problem((16, 0, 32), 0, torch.float32)
    rows, offsets = problem.rows.requires_grad_(), problem.offsets
    adapter = Adapter(*(factor("packed", 3, *shape, rows) for shape in SHAPES), SCALE, 0.0, False)

    def linear(make: Any) -> Tensor:
        return grouped_linear(rows, offsets, problem.weights, GradientTarget(), make)

    def adapted(make: Any) -> Tensor:
        plain = torch.zeros(len(rows), OUT)
        return add_adapter(plain, rows, offsets, adapter, False, make)

    factors = weights_in([*adapter.a, *adapter.b])
    for run, weights in ((linear, problem.weights), (adapted, factors)):
        found = []
        for makes_rows in (False, True):
            kept, make_rows = list[int](), mock.Mock(side_effect=problem.rows.detach)
            keep = lambda tensor, kept=kept: kept.append(tensor.data_ptr()) or tensor  # noqa: E731
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                out = run(make_rows if makes_rows else None)
            assert (rows.data_ptr() in kept) == (not makes_rows)
            assert not make_rows.called
            found.append(torch.autograd.grad(out, weights, problem.grad))
            assert make_rows.call_count == makes_rows
        assert all(map(torch.equal, *found))
    for weight in problem.weights:
        weight.requires_grad_(False)
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(None)
    assert rows.data_ptr() not in kept
