"""What `--ncclep-on-overflow rerun` costs in time and memory, on ranks whose router is skewed.

    python scripts/overflow_costs.py [--ranks 8] [--tokens 2048] [--steps 140] [--out FILE]

The model is moe-2b.  Three trainings run, there and back: exact mode without CUDA graphs, graphs of
whole iterations with room for any routing (`worst`), and the same with `auto` and `rerun`.  Experts
of low numbers get more tokens than others, by an amount that changes from step to step.  Ranks may
share a GPU: ratios of times then compare the work of all ranks, and hide none of it behind hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gpu
import torch
import torch.distributed as dist

from megatron_ncclep.benchmark import Setting, job
from megatron_ncclep.benchmark.layer_model import initialize
from megatron_ncclep.benchmark.training_model import SubjectModel, Text
from megatron_ncclep.ranks.pool import RankContext, RankPool
from megatron_ncclep.training.settings import Settings

SUBJECTS = {
    "exact": ("train:ncclep:native:grouped", {}),
    "worst": ("train:ncclep:native:grouped:full_iteration", {"max_recv_rows": "worst"}),
    "auto, rerun": (
        "train:ncclep:native:grouped:full_iteration",
        {"max_recv_rows": "auto", "on_overflow": "rerun"},
    ),
}
# Steps of each training that are not timed: graphs are captured, and the limit is found.
FIRST_STEPS = 40
VOCABULARY = 4096
TIMEOUT_S = 120.0
GIB = 2**30


@dataclass(frozen=True)
class Subject(job.Variant):
    """A variant with further options of ours."""

    more: dict[str, Any] = field(default_factory=dict)

    def options(self, max_recv_rows: Any) -> dict[str, Any]:
        """As of a variant."""
        return super().options(max_recv_rows) | self.more


def skew(model: SubjectModel, level: torch.Tensor) -> None:
    """Add `level` (on the device), times a number that falls from 1 to -1, to experts' logits."""

    def skewed(gating: Any, *args: Any) -> torch.Tensor:
        logits: torch.Tensor = gating(*args)
        slope = torch.linspace(1, -1, logits.shape[-1], device=logits.device)
        return (logits.float() + level * slope).to(logits.dtype)

    for module in model.gpt.modules():
        if hasattr(module, "gating"):
            module.gating = partial(skewed, module.gating)


def measure(ctx: RankContext, name: str, tokens: int, steps: int, bias: float) -> dict[str, Any]:
    """Train with a subject; what that took on the slowest rank."""
    setting = Setting(ctx.rank, ctx.num_ranks, ctx.device, TIMEOUT_S, lambda: ctx.group)
    initialize(setting)
    # A small learning rate: what the router learns changes the load less than what is given.
    changes = {"seq-length": tokens, "micro-batch-size": 1, "lr": 1e-5, "min-lr": 1e-5}
    changes["global-batch-size"] = ctx.num_ranks
    settings = Settings.load("moe-2b", changes)
    generator = torch.Generator().manual_seed(ctx.rank)
    words = torch.randint(VOCABULARY, (8, 1, tokens + 1), generator=generator).cuda()
    positions = torch.arange(tokens, device="cuda")[None]
    batches = [
        [{
            "tokens": w[:, :-1].contiguous(), "labels": w[:, 1:].contiguous(),
            "position_ids": positions, "loss_mask": torch.ones(1, tokens, device="cuda"),
        }]
        for w in words
    ]  # fmt: skip
    variant, more = SUBJECTS[name]
    choice = Subject(**vars(job.known_variant(variant)), more=more)
    model = SubjectModel(choice, settings, setting, Text("random", VOCABULARY, batches), None)
    level = torch.zeros((), device="cuda")
    skew(model, level)
    seconds = [one_step(ctx, model, level, step, bias) for step in range(steps)]
    reruns = getattr(model.model, "_ncclep_reruns", None)
    return {
        "subject": name,
        "seconds": seconds,
        "reserved": largest(ctx, torch.cuda.max_memory_reserved()),
        "allocated": largest(ctx, torch.cuda.max_memory_allocated()),
        "held at the end": largest(ctx, torch.cuda.memory_reserved()),
        "reruns": reruns.num_reruns if reruns else 0,
        "limit": reruns.limit.factor / 1000 if reruns and reruns.limit else None,
    }


def one_step(
    ctx: RankContext, model: SubjectModel, level: torch.Tensor, step: int, bias: float
) -> float:
    """The seconds of a step on the slowest rank."""
    # The same on all ranks, and in all trainings.
    level.fill_(
        bias * (1 + 0.2 * float(torch.randn((), generator=torch.Generator().manual_seed(step))))
    )
    torch.cuda.synchronize()
    dist.barrier(ctx.group)
    start = time.perf_counter()
    model.step()
    torch.cuda.synchronize()
    return largest(ctx, time.perf_counter() - start)


def largest(ctx: RankContext, value: float) -> float:
    """The largest of all ranks.  Collective."""
    word = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(word, dist.ReduceOp.MAX, group=ctx.group)
    return float(word)


def main() -> None:
    """Measure, print a table, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank and step")
    parser.add_argument("--steps", type=int, default=140, help="of each training")
    parser.add_argument("--bias", type=float, default=0.2, help="of the first expert's logits")
    parser.add_argument("--timeout-s", type=float, default=300, help="of each training")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    import overflow_costs  # by the name that other processes know

    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    shared = args.ranks > torch.cuda.device_count()
    gpus = {"CUDA_VISIBLE_DEVICES": "0"} if shared else {}
    found = []
    with gpu.mps(shared, {**os.environ, **gpus}) as environment:
        folders, arguments = [str(Path(__file__).parent)], (args.tokens, args.steps, args.bias)
        for name in [*SUBJECTS, *reversed(SUBJECTS)]:
            pool = RankPool(args.ranks, "nccl", folders, environment)  # no memory is left in it
            with closing(pool):
                each = pool.run(overflow_costs.measure, name, *arguments, timeout=args.timeout_s)[0]
            show(each, args.ranks * args.tokens)
            found.append(each)
    if args.out:
        args.out.write_text(json.dumps(found))


def show(each: dict[str, Any], tokens: int) -> None:
    """Print what a training took, in steps of `tokens` tokens."""
    seconds = each["seconds"][FIRST_STEPS:]
    print(
        f"{each['subject']:12} median {statistics.median(seconds) * 1e3:6.1f} ms, "
        f"{tokens * len(seconds) / sum(seconds):7.0f} tokens/s, "
        f"GiB: {each['reserved'] / GIB:5.2f} reserved at most, "
        f"{each['allocated'] / GIB:5.2f} allocated, {each['held at the end'] / GIB:5.2f} at the "
        f"end; {each['reruns']} reruns, limit {each['limit']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
