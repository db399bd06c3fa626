"""`ncclep` with any words: it ends with a status, and with one line or the usage; no traceback.

What a command does once its input is checked is not done here: ranks are not started, scripts not
run, machines not examined.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from anything import FUZZ, odd_words, words
from hypothesis import example, given, settings
from hypothesis import strategies as st

import benchmarks.__main__ as benchmarks
from benchmarks import plot
from megatron_ncclep import cli
from megatron_ncclep.benchmark import result

# Options of each command, and words with which it gets somewhere.
OPTIONS = {
    "train": (
        "--model --set --steps --seed --dispatcher --compare --text --resume --overwrite --ranks "
        "--expert-parallel --device --save-every --exit-at-step --print-every --out "
        "--ncclep-alignment --ncclep-timeout-s --ncclep-num-sms --ncclep-max-recv-rows",
        "--device cpu --out d",
    ),
    "run": ("--cpu", "s.py"),
    "render": (
        "--model --dispatcher --cluster --script --nproc --one-line --",
        "--model tiny --dispatcher ncclep --cluster local-cpu",
    ),
    "bench": (
        "--config --subjects --ranks --device --samples --warmup --mode --out --overwrite",
        "--smoke --overwrite --out d",
    ),
    "doctor": ("--json --ranks", ""),
    "env": ("", ""),
    # Of a checkout.
    "benchmarks": (
        "--config --subjects --ranks --device --samples --warmup --max-recv-rows --out --overwrite",
        "--smoke --overwrite --out d",
    ),
    "plot": ("-o --out --subjects", "bench.json"),
}
OF_A_CHECKOUT = {"benchmarks": benchmarks.main, "plot": plot.main}
RESULT = Path(__file__).parents[2] / "benchmarks/results/2026-11-22-2xH200-native/bench.json"
FILES = {
    "text.txt": "some text " * 20, "empty.txt": "", "list.yaml": "[1]", "s.py": "pass",
    "half.json": json.dumps({"format": result.FORMAT, "shapes": [{"subjects": [{"passes": 1}]}]}),
    "none.json": json.dumps({"format": result.FORMAT}), "bench.json": "{}",
}  # fmt: skip
known = st.sampled_from(
    [*FILES, "d", "tiny", "smoke", "ncclep", "local-cpu", "alltoall", "cpu", "auto", "reference",
     "native@3", "reference@3", "train:ncclep:native:static", "train:alltoall:x", "lr=nan",
     "seed=-1", "num-layers=0", "2", "4"]
)  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with some files, and commands that stop before they do anything."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "d").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron_ncclep.training.command._start_ranks", lambda *_: 0)
    monkeypatch.setattr("megatron_ncclep.training.corpus._write", write)
    monkeypatch.setattr("megatron_ncclep.training.corpus._describe", describe)
    monkeypatch.setattr("megatron_ncclep.benchmark.command._measure_in_ranks", lambda job: [])
    monkeypatch.setattr("megatron_ncclep.doctor.examine", lambda title, ranks: [])
    monkeypatch.setattr("megatron_ncclep.cli.run._move_to_cpu", lambda: None)
    monkeypatch.setattr("megatron_ncclep.cli.run.after_import", lambda *_: None)
    monkeypatch.setattr("megatron_ncclep.autoload.hook_imports", lambda: None)
    monkeypatch.setattr("runpy.run_path", lambda *_, **__: {})
    # What a command may change for the rest of its process.
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def write(files: list[Path], source: str, prefix: str) -> None:
    """Stands in for writing a corpus, which takes Megatron; the files are read."""
    Path(f"{prefix}.bin").write_bytes(b"".join(path.read_bytes() for path in files))


def describe(prefix: str, end_token: int | None) -> dict[str, float]:
    size = Path(f"{prefix}.bin").stat().st_size
    return {"vocab_size": 257, "end_token": 256, "num_train_tokens": size,
            "num_valid_tokens": size, "unigram_entropy": 1.0}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@settings(FUZZ, max_examples=120)
@given(
    groups=st.lists(st.tuples(st.integers(0, 30), known | words | odd_words), max_size=4),
    starts_well=st.booleans(),
)
@example(groups=[], starts_well=True)
def test_any_words(
    here: None, name: str, groups: list[tuple[int, str]], starts_well: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    options, right = OPTIONS[name]
    flags = [*options.split(), ""]
    given_words = [word for i, word in groups for word in (flags[i % len(flags)], word) if word]
    run([name, *(right.split() if starts_well else []), *given_words], capsys)


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Run `ncclep`, or a command of a checkout; it must end as a command ends."""
    capsys.readouterr()
    status, usage = None, None
    try:
        name, *rest = arguments
        status = OF_A_CHECKOUT[name](rest) if name in OF_A_CHECKOUT else cli.main(arguments)
    except SystemExit as end:
        usage = end.code
    printed = capsys.readouterr().err
    assert status in (0, 2) or usage in (0, 2)
    assert (2 in (status, usage)) == (": error: " in printed)


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        f"run {LONG}",
        f"render --model {LONG}.yaml --dispatcher ncclep --cluster local-cpu",
        "train --device cpu --out text.txt",
        f"train --device cpu --out {LONG}",
        f"train --device cpu --out d --text {LONG}",
        "bench --device cpu --out text.txt",
        f"plot {RESULT} -o d",
        "render --model tiny --dispatcher ncclep --cluster local-cpu --nproc 0",
        "plot half.json",
        f"plot {RESULT} -o x.foo",
        "plot gone.json",
        "plot none.json",
    ],
)
def test_what_ended_in_a_traceback(
    here: None, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(arguments.split(), capsys)


def test_a_result_that_cannot_be_written_is_refused_before_anything_is_measured(
    here: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ncclep bench --out FILE` measured for minutes, and lost what it had measured."""
    monkeypatch.delattr("megatron_ncclep.benchmark.command._measure_in_ranks")
    Path("d/bench.json").touch()  # results, which it would have overwritten
    for out in ("text.txt", "d"):
        assert cli.main(["bench", "--smoke", "--out", out]) == 2
        assert f"--out {out}" in capsys.readouterr().err


def test_every_command_is_tried() -> None:
    assert set(OPTIONS) == set(cli.COMMANDS) | set(OF_A_CHECKOUT)
