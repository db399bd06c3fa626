"""Plain averaging, PowerSGD and A2SGD on four CPU ranks: results of docs/gradient-averaging.md.

    torchrun --nproc-per-node 4 scripts/a2sgd.py --model lstm --averaging a2sgd --out losses.json
    python scripts/a2sgd.py --model gpt --figures FOLDER    # all methods; --model cable: step times

`gpt` is the model of `ncclep train`, with its text, its batches and Adam's settings; `lstm` has two
layers and SGD.  Both are in torch's DistributedDataParallel with one bucket, as in the paper.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.functional import cross_entropy

from megatron_ncclep import cpu
from megatron_ncclep.gradient_averaging import TwoLevelAveraging, average_weights
from megatron_ncclep.training import corpus, data
from megatron_ncclep.training.model import gpt_model, seed_everything, transformer_config
from megatron_ncclep.training.settings import Settings

METHODS = ("mean", "powersgd", "a2sgd", "a2sgd-20", "local")  # -20: weights averaged at 20 steps
STEPS, VALIDATED = {"lstm": 600, "gpt": 200, "cable": 32}, 16
SEEDS = {"lstm": (1, 2, 3), "gpt": (1, 2)}
RATES, NODES = ("1gbit", "100mbit"), ("a2sgd-0", "a2sgd-1")


class Lstm(torch.nn.Module):
    """Tokens in, their losses out, like a GPT of Megatron."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(257, hidden)
        self.lstm = torch.nn.LSTM(hidden, hidden, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(hidden, 257)

    def forward(self, tokens: Any, positions: Any, mask: Any, labels: Any) -> torch.Tensor:
        """[batch, length] -> [batch, length], nats."""
        logits = self.head(self.lstm(self.embedding(tokens))[0])
        return cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def build(kind: str, steps: int, seed: int, folder: Path) -> tuple[Any, Any, Any]:
    """A model, its optimizer, and a function that returns a step's or a validation's batches."""
    size = {"micro-batch-size": 4} if kind == "gpt" else {"seq-length": 32, "micro-batch-size": 8}
    changes = {"global-batch-size": 4 * size["micro-batch-size"], "train-iters": steps}
    settings = Settings.load("tiny", size | changes)
    if dist.get_rank() == 0:
        corpus.prepare([], folder)
    dist.barrier()
    parts = data.build_datasets(folder, settings, steps, VALIDATED, seed)
    where = (dist.get_rank(), dist.get_world_size(), torch.device("cpu"))

    def batches(part: int, step: int) -> Iterator[data.Batch]:
        yield from data.batches(parts[part], settings, step, *where)

    seed_everything(seed)  # Megatron's generators too
    torch.manual_seed(seed)
    if kind == "gpt":
        config = transformer_config(settings, "alltoall", 1, None)
        model = gpt_model(settings, config, corpus.load(folder).vocab_size)
        adam = {"lr": settings["lr"], "betas": (0.9, settings["adam-beta2"])}
        return model, torch.optim.AdamW(model.parameters(), **adam, weight_decay=0.1), batches
    model = Lstm(256 if kind == "cable" else 96)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), batches


def train(kind: str, averaging: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train on this rank, with others.  Collective.

    Returns:
        dict: the median time of a step, and [step, loss of the averaged weights] ten times.
    """
    steps, (method, _, interval) = STEPS[kind], averaging.partition("-")
    module, optimizer, batches = build(kind, steps, seed, folder)
    model = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1024)
    two_levels = TwoLevelAveraging(int(interval or 0))
    if method == "a2sgd":
        two_levels.register(model)
    elif method == "powersgd":
        # Gradients of zero, of experts without tokens, cannot be made orthogonal.
        state = powerSGD_hook.PowerSGDState(
            None, 2, start_powerSGD_iter=10, orthogonalization_epsilon=1e-6
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    trained = module if method == "local" else model  # each worker on its own

    def loss(of: Callable[..., torch.Tensor], batch: data.Batch) -> torch.Tensor:
        nats = of(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).mean()
        # Experts without tokens get gradients too: DistributedDataParallel waits for them.
        return nats + 0 * sum(p.sum() for p in module.parameters())

    evaluated, times = [], []
    for step in range(1, steps + 1):
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        for batch in batches(0, step - 1):
            loss(trained, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if method == "a2sgd":
            two_levels.after_step()
        times.append(time.perf_counter() - begin)
        if kind != "cable" and step % (steps // 10) == 0:
            own = [p.detach().clone() for p in module.parameters()]
            average_weights(module.parameters())
            with torch.no_grad():
                found = [loss(module, b) for n in range(VALIDATED) for b in batches(1, n)]
                total = torch.stack(found).mean() / dist.get_world_size()
                dist.all_reduce(total)
                for parameter, value in zip(module.parameters(), own, strict=True):
                    parameter.copy_(value)  # replicas stay apart
            evaluated.append((step, total.item()))
    median = statistics.median(times[min(12, len(times) // 2) :])
    size = sum(p.numel() for p in module.parameters())
    return {"parameters": size, "median_step_s": median, "validation": evaluated}


def on_rank(args: argparse.Namespace) -> None:
    """The entry point of a rank."""
    cpu.enable()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    # Next to the result, so it is the same for all ranks of a host.
    found = train(args.model, args.averaging, args.seed, args.out.with_suffix(".data"))
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def ranks(*options: str, **words: object) -> list[str]:
    """The command that starts all ranks, or with torchrun's `options` some of them."""
    run = [sys.executable, "-m", "torch.distributed.run", *(options or ("--nproc-per-node=4",))]
    return [*run, __file__, *(f"--{name}={value}" for name, value in words.items())]


def converge(kind: str, folder: Path) -> None:
    """Train with every method and seed, and plot the means over the seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for method in METHODS:
        runs = []
        for seed in SEEDS[kind]:
            out = folder / f"{kind}-{method}-{seed}.json"
            if not out.is_file():
                words = {"model": kind, "averaging": method, "seed": seed, "out": out}
                subprocess.run(ranks("--standalone", "--nproc-per-node=4", **words), check=True)
            runs.append(json.loads(out.read_text())["validation"])
        ends = [run[-1][1] for run in runs]
        print(f"{kind} {method}: {statistics.mean(ends):.3f} ± {statistics.stdev(ends):.3f}")
        lines = [[step for step, _ in runs[0]], *([v for _, v in run] for run in runs)]
        axes.plot(lines[0], [statistics.mean(v) for v in zip(*lines[1:], strict=True)], ".-",
                  label=method)  # fmt: skip
    axes.set(xlabel="step", ylabel="validation loss of averaged weights, nats per byte")
    axes.legend()
    figure.savefig(folder / f"{kind}.png", dpi=110, bbox_inches="tight")


def time_steps(folder: Path) -> None:
    """As root: two network namespaces of two ranks, and a cable whose rate `tc` limits."""

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True)

    for node in NODES:
        ip(f"netns add {node}")
    try:
        ip(f"link add net0 netns {NODES[0]} type veth peer name net0 netns {NODES[1]}")
        for number, node in enumerate(NODES):
            ip(f"-n {node} address add 10.0.0.{1 + number}/24 dev net0")
            for device in ("lo", "net0"):
                ip(f"-n {node} link set {device} up")
        for rate in RATES:
            for node in NODES:
                limit = f"tbf rate {rate} burst 256kb latency 400ms"
                ip(f"netns exec {node} tc qdisc replace dev net0 root {limit}")
            for method in METHODS[:3]:
                words = {"averaging": method, "out": folder / f"cable-{rate}-{method}.json"}
                started = []
                for number, node in enumerate(NODES):
                    here = ["--nproc-per-node=2", "--nnodes=2", "--master-addr=10.0.0.1"]
                    command = ranks(*here, f"--node-rank={number}", model="cable", **words)
                    enter = f"ip netns exec {node} env GLOO_SOCKET_IFNAME=net0".split()
                    started.append(subprocess.Popen([*enter, *command]))
                assert [each.wait(timeout=300) for each in started] == [0, 0]
    finally:
        for node in NODES:
            ip(f"netns delete {node}")


def main() -> None:
    """Train on one rank, or start all trainings for `--figures`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=[*STEPS], required=True)
    parser.add_argument("--averaging", choices=METHODS, default="mean")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figures", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    if args.figures is None:
        on_rank(args)
    elif args.model == "cable":
        time_steps(args.figures)
    else:
        converge(args.model, args.figures)


if __name__ == "__main__":
    main()
