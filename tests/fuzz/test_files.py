"""Configuration files: what they say, or an InputError that names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from anything import FUZZ, attempt, numbers, scalars, yaml_bytes
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import shapes
from megatron_ncclep.cli import config_files, render
from megatron_ncclep.training.settings import TYPES, Settings, layer_pattern

KEYS = st.sampled_from(
    [*TYPES, *render.SECTIONS, "nproc-per-node", "standalone", "--x", "", "shapes", "subjects",
     "warmup", "samples", "timeout_s", "name", "tokens", "hidden", "experts", "top_k", "dtype"]
)  # fmt: skip
READERS: dict[str, Callable[[str], Any]] = {
    "model": lambda path: Settings.load(path, {}),
    "dispatcher": lambda path: config_files.load("dispatcher", path),
    "cluster": lambda path: command("tiny", "ncclep", path),
    "three files": lambda path: command(path, path, path),
    "benchmark": shapes.load,
}


def command(*files: str) -> str:
    return render.format_command(render.command_lines(*files))


@pytest.mark.parametrize("kind", READERS)
@FUZZ
@given(content=yaml_bytes(KEYS))
@example(content=b"\xff")
@example(content=b"!!bool x")
@example(content=b"!!int ''")
@example(content=b"!!timestamp x")
@example(content=b"2001-99-99")
@example(content=b"[" * 1000)
def test_any_file(kind: str, content: bytes, tmp_path: Path) -> None:
    """PyYAML raises more than its own errors; a KeyError ended `ncclep render` in a traceback."""
    path = tmp_path / "any.yaml"
    path.write_bytes(content)
    _, refusal = attempt(lambda: READERS[kind](str(path)))
    assert refusal is None or str(path) in refusal


@FUZZ
@given(
    changes=st.dictionaries(st.sampled_from(sorted(TYPES)), scalars | numbers, max_size=3),
    ranks=st.integers(1, 5),
)
@example(changes={"lr": float("nan")}, ranks=2)
@example(changes={"hidden-dropout": 10**400}, ranks=2)
@example(changes={"hidden-size": 0}, ranks=2)
def test_values_of_a_model(changes: dict[str, Any], ranks: int) -> None:
    def load() -> Settings:
        settings = Settings.load("tiny", changes)
        settings.check_ranks(ranks, ranks)
        return settings

    settings, refusal = attempt(load)
    if refusal is not None:
        assert any(name in refusal for name in TYPES)
        return
    for name, value in settings.values.items():
        assert type(value) is TYPES[name]
        assert type(value) is not float or abs(value) < float("inf")
        assert type(value) is not int or 0 <= value < 2**31
    assert 0 <= settings["lr-warmup-fraction"] < 1
    pattern = layer_pattern(settings["moe-layer-freq"], settings["num-layers"])
    assert len(pattern) == settings["num-layers"]
