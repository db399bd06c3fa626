"""What the tables of `ncclep bench` need to be understood, in words below them."""

from __future__ import annotations

from typing import Any

from megatron_ncclep.benchmark.result import PEAK_TFLOPS
from megatron_ncclep.benchmark.subjects import WITH_EXPERTS

SHAPE_NOTES = (
    "Times are microseconds: the median over the samples of the slowest rank, all ranks starting "
    "together, and below it the 10th to the 90th percentile; sum adds the medians. bwd_dispatch is "
    'the backward of combine, bwd_combine the backward of dispatch. "of lib." divides the sum by '
    "that of the quickest row of NVIDIA's library (lib: called directly). GB/s is the busiest "
    "rank's rows, each counted once for every other rank that needs it, over the time; in "
    "brackets, percent of the ceiling. Limit is the time of these rows at the ceiling. GB held is "
    "device memory on the rank that takes most: the peak of torch's allocator during one round, "
    "plus what is held outside of it.",
    "On GPUs the passes of engines are timed while the device is kept busy, so that launching them "
    "does not count. Megatron-Core's dispatchers are timed through their hooks, with identity "
    "experts, from an idle device: their host time counts.",
)
EXPERTS_NOTE = (
    "Whole MoELayers, with router and experts, and experts alone, on the rows that they receive, "
    "are timed from an idle device too; compare layers with layers only. Weight gradients are "
    "added to fp32 main_grads as in training: on GPUs by TransformerEngine's layers and by this "
    "package's experts themselves (gradient accumulation fusion), the router's by "
    "DistributedDataParallel's hook. They are not reduced over the ranks. What is one CUDA graph "
    "has only a sum, the time of a replay. Limit is the time of the experts' products on the rank "
    f"with most rows at {PEAK_TFLOPS} TFLOP/s, which the product of two 8192 x 8192 matrices in "
    "bf16 reaches on an H100 or H200. \"of Megatron's\" divides the sum by that of Megatron-Core's "
    "experts. GB held counts the weights and main_grads, which all share, for each of them."
)
STEPS_NOTE = (
    "Training steps. "
    "Every subject is built, trained and thrown away in turn, first in the order of the table and "
    "then in the reverse order, and the samples of both turns count: models that stay would take "
    "18 bytes a parameter each. A step is zeroing the gradients, forward, backward, gradient "
    "reduction and Adam; the batches lie on the device. bf16 weights, gradients in fp32, Adam's "
    "moments and weights in fp32, in the distributed optimizer; Megatron-LM's fusions as it has "
    "them by default. Steps follow each other without a pause. "
    "Shown is the median of the slowest rank in milliseconds, with the 10th "
    'to the 90th percentile below it; "speed" divides the first subject\'s time by it; "turns" are '
    "the medians of the two turns. Loss is that of the last step that is compared with alltoall's; "
    '"apart" is the largest difference of the losses in nats, "layer" the larger one of the first '
    "MoE layer's output and gradient for given hidden states, relative to their size."
)
FUSION_NOTE = (
    "Weight gradients are added to the fp32 main_grad by the layers themselves (gradient "
    "accumulation fusion), as in training: by TransformerEngine's layers, and by Megatron-Core's "
    "output layer with a function of {}, the same for all subjects."
)
PROFILE_NOTE = (
    "With the profiler, apart from timing: the device's time by kind, where kernels that overlap "
    "share the time. With one rank busy is their sum, in percent of the step without profiler, "
    "and idle is the rest; with several, kernels that wait for another rank run meanwhile, "
    "longer than without the profiler, so that neither is known. Host is how long a host works "
    "at a step, waits for the device left out. Plan includes routes; permute is rows put in "
    "order on their own GPU, by whatever kernel; all kernels of the optimizer's phase but "
    "collectives are its own. alltoall's transfers are collectives."
)
LOW_LATENCY_NOTE = (
    "Low-latency mode. Times are microseconds of one operation, the slowest rank's of each: the "
    "median and the 99th percentile over all operations of all samples. On GPUs a sample is a "
    "replay of a CUDA graph of dispatches and combines in turns, without experts, in which a "
    "kernel writes down the device's clock after each operation; its launch, half a microsecond, "
    'counts; of "pair" after each pair only. MB window is memory on each rank that the others '
    "write to. NVIDIA's library is called directly, with rows by rank, as ours: its dispatch is "
    "preceded by the update of its handle, which takes new routes, and both count."
)
NO_GPU_NOTE = (
    "NO GPU TOOK PART: the times of low-latency mode are those of hosts and of gloo, and say "
    "nothing about its kernels."
)


def notes(result: dict[str, Any]) -> list[str]:
    """The notes on the tables of a whole result."""
    trainings, low_latency = result["trainings"], result["low_latency"]
    profiled = any(s["kinds_us"] for training in trainings for s in training["subjects"])
    fused_by = dict.fromkeys(training["fused_by"] for training in trainings)
    with_experts = any(
        subject["kind"] in WITH_EXPERTS
        for shape in result["shapes"]
        if shape["expert_rows"] is not None  # older results did not add gradients
        for subject in shape["subjects"]
    )
    on_cpu = any(not found["on_gpu"] and not found["error"] for found in low_latency)
    return [
        *(SHAPE_NOTES if result["shapes"] else ()),
        *[EXPERTS_NOTE] * with_experts,
        *[STEPS_NOTE] * bool(trainings),
        *[FUSION_NOTE.format(whose) for whose in fused_by if whose is not None],
        *[PROFILE_NOTE] * profiled,
        *[LOW_LATENCY_NOTE] * bool(low_latency),
        *[NO_GPU_NOTE] * on_cpu,
    ]
