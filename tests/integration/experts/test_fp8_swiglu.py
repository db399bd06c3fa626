"""FP8 experts as one autograd node, on a CPU: which products it asks for, and where results go.

Kernels in plain torch (torch_fp8_kernels.py) stand in for the extension's.  What comes out is
compared with the definition below, which quantises tensors where it says so and multiplies in fp64;
tests/gpu/test_gpu_fp8_experts.py compares the kernels.
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import fp8_format as fp8
import pytest
import torch
from torch import Tensor, nn
from torch_fp8_kernels import TorchFp8Kernels, stand_in

from megatron_ncclep.integration.experts.expert_stack import lay_out
from megatron_ncclep.integration.experts.fp8_products import Fp8Products
from megatron_ncclep.integration.experts.fp8_swiglu import Fp8Layer, fp8_swiglu_experts
from megatron_ncclep.integration.experts.main_grad import GradientTarget

HIDDEN, FFN = 256, 384
SIZES = (3, 0, 129, 1, 16, 128)
REST = 5  # rows after the last block, all NaN
STUB = Path(__file__).parents[3] / "megatron_ncclep" / "_C.pyi"
NAMES = ("output", "rows", "probs", "fc1", "fc2")
THROUGH_AUTOGRAD = GradientTarget()
INTO_MAIN_GRAD = GradientTarget(into_main_grad=True, may_overwrite=True)


class Problem:
    """Weights, rows and gradients of one layer; every value is drawn."""

    def __init__(
        self, sizes: Sequence[int] = SIZES, rest: int = REST, powers_of_two: bool = True
    ) -> None:
        self.products = Fp8Products(powers_of_two)
        generator = torch.Generator().manual_seed(11)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, generator=generator)).bfloat16()

        self.sizes, self.used = sizes, sum(sizes)
        total = self.used + rest
        self.ends = [0, *torch.tensor(sizes).cumsum(0).tolist()]
        self.offsets = torch.tensor(self.ends[1:], dtype=torch.int32)
        self.rows, self.grad = draw(total, HIDDEN), draw(total, HIDDEN)
        self.probs = draw(total).abs().float()
        for tensor in (self.rows, self.grad, self.probs):
            tensor[self.used :] = torch.nan
        number = len(sizes)
        self.fc1 = [nn.Parameter(draw(2 * FFN, HIDDEN, scale=0.06)) for _ in range(number)]
        self.fc2 = [nn.Parameter(draw(HIDDEN, FFN, scale=0.09)) for _ in range(number)]
        for weights in (self.fc1, self.fc2):
            for weight in weights:  # blocks of 128 x 128 have different scales
                weight.data[:128] *= 4
                weight.data[:, :128] *= 0.5
            lay_out(weights)

    def give_main_grads(self, apart: bool = False, value: float = 0.0) -> None:
        """As DDP does; `apart`: no view of all exists."""
        for weights in (self.fc1, self.fc2):
            stack = torch.full((len(weights), *weights[0].shape), value)
            for weight, part in zip(weights, stack, strict=True):
                weight.main_grad = part.clone() if apart else part
                weight.grad_added_to_main_grad = False

    def layer(self, target: GradientTarget, recomputes: bool = False) -> Fp8Layer:
        quantised = map(self.products.quantize_weights, (self.fc1, self.fc2))
        return Fp8Layer(self.products, *quantised, target, recomputes)

    def run(
        self, target: GradientTarget = THROUGH_AUTOGRAD, recomputes: bool = False, **wanted: bool
    ) -> dict[str, Tensor]:
        """A micro-batch; `wanted`: whether rows and probs need gradients."""
        rows = self.rows.clone().requires_grad_(wanted.get("rows", True))
        probs = self.probs.clone().requires_grad_(wanted.get("probs", True))
        layer = self.layer(target, recomputes)
        out = fp8_swiglu_experts(rows, probs, self.offsets, self.fc1, self.fc2, layer)
        out.backward(self.grad)
        found = {"output": out.detach(), "rows": rows.grad, "probs": probs.grad}
        return {k: v[: self.used] for k, v in found.items() if v is not None}

    def definition(self) -> dict[str, Tensor]:
        """All results, weight gradients as fp64 [num_experts, ...]."""
        powers = self.products.powers_of_two
        along = lambda values: along_rows(values, powers)  # noqa: E731
        across = lambda values: across_rows(values, powers)  # noqa: E731
        found: dict[str, list[Tensor]] = {name: [] for name in NAMES}
        for g, (begin, end) in enumerate(pairwise(self.ends)):
            x, grad, p = (t[begin:end] for t in (self.rows, self.grad, self.probs))
            w1, w2 = (fp8.weights_again(*fp8.of_weights(w[g].detach()[None], powers))[0]
                      for w in (self.fc1, self.fc2))  # fmt: skip
            gate_up = (along(x) @ w1.t()).bfloat16().float()
            gate, up = gate_up.chunk(2, 1)
            s = torch.sigmoid(gate)
            activated = (gate * s * up * p[:, None]).bfloat16()
            found["output"].append((along(activated) @ w2.t()).bfloat16())
            of_activated = (along(grad) @ w2).bfloat16().float()
            of_gate = of_activated * p[:, None] * up * (s + gate * s * (1 - s))
            of_up = of_activated * p[:, None] * gate * s
            of_gate_up = torch.cat([of_gate, of_up], 1).bfloat16()
            found["rows"].append((along(of_gate_up) @ w1).bfloat16())
            found["probs"].append((of_activated * gate * s * up).sum(1))
            found["fc1"].append(across(of_gate_up).t() @ across(x))
            found["fc2"].append(across(grad).t() @ across(activated))
        join = {"fc1": torch.stack, "fc2": torch.stack}
        return {name: join.get(name, torch.cat)(parts) for name, parts in found.items()}


def along_rows(values: Tensor, powers_of_two: bool) -> Tensor:
    """Quantised along rows, and back in fp64."""
    return fp8.rows_again(*fp8.by_rows(values, powers_of_two))


def across_rows(values: Tensor, powers_of_two: bool) -> Tensor:
    """Quantised along columns, and back in fp64."""
    ends = [0, len(values)]
    return fp8.transposed_again(*fp8.transposed(values, ends, powers_of_two), ends)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Within what another order of fp32 operations moves: a rounding to bf16 (2^-8) or to e4m3
    (2^-4) may go the other way in a few places, so norms are compared: far below the error of a
    quantisation that is left out, 2^-5 of each value.
    """
    for name, value in found.items():
        want = expected[name].double()
        distance = (value.double() - want).norm()
        assert distance <= 2e-3 * want.norm() + 1e-30, f"{name}: {distance} of {want.norm()}"


def stacked(weights: Sequence[Any], attribute: str) -> Tensor:
    return torch.stack([getattr(weight, attribute) for weight in weights])


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> TorchFp8Kernels:
    return stand_in(monkeypatch)


def test_the_stand_in_has_the_extensions_functions() -> None:
    stub = runpy.run_path(str(STUB), run_name="stub")
    theirs = {name: thing for name, thing in stub.items() if name.startswith("fp8_")}
    own = {name: thing for name, thing in vars(TorchFp8Kernels).items() if name.startswith("fp8_")}
    assert own.keys() == theirs.keys()
    for name, function in theirs.items():
        assert list(inspect.signature(own[name]).parameters)[1:] == list(
            inspect.signature(function).parameters
        ), name


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("apart", [False, True], ids=["stack", "apart"])
@pytest.mark.parametrize("powers_of_two", [True, False], ids=["powers", "any scales"])
def test_micro_batches_of_a_step(powers_of_two: bool, apart: bool, recomputes: bool) -> None:
    """The first one overwrites main_grads, all others add; 129 rows, 1 row and none are there."""
    problem = Problem(powers_of_two=powers_of_two)
    expected = problem.definition()
    problem.give_main_grads(apart, torch.nan)
    for passes in (1, 2, 3):
        found = problem.run(INTO_MAIN_GRAD, recomputes)
        for name, weights in (("fc1", problem.fc1), ("fc2", problem.fc2)):
            found[name] = stacked(weights, "main_grad") / passes
            assert all(w.grad_added_to_main_grad for w in weights)
        assert_near(found, expected)
    for weights in (problem.fc1, problem.fc2):
        assert not weights[1].main_grad.any()  # of an expert without rows


@pytest.mark.parametrize("name", ["along_rows", "across_rows"])
def test_quantising_cannot_be_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance above finds it; with powers of two both ways give nearly the same values."""
    expected = Problem(powers_of_two=False).definition()
    swapped = {"along_rows": across_rows, "across_rows": along_rows}[name]
    for other in (lambda values, _: values.double(), swapped):
        monkeypatch.setitem(globals(), name, other)
        found = Problem(powers_of_two=False).definition()
        for result in ("output", "rows") if name == "along_rows" else ("fc1", "fc2"):
            with pytest.raises(AssertionError, match=result):
                assert_near({result: found[result]}, expected)


def test_gradients_through_autograd() -> None:
    """Without main_grads, in the weights' dtype."""
    problem = Problem()
    problem.run()
    expected = problem.definition()
    for name, weights in (("fc1", problem.fc1), ("fc2", problem.fc2)):
        assert all(weight.grad.dtype is torch.bfloat16 for weight in weights)
        assert_near({name: stacked(weights, "grad")}, expected)


@pytest.mark.parametrize("trained", ["fc1", "fc2", "some", "none"])
@pytest.mark.parametrize("inputs", [True, False], ids=["inputs", "no inputs"])
def test_frozen_parts(trained: str, inputs: bool) -> None:
    """What is trained has its gradients, what is frozen none, and nothing else changes."""
    if trained == "none" and not inputs:
        trained, inputs = "fc2", False
    problem = Problem()
    expected = problem.definition()
    problem.give_main_grads(value=0.0)
    for name, weights in (("fc1", problem.fc1), ("fc2", problem.fc2)):
        for g, weight in enumerate(weights):
            weight.requires_grad_(name == trained or (trained == "some" and g % 2 == 0))
    found = problem.run(INTO_MAIN_GRAD, rows=inputs, probs=inputs)
    assert ("rows" in found, "probs" in found) == (inputs, inputs)
    assert_near(found, expected)
    for name, weights in (("fc1", problem.fc1), ("fc2", problem.fc2)):
        for weight, want in zip(weights, expected[name], strict=True):
            wanted = want if weight.requires_grad else torch.zeros_like(want)
            assert_near({name: weight.main_grad}, {name: wanted})
            assert weight.grad_added_to_main_grad is weight.requires_grad


@pytest.mark.parametrize("rest", [0, 7])
def test_no_rows(rest: int) -> None:
    problem = Problem((0, 0), rest)
    problem.give_main_grads(value=3.0)
    found = problem.run(GradientTarget(into_main_grad=True))
    assert found["output"].shape == (0, HIDDEN)
    assert all(bool((w.main_grad == 3).all()) for w in (*problem.fc1, *problem.fc2))
    problem.give_main_grads(value=3.0)
    problem.run(INTO_MAIN_GRAD)
    assert not any(bool(w.main_grad.any()) for w in (*problem.fc1, *problem.fc2))


@pytest.mark.parametrize("recomputes", [False, True])
def test_what_is_kept(recomputes: bool) -> None:
    """Rows in FP8, transposed and only for trained weights, and no bf16 but gate and up."""
    for trained in (True, False):
        problem, kept = Problem(rest=0), list[Tensor]()
        for weight in (*problem.fc1, *problem.fc2):
            weight.requires_grad_(trained)
        keep = lambda tensor, kept=kept: kept.append(tensor) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            problem.run(recomputes=recomputes)
        weights = {weight.data_ptr() for weight in (*problem.fc1, *problem.fc2)}
        others = [t for t in kept if t.data_ptr() not in weights and t.dim() > 1]
        kinds = [(t.dtype, t.shape[-2]) for t in others]
        in_fp8 = [rows for dtype, rows in kinds if dtype is torch.uint8]
        assert [rows for dtype, rows in kinds if dtype is torch.bfloat16] == [problem.used]
        assert in_fp8 == ([HIDDEN] + ([] if recomputes else [FFN]) if trained else [])


def test_weights_that_change_before_backward() -> None:
    """torch refuses them, as with products in bf16."""
    problem = Problem()
    rows = problem.rows.clone().requires_grad_()
    state = (problem.offsets, problem.fc1, problem.fc2, problem.layer(THROUGH_AUTOGRAD))
    out = fp8_swiglu_experts(rows, problem.probs, *state)
    with torch.no_grad():
        problem.fc2[2].mul_(2)
        with torch.enable_grad(), pytest.raises(RuntimeError, match="modified by an inplace"):
            out.backward(problem.grad)
    with torch.no_grad():
        assert not fp8_swiglu_experts(rows, problem.probs, *state).requires_grad


def test_the_rule_of_the_format() -> None:
    """By hand: a block of one value, zeros, denormals, infinities, NaN, and ties."""
    row = torch.zeros(8, 128)
    row[0] = 3.0  # 448 / 3 = 149.3 -> 128: 384
    row[1, 5] = torch.inf  # scale 1
    row[1, 6] = 1.0625  # between 1 and 1.125: ties to even
    row[2, 7] = torch.nan
    row[2, 8] = 448.0
    row[3, 0] = 2.0**-133  # the smallest bf16; 448 times its inverse is no fp32
    row[4, 0], row[4, 1] = 1.0, 2.0**-18  # 448 -> 256 * 2^-18 = 2^-10: a tie with 0
    row[6] = -500.0  # 448 / 500 -> 1/2: 250 -> 256
    row[7, :2] = torch.tensor([448.0, 447.0])
    codes, scales = fp8.by_rows(row)
    values = fp8.values_of(codes)
    assert scales[0].tolist()[:5] == [2.0**-7, 1.0, 1.0, 2.0**-127, 2.0**-8]
    assert scales[0].tolist()[5:] == [1.0, 2.0, 1.0]
    assert set(values[0].tolist()) == {384.0}
    assert values[1, 5:7].tolist() == [448.0, 1.0]
    assert values[2, 7].isnan()
    assert values[2, 8] == 448
    assert values[3, 0] == 2.0**-6
    assert values[4, :2].tolist() == [256.0, 0.0]
    assert set(values[6].tolist()) == {-256.0}
    assert values[7, :2].tolist() == [448.0, 448.0]
    _, scales = fp8.by_rows(row, powers_of_two=False)
    assert scales[0, 0] == 1 / (torch.tensor(448.0) / 3)
    assert scales[0, 3] == 1 / torch.tensor(torch.finfo(torch.bfloat16).max)
