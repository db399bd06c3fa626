"""Train a mixture-of-experts layer in plain torch, without Megatron.

    torchrun --nproc-per-node 2 examples/train_moe.py

Each rank has its own tokens, two of the experts, and a copy of the router.  The task: there are
four kinds of tokens, and each kind must be multiplied by a different matrix.  One expert alone
cannot learn that, so the loss falls only if the router learns to tell the kinds apart.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import megatron_ncclep
from megatron_ncclep import EpConfig, combine, create_engine, dispatch, metrics

HIDDEN, EXPERTS, TOP_K, TOKENS, KINDS, STEPS = 16, 4, 2, 256, 4, 100


class MoELayer(nn.Module):
    """A router, this rank's experts, and the engine that moves rows between the ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        # Every 50 steps the ranks exchange their counts (docs/metrics.md).
        self.engine = create_engine(group, EXPERTS, EpConfig(metrics_interval=50))
        self.counts = metrics.count_layer(self.engine, self)
        torch.manual_seed(0)  # the same router on all ranks
        self.router = nn.Linear(HIDDEN, EXPERTS)
        torch.manual_seed(1 + group.rank())  # different experts on each
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, HIDDEN))
            for _ in range(EXPERTS // group.size())
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send each token to its best experts, and add up their outputs."""
        weights, topk_idx = self.router(x).softmax(dim=-1).topk(TOP_K)
        plan = self.engine.plan(topk_idx)
        self.counts.count(topk_idx, plan)
        rows, row_weights = dispatch(self.engine, plan, x, weights)
        # Rows are in the order of experts, so each expert's are one block.
        blocks = rows.split(plan.tokens_per_expert_on_host().tolist())
        outputs = [expert(block) for expert, block in zip(self.experts, blocks, strict=True)]
        return combine(self.engine, plan, torch.cat(outputs) * row_weights[:, None])

    def average_gradients(self) -> None:
        """Make the gradients those of the loss averaged over all ranks.

        For the router, a rank has the gradients of its own tokens.  For its experts, it already has
        the sum over the tokens of all ranks: the backward of combine has brought them here.
        """
        for parameter in self.router.parameters():
            dist.all_reduce(parameter.grad)
        for parameter in self.parameters():
            parameter.grad /= dist.get_world_size()


def main() -> None:
    """Train on this rank."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device("cuda" if on_gpu else "cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    layer = MoELayer(dist.group.WORLD)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    torch.manual_seed(0)  # the same task on all ranks
    centers = 3 * torch.randn(KINDS, HIDDEN)
    matrices = torch.randn(KINDS, HIDDEN, HIDDEN) / HIDDEN**0.5
    torch.manual_seed(100 + dist.get_rank())  # different tokens on each
    for step in range(1, STEPS + 1):
        kinds = torch.randint(KINDS, (TOKENS,))
        noise = torch.randn(TOKENS, HIDDEN)
        x = centers[kinds] + noise
        target = torch.einsum("th,tho->to", noise, matrices[kinds])
        loss = (layer(x) - target).square().mean()
        loss.backward()
        layer.average_gradients()
        # Before the optimizer: raises if a rank has failed meanwhile and the gradients are wrong.
        megatron_ncclep.check()
        optimizer.step()
        optimizer.zero_grad()
        intervals = metrics.after_step()  # every rank calls it
        if step == 1 or step % 20 == 0:
            dist.all_reduce(mean := loss.detach() / dist.get_world_size())
            if dist.get_rank() == 0:
                print(f"step {step:3}  loss {mean:.3f}", flush=True)
        for interval in intervals if dist.get_rank() == 0 else ():
            print(f"rows from rank to rank {interval.rows}, imbalance {interval.imbalance:.2f}")
    layer.engine.close()
    dist.destroy_process_group()


main()
