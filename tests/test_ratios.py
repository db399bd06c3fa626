"""The ratios in README.md, CHANGELOG.md and docs/performance.md follow from the results.

Tables that scripts/pages.py writes need no test; these are in sentences, and in a table by hand.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

import comparison  # noqa: E402
from results import subjects  # noqa: E402

from benchmarks.catalogue import baseline  # noqa: E402

GPUS = (2, 4)
HYBRIDEP, ALLTOALL = ("flex_hybridep", "flex_hybridep_fused"), ("alltoall", "alltoall_fused")
ADDED = ("", ":grouped", ":grouped:full_iteration")


def text(name: str) -> str:
    return " ".join((ROOT / name).read_text().split())


def ratios(num_gpus: int, run: str, names: Sequence[str], ours: str) -> list[float]:
    """How many times as long as ours the fastest of these takes, for each shape of a run."""
    of = comparison.of_shapes(num_gpus, run)
    found = [comparison.fastest(num_gpus, run, names, shape) for shape in comparison.SHAPES]
    return [
        each[1] / of[shape][ours]["sum_us"]
        for shape, each in zip(comparison.SHAPES, found, strict=True)
        if each
    ]


def passes(num_gpus: int, *libraries: str) -> list[float]:
    """The same for libraries of the tables of sums; of several, the fastest for each shape."""
    each = [
        ratios(num_gpus, run, names, comparison.OURS)
        for run, names, title in comparison.PASSES
        if title in libraries
    ]
    return [min(of_shape) for of_shape in zip(*each, strict=True)]


NVIDIA = ("NVIDIA's, of nccl-extensions", "NVIDIA's, of TransformerEngine")
DEEPEP_V2 = {n: passes(n, "DeepEP V2") for n in GPUS}
HYBRIDEP_PASSES = {n: passes(n, "HybridEP") for n in GPUS}
NVIDIAS = {n: passes(n, *NVIDIA) for n in GPUS}


def hooks(num_gpus: int, names: Sequence[str]) -> list[float]:
    return ratios(num_gpus, "hybridep", names, "ncclep:native")


def speeds(num_gpus: int, kind: str, run: str, added: str) -> Iterator[float]:
    """How many times as fast as the fastest of Megatron-Core's: layers or training steps."""
    is_layer = kind == "layer"
    result = comparison.result(num_gpus, run)
    for of in subjects(result, "shapes" if is_layer else "trainings").values():
        us = {name: s["sum_us"] if is_layer else s["step"]["median_us"] for name, s in of.items()}
        base = baseline(us)
        assert base is not None
        yield us[base] / us[f"{kind}:ncclep:native{added}"]


LAYERS = [{n: list(speeds(n, "layer", "layers", added)) for n in GPUS} for added in ADDED]
STEPS = [{n: list(speeds(n, "train", "training", added)) for n in GPUS} for added in ADDED]


def to(values: Sequence[float], digits: int) -> str:
    """A range in words; one number where it has only one."""
    ends = [f"{end:.{digits}f}" for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def both(of: dict[int, list[float]]) -> list[float]:
    return [value for n in GPUS for value in of[n]]


def test_readme() -> None:
    readme = text("README.md")
    of_hybridep, of_alltoall = (
        [r for n in GPUS for r in hooks(n, of)] for of in (HYBRIDEP, ALLTOALL)
    )
    assert (
        f"is {to(of_hybridep, 1)} times as fast as HybridEP's and {to(of_alltoall, 1)} times as"
        in readme
    )
    others = both(DEEPEP_V2) + both(NVIDIAS)
    assert (
        f"combine are {to(others, 1)} times as fast as DeepEP V2's and NVIDIA's NCCL EP" in readme
    )
    tie, *rest = sorted(both(HYBRIDEP_PASSES))
    assert tie == min(HYBRIDEP_PASSES[4])
    assert f"{tie:.2f}" == "1.00"
    assert f"and {to(rest, 1)} times as fast as HybridEP's, except one model on 4 GPUs" in readme
    percent = [f"{100 * max(both(of[0])) - 100:.0f}" for of in (LAYERS, STEPS)]
    assert f"as with HybridEP's, within {percent[0]} and {percent[1]} %" in readme


def test_changelog() -> None:
    changelog = text("CHANGELOG.md")
    alone, grouped, graph = (" and ".join(to(of[n], 2) for n in GPUS) for of in STEPS)
    assert (
        f"{alone} times as fast with Megatron's experts, {grouped} with grouped ones" in changelog
    )
    assert f"{graph} with forward and backward in one CUDA graph" in changelog
    assert (
        f"DeepEP V2 takes {to(both(DEEPEP_V2), 2)} times as long, HybridEP "
        f"{to(both(HYBRIDEP_PASSES), 2)}, NVIDIA's libraries {to(both(NVIDIAS), 2)} ("
    ) in changelog


def test_the_first_table_of_performance() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    table = [line.split(" | ", 1)[1] for line in page.splitlines()[:40] if line.startswith("| ")]
    shown = [row.removesuffix(" |") for row in table if row[0].isdigit() and "H100" not in row]
    rows = [*STEPS, *LAYERS]
    rows += [{n: hooks(n, of) for n in GPUS} for of in (ALLTOALL, HYBRIDEP)]
    rows += [DEEPEP_V2, HYBRIDEP_PASSES, NVIDIAS]
    assert shown == [" | ".join(to(of[n], 2) for n in GPUS) for of in rows]
