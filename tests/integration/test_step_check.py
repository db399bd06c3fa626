"""What failed on the device reaches no weight: every optimizer's step asks `check()` first."""

from __future__ import annotations

import torch
from megatron_setup import BATCH, HIDDEN, SEQUENCE, build_layer, initialize, make_config

from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.errors import PeerError
from megatron_ncclep.testing.launcher import RankContext, RankPool


class LateFailure:
    """Belongs to the group as the native engine's windows do, and knows of a failure on a device.

    Attributes:
        failed: the last backward combine has failed: its gradients are garbage.
    """

    failed = False

    def check(self) -> None:
        if self.failed:
            raise PeerError("rank 1 of 4: rank 0 did not come in combine, on the device")

    def close(self) -> None:
        pass


def train_past_a_failure(ctx: RankContext) -> tuple[list[bool], str | None]:
    """Train a layer for three steps; the last one's backward fails on rank 1, as if late.

    Returns, on each rank: by step, whether any weight changed; and the error.
    """
    initialize(ep=4)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = make_config("ncclep", torch.float32, 4)
    layer = build_layer(config)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.1, params_dtype=torch.float32),
        [model],
        use_gloo_process_groups=False,
    )
    group = EpGroup.of(layer.token_dispatcher.ep_group)
    late = group.share("late failure", LateFailure)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN)
    changed, error = [], None
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        out, _ = model(hidden)
        out.square().sum().backward()
        model.finish_grad_sync()
        late.failed = (ctx.rank, step) == (1, 2)
        try:
            optimizer.step()
        except PeerError as raised:
            error = str(raised)
        weights = zip(before, model.parameters(), strict=True)
        changed.append(not all(torch.equal(a, b.detach()) for a, b in weights))
    late.failed = False
    group.release("late failure", timeout_s=60)
    return changed, error


def test_a_failure_after_the_last_backward_reaches_no_weight(megatron_pool: RankPool) -> None:
    """The native engine learns after the fact that a wait on the device has passed its deadline:
    what it gave back is garbage, and its next call raises.  After the last backward combine of a
    step there is no next call before the optimizer, which took the garbage into the weights.
    Nothing saw it, because the tests of failing ranks called an engine, and no optimizer.
    """
    results = megatron_pool.run(train_past_a_failure)
    for rank, (changed, error) in enumerate(results):
        assert changed == [True, True, rank != 1]
        assert (error is not None) == (rank == 1)
    assert "did not come in combine" in str(results[1][1])
