"""The examples run on two ranks, and print what examples/README.md shows."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from fixtures import closed
from fork_server import ForkServer
from timeouts import patient

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
# A line of an example, where others are warnings and logs.
OWN_LINE = re.compile(r"step|rows|rank \d|\[")
# Numbers that follow from a training, in which another CPU's rounding grows.
TRAINED = re.compile(r"(?<=loss )\S+|(?<=imbalance )\S+|\d{4,}")


def be_rank(path: str) -> None:
    """Be a rank of an example, as torchrun would start it."""
    runpy.run_path(path, run_name="__main__")


server = closed(lambda: ForkServer("imports:import_megatron"), "module")


def blocks(markdown: str) -> list[str]:
    return re.findall(r"^```[^\n]*\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_prints_what_its_page_shows(name: str, server: ForkServer):
    command = f"torchrun --nproc-per-node 2 examples/{name}\n"
    page = (EXAMPLES / "README.md").read_text()
    shown = blocks(page[page.index(command) - len("```\n") :])[1].splitlines()
    job = ("test_examples:be_rank", [str(EXAMPLES / name)], 2, patient(120))
    ended = server.run(*job, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert [rank.exit_code for rank in ended] == [0, 0], ended
    lines = [line for rank in ended for line in rank.output.splitlines() if OWN_LINE.match(line)]
    assert [TRAINED.sub("", line) for line in lines] == [TRAINED.sub("", line) for line in shown]
    values = [list(map(float, TRAINED.findall("\n".join(text)))) for text in (lines, shown)]
    assert values[0] == pytest.approx(values[1], rel=0.08, abs=0.02)


def test_the_readme_has_the_program_of_the_three_calls():
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    program = (EXAMPLES / "dispatch_combine.py").read_text().rpartition('"""')[2]
    assert [*filter(None, code.splitlines())] == [*filter(None, program.splitlines())]


def test_the_loop_with_megatron_is_short():
    assert len((EXAMPLES / "train_megatron.py").read_text().splitlines()) <= 80
