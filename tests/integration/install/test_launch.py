"""`ncclep run`: scripts run as Python would run them, and train on the CPU with our dispatcher."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fork_server import ForkServer
from megatron_versions import INSTALLED
from small_job import TIMEOUT_S, Trainer, environment

from megatron_ncclep import cli

HERE = Path(__file__).parent


# Four experts per token: two fp32 summation orders, one rounding apart (6e-8), and then carried
# through the steps: 3e-7 was seen after 20 steps.  Ten times that is allowed.
SAME_LOSS_REL = 3e-6

PRETRAIN_ARGUMENTS = shlex.split("""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
    --moe-ffn-hidden-size 64 --seq-length 16 --max-position-embeddings 16
    --num-experts 8 --moe-router-topk 4 --tensor-model-parallel-size 2 --sequence-parallel
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-router-dtype fp32
    --micro-batch-size 2 --global-batch-size 8 --train-iters 10
    --lr 3e-3 --lr-decay-style constant
    --disable-bias-linear --hidden-dropout 0 --attention-dropout 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 63 --split 99,1,0 --num-workers 0
    --eval-iters 0 --eval-interval 1000 --log-interval 1
    --distributed-backend gloo --use-cpu-initialization --transformer-impl local
    --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-dropout-fusion
""")

# What two ranks do with the experts: with tensor parallelism Megatron's default is slices of all.
EXPERTS = {
    "slices": [],
    "divided": ["--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"],
}


def be_rank(folder: str, *arguments: str) -> int:
    """Be a rank of a script."""
    os.chdir(folder)
    return cli.main(["run", "--cpu", *arguments])


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with `arguments` in `folder`; stdout and stderr come in one text."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment(), "NCCLEP_AUTOLOAD": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.supports(
    "tensor_model_parallel_size",
    "sequence_parallel",
    "moe_router_load_balancing_type=aux_loss",
    compared="losses of a pretrain script, unmodified, with alltoall's, 3e-6 (fp32)",
)
@pytest.mark.each_release
@pytest.mark.since("0.17")  # whose wheel has megatron.training
def test_pretrain_script_trains_like_alltoall(
    tmp_path: Path, python: ForkServer, trainer: Trainer, request: pytest.FixtureRequest
) -> None:
    """With tensor parallelism, for which Megatron's validate_args asks for the GPU's properties:
    its scripts ended in "Found no NVIDIA driver".

    An older release shows that its script starts, takes our options and learns; that its losses are
    alltoall's is shown by test_gpt_model.py and test_moe_layer.py, with every release.
    """
    is_installed = request.config.getoption("--megatron") == INSTALLED
    experts = EXPERTS["slices" if is_installed else "divided"]
    shutil.copy(HERE / "pretrain_template.py", tmp_path / "pretrain_gpt.py")
    # A toolkit; without a GPU torch remarks on it.
    toolkit = {"CUDA_HOME": str(tmp_path)}

    def losses(server: ForkServer, dispatcher: str, *arguments: str) -> tuple[list[float], str]:
        command = [str(tmp_path), "pretrain_gpt.py", *PRETRAIN_ARGUMENTS, *experts]
        command += ["--moe-token-dispatcher-type", dispatcher, *arguments]
        ended = server.run("test_launch:be_rank", command, 2, TIMEOUT_S, **toolkit)
        output = "".join(rank.output for rank in ended)
        assert [rank.exit_code for rank in ended] == [0, 0], output[-4000:]
        assert f"trained with {dispatcher}" in output
        return [float(loss) for loss in re.findall(r"\| lm loss: (\S+)", output)], output

    # Forks have imported torch, and nothing of Megatron; those that they are compared with, all.
    ours, output = losses(python, "ncclep", "--ncclep-engine", "reference")
    theirs = losses(trainer.server, "alltoall")[0] if is_installed else ours
    assert "No CUDA runtime is found" not in output
    assert "engine 'reference' for 2 ranks" in output, "another dispatcher has run"
    assert len(ours) == 10
    assert ours[-1] < ours[0] - 0.3, ours
    assert ours == pytest.approx(theirs, rel=SAME_LOSS_REL)


def test_script_sees_what_python_would_show_it(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "neighbour.py").write_text("")
    (tmp_path / "scripts" / "show.py").write_text(
        "import json, sys, neighbour\n"
        "loaded = [name for name in ('torch', 'megatron') if name in sys.modules]\n"
        "main = sys.modules['__main__'].__dict__ is globals()\n"
        "print(json.dumps([sys.argv, sys.path[0], __name__, main, loaded]))\n"
    )
    arguments = ["scripts/show.py", "--cpu", "--help", "-x", "a b", "--y=1"]
    python = run(tmp_path, *arguments)
    ours = run(tmp_path, "-m", "megatron_ncclep", "run", *arguments)
    assert json.loads(python.stdout)[0] == arguments
    assert ours.stdout == python.stdout


@pytest.mark.parametrize(
    ("script", "status", "output"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("raise SystemExit('the reason')", 1, "the reason\n"),
        ("print('done')", 0, "done\n"),
        (
            "class Own(Exception): pass\nraise Own('its message')",
            1,
            "Traceback.*Own: its message\n",
        ),
    ],
)
def test_a_script_ends_as_it_would_alone(
    tmp_path: Path, script: str, status: int, output: str
) -> None:
    (tmp_path / "script.py").write_text(script)
    done = run(tmp_path, "-m", "megatron_ncclep", "run", "script.py")
    assert done.returncode == status
    assert re.fullmatch(output, done.stdout, re.DOTALL)
    assert "During handling" not in done.stdout  # of another exception


def test_a_task_of_slurm_is_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text(
        "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')))"
    )
    tasks = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
    for name, value in tasks.items():
        monkeypatch.setenv(name, value)
    command = ["-m", "megatron_ncclep", "run", "--slurm", "script.py"]
    assert run(tmp_path, *command).stdout == "5 8 1\n"
    monkeypatch.delenv("SLURM_LOCALID")
    done = run(tmp_path, *command)
    assert done.returncode == 2
    assert "--slurm: SLURM_LOCALID is not set: start ranks with srun" in done.stdout


@pytest.mark.parametrize(("name", "problem"), [("missing.py", "not there"), (".", "a folder")])
def test_script_that_is_no_file(
    tmp_path: Path, name: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / name)
    assert cli.main(["run", path]) == 2
    assert re.search(f"{re.escape(path)}.* is {problem}: give the path", capsys.readouterr().err)
