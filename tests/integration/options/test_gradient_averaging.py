"""Two-level gradient averaging against the paper's formula in fp64, and what it puts on the wire.

Gradients come from a generator of their own on each rank, so that the oracle has them before any
of ours has seen them.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron_setup import build_layer, initialize, make_config
from numpy.typing import NDArray
from on_ranks import gathered
from rank_pool import RankContext

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import InputError, UnsupportedError
from megatron_ncclep.gradient_averaging import TwoLevelAveraging, two_means

# A few roundings to fp32 of numbers up to about 5, in sums whose own error is below that.
CLOSE = {"rtol": 1e-5, "atol": 3e-6}


def means(gradients: NDArray[np.float64]) -> tuple[float, float]:
    """Of the non-negative gradients, and of the magnitudes of the others."""
    kept, negative = gradients[gradients >= 0], gradients[gradients < 0]
    return (kept.mean() if kept.size else 0.0, np.abs(negative).mean() if negative.size else 0.0)


def encoded(gradients: NDArray[np.float64], plus: float, minus: float) -> NDArray[np.float64]:
    return np.where(gradients >= 0, plus, -minus)


def oracle(workers: list[NDArray[np.float64]], own: int) -> NDArray[np.float64]:
    """The paper's formula, step by step, for one of the workers."""
    every = [means(worker) for worker in workers]
    error = workers[own] - encoded(workers[own], *every[own])
    plus, minus = (float(np.mean(side)) for side in zip(*every, strict=True))
    return error + encoded(workers[own], plus, minus)


def watched_sums() -> Any:
    """Note the tensors that torch.distributed.all_reduce is given."""
    return mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce)


def sizes_of(sums: Any) -> list[int]:
    """Their bytes."""
    return [call.args[0].nbytes for call in sums.call_args_list]


def test_means_are_those_of_fp64() -> None:
    mixed = torch.randn(100_003, generator=torch.Generator().manual_seed(3)) + 0.3
    for values in (mixed, mixed.abs(), -mixed.abs() - 1, mixed * 0, mixed.bfloat16()):
        expected = means(values.double().numpy())
        np.testing.assert_allclose(two_means(values).numpy(), expected, rtol=1e-5)
    # What is not finite reaches all ranks: they must agree on whether to skip a step.
    for value in (float("nan"), float("inf"), -float("inf")):
        assert not two_means(torch.tensor([1.0, -1.0, value])).isfinite().all()


def test_several_buckets_and_weights_averaged_every_second_step(ctx: RankContext) -> None:
    torch.manual_seed(1)
    # Each fills a bucket of its own once DistributedDataParallel has made buckets, after a step.
    layers = torch.nn.Sequential(*(torch.nn.Linear(600, 600, bias=False) for _ in range(2)))
    model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=1)
    averaging = TwoLevelAveraging(resync_interval=2)
    averaging.register(model)
    with pytest.raises(UnsupportedError, match="DistributedDataParallel, not Linear"):
        averaging.register(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(ctx.rank)
    gradients = [torch.randn(p.shape, generator=generator) for p in layers.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (1, 2):
        optimizer.zero_grad()
        with watched_sums() as sums:
            total = model(torch.zeros(1, 600)).sum() * 0
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                total = total + (parameter * gradient).sum()
            total.backward()
        found = torch.stack([p.grad for p in model.parameters() if p.grad is not None]).numpy()
        sent = torch.stack(gradients).double().numpy()
        for bucket in [slice(0, 2)] if step == 1 else [slice(0, 1), slice(1, 2)]:
            wanted = oracle(gathered(ctx, sent[bucket]), ctx.rank)
            np.testing.assert_allclose(found[bucket], wanted, **CLOSE)
        assert sizes_of(sums) == [8] * step
        optimizer.step()
        averaging.after_step()
        weights = gathered(ctx, next(model.parameters()).detach())
        assert torch.equal(weights[0], weights[3]) == (step == 2)


@pytest.mark.each_release
@pytest.mark.parametrize(
    "of_ddp", [{}, {"overlap_grad_reduce": True}, {"average_in_collective": True}]
)
def test_megatron_ddp(ctx: RankContext, of_ddp: dict[str, bool]) -> None:
    """With EP 2, dense parameters are averaged over all four ranks, and experts over the two that
    have them.  Megatron divides both by four, so that experts get half of their mean, whether it
    adds up scaled gradients or scales a mean.
    """
    initialize(ep=2)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = EpConfig(gradient_averaging="a2sgd", resync_interval=1)
    config = make_config("ncclep", torch.float32, 2, ncclep=options)
    ddp = DistributedDataParallelConfig(**of_ddp)
    model = DistributedDataParallel(config, ddp, build_layer(config))
    generator = torch.Generator().manual_seed(ctx.rank)
    model.zero_grad_buffer()
    groups = model.bucket_groups + model.expert_parallel_bucket_groups
    buckets = [bucket for group in groups for bucket in group.buckets]
    before = []
    for bucket in buckets:
        bucket.grad_data.copy_(torch.randn(bucket.grad_data.shape, generator=generator) + 0.1)
        bucket.grad_data.mul_(1 + ctx.rank)
        before.append(bucket.grad_data.double().numpy().copy())
    with watched_sums() as sums:
        model.finish_grad_sync()
    assert sizes_of(sums) == [8] * len(buckets)
    assert len(model.expert_parallel_bucket_groups) == 1
    every = gathered(ctx, before)
    for number, bucket in enumerate(buckets):
        is_expert = number == len(buckets) - 1
        ranks = [ctx.rank % 2, ctx.rank % 2 + 2] if is_expert else [0, 1, 2, 3]
        wanted = oracle([every[rank][number] for rank in ranks], ranks.index(ctx.rank))
        if is_expert:
            wanted = wanted / 2
        np.testing.assert_allclose(bucket.grad_data.numpy(), wanted, **CLOSE)

    dense, expert = (bucket.params_list[0] for bucket in (buckets[0], buckets[-1]))
    with torch.no_grad():
        for parameter in (dense, expert):
            parameter.fill_(2.0**ctx.rank)
    # As Megatron's optimizer has it for weights in bf16: what its next step starts from.
    expert.main_param = torch.full_like(expert, 2.0**ctx.rank, dtype=torch.float64)
    model.zero_grad_buffer()  # of the next step
    np.testing.assert_array_equal(dense.detach().numpy(), 15 / 4)
    for weights in (expert.detach(), expert.main_param):
        np.testing.assert_array_equal(weights.numpy(), 2.0 ** (ctx.rank % 2) * 5 / 2)


@pytest.mark.alone
def test_what_it_cannot_do_is_refused(ctx: RankContext) -> None:
    initialize(ep=1)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.distributed.torch_fully_sharded_data_parallel import (
        TorchFullyShardedDataParallel,
    )

    options = EpConfig(gradient_averaging="a2sgd")
    config = make_config("ncclep", torch.float32, 1, ncclep=options)
    layer = build_layer(config)
    for sharded in (FullyShardedDataParallel, TorchFullyShardedDataParallel):
        with pytest.raises(UnsupportedError, match=rf"FSDP \({sharded.__name__}\)"):
            sharded(config, DistributedDataParallelConfig(), layer)
    sharded_states = DistributedDataParallelConfig(use_distributed_optimizer=True)
    with pytest.raises(UnsupportedError, match="use_distributed_optimizer=True"):
        DistributedDataParallel(config, sharded_states, layer)
    for name, value, text in (
        ("tensor_model_parallel_size", 2, "=2"), ("expert_tensor_parallel_size", 2, "=2"),
        ("pipeline_model_parallel_size", 2, "=2"), ("cuda_graph_impl", "local", "='local'"),
        ("moe_token_dispatcher_type", "alltoall", "'alltoall', which would ignore"),
    ):  # fmt: skip
        config = make_config("ncclep", torch.float32, 1, ncclep=options)
        setattr(config, name, value)
        with pytest.raises(UnsupportedError, match=f"{name}{text}" if text[0] == "=" else text):
            DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    linear = torch.nn.Linear(2, 2)
    linear.weight.main_grad = torch.zeros(2, 2)
    with pytest.raises(UnsupportedError, match="weight has a main_grad"):
        TwoLevelAveraging().register(torch.nn.parallel.DistributedDataParallel(linear))
    for wrong, text in (
        ({"gradient_averaging": "sum"}, r"must be one of \('mean', 'a2sgd'\)"),
        ({"resync_interval": 5}, "without gradient_averaging 'a2sgd'"),
        ({"gradient_averaging": "a2sgd", "resync_interval": -1}, "resync_interval -1"),
    ):
        with pytest.raises(InputError, match=text):
            EpConfig(**wrong)
