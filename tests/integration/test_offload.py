"""Activations that are elsewhere between forward and backward: what offloading does, on a CPU.

tests/gpu/test_gpu_memory.py runs Megatron's offloading and TransformerEngine's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron_setup import BATCH, HIDDEN, SEQUENCE, build_layer, initialize, make_config

from megatron_ncclep.config import EpConfig
from megatron_ncclep.testing.launcher import RankContext, RankPool

CASES: dict[str, EpConfig] = {
    "exact": EpConfig(),
    "static": EpConfig(max_recv_rows="worst", alignment=16, experts="grouped"),
}


class TakenAway:
    """Copies what autograd saves, and overwrites what it has copied."""

    def __init__(self, *kept: torch.Tensor) -> None:
        """Leave `kept` alone, and what shares memory with it."""
        self._kept = {tensor.untyped_storage().data_ptr() for tensor in kept}
        self._taken: list[torch.Tensor] = []
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() in self._kept:
            return tensor
        self._taken.append(tensor.detach())
        return tensor.detach().clone()

    def overwrite(self, *results: torch.Tensor) -> int:
        """Spoil all but `results`; returns how much that was."""
        self._kept |= {tensor.untyped_storage().data_ptr() for tensor in results}
        spoilt = [t for t in self._taken if t.untyped_storage().data_ptr() not in self._kept]
        for tensor in spoilt:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        return sum(tensor.numel() for tensor in spoilt)


def gradients_on_rank(ctx: RankContext, ncclep: EpConfig) -> list[Any]:
    """Two micro-batches in flight, without and with everything taken away before backward."""
    initialize(ep=4)
    results: list[list[Any]] = []
    for is_taken in (False, True):
        torch.manual_seed(1)
        layer = build_layer(make_config("ncclep", torch.float32, 4, ncclep=ncclep))
        waiting = []
        for micro_batch in range(2):
            generator = torch.Generator().manual_seed(10 * micro_batch + ctx.rank)
            hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator, requires_grad=True)
            away = TakenAway(hidden, *layer.parameters(), *layer.buffers())
            with away.hooks if is_taken else nullcontext():
                waiting.append((hidden, layer(hidden)[0], away))
        for _, out, away in waiting:
            if is_taken:
                assert away.overwrite(out) > 0
        for _, out, _ in waiting:
            out.backward(torch.ones_like(out))
        results.append([hidden.grad for hidden, _, _ in waiting])
        results[-1] += [parameter.grad for parameter in layer.parameters()]
    return results


@pytest.mark.parametrize("name", CASES)
def test_backward_needs_nothing_that_may_be_offloaded(megatron_pool: RankPool, name: str) -> None:
    """Plans are no activations: they stay, and read none."""
    for usual, offloaded in megatron_pool.run(gradients_on_rank, CASES[name]):
        for expected, found in zip(usual, offloaded, strict=True):
            assert (expected is None) == (found is None)  # an expert without rows
            assert expected is None or torch.equal(found, expected)
