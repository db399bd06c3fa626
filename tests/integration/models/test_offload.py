"""Activations that are elsewhere between forward and backward, as with offloading.

tests/gpu/test_gpu_memory.py runs Megatron's offloading, and TransformerEngine's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_setup import BATCH, HIDDEN, SEQUENCE, drawn, new_layer
from rank_pool import RankContext
from torch.autograd.graph import saved_tensors_hooks
from trainer import differences

from megatron_ncclep.config import EpConfig

CASES: dict[str, EpConfig] = {
    "exact": EpConfig(),
    "static": EpConfig(max_recv_rows="worst", alignment=16, experts="grouped"),
}


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.each_release
@pytest.mark.parametrize("name", CASES)
def test_backward_needs_nothing_that_may_be_offloaded(ctx: RankContext, name: str) -> None:
    """Two micro-batches in flight, without and with everything taken away before backward: what
    autograd saves is copied, and overwritten.  Plans are no activations: they stay, and read none.
    """
    results: list[dict[str, Any]] = []
    for is_taken in (False, True):
        layer = new_layer(4, ncclep=CASES[name])
        batches = [drawn(n + ctx.rank, SEQUENCE, BATCH, HIDDEN).requires_grad_() for n in (0, 10)]
        kept = {storage(tensor) for tensor in (*batches, *layer.parameters(), *layer.buffers())}
        taken: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor, kept: Any = kept, taken: Any = taken) -> torch.Tensor:
            if storage(tensor) in kept:
                return tensor
            taken.append(tensor.detach())
            return tensor.detach().clone()

        with saved_tensors_hooks(pack, lambda saved: saved):
            outputs = [layer(hidden)[0] for hidden in batches]
        kept |= {storage(out) for out in outputs}
        spoilt = [tensor for tensor in taken if storage(tensor) not in kept]
        assert sum(tensor.numel() for tensor in spoilt) > 0
        for tensor in spoilt if is_taken else ():
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        for out in outputs:
            out.backward(torch.ones_like(out))
        results.append({name: parameter.grad for name, parameter in layer.named_parameters()})
        results[-1] |= {f"input {i}": hidden.grad for i, hidden in enumerate(batches)}
    assert differences(*results) == []
