"""The products of quack_products.py in torch, expert by expert, on any device and in any dtype."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class TorchProducts:
    """Stands in for `QuackProducts`, whose docstrings say what each method computes.

    Results are NaN where these are undefined: in rows after the last block.
    """

    def _by_rows(
        self, rows: Tensor, factors: Tensor, ends: Tensor, addend: Tensor | None = None
    ) -> Tensor:
        """rows @ factors[g]^T, and the addend."""
        result = rows.new_full((len(rows), factors.shape[1]), torch.nan)
        for (begin, end), factor in zip(blocks(ends), factors, strict=True):
            product = rows[begin:end] @ factor.t()
            result[begin:end] = product if addend is None else product + addend[begin:end]
        return result

    def fc1(
        self, rows: Tensor, weights: Tensor, probs: Tensor, ends: Tensor, keep: bool,
        addend: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        gate_up = self._by_rows(rows, interleave(weights, 1), ends, addend)
        activated = F.silu(gate_up[:, ::2]) * gate_up[:, 1::2] * probs[:, None].to(rows.dtype)
        return gate_up if keep else None, activated

    def fc2(
        self, activated: Tensor, weights: Tensor, ends: Tensor, addend: Tensor | None = None
    ) -> Tensor:
        return self._by_rows(activated, weights, ends, addend)

    def fc2_backward(
        self, grad: Tensor, weights: Tensor, probs: Tensor, gate_up: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_activated = self._by_rows(grad, weights.mT, ends)
        with torch.enable_grad():
            inputs = (gate_up.detach().requires_grad_(), probs.detach().requires_grad_())
            gate, up = inputs[0][:, ::2], inputs[0][:, 1::2]
            activated = F.silu(gate) * up * inputs[1][:, None].to(grad.dtype)
            gate_up_grad, probs_grad = torch.autograd.grad(activated, inputs, of_activated)
        return gate_up_grad, activated.detach(), probs_grad

    def fc1_backward(
        self, gate_up_grad: Tensor, weights: Tensor, ends: Tensor, addend: Tensor | None = None
    ) -> Tensor:
        return self._by_rows(gate_up_grad, interleave(weights, 1).mT, ends, addend)

    def narrow(
        self, key: str, rows: Tensor, factor: Tensor, ends: Tensor, scale: float,
        interleaved: bool = False,
    ) -> Tensor:  # fmt: skip
        return self._by_rows(rows, interleave(factor, 2) if interleaved else factor, ends) * scale

    def with_low_rank(self, rows: Tensor, factor: Tensor, ends: Tensor, scale: float) -> Tensor:
        return torch.cat([rows, self._by_rows(rows, factor.mT, ends) * scale], dim=1)

    def wide(
        self, key: str, low: Tensor, factor: Tensor, ends: Tensor, interleaved: bool = False
    ) -> Tensor:
        return self._by_rows(low, interleave(factor, 1) if interleaved else factor, ends)

    def factor_gradients(
        self, grad: Tensor, rows: Tensor, ends: Tensor, interleaved: bool = False
    ) -> Tensor:
        if interleaved:
            grad = torch.cat([grad[:, ::2], grad[:, 1::2]], dim=1)
        return torch.stack([grad[begin:end].t() @ rows[begin:end] for begin, end in blocks(ends)])

    def weight_gradients(
        self, grad: Tensor, rows: Tensor, ends: Tensor, interleaved: bool, out: Any = None,
        adds: bool = False,
    ) -> Any:  # fmt: skip
        assert out is None, "only through autograd"
        return self.factor_gradients(grad, rows, ends, interleaved)


def interleave(weights: Tensor, dim: int) -> Tensor:
    """The first half's slices and the second's in turn."""
    first, second = weights.chunk(2, dim)
    return torch.stack([first, second], dim + 1).flatten(dim, dim + 1)


def blocks(ends: Tensor) -> list[tuple[int, int]]:
    bounds: list[int] = ends.tolist()
    return list(pairwise(bounds))
