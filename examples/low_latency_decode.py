"""Generate tokens with low-latency mode: dispatch and combine without a plan.

    torchrun --nproc-per-node 2 examples/low_latency_decode.py

Each rank decodes its own sequences, one token of each in every step, and holds half of the
experts.  The "model" is one mixture-of-experts layer between an embedding and its transpose.
Low-latency mode is for a few tokens on each rank: `native` has it on GPUs, and `reference` on a
CPU.  Other engines refuse it with an error.
"""

import os

import torch
import torch.distributed as dist

import megatron_ncclep
from megatron_ncclep import create_engine
from megatron_ncclep.engines.low_latency import LowLatency, create_low_latency

VOCABULARY, HIDDEN, EXPERTS, TOP_K, MAX_TOKENS, STEPS = 100, 64, 8, 2, 4, 10


def moe(
    low_latency: LowLatency, x: torch.Tensor, router: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """The layer for x [num_tokens, hidden]; `experts` [num_local_experts, hidden, hidden]."""
    weights, topk_idx = (x @ router).float().softmax(dim=-1).topk(TOP_K)
    # Each token's row arrives once, however many of this rank's experts it needs.
    rows = low_latency.dispatch(x, topk_idx, weights)
    y = torch.zeros_like(rows.rows)  # [num_ranks, max_tokens, hidden]
    for expert, matrix in enumerate(experts):
        # Zero for rows of other experts.  Rows beyond rows.counts are undefined, and combine does
        # not read their results.
        weight = torch.where(rows.topk_idx == expert, rows.weights, 0.0).sum(dim=-1, keepdim=True)
        y += (weight * (rows.rows @ matrix).relu()).to(y.dtype)
    return low_latency.combine(y)


def main() -> None:
    """Decode on this rank."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device("cuda" if on_gpu else "cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    engine = create_engine(dist.group.WORLD, EXPERTS)
    low_latency = create_low_latency(
        engine, max_tokens=MAX_TOKENS, hidden=HIDDEN, top_k=TOP_K, dtype=torch.float32
    )
    torch.manual_seed(0)  # the same weights on all ranks; each keeps those of its experts
    embedding = torch.randn(VOCABULARY, HIDDEN)
    router = torch.randn(HIDDEN, EXPERTS) / HIDDEN**0.5
    experts = torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5
    experts = experts.chunk(num_ranks)[rank]

    tokens = torch.arange(2 + rank)  # ranks may have different numbers of sequences, or none
    texts = [tokens]
    for _ in range(STEPS):
        x = embedding[tokens]
        logits = moe(low_latency, x, router, experts) @ embedding.T
        tokens = logits.argmax(dim=-1)
        megatron_ncclep.check()  # before a token is served: raises if a rank has failed
        texts.append(tokens)
    for text in torch.stack(texts, dim=1).tolist():
        print(f"rank {rank}: {text}", flush=True)

    low_latency.close()
    engine.close()
    dist.destroy_process_group()


main()
