"""Activations that are elsewhere between forward and backward: what offloading does, on a CPU.

tests/gpu/test_gpu_memory.py runs Megatron's offloading with TransformerEngine's layers, and
TransformerEngine's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_setup import BATCH, HIDDEN, SEQUENCE, build_layer, initialize, make_config
from trainer import ModelCase, differences, train

from megatron_ncclep.config import EpConfig
from megatron_ncclep.ranks.pool import RankContext

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
        """Spoil all but `results`; returns how much that was."""
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


# Of a layer: what experts keep can be offloaded with TransformerEngine's only.
MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")


@contextmanager
def offloading_on_a_cpu() -> Iterator[list[int]]:
    """Let Megatron offload tensors that are on the host already, from ordinary memory to ordinary
    memory; sizes of what it offloads.
    """
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading

    sizes: list[int] = []
    handler, empty = offloading.ChunkOffloadHandler, torch.empty
    offload = handler.offload

    def offload_one(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return offload(self, tensor, *args, **kwargs)

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    def is_no_parameter(tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, torch.nn.Parameter)

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (transformer_engine, "cpu_offload", SimpleNamespace()),
            (torch, "empty", unpinned),
            (torch.Tensor, "record_stream", lambda tensor, stream: None),
            (handler, "offload", offload_one),
            # Which asks from 0.19 on whether a tensor is on a GPU.
            (handler, "_can_manage_tensor_for_offload", staticmethod(is_no_parameter)),
        ):
            changes = mock.patch.object(owner, name, stand_in, create=name.startswith("_can"))
            stack.enter_context(changes)
        offloading.PipelineOffloadManager.reset_instance()
        yield sizes
        offloading.PipelineOffloadManager.reset_instance()


@pytest.mark.supports(
    "fine_grained_activation_offloading",
    *(f"offload_modules={name}" for name in MODULES),
    compared="losses and gradients of a training with those of alltoall without offloading, to the "
    "bit",
)
def test_megatrons_offloading(ctx: RankContext) -> None:
    """Fine-grained, around and in front of our dispatcher."""
    case = ModelCase(dtype=torch.bfloat16, ep=ctx.num_ranks, evaluates=False)
    offloading = {
        "fine_grained_activation_offloading": True,
        "offload_modules": list(MODULES),
        "min_offloaded_tensor_size": 1,
    }
    expected = train(ctx, "alltoall", case)
    with offloading_on_a_cpu() as sizes:
        found = train(ctx, "ncclep", replace(case, options=offloading))
    assert differences(found, expected) == []
    assert sum(sizes), "nothing was offloaded"
