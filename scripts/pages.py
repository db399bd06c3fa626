"""Write what README.md and docs/ take from committed results and from the code: `make pages`.

The tables between `<!-- written by make pages: NAME -->` and the next `<!-- end -->`, and the
figures in docs/figures.  `--check` writes nothing and fails if something is out of date.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import figures  # noqa: E402
from figures import Bars  # noqa: E402

from megatron_ncclep import envs  # noqa: E402
from megatron_ncclep.config import EpConfig  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
TRAINING = RESULTS / "2026-11-24-1xH100-training" / "bench.json"
ENGINES = RESULTS / "2026-11-22-2xH200-native" / "bench.json"

# Subjects of the two runs, and what pages call them.
BASELINE = "alltoall_fused"
STEPS = {
    f"train:{BASELINE}": ("Megatron's `alltoall`, all fusions", "alltoall, all fusions"),
    "train:ncclep:native": ("`ncclep`, Megatron's experts", "ncclep, dispatcher only"),
    "train:ncclep:native:grouped": ("`ncclep`, grouped experts", "ncclep, grouped experts"),
    "train:ncclep:native:grouped:full_iteration": (
        "… with forward and backward in one CUDA graph",
        "+ CUDA graph",
    ),
}
OURS = "ncclep:native"
HOOKS = {BASELINE: "alltoall, fused", OURS: "ncclep"}
TIMELINE_SHAPE = "deepseek-v3"


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is words, the others are numbers if heads end in ':'."""
    rule = ["---:" if name.endswith(":") else "---" for name in head]
    lines = [[name.removesuffix(":") for name in head], rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def subjects(result: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Of each shape, by its name: the subjects by theirs.  `kind`: shapes or trainings."""
    return {one["shape"]["name"]: {s["name"]: s for s in one["subjects"]} for one in result[kind]}


def read(path: Path) -> dict[str, Any]:
    """A result of `ncclep bench`, in which every check has passed."""
    result = json.loads(path.read_text())
    assert not result["failures"], f"{path} has failures: it is no result to publish"
    return dict(result)


def gains_tables(training: dict[str, Any], engines: dict[str, Any]) -> str:
    """The README's two tables, and what they were measured on."""
    runs = subjects(training, "trainings")
    head = ["training step, tokens/s", *(f"{_words(shape)}:" for shape in runs)]
    steps = [
        [words, *(_tokens_per_s(run, name) for run in runs.values())]
        for name, (words, _) in STEPS.items()
    ]

    shapes = subjects(engines, "shapes")
    us = {name: [shape[name]["sum_us"] for shape in shapes.values()] for name in HOOKS}
    times = zip(*us.values(), strict=True)
    hooks = [
        ["Megatron's `alltoall`, fused permute", *(f"{t:,.0f}" for t in us[BASELINE])],
        ["`ncclep`, engine `native`", *(f"{t:,.0f}" for t in us[OURS])],
        ["times as fast", *(f"{theirs / ours:.2f}x" for theirs, ours in times)],
    ]
    names = ["dispatcher of one layer, µs", *(f"{shape}:" for shape in shapes)]
    return "\n\n".join(
        f"{rows}\n\n{measured(result)}."
        for rows, result in ((table(head, steps), training), (table(names, hooks), engines))
    )


def _words(shape: str) -> str:
    sequence, batch = shape.split("x")
    return f"sequence {sequence}, micro-batch {batch}"


def _tokens_per_s(run: dict[str, dict[str, Any]], name: str) -> str:
    return f"{run[name]['tokens_per_s']:,.0f} ({_speed(run, name):.2f}x)"


def _speed(found: dict[str, dict[str, Any]], name: str) -> float:
    return float(found[name]["tokens_per_s"] / found[f"train:{BASELINE}"]["tokens_per_s"])


def gains_figure(training: dict[str, Any], engines: dict[str, Any]) -> str:
    """The README's picture."""
    steps = [
        Bars(
            _words(shape),
            [
                (label, _speed(run, name), _tokens_per_s(run, name))
                for name, (_, label) in STEPS.items()
            ],
        )
        for shape, run in subjects(training, "trainings").items()
    ]
    hooks = [
        Bars(
            shape,
            [
                (label, run[name]["sum_us"], f"{run[name]['sum_us']:,.0f}")
                for name, label in HOOKS.items()
            ],
        )
        for shape, run in subjects(engines, "shapes").items()
    ]
    return figures.gains(steps, hooks, (measured(training), measured(engines)))


def measured(result: dict[str, Any]) -> str:
    """One line: machine, date and versions."""
    machine, versions = result["machine"], result["versions"]
    return (
        f"{machine['gpus']} x {machine['gpu']}, {result['date'][:10]}; torch {versions['torch']}, "
        f"NCCL {versions['nccl']}, Megatron-Core {versions['megatron-core']}, "
        f"TransformerEngine {versions['transformer-engine']}"
    )


def timeline(engines: dict[str, Any]) -> str:
    """One layer with the times of the engine's passes."""
    passes = subjects(engines, "shapes")[TIMELINE_SHAPE]["native"]["passes"]
    us = {name: found["median_us"] for name, found in passes.items()}
    text = f"engine native, {TIMELINE_SHAPE}'s shape, bf16, kernels timed one by one; "
    machine = f"{engines['machine']['gpus']} x {engines['machine']['gpu']}"
    return figures.layer_timeline(us, f"{text}{machine}, {engines['date'][:10]}")


def options_table() -> str:
    """Every option of EpConfig, as the code has it."""
    rows = []
    for option in dataclasses.fields(EpConfig):
        flag = f"`--ncclep-{option.name.replace('_', '-')}`"
        default = "none" if option.default is None else f"`{str(option.default).lower()}`"
        rows.append([flag, default, _cell(option.metadata["help"])])
    return table(["argument", "default", "meaning"], rows)


def variables_table() -> str:
    """The environment variables that are not options."""
    options = {f"NCCLEP_{option.name.upper()}" for option in dataclasses.fields(EpConfig)}
    rows = [
        [f"`{variable.name}`", _cell(variable.meaning)]
        for variable in envs.VARIABLES.values()
        if variable.name not in options
    ]
    return table(["variable", "meaning"], rows)


def _cell(text: str) -> str:
    """`text` inside a table: quoted words of an option become code."""
    return re.sub(r"'([\w.-]+)'", r"`\1`", text).replace("|", "\\|")


def filled(text: str, parts: dict[str, str]) -> str:
    """`text` with the parts that it has markers for."""
    for name, content in parts.items():
        pattern = rf"(<!-- written by make pages: {name} -->\n).*?(\n<!-- end -->)"
        text = re.sub(pattern, lambda m: f"{m[1]}\n{content}\n{m[2]}", text, flags=re.DOTALL)  # noqa: B023
    return text


def contents() -> dict[Path, str]:
    """What every file that this writes, wholly or in part, must hold."""
    training, engines = read(TRAINING), read(ENGINES)
    parts = {
        "gains": gains_tables(training, engines),
        "options": options_table(),
        "variables": variables_table(),
    }
    drawn = {
        "gains": gains_figure(training, engines),
        "data-flow": figures.data_flow(),
        "layer-timeline": timeline(engines),
    }
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {
        **{ROOT / "docs" / "figures" / f"{name}.svg": svg for name, svg in drawn.items()},
        **{
            page: filled(page.read_text(), parts)
            for page in pages
            if "make pages:" in page.read_text()
        },
    }


def main() -> int:
    """Write the files, or with --check name those that are out of date."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if out of date")
    check = parser.parse_args().check
    stale = {
        path: content
        for path, content in contents().items()
        if not path.is_file() or path.read_text() != content
    }
    for path, content in stale.items():
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
    if check and stale:
        print("run `make pages`")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
