"""A result as a run on GPUs would have it, for the table and the plot."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.catalogue import LIBRARY
from benchmarks.result import TrainingResult, TrainResult
from benchmarks.shapes import TrainingShape
from benchmarks.training_model import STAND_IN
from megatron_ncclep.benchmark import BOTH, PAIR, STEPS, WHOLE
from megatron_ncclep.benchmark import result as results
from megatron_ncclep.benchmark.result import ShapeResult, SubjectResult
from megatron_ncclep.benchmark.shapes import Shape

SHAPE = Shape("deepseek-v3", tokens=4096, hidden=7168, experts=256, top_k=8, ffn_hidden_size=2048)


def subject(name: str, kind: str, times: tuple[float, ...], sms: str) -> SubjectResult:
    """Five samples of each pass, around `times`."""
    found = SubjectResult(name, kind=kind, sms=sms)
    found.memory = {"torch_bytes": 1_200_000_000, "other_bytes": 9_800_000_000}
    names = {len(passes): passes for passes in (STEPS, WHOLE, (BOTH,))}[len(times)]
    found.set_samples(
        {n: [t - 8, t - 4, t, t + 4, t + 8] for n, t in zip(names, times, strict=True)}, False
    )
    return found


KINDS_US = {"attention": 9e3, "GEMM": 40e3, "dispatch": 3e3, "combine": 2e3, "rest": 6e3}


def sample_training() -> dict[str, Any]:
    """Two subjects, the second with graphs, as a run on a GPU would have them."""
    training = TrainingResult.of(TrainingShape("4096x2", "moe-2b"))
    training.settings = training_settings()
    training.tokens, training.max_recv_rows = 8192, "1.5x"
    training.fused_by = STAND_IN
    for name, times, apart in (
        ("train:alltoall_fused", (160e3, 164e3), 2e-3),
        ("train:ncclep:native:grouped:full_iteration", (65e3, 66e3), 1e-3),
    ):
        found = TrainResult(name)
        found.set_samples([[t - 1e3, t, t + 1e3] for t in times], training.tokens)
        found.losses, found.loss_apart, found.layer_apart = [5.9, 5.25], apart, 4e-3
        found.kinds_us, found.host_us = dict(KINDS_US), 120e3
        found.memory = {"torch_bytes": 41_000_000_000, "other_bytes": 300_000_000}
        training.subjects.append(found)
    training.judge(())
    return dataclasses.asdict(training)


def sample_low_latency(tokens: int) -> dict[str, Any]:
    """100 operations of each pass, 1 us apart from 7, 6 and 12 us on; and one that cannot run."""
    shape = dataclasses.replace(SHAPE, name=f"tokens-{tokens}", tokens=tokens)
    result = ShapeResult.of(shape)
    result.max_tokens, result.wire_bytes, result.on_gpu = 128, tokens * 14336, True
    found = SubjectResult("native", kind="engine", window_bytes=30_000_000)
    found.set_samples(
        {
            name: [start + number for number in range(101)]
            for name, start in zip(PAIR, (7.0, 6.0, 12.0 + tokens), strict=True)
        },
        low_latency=True,
    )
    missing = SubjectResult("reference", "unavailable", "it is not there", "engine")
    result.subjects = [found, missing]
    result.judge(())
    return dataclasses.asdict(result)


def training_settings() -> dict[str, Any]:
    return TrainingShape("4096x2", "moe-2b").settings(1).values


def sample_result(required: tuple[str, ...] = ()) -> dict[str, Any]:
    shape = ShapeResult.of(SHAPE)
    shape.row_bytes, shape.on_gpu = 14336, True
    shape.wire_bytes, shape.logical_bytes = 159_000_000, 212_000_000
    rates = {"push": {"gb_per_s": 350.0, "num_sms": 96}, "pull": {"gb_per_s": 318.0, "num_sms": 24}}
    shape.set_ceiling(rates, None)
    shape.expert_rows, shape.products_us = 40_000, {"forward": 4459.0, "backward": 8919.0}
    shape.subjects = [
        subject("native@24", "engine", (20, 500, 530, 510, 540), "24"),
        subject(LIBRARY, "library", (140, 800, 700, 720, 770), "16"),
        subject("alltoall", "megatron", (5001, 4002), "-"),
        subject("layer:ncclep:native:grouped:full_iteration", "layer", (12005,), "-"),
        subject("layer:alltoall", "layer", (9003, 16004), "-"),
        subject("experts:megatron", "experts", (6003, 12004), "-"),
        subject("experts:grouped", "experts", (5003, 10004), "-"),
        SubjectResult("flex_deepep", "unavailable", "ImportError: no DeepEP", "megatron"),
    ]
    shape.judge(required)
    return {
        "format": results.FORMAT,
        "date": "2026-11-21 12:00 UTC",
        "machine": {"device": "cuda", "gpu": "NVIDIA H200", "gpus": 4, "driver": "580.1"},
        "versions": {"torch": "2.11.0", "transformer-engine": None},
        "options": {
            "config": "models", "ranks": 4, "samples": 5, "warmup": 1, "max_recv_rows": "1.5x",
        },
        "shapes": [dataclasses.asdict(shape)],
        "trainings": [sample_training()],
        "low_latency": [sample_low_latency(tokens) for tokens in (1, 8)],
        "failures": shape.failures,
    }  # fmt: skip
