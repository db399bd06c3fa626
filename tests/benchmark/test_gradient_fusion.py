"""The stand-in for Apex' function adds products to main_grad, in every release of Megatron-Core."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from dispatcher_bugs import setting_of
from imports import import_megatron_on_cpu
from patience import PatientPool

from megatron_ncclep.benchmark import gradient_fusion
from megatron_ncclep.benchmark.gradient_fusion import STAND_IN, wgrad_gemm_accum_fp32
from megatron_ncclep.ranks.pool import RankContext

ROWS, IN, OUT = 5, 3, 4


def integers(seed: int, *shape: int) -> torch.Tensor:
    """From -4 to 4: five products of two of them add up to at most 80, which bf16 holds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).bfloat16()


def test_products_are_added() -> None:
    """Sums of 258 and more would need more bits than bf16 has: they are fp32's."""
    main_grad = torch.full((OUT, IN), 1000.0)
    expected = main_grad.clone()
    for step in range(4):
        rows, grad = integers(step, ROWS, IN), integers(10 + step, ROWS, OUT)
        wgrad_gemm_accum_fp32(rows, grad, main_grad)
        expected += torch.einsum("no,ni->oi", grad.float(), rows.float())
        assert torch.equal(main_grad, expected), step
    assert (expected - 1000).abs().max() > 0


def output_layer_on_rank(context: RankContext) -> tuple[str, bool, bool]:
    """Two micro-batches of Megatron's output layer in DistributedDataParallel.

    Returns:
        whose function adds the gradients, whether main_grad is their sum, and whether the layer
        told the hooks that it is.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_ncclep.benchmark.megatron_setup import initialize

    initialize(setting_of(context))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=IN,
        num_attention_heads=1,
        params_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=True,
    )
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        layers.ColumnParallelLinear(IN, OUT, config=config, init_method=torch.nn.init.ones_)
    whose = {gradient_fusion.provide(), gradient_fusion.provide()}
    layer = layers.ColumnParallelLinear(
        IN, OUT, config=config, init_method=torch.nn.init.ones_, bias=False
    )
    wrapped = DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), layer
    )
    wrapped.zero_grad_buffer()
    expected = torch.zeros(OUT, IN)
    for step in range(2):
        rows, grad = integers(step, ROWS, 1, IN), integers(10 + step, ROWS, 1, OUT)
        out, _ = wrapped(rows)
        out.backward(grad)
        expected += torch.einsum("nbo,nbi->oi", grad.float(), rows.float())
    weight = layer.weight
    return ", ".join(whose), torch.equal(weight.main_grad, expected), weight.grad_added_to_main_grad


@pytest.mark.skipif(find_spec("megatron") is None, reason="Megatron-Core is not installed")
@pytest.mark.each_release
def test_the_output_layer_calls_it() -> None:
    pool = PatientPool(1, "gloo", prepare=import_megatron_on_cpu)
    try:
        assert pool.run(output_layer_on_rank) == [(STAND_IN, True, True)]
    finally:
        pool.close()
