"""Activations that are elsewhere between forward and backward, as with offloading.

tests/gpu/test_gpu_memory.py runs Megatron's offloading, and TransformerEngine's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron_setup import BATCH, HIDDEN, SEQUENCE, build_layer, initialize, make_config
from rank_pool import RankContext

from megatron_ncclep.config import EpConfig

pytestmark = pytest.mark.each_release

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
        """Overwrite all but `results`; returns how many values those were."""
        self._kept |= {tensor.untyped_storage().data_ptr() for tensor in results}
        spoilt = [t for t in self._taken if t.untyped_storage().data_ptr() not in self._kept]
        for tensor in spoilt:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        return sum(tensor.numel() for tensor in spoilt)


@pytest.mark.parametrize("name", CASES)
def test_backward_needs_nothing_that_may_be_offloaded(ctx: RankContext, name: str) -> None:
    """Two micro-batches in flight, without and with everything taken away before backward.  Plans
    are no activations: they stay, and read none.
    """
    initialize(ep=4)
    results: list[list[Any]] = []
    for is_taken in (False, True):
        torch.manual_seed(1)
        layer = build_layer(make_config("ncclep", torch.float32, 4, ncclep=CASES[name]))
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
    for expected, found in zip(*results, strict=True):
        assert (expected is None) == (found is None)  # an expert without rows
        assert expected is None or torch.equal(found, expected)
