"""A result as a run on GPUs would have it, for the table and the plot."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_ncclep.benchmark.catalogue import LIBRARY
from megatron_ncclep.benchmark.ceiling import Ceiling
from megatron_ncclep.benchmark.result import FORMAT, ShapeResult, SubjectResult
from megatron_ncclep.benchmark.shapes import Shape
from megatron_ncclep.benchmark.subjects import STEPS, WHOLE

SHAPE = Shape("deepseek-v3", tokens=4096, hidden=7168, experts=256, top_k=8, ffn_hidden_size=2048)


def subject(name: str, kind: str, times: tuple[float, ...], sms: str) -> SubjectResult:
    """Five samples of each pass, around `times`."""
    found = SubjectResult(name, kind, "bits", sms=sms)
    found.memory = {"torch_bytes": 1_200_000_000, "other_bytes": 9_800_000_000}
    names = STEPS if len(times) == len(STEPS) else WHOLE
    found.set_samples(
        {n: [t - 8, t - 4, t, t + 4, t + 8] for n, t in zip(names, times, strict=True)}
    )
    return found


def sample_result(required: tuple[str, ...] = ()) -> dict[str, Any]:
    shape = ShapeResult.of(SHAPE, [32768] * 4, wire_bytes=159_000_000)
    shape.set_ceiling({"push": Ceiling(350.0, 96), "pull": Ceiling(318.0, 24)}, None)
    shape.subjects = [
        subject("native@24", "engine", (20, 500, 530, 510, 540), "24"),
        subject(LIBRARY, "library", (140, 800, 700, 720, 770), "16"),
        subject("alltoall", "megatron", (5001, 4002), "-"),
        subject("layer:alltoall", "layer", (9003, 16004), "-"),
        SubjectResult("flex_deepep", "megatron", "", "unavailable", "ImportError: no DeepEP"),
    ]
    shape.judge(required)
    return {
        "format": FORMAT,
        "date": "2026-11-21 12:00 UTC",
        "machine": {"device": "cuda", "gpu": "NVIDIA H200", "gpus": 4, "driver": "580.1"},
        "versions": {"torch": "2.11.0", "transformer-engine": None},
        "options": {"config": "models", "ranks": 4, "samples": 5, "warmup": 1},
        "shapes": [dataclasses.asdict(shape)],
        "failures": shape.failures,
    }
