"""What the products of grouped experts cost a GPU, beside one product for each expert.

    python3 tests/experts/time_products.py

For each shape of configs/benchmark/layers.yaml, with assignments spread evenly at random: device
time in us and TFLOP/s of torch's grouped GEMM, and of a cuBLAS product for each expert, launched by
a CUDA graph so that no host counts.  `swapped` is the weight gradient made transposed, from rows^T
and gradients.  `--smoke` runs it on a CPU, where the times mean nothing.  No test: it compares
nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from megatron_ncclep.benchmark.shapes import Shape, load
from megatron_ncclep.config import GROUPED_ALIGNMENT
from megatron_ncclep.integration.experts import grouped_gemm

SAMPLES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    device = torch.device("cpu" if args.smoke else "cuda")
    print(f"{'':34}{'product':>22}{'grouped us':>12}{'TFLOP/s':>9}{'one by one':>12}{'TFLOP/s':>9}")
    for shape in load("smoke" if args.smoke else "layers").shapes:
        rows = blocks(shape, device)
        for name, flops, grouped, single in products(shape, rows, device):
            times = [microseconds(call, device) for call in (grouped, graph_of(single, device))]
            shown = "".join(f"{us:12.0f}{flops / us * 1e-6:9.0f}" for us in times)
            print(f"{shape.name:34}{name:>22}{shown}", flush=True)
        print(f"{shape.name:34}{'rows of an expert':>22}{sum(rows) / len(rows):12.0f}")


def blocks(shape: Shape, device: torch.device) -> list[int]:
    """Rows of each expert's block, padded."""
    topk_idx = shape.case(1, "cpu").topk_idx(0)
    counts = topk_idx.reshape(-1).bincount(minlength=shape.experts)
    padded = -(-counts // GROUPED_ALIGNMENT) * GROUPED_ALIGNMENT
    return [int(count) for count in padded]


Product = tuple[str, float, Callable[[], Any], Callable[[], Any]]


def products(shape: Shape, rows: list[int], device: torch.device) -> Iterator[Product]:
    """Name, operations, and both ways to compute it."""
    assert shape.ffn_hidden_size is not None
    dtype = torch.bfloat16
    offsets = torch.tensor(rows, device=device).cumsum(0, dtype=torch.int32)
    layers = {
        "fc1": (shape.hidden, 2 * shape.ffn_hidden_size),
        "fc2": (shape.ffn_hidden_size, shape.hidden),
    }
    for layer, (k, n) in layers.items():
        weights = torch.randn(len(rows), n, k, device=device, dtype=dtype)
        x = torch.randn(sum(rows), k, device=device, dtype=dtype)
        grad = torch.randn(sum(rows), n, device=device, dtype=dtype)
        parts = list(zip(x.split(rows), grad.split(rows), weights, strict=True))
        flops = 2.0 * sum(rows) * k * n
        multiply, backward = grouped_gemm.multiply, grouped_gemm.input_gradient
        makers = {
            "forward": (partial(multiply, x, weights, offsets), lambda p: p[0] @ p[2].t()),
            "input gradient": (partial(backward, grad, weights, offsets), lambda p: p[1] @ p[2]),
            "weights": (
                partial(grouped_gemm.weight_gradient, grad, x, offsets),
                lambda p: p[1].t() @ p[0],
            ),
            "swapped": (
                partial(grouped_gemm.weight_gradient, x, grad, offsets),
                lambda p: p[0].t() @ p[1],
            ),
        }
        for name, (grouped, one) in makers.items():
            yield f"{layer} {name}", flops, grouped, partial(_each, one, parts)


def _each(call: Callable[[Any], Any], parts: list[Any]) -> list[Any]:
    return [call(part) for part in parts]


def graph_of(call: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """The call as a CUDA graph."""
    if device.type != "cuda":
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay(kept: Any = kept) -> None:
        graph.replay()

    return replay


def microseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median of the device's time, without the launch: the device is busy meanwhile."""
    times = []
    for _ in range(SAMPLES + 2):
        if device.type != "cuda":
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e6)
            continue
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        before.record()
        call()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3)
    return sorted(times[2:])[SAMPLES // 2]


if __name__ == "__main__":
    main()
