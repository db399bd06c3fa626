"""An expert layer with SwiGLU as one autograd node: two GEMMs in forward, four in backward.

Adapters on its linears are part of the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ncclep.integration.experts.adapter_product import LowRank
from megatron_ncclep.integration.experts.expert_stack import stack_of, with_room
from megatron_ncclep.integration.experts.grouped_gemm import ADDRESS_BYTES
from megatron_ncclep.integration.experts.main_grad import (
    GradientTarget,
    store_weight_gradients,
)

if TYPE_CHECKING:
    from megatron_ncclep.integration.experts.quack_products import QuackProducts

PACKAGE, COMPILER = "quack-kernels", "nvidia-cutlass-dsl"
# The versions that were tried: the functions called here may change in others.  The first compiler
# is pyproject.toml's, and ran; the other one, which vLLM 0.33 pins, has compiled the GEMMs.
VERSION, COMPILERS = "0.6.5", ("4.7.1", "4.8.0")
INSTALL = "pip install 'megatron-ncclep[experts]'"
_CAPABILITY = 9
# Its modules and those of nvidia-cutlass-dsl take the functions of any other folder for a user's.
_MODULES = ("quack", "cutlass")
_FOLDERS = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Mode:
    """The settings of a call, the same for all rows.

    Attributes:
        products: the layer's GEMMs.
        target: where the weights' gradients go.
        has_backward: a backward pass will follow.
        scales: of the products of the adapters on fc1 and fc2.
        room: rows that are free behind the weights of fc2 of each expert.
    """

    products: QuackProducts
    target: GradientTarget
    has_backward: bool
    scales: tuple[float, float]
    room: int


def unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say what keeps quack-kernels' GEMMs from running there, if anything does."""
    if device.type != "cuda":
        return f"{PACKAGE} has no kernels for a {device.type.upper()}"
    if reason := untried_pair():
        return reason
    for module in _MODULES:
        spec = find_spec(module)
        if spec is None or spec.origin is None:
            return f"{PACKAGE} {VERSION} lacks its module {module}: {INSTALL}"
        if not any(folder in spec.origin for folder in _FOLDERS):
            return (
                f"{PACKAGE} works only in a folder called {' or '.join(_FOLDERS)}, and its module "
                f"{module} is {spec.origin}: install it where pip does by default"
            )
    if find_spec("triton") is None:
        return "adapters' kernels need the package triton, which torch for GPUs brings"
    major, minor = torch.cuda.get_device_capability(device)
    if major != _CAPABILITY:
        return (
            f"{PACKAGE} was tried on compute capability {_CAPABILITY}.x, and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
    if dtype is not torch.bfloat16:
        return f"{PACKAGE} was tried in bf16, and the experts compute in {dtype}"
    return None


def untried_pair() -> str | None:
    """Say which installed versions were not tried together; None if these were."""
    found = []
    for name in (PACKAGE, COMPILER):
        try:
            found.append(metadata.version(name))
        except metadata.PackageNotFoundError:
            return f"{name} is not installed: {INSTALL}"
    version, compiler = found
    if version == VERSION and compiler in COMPILERS:
        return None
    return (
        f"{PACKAGE} {version} with {COMPILER} {compiler} is installed, and only {VERSION} with "
        f"{' or '.join(COMPILERS)} was tried: {INSTALL}"
    )


def other_activation(config: Any) -> str | None:
    """Say which setting of a TransformerConfig is not plain SwiGLU, if any."""
    if config.activation_func is not F.silu or not config.gated_linear_unit:
        return "the activation is not SwiGLU"
    if getattr(config, "activation_func_clamp_value", None) is not None:
        return "activation_func_clamp_value is set"
    if getattr(config, "glu_linear_offset", 0):
        return "glu_linear_offset is set"
    return None


def swiglu_experts(
    rows: Tensor,
    probs: Tensor,
    offsets: Tensor,
    fc1: Sequence[Tensor],
    fc2: Sequence[Tensor],
    products: QuackProducts,
    target: GradientTarget,
    adapters: tuple[LowRank | None, LowRank | None] = (None, None),
    room: int = 0,
) -> Tensor:
    """Apply every expert to its block of rows: fc2(silu(gate) * up * probability).

    Gate and up, the probabilities, and the rows unless fc1 is frozen and has no adapter, are kept
    for backward.  The host reads nothing.
    Rows after the last block may hold anything; their results and gradients are undefined.

    Args:
        rows: [num_rows, hidden].
        probs: [num_rows], of any dtype.
        offsets: ends of the blocks, int32 [num_experts], on the rows' device.
        fc1: one parameter [2 * ffn, hidden] for each block, in the blocks' order, gates first.
        fc2: likewise, [hidden, ffn].
        products: the layer's GEMMs.
        target: where the weights' gradients go; those of adapters go through autograd.
        adapters: on fc1 and on fc2.
        room: rows that `expert_stack.lay_out` has left behind the weights of fc2, for the first
            factor of its adapter; if these are too few, backward copies all weights.

    Returns:
        [num_rows, hidden].
    """
    factors = [each for pair in adapters for each in (pair[:2] if pair else (None, None))]
    has_backward = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad
        for tensor in (rows, probs, *factors, *fc1, *fc2)
    )
    of_fc1, of_fc2 = (pair.scale if pair else 1.0 for pair in adapters)
    mode = Mode(products, target, has_backward, (of_fc1, of_fc2), room)
    result: Tensor = _SwigluExperts.apply(rows, probs, offsets, mode, *factors, *fc1, *fc2)
    return result


class _SwigluExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        probs: Tensor,
        offsets: Tensor,
        mode: Mode,
        a1: Tensor | None,
        b1: Tensor | None,
        a2: Tensor | None,
        b2: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        fc1, fc2 = _halves(weights)
        rows, scale, ends = rows.contiguous(), probs.float().contiguous(), F.pad(offsets, (1, 0))
        if scale.data_ptr() % ADDRESS_BYTES:
            scale = scale.clone()
        products, keep = mode.products, mode.has_backward
        low1, addend = _products_of(products, "1", rows, a1, b1, ends, mode.scales[0])
        gate_up, activated = products.fc1(rows, stack_of(fc1), scale, ends, keep, addend)
        low2, addend = _products_of(products, "2", activated, a2, b2, ends, mode.scales[1])
        # The weights one by one, not their stack, which may be a copy that must not be kept.
        fc1_trained, _ = _halves(ctx.needs_input_grad[_WEIGHTS:])
        kept = rows if any(fc1_trained) or ctx.needs_input_grad[_A1] else None
        ctx.save_for_backward(kept, scale, ends, gate_up, a1, b1, a2, b2, low1, low2, *weights)
        ctx.mode, ctx.probs_dtype = mode, probs.dtype
        return products.fc2(activated, stack_of(fc2), ends, addend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: what waits on the host is fetched each time
        # What one linear needs is freed before the other one's begins.
        of_fc2 = _backward_of_fc2(ctx, saved, grad)
        gate_up_grad, probs_grad, a2_grad, b2_grad, fc2_grads = of_fc2
        rows_grad, a1_grad, b1_grad, fc1_grads = _backward_of_fc1(ctx, saved, gate_up_grad)
        factors = (a1_grad, b1_grad, a2_grad, b2_grad)
        return rows_grad, probs_grad, None, None, *factors, *fc1_grads, *fc2_grads


def _products_of(
    products: QuackProducts,
    linear: str,
    rows: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    ends: Tensor,
    scale: float,
) -> tuple[Tensor | None, Tensor | None]:
    """An adapter's products: scale * rows @ a^T, and that @ b^T, interleaved for fc1."""
    if a is None or b is None:
        return None, None
    low = products.narrow(f"narrow{linear}", rows, a, ends, scale)
    return low, products.wide(f"wide{linear}", low, b, ends, interleaved=linear == "1")


def _backward_of_fc2(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Any, ...]:
    """The gradients of gate and up, of the probabilities, and of fc2's factors and weights."""
    _, probs, ends, gate_up, _, _, a2, b2, _, low2, *weights = saved
    (_, fc2), grad = _halves(weights), grad.contiguous()
    mode: Mode = ctx.mode
    products, wanted = mode.products, ctx.needs_input_grad
    wide_grad, stack = grad, stack_of(fc2) if a2 is None else _with_factor(fc2, a2, mode.room)
    if a2 is not None:
        wide_grad = products.with_low_rank(grad, b2, ends, mode.scales[1])
    of_fc2 = products.fc2_backward(wide_grad, stack, probs, gate_up, ends)
    gate_up_grad, activated, probs_grad = of_fc2
    a2_grad = b2_grad = None
    if wanted[_A2]:
        low2_grad = wide_grad[:, grad.shape[1] :]
        a2_grad = products.factor_gradients(low2_grad, activated, ends)
    if wanted[_B2]:
        b2_grad = products.factor_gradients(grad, low2, ends)
    _, is_trained = _halves(wanted[_WEIGHTS:])
    fc2_grads: list[Tensor | None] = [None] * len(fc2)
    if any(is_trained):
        product = partial(products.weight_gradients, grad, activated, ends, False)
        fc2_grads = store_weight_gradients(fc2, is_trained, product, mode.target)
    return gate_up_grad, probs_grad.to(ctx.probs_dtype), a2_grad, b2_grad, fc2_grads


def _backward_of_fc1(ctx: Any, saved: Sequence[Any], grad: Tensor) -> tuple[Any, ...]:
    """The gradients of the rows, and of fc1's factors and weights; `grad`: of gate and up."""
    rows, _, ends, _, a1, b1, _, _, low1, _, *weights = saved
    (fc1, _), wanted = _halves(weights), ctx.needs_input_grad
    mode: Mode = ctx.mode
    products = mode.products
    rows_grad = addend = a1_grad = b1_grad = None
    if a1 is not None:
        operands = (grad, b1.mT, ends, mode.scales[0])
        low1_grad = products.narrow("low1_grad", *operands, interleaved=True)
        if wanted[0]:
            addend = products.wide("rows_grad", low1_grad, a1.mT, ends)
        if wanted[_A1]:
            a1_grad = products.factor_gradients(low1_grad, rows, ends)
        if wanted[_B1]:
            b1_grad = products.factor_gradients(grad, low1, ends, True)
    if wanted[0]:
        rows_grad = products.fc1_backward(grad, stack_of(fc1), ends, addend)
    is_trained, _ = _halves(wanted[_WEIGHTS:])
    fc1_grads: list[Tensor | None] = [None] * len(fc1)
    if any(is_trained):
        product = partial(products.weight_gradients, grad, rows, ends, True)
        fc1_grads = store_weight_gradients(fc1, is_trained, product, mode.target)
    return rows_grad, a1_grad, b1_grad, fc1_grads


# Places among the arguments of forward.
_A1, _B1, _A2, _B2, _WEIGHTS = 4, 5, 6, 7, 8


def _with_factor(weights: Sequence[Tensor], a: Tensor, room: int) -> Tensor:
    """The weights of each expert, with the adapter's first factor as more rows."""
    stack, rank, rows = with_room(weights, room), a.shape[1], len(weights[0])
    if stack is None or room < rank:
        return torch.cat([stack_of(weights), a], dim=1)
    stack[:, rows : rows + rank].copy_(a)
    return stack[:, : rows + rank]


def _halves(values: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """The values for fc1, and those for fc2."""
    half = len(values) // 2
    return values[:half], values[half:]
