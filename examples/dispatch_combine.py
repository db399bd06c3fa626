"""The three calls: plan, dispatch and combine, on a CPU.

    torchrun --nproc-per-node 2 examples/dispatch_combine.py

README.md of this folder explains what it prints.
"""

import torch
import torch.distributed as dist

from megatron_ncclep import combine, create_engine, dispatch

dist.init_process_group("gloo")  # on GPUs: "nccl", and tensors on them
engine = create_engine(dist.group.WORLD, num_experts=4)  # two on each rank
x = torch.full((3, 8), 1.0 + dist.get_rank(), requires_grad=True)  # 3 tokens
plan = engine.plan(torch.tensor([[0, 2], [1, 3], [3, 0]]))  # their experts
weights = torch.tensor([[0.25, 0.75]] * 3)  # and probabilities
rows, row_weights = dispatch(engine, plan, x, weights)  # ordered by expert
out = combine(engine, plan, 10 * rows * row_weights[:, None])  # experts: times 10
out.sum().backward()
print(plan.tokens_per_expert.tolist(), out[:, 0].tolist(), x.grad[:, 0].tolist())
dist.destroy_process_group()
