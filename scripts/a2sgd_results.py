"""Measure and plot what docs/gradient-averaging.md shows; as root, without arguments.

Losses come from four ranks on this machine; step times from two network namespaces with two ranks
each, joined by a cable whose rate `tc` limits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl

OUT = Path(__file__).parents[1] / "docs" / "results" / "2026-11-25-a2sgd"
RUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
SCRIPT = str(Path(__file__).with_name("a2sgd_lstm.py"))
METHODS = ("mean", "powersgd", "a2sgd", "a2sgd-20", "local")
RATES = ("1gbit", "100mbit")
NODES = ("a2sgd-0", "a2sgd-1")


def converge(name: str) -> None:
    """Train with one method; `a2sgd-20` averages weights every 20 steps."""
    method, _, interval = name.partition("-")
    command = [*RUN, "4", "--standalone", SCRIPT, "--averaging", method, "--steps", "600"]
    command += ["--resync-interval", interval or "0", "--every", "50"]
    subprocess.run([*command, "--out", str(OUT / f"loss-{name}.json")], check=True)


def ip(words: str) -> None:
    """Run `ip` with these words."""
    subprocess.run(["ip", *words.split()], check=True)


def network() -> None:
    """Time steps of a larger LSTM over the cable at each of the rates."""
    made = []
    try:
        for node in NODES:
            ip(f"netns add {node}")
            made.append(node)
        ip(f"link add net0 netns {NODES[0]} type veth peer name net0 netns {NODES[1]}")
        for number, node in enumerate(NODES):
            ip(f"-n {node} address add 10.0.0.{1 + number}/24 dev net0")
            for device in ("lo", "net0"):
                ip(f"-n {node} link set {device} up")
        for rate in RATES:
            for node in NODES:
                limit = f"tbf rate {rate} burst 256kb latency 400ms"
                ip(f"netns exec {node} tc qdisc replace dev net0 root {limit}")
            for method in ("mean", "powersgd", "a2sgd"):
                out = OUT / f"steps-{rate}-{method}.json"
                command = [*RUN, "2", "--nnodes", "2", "--master-addr", "10.0.0.1"]
                command += ["--master-port", "29511"]
                tail = [SCRIPT, "--averaging", method, "--hidden", "256", "--steps", "32"]
                tail += ["--every", "0", "--out", str(out)]
                ranks = []
                for number, node in enumerate(NODES):
                    enter = ["ip", "netns", "exec", node, "env", "GLOO_SOCKET_IFNAME=net0"]
                    words = [*enter, *command, "--node-rank", str(number), *tail]
                    ranks.append(subprocess.Popen(words))
                assert [each.wait(timeout=120) for each in ranks] == [0, 0]
    finally:
        for node in made:
            ip(f"netns delete {node}")


def plot() -> None:
    """Draw the validation losses."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for name in METHODS:
        found = json.loads((OUT / f"loss-{name}.json").read_text())["validation"]
        axes.plot(*zip(*found, strict=True), label=name, marker=".")
    axes.set(xlabel="step", ylabel="validation loss of averaged weights, nats per byte")
    axes.legend()
    figure.savefig(OUT / "loss.png", dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    network()
    for each in METHODS:
        converge(each)
    plot()
