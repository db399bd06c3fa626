"""The documents, executed: each command and program of README.md and docs/, as far as a CPU goes.

What needs GPUs or Slurm goes through `--dry-run` and Megatron's own checks of its arguments, for as
many ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import parsed_models
import pytest
import small_job
from fixtures import closed
from fork_server import ForkServer
from timeouts import patient

import benchmarks.__main__ as benchmarks
from megatron_ncclep.cli import COMMANDS
from megatron_ncclep.config import EpConfig

ROOT = Path(__file__).resolve().parents[1]
IN_DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))
PAGES = ["README.md", "benchmarks/README.md", *IN_DOCS]
SCRIPTS = ["scripts/launch_local.sh", "scripts/train.slurm"]
TIMEOUT_S = patient(300)

# What `...` stands for: the least that a pretrain_gpt.py needs, and the data of a Slurm job.
DATA = shlex.split("--mock-data --tokenizer-type NullTokenizer --vocab-size 63 --split 99,1,0")
NEEDED = [*DATA, *shlex.split("""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --num-experts 8
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --train-iters 2
    --lr 1e-3 --eval-interval 2 --eval-iters 1 --disable-bias-linear
    --normalization RMSNorm
""")]  # fmt: skip
SHORT = shlex.split("--train-iters 2 --eval-iters 1")
NCCLEP = ["--moe-token-dispatcher-type", "ncclep"]


@dataclass(frozen=True)
class Block:
    """A fenced block: the document, its line there, its language, its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, or the examples in the help of a script."""
    text = (ROOT / page).read_text()
    if page in SCRIPTS:
        found = re.finditer(r"^  ()((?:sbatch|scripts/)(?:.*\\\n)*.*\n)", text, re.M)
    else:
        found = re.finditer(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    return [Block(page, text[: m.start()].count("\n") + 1, m[1], m[2]) for m in found]


def commands(text: str) -> list[list[str]]:
    """The words of each command of a block."""
    lines = re.sub(r"\\\n", " ", text).split("\n")
    parts = [p for line in lines for p in line.removeprefix("$ ").split(" && ")]
    return [words for part in parts if (words := shlex.split(part, comments=True))]


BLOCKS = [block for page in [*PAGES, *SCRIPTS] for block in blocks(page)]
OF_COMMANDS = [block for block in BLOCKS if not block.language]
PROGRAMS = [block for block in BLOCKS if block.language]


# --- in forks of a process that has imported Megatron --------------------------------------------


def prepare() -> None:
    if importlib.util.find_spec("megatron.training"):  # the wheel of 0.16.1 has none
        parsed_models.prepare()
    small_job.prepare()


def run_ncclep(folder: str, *words: str) -> int:
    """Be a rank that runs `ncclep`."""
    from megatron_ncclep.cli import main

    os.chdir(folder)
    return main(list(words))


def check_arguments(num_ranks: int, *words: str) -> None:
    """Let Megatron check a script's arguments."""
    parsed_models.check(num_ranks, *words, *parsed_models.NO_ENGINE)


def run_program(code: str) -> None:
    exec(compile(code, "program", "exec"), {"__name__": "__main__"})


server = closed(
    lambda: ForkServer("test_doc_commands:prepare", NCCLEP_AUTOLOAD="0"),
    "module",
)


# --- rules: how a command is run, by its first word: run_ and its name ---------------------------


class Shell:
    """Runs the commands of a block, in a folder that also has a Megatron-LM."""

    def __init__(self, server: ForkServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.variables: dict[str, str] = {}
        (folder / "Megatron-LM").mkdir()
        template = ROOT / "tests" / "integration" / "install" / "pretrain_template.py"
        for place in (folder, folder / "Megatron-LM"):
            shutil.copy(template, place / "pretrain_gpt.py")
        (folder / "bin").mkdir()
        ncclep = folder / "bin" / "ncclep"
        ncclep.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m megatron_ncclep "$@"')
        ncclep.chmod(0o755)

    def run(self, words: list[str]) -> None:
        """Run one command; one without a rule fails."""
        while re.match(r"[A-Z]\w*=", words[0]):
            self.set(words.pop(0))
        if words[0] not in ELSEWHERE:
            first = "arguments" if words[0].startswith("--") else Path(words[0]).stem
            rule = getattr(self, f"run_{first}", None)
            assert rule is not None, f"no rule for {words}: add one"
            rule(words)

    def set(self, assignment: str) -> None:
        name, _, value = assignment.partition("=")
        self.variables[name] = value
        if name.startswith("NCCLEP_"):
            assert name in (ROOT / "setup.py").read_text(), f"nothing reads {name}"

    def in_forks(self, function: str, arguments: list[object], num_ranks: int = 1) -> None:
        ended = self.server.run(f"test_doc_commands:{function}", arguments, num_ranks, TIMEOUT_S)
        assert [rank.exit_code for rank in ended] == [0] * num_ranks, ended[0].output[-3000:]

    def output(self, *command: str) -> str:
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "VIRTUAL_ENV": "/"}
        done = subprocess.run(
            command, cwd=self.folder, env=env, text=True, capture_output=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def check(self, num_ranks: int, arguments: list[str]) -> None:
        """Megatron's own checks of a script's arguments."""
        assert "..." not in arguments, arguments
        self.in_forks("check_arguments", [num_ranks, *arguments])

    def run_docker(self, words: list[str]) -> None:
        if words[1] == "build":
            assert (ROOT / words[words.index("-f") + 1]).is_file(), words
        else:
            assert words[words.index("ncclep") + 1] in COMMANDS, words

    def run_export(self, words: list[str]) -> None:
        for word in words[1:]:
            self.set(word)

    def run_make(self, words: list[str]) -> None:
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
        assert words[1:], words
        assert set(words[1:]) <= set(targets), words

    def run_pip(self, words: list[str]) -> None:
        assert words[1] == "install"
        project = (ROOT / "pyproject.toml").read_text()
        for word in words[2:]:
            for extra in re.findall(r"^(?:\.|megatron-ncclep)\[(.*)\]$", word):
                assert re.search(rf"^{extra} = \[", project, re.M), f"no extra {extra}"
            if "==" in word:
                assert f'"{word.partition("==")[0]}>=' in project, f"{word}: not of this project"

    def run_ncclep(self, words: list[str]) -> None:
        if words[1] == "train":
            ranks = int(words[words.index("--ranks") + 1]) if "--ranks" in words else 2
            short = shlex.split(f"--steps 5 --set eval-iters=1 --text {ROOT}/docs/support.md")
            self.in_forks("run_ncclep", [str(self.folder), *words[1:], *short], ranks)
        elif words != ["ncclep", "doctor"]:  # which tests/integration/doctor runs
            self.output(*words)

    def run_python(self, words: list[str]) -> None:
        """A benchmark of the checkout, on what the commands before it have made."""
        assert words[1] == "-m", words
        if not words[2].startswith("verl."):  # see ELSEWHERE
            assert words[2].startswith("benchmarks"), words
            self.output(sys.executable, *words[1:])

    def run_torchrun(self, words: list[str]) -> None:
        from torch.distributed.run import get_args_parser

        if words[1] == "...":
            words[1:2] = ["--nproc-per-node", "8", "pretrain_gpt.py", "...", *NCCLEP]
        if "..." in words:
            at = words.index("...")
            words[at : at + 1] = NEEDED
        parsed = get_args_parser().parse_args(words[1:])
        num_ranks, arguments = int(parsed.nproc_per_node), parsed.training_script_args
        if not parsed.module:
            return self.check(num_ranks, arguments)
        assert (parsed.training_script, arguments[:2]) == ("megatron_ncclep", ["run", "--cpu"])
        return self.in_forks("run_ncclep", [str(self.folder), *arguments], num_ranks)

    def run_nsys(self, words: list[str]) -> None:
        self.run_torchrun(words[words.index("torchrun") :])

    def run_launch_local(self, words: list[str]) -> None:
        text = self.output(str(ROOT / words[0]), "--dry-run", *words[1:], *SHORT)
        self.run(*commands(text))

    def run_sbatch(self, words: list[str]) -> None:
        """Up to the command that srun would start as each rank."""
        at = words.index("scripts/train.slurm")
        in_script = re.findall(
            r"^#SBATCH (--gpus-per-node=.*)", (ROOT / words[at]).read_text(), re.M
        )
        options = argparse.ArgumentParser()
        options.add_argument("--nodes", type=int, default=1)
        options.add_argument("--gpus-per-node", type=int)
        options.add_argument("--export", default="ALL")
        job = options.parse_args([*in_script, *words[1:at]])
        for assignment in job.export.split(",")[1:]:
            self.set(assignment)
        given = words[at + 1 :]
        if given[-1] == "...":
            given[-1:] = ["--model", "qwen3-30b-a3b", "--", *DATA, "--train-iters", "2"]
        text = self.output(str(ROOT / words[at]), "--dry-run", *given)
        theirs = {n for n in re.findall(r"\$\{(\w+)\}", text) if not n.startswith("SLURM")}
        assert theirs <= {*self.variables, "PWD"}, text
        counted = job.gpus_per_node or int(self.variables["SLURM_GPUS_ON_NODE"])
        command = shlex.split(text.replace("\\\n", " "))
        (script,) = [i for i, word in enumerate(command) if word.endswith("pretrain_gpt.py")]
        self.check(job.nodes * counted, command[script + 1 :])

    def run_arguments(self, words: list[str]) -> None:
        """Arguments alone, of a script."""
        self.check(1, [*NEEDED, *NCCLEP, *words])


# Other tests run or parse these with what they are of: tests/post_training with verl and ms-swift,
# tests/serving/test_vllm.py and test_sglang.py.
ELSEWHERE = ("megatron", "vllm", "sglang")


@pytest.mark.any_python("the commands are the same")
@pytest.mark.parametrize("block", OF_COMMANDS, ids=str)
def test_commands_run(server: ForkServer, tmp_path: Path, block: Block):
    shell = Shell(server, tmp_path)
    for words in commands(block.text):
        shell.run(words)


def test_blocks_are_found():
    """And the README starts with the two commands."""
    assert {block.language for block in PROGRAMS} == {"python"}
    assert {block.page for block in OF_COMMANDS} >= {*SCRIPTS, "README.md", "docs/get-started.md"}
    found = [words for block in blocks("README.md") for words in commands(block.text)][:2]
    assert found == [["make", "train"], ["make", "test"]]


# --- programs -------------------------------------------------------------------------------------

JOB = "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
CONFIG = (
    "import megatron_ncclep\nfrom megatron.core import transformer\n"
    "def TransformerConfig(_=None, **given):\n"
    "    return transformer.TransformerConfig(num_layers=1, hidden_size=8, num_moe_experts=4,\n"
    "        num_attention_heads=2, **given)\n"
)
# By a text that only this program has: what stands before it, what its `...` is, what follows.
FRAMES: dict[str, tuple[str, str, str]] = {
    "create_engine(": ("", "", ""),
    "config = TransformerConfig(...": (CONFIG, "...", "config.ncclep"),
    "cfg.model.ncclep": (
        "from types import SimpleNamespace\n" + CONFIG
        + "def qwen3_30b_a3b_pretrain_8gpu_h100_bf16_config():\n"
        "    return SimpleNamespace(model=TransformerConfig(moe_token_dispatcher_type='flex'))\n",
        "", "megatron_ncclep.install()\ncfg.model.__post_init__()",
    ),
    "TwoLevelAveraging(": (
        JOB + "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))\n"
        "optimizer = torch.optim.SGD(model.parameters())\n",
        "model(torch.ones(1, 2)).sum().backward()", "dist.destroy_process_group()",
    ),
    "destroy_model_parallel()": (
        JOB + "from megatron.core import parallel_state\nmodel = optimizer = 0\n"
        "parallel_state.initialize_model_parallel(expert_model_parallel_size=2)\n",
        "", "dist.destroy_process_group()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("block", PROGRAMS, ids=str)
def test_programs_run(server: ForkServer, block: Block):
    """With two ranks.

    The values of the README's follow from its routing by hand: tokens of rank r are rows of 1 + r.
    Each goes to two experts that multiply by 10, with weights .25 and .75: sums are 10 (1 + r), and
    gradients 10.  Experts 0 and 3 get two rows of each rank.
    """
    (frame,) = (frame for text, frame in FRAMES.items() if text in block.text)
    before, filling, after = frame
    code = before + block.text.replace("...", filling or "...") + after
    ended = server.run("test_doc_commands:run_program", [code], 2, TIMEOUT_S)
    assert [rank.exit_code for rank in ended] == [0, 0], [rank.output for rank in ended]
    if block.page == "README.md":
        assert len(block.text.splitlines()) <= 16
        for rank, end in enumerate(ended):
            rows = [[4, 2], [2, 4]][rank]
            assert end.output.splitlines()[-1] == f"{rows} {[10.0 * (1 + rank)] * 3} {[10.0] * 3}"


# --- in the text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_options_in_the_text_exist(page: str):
    """Those of the dispatcher, and of `ncclep` and its commands."""
    text = (ROOT / page).read_text()
    ours = {f"--ncclep-{field.name.replace('_', '-')}" for field in dataclasses.fields(EpConfig)}
    assert set(re.findall(r"--ncclep-[\w-]*\w", text)) <= ours
    for name, rest in re.findall(r"`ncclep ([a-z]+)\b([^`]*)`", text):
        if name in ("plan", "dispatch", "combine"):  # NVTX ranges
            continue
        parser = argparse.ArgumentParser()
        importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
        known = {*parser._option_string_actions, "--help"}
        assert set(re.findall(r"(?<!\S)--[\w-]+", rest)) <= known | ours, f"ncclep {name}{rest}"
    known = {*benchmarks.make_parser()._option_string_actions}
    for rest in re.findall(r"`python -m benchmarks\b([^`]*)`", text):
        assert set(re.findall(r"(?<!\S)--[\w-]+", rest)) <= known, rest
