"""Shared experts beside dispatch and combine (moe_shared_expert_overlap): in which order things are
queued, that nothing but the order changes, and that an error does not last.  That they run at one
time needs a GPU: tests/gpu/test_gpu_shared_experts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer_case import LayerCase, assert_overlap_changes_no_bits
from megatron_setup import BATCH, HIDDEN, SEQUENCE, build_layer, initialize, make_config

from megatron_ncclep.errors import InputError
from megatron_ncclep.ranks.pool import RankContext, RankPool

pytestmark = pytest.mark.each_release

OVERLAP = {
    "moe_shared_expert_intermediate_size": 32,
    "moe_shared_expert_gate": True,
    "moe_shared_expert_overlap": True,
}


def order_on_rank(ctx: RankContext) -> list[str]:
    """What a forward and a backward pass queue, in order; "wait": the shared experts' stream."""
    initialize(ep=4)
    from megatron_ncclep.cpu.torch_calls import CpuStream

    layer = build_layer(make_config("ncclep", torch.float64, 4, **OVERLAP))
    order: list[str] = []

    def log(owner: Any, name: str, text: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(text)
            return original(*args, **kwargs)

        setattr(owner, name, call)

    shared, engine = layer.shared_experts, layer.token_dispatcher.engine
    shared.stream = CpuStream()
    log(shared.stream, "wait_stream", "wait")
    for step in ("plan", "dispatch", "combine"):
        log(engine, step, step)
    log(shared, "linear_fc1_forward_and_act", "fc1")
    log(shared, "linear_fc2_forward", "fc2")
    log(shared, "get_output", "sum")
    for name in ("fc1", "fc2"):
        weight = getattr(shared, f"linear_{name}").weight
        weight.register_hook(lambda _, name=name: order.append(f"{name} backward"))
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.float64, requires_grad=True)
    out, _ = layer(hidden)
    order.append("backward")
    out.sum().backward()
    return order


def test_our_kernels_are_queued_first(megatron_pool: RankPool) -> None:
    """A GEMM that is queued before them takes all SMs, and one that does not wait for what comes
    before them starts before they can.
    """
    for order in megatron_pool.run(order_on_rank):
        backward = order.index("backward")
        # The first wait is for the layer's input.
        assert order[:backward] == [
            *("wait", "plan", "wait", "dispatch", "fc1", "wait", "combine", "fc2", "sum")
        ]
        # The backward of combine is a dispatch, and the other way round; newer Megatron waits too.
        assert [step for step in order[backward + 1 :] if step != "wait"] == [
            *("dispatch", "fc2 backward", "combine", "fc1 backward")
        ]


@pytest.mark.supports(
    "moe_shared_expert_overlap",
    compared="outputs and all gradients with those without overlap, to the bit (input gradients: "
    "one rounding)",
)
def test_overlap_changes_no_bits(megatron_pool: RankPool) -> None:
    case = LayerCase("bits", dtype=torch.bfloat16, options=OVERLAP, micro_batches=2)
    assert_overlap_changes_no_bits(megatron_pool, case)


def errors_on_rank(ctx: RankContext) -> list[str]:
    """Mistakes of one rank: a token with too many experts, experts that lose a row."""
    initialize(ep=4)
    layer = build_layer(make_config("ncclep", torch.float64, 4, **OVERLAP))
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.float64)

    def too_many(module: Any, inputs: Any, outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = outputs
        return probs, routing_map | (ctx.rank == 2)

    def lose(module: Any, inputs: Any, outputs: Any) -> tuple[torch.Tensor, None]:
        return outputs[0][ctx.rank == 1 :], None

    expected, _ = layer(hidden)
    errors = []
    for module, mistake in ((layer.router, too_many), (layer.experts, lose)):
        hook = module.register_forward_hook(mistake)
        with pytest.raises(InputError) as caught:
            layer(hidden)
        errors.append(str(caught.value))
        hook.remove()
        assert torch.equal(layer(hidden)[0], expected)
    return errors


def test_errors_do_not_last(megatron_pool: RankPool) -> None:
    """From Megatron-Core 0.18 on every later forward pass failed an assertion of its own: the
    shared experts were still in the middle of the one that an InputError had ended.
    """
    for in_plan, in_combine in megatron_pool.run(errors_on_rank):
        assert "rank 2" in in_plan
        assert "rank 1" in in_combine
