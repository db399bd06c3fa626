"""An LSTM language model with plain averaging, PowerSGD and A2SGD on CPU ranks.

    torchrun --nproc-per-node 4 scripts/a2sgd_lstm.py --averaging a2sgd --out losses.json

docs/gradient-averaging.md shows what it measured; scripts/a2sgd_results.py ran it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.functional import cross_entropy

from megatron_ncclep.gradient_averaging import TwoLevelAveraging, average_weights
from megatron_ncclep.training.corpus import standard_library

LENGTH, BATCH, CAP_MB = 32, 8, 1024  # one bucket, as in the paper


class Lstm(torch.nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, hidden)
        self.lstm = torch.nn.LSTM(hidden, hidden, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(hidden, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, length] -> [batch, length, 256]."""
        return self.head(self.lstm(self.embedding(tokens))[0])


def loss_of(model: torch.nn.Module, text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Cross-entropy in nats a byte of one random batch."""
    starts = torch.randint(len(text) - LENGTH - 1, (BATCH,), generator=generator)
    batch = torch.stack([text[s : s + LENGTH + 1] for s in starts]).long()
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    """Train on this rank; rank 0 writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--averaging", choices=("mean", "powersgd", "a2sgd", "local"), required=True
    )
    parser.add_argument("--resync-interval", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--every", type=int, default=20, help="steps between validations; 0: none")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    files = standard_library()
    text = torch.frombuffer(
        bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8
    )
    cut = len(text) * 95 // 100
    module = Lstm(args.hidden)
    model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=CAP_MB)
    averaging = TwoLevelAveraging(args.resync_interval)
    if args.averaging == "a2sgd":
        averaging.register(model)
    elif args.averaging == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=10)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    synced = model if args.averaging != "local" else module  # each worker on its own
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(100 + rank)
    evaluated, times = [], []
    for step in range(1, args.steps + 1):
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss_of(synced, text[:cut], generator).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if args.averaging == "a2sgd":
            averaging.after_step()
        times.append(time.perf_counter() - begin)
        if args.every and step % args.every == 0:
            # The paper evaluates averaged weights: of a copy here, so that replicas stay apart.
            averaged = Lstm(args.hidden)
            averaged.load_state_dict(module.state_dict())
            average_weights(averaged.parameters())
            same = torch.Generator().manual_seed(7)
            with torch.no_grad():
                found = [loss_of(averaged, text[cut:], same).item() for _ in range(20)]
            evaluated.append((step, statistics.mean(found)))
    if rank == 0:
        result = {
            **{name: value for name, value in vars(args).items() if name != "out"},
            "ranks": dist.get_world_size(),
            "parameters": sum(p.numel() for p in module.parameters()),
            "median_step_s": statistics.median(times[min(12, len(times) // 2) :]),
            "validation": evaluated,
        }
        args.out.write_text(json.dumps(result) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
