"""What failed on the device, or was dropped where it must not be, reaches no weight.

Every optimizer's step asks `check()` first.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from megatron_setup import BATCH, HIDDEN, SEQUENCE, build_layer, initialize, make_config
from on_ranks import gathered
from rank_pool import RankContext
from torch.optim import optimizer as torch_optimizer

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import PeerError, RowsDroppedError
from megatron_ncclep.integration.checks.optimizer_step import check_before_steps
from megatron_ncclep.integration.patching import is_changed
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource

pytestmark = pytest.mark.each_release


class Planted(Resource):
    """Belongs to the group as the native engine's windows do; holds a failure on a device that no
    call has raised yet.

    Attributes:
        failed: the last backward combine has failed: its gradients are garbage.
    """

    failed = False
    times_asked = 0

    def check(self) -> None:
        self.times_asked += 1
        if self.failed:
            raise PeerError("rank 1 of 4: rank 0 did not come in combine (planted)")


def with_optimizer(config: Any, distributed: bool = False) -> tuple[Any, Any]:
    """A layer in DistributedDataParallel, and Megatron's optimizer of it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    model = DistributedDataParallel(config, ddp, build_layer(config))
    dtype = config.params_dtype
    options = OptimizerConfig(
        optimizer="adam", lr=0.1, bf16=dtype == torch.bfloat16, params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )  # fmt: skip
    return model, get_megatron_optimizer(options, [model], use_gloo_process_groups=False)


# Where the router cannot tell the experts apart it sends all 4 x 12 tokens to the same one.
NUM_TOKENS, NUM_ROWS = 4 * SEQUENCE * BATCH, 40


@pytest.mark.supports(
    "--ncclep-on-overflow=raise", compared="which steps change weights, and the error of each rank"
)
def test_with_on_overflow_raise_no_rank_steps_with_dropped_rows(ctx: RankContext) -> None:
    """Only one rank drops rows, in the second step, and only it counts them; but they are tokens of
    other ranks, and the gradients of all ranks are incomplete.
    """
    initialize(ep=4)
    ncclep = EpConfig(max_recv_rows=NUM_ROWS, on_overflow="raise")
    options = {"moe_router_topk": 1, "moe_router_pre_softmax": True}
    config = make_config("ncclep", torch.float32, 4, ncclep=ncclep, **options)
    model, optimizer = with_optimizer(config)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN)
    texts = []
    for scale in (1, 0, 1, 1):
        model.zero_grad_buffer()
        model(scale * hidden)[0].square().sum().backward()
        model.finish_grad_sync()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        texts.append("")
        try:
            optimizer.step()
        except RowsDroppedError as error:
            texts[-1] = str(error)
        weights = zip(before, model.parameters(), strict=True)
        assert all(torch.equal(a, b.detach()) for a, b in weights) == (scale == 0)
    dropped = gathered(ctx, int(model.module.token_dispatcher.num_dropped))
    assert sorted(dropped) == [0, 0, 0, NUM_TOKENS - NUM_ROWS]
    assert [bool(text) for text in texts] == [False, True, False, False]
    assert gathered(ctx, texts) == [texts] * ctx.num_ranks
    assert f"rows were dropped: with max_recv_rows={NUM_ROWS}, " in texts[1]
    full = dropped.index(max(dropped))
    assert f"rank {full} needed {NUM_TOKENS} rows and had {NUM_ROWS} (each rank" in texts[1]


@pytest.mark.alone
def test_no_optimizer_of_megatrons_steps_after_a_failure(ctx: RankContext) -> None:
    """When a wait on the device has passed its deadline, results are garbage, and the native
    engine's next call raises.  After the last backward combine of a step there is none before the
    optimizer, which took the garbage into the weights.

    Plain, chained, distributed and layer-wise, in fp32 and bf16; and torch's own.  Where no
    layer has our dispatcher, no hook is registered.
    """
    initialize(ep=1)
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    torch_optimizer._global_optimizer_pre_hooks.clear()
    check_before_steps.cache_clear()
    build_layer(make_config("alltoall", torch.float32, 1))
    assert not torch_optimizer._global_optimizer_pre_hooks
    for _ in range(2):
        layer = build_layer(make_config("ncclep", torch.float32, 1))
    assert len(torch_optimizer._global_optimizer_pre_hooks) == 1
    planted = EpGroup.of(layer.token_dispatcher.ep_group).resources.share("planted", Planted)
    for distributed, dtype in itertools.product((False, True), (torch.float32, torch.bfloat16)):
        model, optimizer = with_optimizer(make_config("ncclep", dtype, 1), distributed)
        assert_steps_are_checked(optimizer, model, planted)
        if (distributed, dtype) == (False, torch.float32):
            groups = ProcessGroupCollection.use_mpu_process_groups()
            chained = list(optimizer.chained_optimizers)
            layer_wise = LayerWiseDistributedOptimizer(chained, chained[0].config, groups)
            assert_steps_are_checked(layer_wise, model, planted)
    linear = torch.nn.Linear(2, 2)
    assert_steps_are_checked(torch.optim.SGD(linear.parameters(), lr=0.1), linear, planted)
    EpGroup.of(layer.token_dispatcher.ep_group).resources.release("planted", timeout_s=60)


def assert_steps_are_checked(optimizer: Any, model: torch.nn.Module, planted: Planted) -> None:
    """A step with a failure raises it and changes no weight; one without changes all."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        if hasattr(parameter, "main_grad"):
            parameter.main_grad.fill_(1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    planted.failed = True
    with pytest.raises(PeerError, match="planted"):
        optimizer.step()
    after = list(model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    planted.failed = False
    asked = planted.times_asked
    optimizer.step()
    # A chained optimizer holds one for the experts and one for the rest.
    assert 1 <= planted.times_asked - asked <= 2
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.alone
@pytest.mark.since("0.17")
def test_an_optimizers_step_in_a_cuda_graph_is_checked(ctx: RankContext) -> None:
    """A replay runs no hooks, so the wrapper of a captured step asks."""
    initialize(ep=1)
    from megatron.core import parallel_state
    from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

    assert is_changed(OptimizerCudaGraphWrapper.__call__)
    group = EpGroup.of(parallel_state.get_expert_model_parallel_group())
    planted = group.resources.share("planted", Planted)
    steps: list[int] = []
    step = OptimizerCudaGraphWrapper(lambda: steps.append(1), cuda_graph_warmup_steps=99)
    planted.failed = True
    with pytest.raises(PeerError, match="planted"):
        step()
    assert not steps
    planted.failed = False
    step()
    assert steps
    group.resources.release("planted", timeout_s=60)
