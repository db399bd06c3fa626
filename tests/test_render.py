"""configs/ and `ncclep render`: what the files may say, and the command that three of them make."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from timeouts import patient

from megatron_ncclep.cli import config_files, render
from megatron_ncclep.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
COMBINATIONS = list(itertools.product(*(config_files.names(kind) for kind in config_files.KINDS)))

SLURM_JOB = {
    "SLURM_JOB_ID": "31234", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8",
    "SLURMD_NODENAME": "node7",
}  # fmt: skip


@pytest.fixture
def write(tmp_path: Path):
    """Write a configuration file and return its path as text."""

    def write_file(name: str, text: str) -> str:
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return str(path)

    return write_file


@pytest.fixture
def fake_commands(tmp_path: Path) -> dict[str, str]:
    """An environment where `ncclep` is this tree's, and srun and torchrun print their words."""
    folder = tmp_path / "bin"
    folder.mkdir()
    echo = (
        'printf "%s\\n" "MASTER=${MASTER_ADDR:-}:${MASTER_PORT:-}" '
        '"OMP_NUM_THREADS=${OMP_NUM_THREADS:-}" "$(basename "$0")" "$@"'
    )
    ncclep = f'exec {shlex.quote(sys.executable)} -m megatron_ncclep "$@"'
    for name, body in {"ncclep": ncclep, "srun": echo, "torchrun": echo}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMP_"))}
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return {**inherited, **paths, "VIRTUAL_ENV": str(tmp_path)}


def run_script(
    name: str, *args: str, env: Mapping[str, str], ok: bool = True
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(ROOT / "scripts" / name), *args], env=env, text=True, capture_output=True,
        timeout=patient(120), stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode == 0) is ok, done.stdout + done.stderr
    return done


def words(*args: object, **kwargs: object) -> list[str]:
    """The rendered command as a shell splits it."""
    lines = render.command_lines(*args, **kwargs)  # type: ignore[arg-type]
    readable = shlex.split(render.format_command(lines).replace("\\\n", " "))
    assert readable == shlex.split(render.format_command(lines, one_line=True))
    return readable


# --- the files -----------------------------------------------------------------------------------


def needs_gpus(model: str) -> bool:
    return config_files.load("model", model)["transformer-impl"] == "transformer_engine"


@pytest.mark.parametrize(("model", "dispatcher", "cluster"), [*COMBINATIONS])
def test_every_shipped_combination_renders(model: str, dispatcher: str, cluster: str):
    if needs_gpus(model) and cluster == "local-cpu":
        with pytest.raises(InputError, match="set --transformer-impl on the command line"):
            words(model, dispatcher, cluster)
        return
    command = words(model, dispatcher, cluster)
    flags = [word for word in command if word.startswith("--")]
    assert len(flags) == len(set(flags)), "an argument is given twice"
    expected = config_files.load("dispatcher", dispatcher)["moe-token-dispatcher-type"]
    assert command[command.index("--moe-token-dispatcher-type") + 1] == expected


def test_unknown_name_lists_the_names():
    with pytest.raises(InputError, match=r"no dispatcher configuration 'nclep'.*alltoall.*ncclep"):
        config_files.load("dispatcher", "nclep")
    # A name is looked up, not joined to a path: nothing outside configs/ can be meant by it.
    for name in ("nowhere/x.yaml", "../dispatcher/ncclep"):
        with pytest.raises(InputError, match=f"model configuration '{name}'"):
            config_files.load("model", name)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("model", "- num-layers", "must be a mapping"),
        ("model", "", "must be a mapping"),
        ("model", "lr: [1", "not valid YAML"),
        ("model", "lr: 1\nlr: 2", "the key 'lr' is there twice"),
        ("model", "'lr 1; date #': 1", "without its dashes"),
        ("model", "1: 1", "without its dashes"),
        ("model", "lr: 1e-4", "such as 1.0e-4"),
        ("model", "lr:", "lr: None must be a number"),
        ("model", "data-path: []", "leave out an empty list"),
        ("model", "swiglu: [true]", "write a flag as true or false"),
        ("model", "a: [[1]]", "must be a number"),
        ("cluster", "torchrn: {standalone: true}", "unknown section 'torchrn'.*env, srun, torchr"),
        ("cluster", "torchrun: 8", "torchrun must be a mapping, is 8"),
        ("cluster", "megatron: {lr: 1e-4}", "megatron: lr"),
        # A name was written into the command as it is, with whatever follows a semicolon.
        ("cluster", "env: {'A=1 date; B': 1}", "env: 'A=1 date; B': write a variable's name"),
        ("cluster", "srun: {'n 1; date; x': 1}", "srun: 'n 1; date; x': write an argument's name"),
        ("cluster", "torchrun: {$(date): 1}", r"torchrun: '\$\(date\)': write an argument's name"),
        ("cluster", "run: {'cpu; date': true}", "run: 'cpu; date': write an argument's name"),
        ("cluster", "megatron: {'a\\n': 1}", "write an argument's name"),
    ],
)
def test_malformed_files_are_refused(write, kind: str, text: str, message: str):
    read = render.read_cluster if kind == "cluster" else lambda path: config_files.load(kind, path)
    with pytest.raises(InputError, match=f"bad.yaml.*{message}"):
        read(write("bad", text))


# tests/parsed_models.py composes for eight GPUs and the models that train on them.
MODELS = [name for name in config_files.names("model") if name != "tiny"]
# Its arguments are those of Megatron-Core 0.19.
NEW = {"gpt-oss-120b": "0.19"}


@pytest.mark.since("0.17")  # whose wheel has Megatron-LM's parser
@pytest.mark.each_release
def test_megatron_takes_the_files(request: pytest.FixtureRequest):
    """Their keys are arguments of Megatron-LM, and the numbers of the models arrive in the config
    that Megatron makes of its arguments.

    A key that Megatron-LM does not know, or a flag with a value, would fail only at launch.
    """
    release = Version(request.config.getoption("--megatron"))
    too_new = {name for name, first in NEW.items() if release < Version(first)}
    paths = [os.environ.get("PYTHONPATH"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "parsed_models.py"), *sorted({*MODELS} - too_new)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        text=True, capture_output=True, timeout=patient(300),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    parsed = json.loads(done.stdout)
    assert parsed["models"]
    for name, facts in parsed["models"].items():
        model = config_files.load("model", name)
        assert facts.pop("moe_token_dispatcher_type") == "ncclep"
        pattern = facts.pop("moe_layer_freq")
        num_layers = len(pattern) if isinstance(pattern, list) else facts["num_layers"]
        assert num_layers == model["num-layers"]
        assert facts.pop("num_moe_experts") == model["num-experts"]
        assert facts == {key: model[key.replace("_", "-")] for key in facts}, name
    for kind in config_files.KINDS:
        for name in {*config_files.names(kind)} - too_new:
            content: Any = config_files.load(kind, name)
            for key, value in (content["megatron"] if kind == "cluster" else content).items():
                where = f"{kind} {name}: {key}"
                assert f"--{key}" in parsed["options"], f"{where} is no argument of Megatron-LM"
                nargs = parsed["options"][f"--{key}"]
                assert isinstance(value, bool) == (nargs == 0), f"{where}: {value}, nargs {nargs}"
                assert not isinstance(value, list) or nargs in ("*", "+"), where


def test_a_slice_differs_from_its_model_where_it_says(write):
    whole, part = (config_files.load("model", f"deepseek-v3{end}") for end in ("", "-4gpus"))
    differing = {name for name in {*whole, *part} if part.get(name) != whole.get(name)}
    assert differing == {"num-layers", "moe-layer-freq", "num-experts", "global-batch-size"}
    with pytest.raises(InputError, match="base: 'deepseek' must be another of the names deepseek-"):
        config_files.load("model", write("a", "base: deepseek"))
    with pytest.raises(InputError, match="base: 'tiny' must be another"):
        config_files.load("model", write("tiny", "base: tiny"))


# --- composition ---------------------------------------------------------------------------------

CLUSTER = """
env: {OMP_NUM_THREADS: 1}
torchrun: {standalone: true, nproc-per-node: 2}
run: {cpu: true}
megatron: {distributed-backend: gloo}
"""


def test_a_whole_command_has_an_argument_on_each_line(write):
    model = write("m", "num-layers: 4\nswiglu: true\nbf16: false\ndata-path: [0.5, my text]\n")
    files = (model, "ncclep", write("c", CLUSTER), "a dir/train.py", ["--seed", "7", "--a"])
    expected = [
        ["OMP_NUM_THREADS=1"], ["torchrun"], ["--standalone"], ["--nproc-per-node", "2"],
        ["-m", "megatron_ncclep", "run", "--cpu", "a dir/train.py"],
        ["--num-layers", "4"], ["--swiglu"], ["--data-path", "0.5", "my text"],
        ["--moe-token-dispatcher-type", "ncclep"], ["--distributed-backend", "gloo"],
        ["--seed", "7"], ["--a"],
    ]  # fmt: skip
    assert words(*files) == list(itertools.chain(*expected))
    lines = render.format_command(render.command_lines(*files)).split(" \\\n    ")
    assert [shlex.split(line) for line in lines] == expected
    nproc = words(*files, nproc=4)
    assert nproc[nproc.index("--nproc-per-node") + 1] == "4"


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("distributed-backend: nccl", "distributed-backend: gloo"),
        # In Python True == 1: compared that way, these would seem to agree.
        ("a: 1", "a: true"),
    ],
)
def test_two_files_that_disagree_are_named(write, ours: str, theirs: str):
    """The command line decides."""
    model = write("m", f"{ours}\nlr: 1")
    cluster = write("c", f"torchrun: {{standalone: true}}\nmegatron: {{{theirs}}}")
    with pytest.raises(InputError) as error:
        render.command_lines(model, "ncclep", cluster)
    name, value = theirs.split(": ")
    said = (f"model {model} says {ours}", f"cluster {cluster} says {name}: {value.capitalize()}")
    for part in (*said, f"set --{name} on the command line"):
        assert part.lower() in str(error.value).lower()
    for extra in ([f"--{name}", "mpi"], [f"--{name}=mpi"]):
        command = words(model, "ncclep", cluster, extra=extra)
        assert command[-len(extra) :] == extra
        assert " ".join(command).count(f"--{name}") == 1
    agreed = words(write("m", theirs), "ncclep", cluster)
    assert agreed.count(f"--{name}") == 1


def test_numbers_of_processes():
    files, size = ("tiny", "ncclep", "local-gpu"), f"--{render.EXPERT_PARALLEL}"
    with pytest.raises(InputError, match=f"6 processes cannot form .*{size} 2"):
        render.command_lines(*files, nproc=6)
    command = words(*files, nproc=6, extra=[size, "2"])
    assert command[command.index(size) + 1] == "2"
    with pytest.raises(InputError, match=r"--nproc 4: .*srun starts the ranks: leave --nproc out"):
        words("tiny", "ncclep", "slurm", nproc=4)


# --- quoting -------------------------------------------------------------------------------------


def in_bash(command: str) -> str:
    """What a command prints, with $A and $B."""
    return subprocess.run(
        ["bash", "-uc", command], env={**os.environ, "A": "one two", "B": "10"},
        text=True, capture_output=True, check=True, timeout=patient(60),
    ).stdout  # fmt: skip


NASTY = [
    "a b", "it's", '"', "$HOME", "${HOME}", "$((1 + 1))", "`date`", "$(date)", "\\", "*", "a;b",
    "${X", "", "é", "\n",
]  # fmt: skip


def test_values_reach_the_program_as_they_are(write):
    """bash itself splits the command; `printf` is the program that is started."""
    model = write("m", json.dumps({"data-path": NASTY}))
    lines = render.command_lines(model, "ncclep", write("c", "{}"), NASTY[0], ["--extra", *NASTY])
    text = in_bash(f"torchrun() {{ printf '%s\\0' \"$@\"; }}; {render.format_command(lines)}")
    assert text.split("\0")[:-1] == [
        "-m", "megatron_ncclep", "run", NASTY[0], "--data-path", *NASTY,
        "--moe-token-dispatcher-type", "ncclep", "--extra", *NASTY,
    ]  # fmt: skip


def test_only_variables_and_sums_are_left_to_the_shell():
    for text, expected in (
        ("${A}", "one two"), ("${A}:$((20 + B % 4))", "one two:22"), ("$A", "$A"),
        ('"`$A`\\${A}', '"`$A`\\one two'), ("${A} $(echo x)", "one two $(echo x)"),
    ):  # fmt: skip
        assert in_bash(f"printf %s {render.quote(text)}") == expected


# --- the scripts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["slurm", "slurm-pyxis"])
def test_slurm_script_fills_in_the_job(fake_commands, cluster: str):
    container = {"CONTAINER_IMAGE": "a b.sqsh", "CONTAINER_MOUNTS": "/data:/data"}
    env = {**fake_commands, **SLURM_JOB, **container}
    done = run_script("train.slurm", "--model", "tiny", "--cluster", cluster, env=env)
    started = done.stdout.splitlines()
    started = started[started.index("srun") :]
    here = os.getcwd()
    assert started[: started.index("-m")] == [
        "srun", "--ntasks", "16", "--ntasks-per-node", "8", "--cpu-bind", "none",
        "--kill-on-bad-exit", *([
            "--container-image", "a b.sqsh", "--container-mounts", f"{here}:{here},/data:/data",
            "--container-workdir", here,
        ] if cluster == "slurm-pyxis" else []), "python",
    ]  # fmt: skip
    assert started[started.index("-m") :][:4] == ["-m", "megatron_ncclep", "run", "--slurm"]
    assert "MASTER=node7:21234" in done.stdout


def test_slurm_script_requeues_what_can_continue(fake_commands, tmp_path: Path):
    """A job with `--save=DIR --load=DIR` was told that it has neither, and not requeued.  Others
    are in tests/cluster.
    """
    folder = tmp_path / "bin"
    (folder / "srun").write_text(
        '#!/bin/sh\necho ranks; until [ -e "$0.ended" ]; do sleep 0.1; done'
    )
    (folder / "scancel").write_text('#!/bin/sh\ntouch "$(dirname "$0")/srun.ended"\n')
    (folder / "scontrol").write_text('#!/bin/sh\necho "scontrol $*"\n')
    for name in ("scancel", "scontrol"):
        (folder / name).chmod(0o755)
    job = subprocess.Popen(
        [str(ROOT / "scripts" / "train.slurm"), "--model", "tiny", "--", "--save=a", "--load=a"],
        env={**fake_commands, **SLURM_JOB}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert job.stdout is not None
    assert "ranks\n" in iter(job.stdout.readline, "")
    job.send_signal(signal.SIGUSR1)
    text, _ = job.communicate(timeout=patient(60))
    assert job.returncode == 0, text
    assert "scontrol requeue 31234" in text


@pytest.mark.parametrize("missing", sorted(SLURM_JOB))
def test_slurm_script_names_a_variable_that_is_missing(fake_commands, missing: str):
    job = {name: value for name, value in SLURM_JOB.items() if name != missing}
    done = run_script("train.slurm", "--model", "tiny", env={**fake_commands, **job}, ok=False)
    ours = {"SLURM_JOB_ID": "this is not a Slurm job: submit it with sbatch", "SLURM_GPUS_ON_NODE":
            "--gpus-per-node=0 --export=ALL,SLURM_GPUS_ON_NODE=8"}  # fmt: skip
    assert ours.get(missing, f"{missing} is not set, and the cluster file needs it") in done.stderr
    assert done.returncode == 2
    assert "\nsrun\n" not in done.stdout


@pytest.mark.parametrize("script", ["launch_local.sh", "train.slurm"])
def test_scripts_say_how_they_are_used_and_stop_when_nothing_can_be_composed(
    fake_commands, script: str
):
    assert "usage:" in run_script(script, "--help", env=fake_commands).stdout
    assert "usage:" in run_script(script, env=fake_commands, ok=False).stderr
    done = run_script(script, "--model", "nope", env={**fake_commands, **SLURM_JOB}, ok=False)
    assert "no model configuration 'nope'" in done.stderr
    assert done.stdout == ""
