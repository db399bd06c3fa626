"""The documents' trainings on GPUs, with as many ranks as the run has.

tests/test_doc_commands.py takes them as far as Megatron's checks of arguments, for the ranks that
the pages name.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_job import environment
from test_doc_commands import NEEDED, OF_COMMANDS, ROOT, Block, commands

TIMEOUT_S = 180
# The stand-in for pretrain_gpt.py is made of Megatron's own modules.
LOCAL = shlex.split("""
    --transformer-impl local --no-persist-layer-norm --no-rope-fusion --no-masked-softmax-fusion
    --no-gradient-accumulation-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
""")
TRAININGS = [b for b in OF_COMMANDS if "torchrun --nproc" in b.text and "--cpu" not in b.text]


def command(block: Block, num_ranks: int) -> list[str]:
    """The last command of a block, for so many ranks and without an installed package.

    Megatron takes the GPU of a rank's local number: ranks that share one are all number 0.
    """
    words = commands(block.text)[-1]
    for option in ("--nproc-per-node", "--expert-model-parallel-size"):
        words[words.index(option) + 1] = str(num_ranks)
    at = words.index("pretrain_gpt.py")
    local_rank = ["LOCAL_RANK=0"] if num_ranks > torch.cuda.device_count() else []
    python = ["--no-python", "env", *local_rank, sys.executable]
    run = [*words[1:at], "--standalone", *python, "-m", "megatron_ncclep", "run", *words[at:]]
    filled = run.index("...")
    run[filled : filled + 1] = [*NEEDED, *LOCAL, "--log-interval", "1"]
    return ["torchrun", *run]


@pytest.mark.parametrize("block", TRAININGS, ids=str)
def test_a_documented_training_runs(tmp_path: Path, rank_counts: list[int], block: Block) -> None:
    template = ROOT / "tests" / "integration" / "install" / "pretrain_template.py"
    shutil.copy(template, tmp_path / "pretrain_gpt.py")
    done = subprocess.run(
        command(block, rank_counts[-1]), cwd=tmp_path, env=environment(), text=True,
        capture_output=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "engine 'native' for" in done.stdout + done.stderr
    assert "iteration        2/       2" in done.stdout
