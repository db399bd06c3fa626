"""The experts of a layer as one step of autograd, over products that are plain loops in fp64.

The same step over quack-kernels' products is tested on GPUs, in tests/gpu/test_gpu_quack.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ncclep.integration.experts import fused_swiglu, main_grad
from megatron_ncclep.integration.experts.fused_swiglu import swiglu_experts
from megatron_ncclep.integration.experts.main_grad import GradientTarget

HIDDEN, FFN = 6, 4
SIZES = (3, 0, 5)


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack([gate, up], dim=-1).flatten(-2)


class LoopProducts:
    """One product for each expert; gate and up interleaved, as the kernels leave them."""

    def __init__(self) -> None:
        self.kept: list[bool] = []
        self.num_weight_products = 0

    def blocks(self, ends: Tensor) -> list[slice]:
        return [slice(*pair) for pair in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]

    def times(self, rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
        result = torch.full((len(rows), weights[0].shape[0]), torch.nan, dtype=rows.dtype)
        for block, weight in zip(self.blocks(ends), weights, strict=True):
            result[block] = rows[block] @ weight.t()
        return result

    def fc1(
        self, rows: Tensor, weights: Tensor, probs: Tensor, ends: Tensor, keep: bool
    ) -> tuple[Tensor | None, Tensor]:
        self.kept.append(keep)
        gate, up = self.times(rows, weights.unbind(), ends).chunk(2, dim=1)
        activated = F.silu(gate) * up * probs[:, None]
        return interleaved(gate, up) if keep else None, activated

    def fc2(self, activated: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return self.times(activated, weights.unbind(), ends)

    def fc2_backward(
        self, grad: Tensor, weights: Tensor, probs: Tensor, gate_up: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        activated_grad = self.times(grad, weights.mT.unbind(), ends)
        gate, up = gate_up[:, ::2], gate_up[:, 1::2]
        slope = torch.sigmoid(gate) * (1 + gate * (1 - torch.sigmoid(gate)))
        scaled = activated_grad * probs[:, None]
        return (
            interleaved(scaled * up * slope, scaled * F.silu(gate)),
            F.silu(gate) * up * probs[:, None],
            (activated_grad * F.silu(gate) * up).sum(dim=1),
        )

    def fc1_backward(self, gate_up_grad: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        apart = torch.cat([gate_up_grad[:, ::2], gate_up_grad[:, 1::2]], dim=1)
        return self.times(apart, weights.mT.unbind(), ends)

    def weight_gradients(
        self,
        grad: Tensor,
        rows: Tensor,
        ends: Tensor,
        interleaved: bool,
        out: Tensor | Sequence[Tensor] | None = None,
        adds: bool = False,
    ) -> Tensor | Sequence[Tensor]:
        self.num_weight_products += 1
        if interleaved:
            grad = torch.cat([grad[:, ::2], grad[:, 1::2]], dim=1)
        if out is None:
            out = torch.empty(len(ends) - 1, grad.shape[1], rows.shape[1], dtype=rows.dtype)
        for block, each in zip(self.blocks(ends), out, strict=True):
            gradient = grad[block].t() @ rows[block]
            each.add_(gradient) if adds else each.copy_(gradient)
        return out


class Layer:
    """Experts of one rank, two rows after the last block, and gradients of a plain computation."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.used = sum(SIZES)
        self.rows, self.grad = draw(self.used + 2, HIDDEN), draw(self.used + 2, HIDDEN)
        self.probs = draw(self.used + 2).abs()
        self.offsets = torch.tensor(SIZES).cumsum(0, dtype=torch.int32)
        self.fc1 = [torch.nn.Parameter(draw(2 * FFN, HIDDEN)) for _ in SIZES]
        self.fc2 = [torch.nn.Parameter(draw(HIDDEN, FFN)) for _ in SIZES]
        self.products = LoopProducts()

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        return [*self.fc1, *self.fc2]

    def run(self, target: GradientTarget = GradientTarget()) -> list[Tensor]:  # noqa: B008
        """Output, and gradients of the rows and probabilities that belong to an expert."""
        rows, probs = self.rows.clone().requires_grad_(), self.probs.clone().requires_grad_()
        arguments = (self.offsets, self.fc1, self.fc2, self.products, target)
        out = swiglu_experts(rows, probs, *arguments)
        out.backward(self.grad)
        assert rows.grad is not None
        assert probs.grad is not None
        return [tensor[: self.used] for tensor in (out.detach(), rows.grad, probs.grad)]

    def expected(self) -> tuple[list[Tensor], list[Tensor]]:
        """The same and the weights' gradients, by autograd."""
        rows = self.rows[: self.used].clone().requires_grad_()
        probs = self.probs[: self.used].clone().requires_grad_()
        parts = []
        blocks = zip(rows.split(SIZES), probs.split(SIZES), self.fc1, self.fc2, strict=True)
        for block, scale, fc1, fc2 in blocks:
            gate, up = (block @ fc1.t()).chunk(2, dim=1)
            parts.append(F.silu(gate) * up * scale[:, None] @ fc2.t())
        out = torch.cat(parts)
        gradients = torch.autograd.grad(out, [rows, probs, *self.weights], self.grad[: self.used])
        return [out.detach(), *gradients[:2]], list(gradients[2:])


# fp64 in both, but probabilities are taken in fp32 (2^-24 a rounding).
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def test_against_autograd() -> None:
    layer = Layer()
    layer.probs = layer.probs.float().double()
    expected, weight_grads = layer.expected()
    torch.testing.assert_close(layer.run(), expected, **CLOSE)
    torch.testing.assert_close([w.grad for w in layer.weights], weight_grads, **CLOSE)
    assert layer.products.kept == [True]


def test_rows_after_the_last_block_are_not_read() -> None:
    clean, spoilt = Layer(), Layer()
    for tensor in (spoilt.rows, spoilt.grad, spoilt.probs):
        tensor[spoilt.used :] = torch.nan
    for result, other in zip(spoilt.run(), clean.run(), strict=True):
        assert torch.equal(result, other)
    for weight, other in zip(spoilt.weights, clean.weights, strict=True):
        assert torch.equal(weight.grad, other.grad)


def test_nothing_is_kept_without_backward() -> None:
    layer = Layer()
    with torch.no_grad():
        swiglu_experts(
            *(layer.rows, layer.probs, layer.offsets, layer.fc1, layer.fc2, layer.products),
            GradientTarget(),
        )
    assert layer.products.kept == [False]


def test_frozen_weights() -> None:
    layer = Layer()
    for weight in layer.fc1:
        weight.requires_grad_(False)
    layer.run()
    assert all(weight.grad is None for weight in layer.fc1)
    assert layer.products.num_weight_products == 1
    torch.testing.assert_close(
        [weight.grad for weight in layer.fc2], Layer().expected()[1][3:], **CLOSE
    )


# ---- main_grad


@pytest.mark.parametrize("lie_together", [True, False])
@pytest.mark.parametrize("may_overwrite", [True, False])
def test_micro_batches(lie_together: bool, may_overwrite: bool) -> None:
    """The first one of a step replaces what main_grad holds, where that may be; others are added.

    Twice: DDP resets the flag when the next step begins.
    """
    layer = Layer()
    _, gradients = layer.expected()
    for weights in (layer.fc1, layer.fc2):
        buffer = torch.empty(len(weights) + 1, *weights[0].shape)
        places = buffer if lie_together else [buffer[0], *buffer[2:]]
        for weight, place in zip(weights, places, strict=False):
            weight.main_grad = place
    for _ in range(2):
        for weight in layer.weights:
            weight.main_grad.fill_(7.0)  # zero in Megatron; here it shows what was read
            weight.grad_added_to_main_grad = False
        for count in (1, 2, 3):
            layer.run(GradientTarget(into_main_grad=True, may_overwrite=may_overwrite))
            before = 0.0 if may_overwrite else 7.0
            for weight, gradient in zip(layer.weights, gradients, strict=True):
                assert weight.grad_added_to_main_grad
                assert weight.grad is not None
                assert weight.grad.shape == weight.shape
                weight.grad = None
                expected = before + count * gradient.float()
                torch.testing.assert_close(weight.main_grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("holds_iteration", [True, False])
def test_captured_micro_batches(holds_iteration: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of one micro-batch is replayed for all: what it stored would replace the others'."""
    monkeypatch.setattr(main_grad, "_is_captured", lambda weights: True)
    layer = Layer()
    _, gradients = layer.expected()
    for weight in layer.weights:
        weight.main_grad = torch.full(weight.shape, 7.0)
        weight.grad_added_to_main_grad = False
    layer.run(GradientTarget(True, may_overwrite=True, holds_iteration=holds_iteration))
    before = 0.0 if holds_iteration else 7.0
    for weight, gradient in zip(layer.weights, gradients, strict=True):
        torch.testing.assert_close(
            weight.main_grad, before + gradient.float(), rtol=1e-5, atol=1e-5
        )


def test_a_gradient_that_ddp_has_not_heard_of_is_added() -> None:
    """Without the flag nobody says when a step begins."""
    layer = Layer()
    _, gradients = layer.expected()
    for weight in layer.weights:
        weight.main_grad = torch.full(weight.shape, 7.0)
    layer.run(GradientTarget(into_main_grad=True, may_overwrite=True))
    for weight, gradient in zip(layer.weights, gradients, strict=True):
        assert weight.grad is None
        torch.testing.assert_close(weight.main_grad, 7 + gradient.float(), rtol=1e-5, atol=1e-5)


# ---- where it can run


def test_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, bf16 = torch.device("cuda"), torch.bfloat16

    def installed(version: str | None) -> None:
        def find(name: str) -> str:
            assert name == "quack-kernels"
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(metadata, "version", find)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    for version, capability, dtype, problem in [
        ("0.6.5", (9, 0), bf16, None),
        (None, (9, 0), bf16, "not installed: pip install 'megatron-ncclep[experts]'"),
        ("0.7.0", (9, 0), bf16, "quack-kernels 0.7.0 is installed, and only 0.6.5 was tried"),
        ("0.6.5", (10, 0), bf16, "on compute capability 9.x, and NVIDIA B200 has 10.0"),
        ("0.6.5", (9, 0), torch.float16, "in bf16, and the experts compute in torch.float16"),
    ]:
        installed(version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        found = fused_swiglu.unavailable_reason(gpu, dtype)
        assert found is None if problem is None else problem in found
    cpu = fused_swiglu.unavailable_reason(torch.device("cpu"), bf16)
    assert cpu == "quack-kernels has no kernels for a CPU"


def test_other_activations() -> None:
    swiglu = {"activation_func": F.silu, "gated_linear_unit": True}
    assert fused_swiglu.other_activation(SimpleNamespace(**swiglu)) is None
    for change, problem in [
        ({"gated_linear_unit": False}, "not SwiGLU"),
        ({"activation_func": F.gelu}, "not SwiGLU"),
        ({"activation_func_clamp_value": 7.0}, "clamp_value is set"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset is set"),
    ]:
        found = fused_swiglu.other_activation(SimpleNamespace(**(swiglu | change)))
        assert found is not None
        assert problem in found
