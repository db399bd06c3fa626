"""Shared experts that overlap dispatch and combine (moe_shared_expert_overlap): the order in which
kernels are queued, and recovery from errors.

Results are compared in test_moe_layer.py, and to the bit in tests/gpu/test_gpu_shared_experts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_setup import BATCH, HIDDEN, SEQUENCE, drawn, log_calls, new_layer
from rank_pool import RankContext
from test_moe_layer import SHARED_OVERLAP

from megatron_ncclep.errors import InputError

pytestmark = pytest.mark.each_release


def test_our_kernels_are_queued_first(ctx: RankContext) -> None:
    """A GEMM that is queued before them takes all SMs, and so does one that starts early because it
    does not wait for the work before them.
    """
    layer = new_layer(4, torch.float64, **SHARED_OVERLAP)
    from megatron_ncclep.cpu.torch_calls import CpuStream

    order: list[str] = []
    shared, engine = layer.shared_experts, layer.token_dispatcher.engine
    shared.stream = CpuStream()
    for owner, name, text in (
        (shared.stream, "wait_stream", "wait"),
        *((engine, step, step) for step in ("plan", "dispatch", "combine")),
        (shared, "linear_fc1_forward_and_act", "fc1"),
        (shared, "linear_fc2_forward", "fc2"),
        (shared, "get_output", "sum"),
    ):
        log_calls(order, owner, name, text)
    for name in ("fc1", "fc2"):
        weight = getattr(shared, f"linear_{name}").weight
        weight.register_hook(lambda _, name=name: order.append(f"{name} backward"))
    out, _ = layer(drawn(ctx.rank, SEQUENCE, BATCH, HIDDEN).double().requires_grad_())
    # The first wait is for the layer's input; all waits are of the shared experts' stream.
    assert order == ["wait", "plan", "wait", "dispatch", "fc1", "wait", "combine", "fc2", "sum"]
    order.clear()
    out.sum().backward()
    # The backward of combine is a dispatch, and the other way round; newer Megatron waits too.
    backward = ["dispatch", "fc2 backward", "combine", "fc1 backward"]
    assert [step for step in order if step != "wait"] == backward


def test_errors_do_not_last(ctx: RankContext) -> None:
    """Mistakes of one rank: a token with too many experts, experts that lose a row.  From
    Megatron-Core 0.18 on every later forward pass failed an assertion of its own: the shared
    experts were still in the middle of the one that an InputError had ended.
    """
    layer = new_layer(4, torch.float64, **SHARED_OVERLAP)
    hidden = drawn(ctx.rank, SEQUENCE, BATCH, HIDDEN).double()

    def too_many(module: Any, inputs: Any, outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = outputs
        return probs, routing_map | (ctx.rank == 2)

    def lose(module: Any, inputs: Any, outputs: Any) -> tuple[torch.Tensor, None]:
        return outputs[0][ctx.rank == 1 :], None

    expected, _ = layer(hidden)
    for module, mistake, rank in ((layer.router, too_many, 2), (layer.experts, lose, 1)):
        hook = module.register_forward_hook(mistake)
        with pytest.raises(InputError, match=f"rank {rank}"):
            layer(hidden)
        hook.remove()
        assert torch.equal(layer(hidden)[0], expected)
