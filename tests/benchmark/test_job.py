"""What benchmarks are asked to do: files, arguments, and what is refused."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks.__main__ as benchmarks
from benchmarks import shapes, table
from benchmarks.catalogue import check_name, default_names, known_variant
from benchmarks.job import Job
from megatron_ncclep import cli
from megatron_ncclep.benchmark import command
from megatron_ncclep.benchmark.result import Measured, ShapeResult
from megatron_ncclep.errors import InputError


@pytest.fixture(autouse=True)
def restore_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job for the CPU hides the GPUs from its process; not from the tests that follow."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]):
    """Run `python -m benchmarks` and return what it refuses with."""

    def run(*arguments: str) -> str:
        assert benchmarks.main(arguments) == 2
        return capsys.readouterr().err

    return run


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shapes.names())
def test_shipped_files_are_right(name: str) -> None:
    found = shapes.load(name)
    for ranks in (1, 2, 4):
        for shape in found.shapes:
            shape.check_ranks(ranks)
        for training in found.trainings:
            training.settings(ranks)
    for subject in found.subjects:
        check_name(subject)


TINY = "{name: a, model: tiny}"
GOOD = "{name: a, tokens: 8, hidden: 8, experts: 8, top_k: 2}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("samples: 3", "at least one shape or training"),
        ("shape: []", "unknown key 'shape': the keys are shapes, subjects, warmup"),
        ("shapes: 3", "must be a list of mappings"),
        ("shapes: [{name: a, tokens: 8, model: huge}]", "no model configuration 'huge'"),
        ("trainings: [{name: a}]", "training a: no model"),
        (f"shapes: [{GOOD}]\ntrainings: [{TINY}]", "a different name"),
        (f"trainings: [{TINY[:-1]}, steps: 3}}]", "training a: unknown key 'steps'"),
        (f"trainings: [{TINY[:-1]}, routing: even}}]", "routing 'even': one of natural, balanced"),
        (f"trainings: [{TINY[:-1]}, on_ranks: 4}}]", "on_ranks 4: must be numbers of ranks"),
        (f"trainings: [{TINY[:-1]}, changes: {{global-batch-size: 4}}}}]", "leave it out"),
        (f"shapes: [{GOOD[:-1]}, dtype: float64}}]", "dtype 'float64': one of bfloat16, float16"),
        (f"shapes: [{GOOD.replace('top_k: 2', 'top_k: 9')}]", "a token picks distinct experts"),
        (f"shapes: [{GOOD[:-1]}, max_recv_rows: 8}}]\nsubjects: [alltoall]", "would ignore"),
        (f"shapes: [{GOOD}]\nsubjects: nothing", "subjects must be a list"),
        (f"shapes: [{GOOD}]\nsamples: 0", "samples 0"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, refused, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    said = refused("--config", str(path), "--device", "cpu", "--out", str(tmp_path))
    assert message in said
    assert "bad.yaml" in said


# --- arguments -----------------------------------------------------------------------------------


LL, CPU = "--mode ll --device cpu", "a CPU has no CUDA graphs: leave"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--smoke --config models", "leave --config models out"),
        ("--smoke --device cuda", "leave --device cuda out"),
        ("--smoke --ranks 3", "8 experts cannot be divided over 3 ranks"),
        ("--smoke --ranks 0", "--ranks 0: must be at least 1"),
        ("--config models --subjects train:alltoall", "give --config training"),
        ("--config training --subjects reference", "training has trainings only"),
        ("--device cpu --subjects train:alltoall", "modules, which need a GPU"),
        ("--device cuda", "no GPU is visible"),
        ("--smoke --trace", "--trace is for trainings on GPUs"),
        ("--smoke --shape smoke", "--shape smoke: the file has smoke-fp32; smoke-bf16; smoke-tr"),
        ("--device cpu", "models takes hours on a CPU: give --smoke"),
        ("--smoke --ranks 16 --subjects train:alltoall", "training smoke-train: 8 experts cannot"),
        ("--smoke --max-recv-rows 64 --subjects layer:ncclep:native", "no subject has a fixed"),
        # Of what has no low-latency mode, or what that would ignore.
        (f"{LL} --subjects alltoall", "graphs can hold: native, reference, nccl_ep_library,"),
        (f"{LL} --config smoke", "alignment 16: low-latency mode has no expert blocks"),
        (f"{LL} --model-network", "leave --device, --mode out"),
    ],
)
def test_refusals(tmp_path: Path, refused, words: str, message: str) -> None:
    assert message in refused(*words.split(), "--out", str(tmp_path))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("native2", "unknown subject 'native2': there are"),
        ("reference,reference", "named twice"),
        ("reference@8", "would ignore a number of SMs"),
        ("train:ncclep:native@24", "would ignore a number of SMs"),
        ("nccl_ep@x", "write a number of SMs after the @"),
        ("nccl_ep_library:nccl-extensions+pull_push", "unknown subject"),
        ("layer:native", "'layer:native': write layer:DISPATCHER["),
        ("layer:ncclep:native:grouped:full_iteration", f"{CPU} full_iteration out"),
        ("layer:alltoall:grouped", "layer:ncclep:ENGINE:grouped"),
        ("layer:alltoall:full_iteration", "write no graphs"),
        ("layer:alltoall:lora8", "write layer:DISPATCHER["),
        ("train:alltoall:frozen", "write train:DISPATCHER["),
        ("train:alltoall:static", "dispatcher can be static"),
        ("train:alltoall:full_iteration", "write partial_graphs"),
        ("train:ncclep:native:full_iteration", "write grouped:full_it"),
        ("train:ncclep:native:grouped:static:full_iteration", "implies static: leave it out"),
        ("train:alltoall:optimizer_graph", f"{CPU} optimizer_graph out"),
        ("train:alltoall:router_fusion", "fused router needs a GPU: leave router_fusion out"),
    ],
)
def test_subjects_that_are_refused(refused, names: str, message: str) -> None:
    assert message in refused("--smoke", "--subjects", names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--smoke --subjects layer:alltoall", "`python -m benchmarks` in a checkout"),
        ("--smoke --subjects reference@8", "would ignore a number of SMs"),
        (f"{LL} --subjects nccl_ep", "graphs can hold: native, reference"),
        ("--smoke --model-network", "--model-network; --model-network and --max-recv-rows are"),
    ],
)
def test_what_the_installed_command_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    try:
        status = cli.main(["bench", *words.split(), "--out", str(tmp_path)])
    except SystemExit as end:  # of the parser
        status = int(str(end.code))
    assert status == 2
    assert message in capsys.readouterr().err


def test_another_number_of_ranks_than_torchruns_is_refused(
    refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "--ranks 2, but torchrun started 4" in refused("--smoke", "--ranks", "2")


def parsed(*words: str) -> argparse.Namespace:
    return benchmarks.make_parser().parse_args(words)


def make(config: str, **given: object) -> Job:
    options = (f"--{name.replace('_', '-')}={value}" for name, value in given.items())
    return Job.make(parsed("--config", config, *options), 2, "cpu")


def test_what_the_command_line_names_wins_over_the_file() -> None:
    """The earlier of two `--subjects` was dropped without a word."""
    assert make("smoke").subjects == shapes.load("smoke").subjects
    assert make("smoke").required == ()
    job = make("smoke", subjects="reference", samples=7, warmup=0)
    assert (job.subjects, job.required) == (("reference",), ("reference",))
    assert (job.samples, job.warmup) == (7, 0)
    assert make("models").subjects == tuple(default_names())
    assert make("models").timeout_s == 60
    args = parsed("--config", "smoke", "--subjects", "reference,alltoall", "--subjects=native@2")
    assert Job.make(args, 2, "cpu").subjects == ("reference", "alltoall", "native@2")
    # On GPUs low-latency mode is measured in graphs, which engines that wait cannot be in.
    assert Job.make(parsed("--mode", "ll"), 2, "cuda").subjects == ("native", "nccl_ep_library")
    static = "layer:ncclep:native:grouped:static"
    assert make("smoke", subjects=f"reference,{static}").max_recv_rows == "1.5x"
    assert make("smoke", subjects=static, max_recv_rows="worst").max_recv_rows == "worst"
    assert make("smoke", subjects="layer:ncclep:native:grouped").max_recv_rows is None


def test_a_variable_that_replaces_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it `train:alltoall`, to which all trainings are compared, was `ncclep`."""
    monkeypatch.setenv("NCCLEP_IN_PLACE_OF", "alltoall")
    assert make("smoke", subjects="reference").subjects == ("reference",)
    with pytest.raises(InputError, match="changes what is measured: unset it"):
        make("smoke", subjects="reference,alltoall")


def test_subjects_that_train_have_shapes_of_their_own() -> None:
    train = "train:alltoall,train:ncclep:reference"
    job = make("smoke", subjects=f"reference,{train}")
    assert (job.measured, ",".join(job.trained)) == (("reference",), train)
    assert [[shape.name for shape in batch] for batch in job.batches()] == [
        ["smoke-fp32", "smoke-bf16"], ["smoke-train"],
    ]  # fmt: skip
    assert make("smoke", subjects=train).batches() == [[], list(job.trainings)]
    assert make("smoke", subjects="reference").trainings == ()
    one = make("smoke", subjects="reference", shape="smoke-bf16")
    assert [[shape.name for shape in batch] for batch in one.batches()] == [["smoke-bf16"]]
    shape = shapes.TrainingShape("a", "tiny", {"num-layers": 3}, {2: {"num-layers": 2}})
    assert shape.settings(2)["num-layers"] == 2
    with pytest.raises(InputError, match="4 ranks: its sizes are for 2: give --ranks"):
        shape.settings(4)


def test_variants() -> None:
    ours, graph = "ncclep:native", "full_iteration"
    for name, expected in (
        ("alltoall_fused:partial_graphs", (False, False, False, "partial_graphs", False)),
        (f"{ours}:grouped:static", (True, True, True, None, False)),
        # Graphs need a fixed number of rows.
        (f"{ours}:grouped:{graph}", (True, True, True, graph, False)),
        # These end before the dispatch: exact mode, as most people would use them.
        (f"{ours}:partial_graphs", (True, False, False, "partial_graphs", False)),
        (f"{ours}:grouped:{graph}:optimizer_graph", (True, True, True, graph, True)),
    ):
        v = known_variant(f"train:{name}")
        assert (v.ours, v.grouped, v.static, v.graphs, v.captures_optimizer) == expected, name
    eager = v.without_graphs()
    # Adam that can be captured rounds in another way: what is compared with must be the same.
    assert (eager.graphs, eager.captures_optimizer, eager.optimizer_graph) == (None, False, True)
    assert (eager.static, eager.captured) == (True, None)
    assert known_variant("train:ncclep:nccl_ep").dispatcher.engine == "nccl_ep"
    fused = known_variant("train:alltoall_fused:router_fusion:partial_graphs")
    assert (fused.router_fusion, fused.graphs) == (True, "partial_graphs")
    adapted = known_variant("layer:ncclep:native:grouped:lora32:full_iteration")
    assert (adapted.frozen, adapted.lora_rank, adapted.static) == (True, 32, True)
    frozen = known_variant("layer:alltoall:frozen")
    assert (frozen.frozen, frozen.lora_rank, frozen.ours) == (True, 0, False)


def test_a_run_that_is_stopped_leaves_the_shapes_before(tmp_path: Path) -> None:
    shape = shapes.load("smoke").shapes[0]

    def measured() -> Iterator[Measured]:
        yield ShapeResult.of(shape)
        raise KeyboardInterrupt

    job = Job.make(parsed("--out", str(tmp_path)), 2, "cpu")
    with pytest.raises(KeyboardInterrupt):
        command._write(job, measured(), "benchmarks", table.render)
    (found,) = json.loads((tmp_path / "bench.json").read_text())["shapes"]
    assert found["shape"]["name"] == shape.name
    assert shape.name in (tmp_path / "bench.txt").read_text()
