"""Wrong input is refused in one line before any rank starts; settings and text are read right."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from small_job import MODEL, ROOT, TIMEOUT_S, environment, write_text

from benchmarks.flops import flops_per_token
from megatron_ncclep import cli
from megatron_ncclep.cli import config_files
from megatron_ncclep.errors import InputError
from megatron_ncclep.training import corpus
from megatron_ncclep.training.command import NEEDED
from megatron_ncclep.training.model import transformer_config
from megatron_ncclep.training.settings import Settings, layer_pattern


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The message with which `ncclep train` refuses `arguments`."""
    try:
        status = cli.main(["train", *map(str, arguments)])
    except SystemExit as end:  # of the parser
        status = int(str(end.code))
    told = capsys.readouterr().err
    assert (status, told.count("\n")) == (2, 1), told
    return str(told)


@pytest.fixture
def out(tmp_path: Path) -> tuple[str, str]:
    return ("--out", str(tmp_path / "out"))


@pytest.mark.parametrize(
    "gone", [("psutil",), ("matplotlib",), NEEDED], ids=["psutil", "plot", "all"]
)
def test_without_the_extra_nothing_starts(gone: tuple[str, ...], tmp_path: Path):
    """After a plain `pip install` every rank printed a traceback about rich; with rich and without
    matplotlib the whole training ran, and then failed.
    """
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({gone}))\n"
        "from megatron_ncclep import cli\n"
        "sys.exit(cli.main(['train', '--out', 'out', '--ranks', '2']))"
    )
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    for more, lines in (({}, 1), (torchrun, 0)):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env={**environment(), **more},
            capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == lines
        if lines:
            assert f"not installed: {', '.join(gone)};" in done.stderr
            assert "pip install 'megatron-ncclep[train]'" in done.stderr
        assert not list(tmp_path.iterdir())
    extra = (ROOT / "pyproject.toml").read_text().partition("\ntrain = [")[2].partition("\n]")[0]
    for name in NEEDED:
        assert f'"{name.replace(".", "-")}>=' in extra, f"{name} is not in the extra [train]"


def test_missing_empty_and_short_text(
    arguments: tuple[str, ...], out: tuple[str, str], tmp_path: Path, capsys
):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    short = write_text(tmp_path / "text.txt", num_bytes=200)
    os.mkfifo(tmp_path / "pipe")
    for text, message in (
        ("/dev/null", "/dev/null: it is a device or a pipe"),
        (tmp_path / "pipe", "pipe: it is a device or a pipe: write its text to a file"),
        ("/no/such/place", "/no/such/place: no such file or folder"),
        (tmp_path / "empty.txt", "there is no text"),
        (tmp_path / "folder", "there is no text"),
        (short, "validation part has"),
        (short, "too few for seq-length 32"),
    ):
        assert message in refusal(capsys, *arguments[:2], *out, "--text", text)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--dispatcher alltoall --ncclep-alignment 16", "--ncclep-alignment has no effect"),
        ("--ncclep-engine nativ", "--ncclep-engine: invalid choice: 'nativ' (choose from"),
        ("--ncclep-max-recv-rows 1.5", "max_recv_rows '1.5': must be"),
        ("--ncclep-timeout-s -1", "timeout_s -1.0: must be"),
        ("--dispatcher alltoall --compare alltoall", "same as --dispatcher"),
        ("--model no-such-model", "no model configuration 'no-such-model'"),
        ("--set num-layerz=2", "unknown key 'num-layerz': did you mean num-layers?"),
        ("--set window-size=2", "`ncclep train` supports these arguments of Megatron-LM: adam-"),
        ("--set num-layers", "must be NAME=VALUE"),
        # The first one was dropped without a word, as was all of the first --set or --text.
        ("--set lr=0.1 --set lr=0.2", "--set lr=0.2: lr is set twice"),
        ("--set num-layers=two --set lr=0.1", "num-layers: 'two' is str, must be int"),
        # An unset variable: all files here were the text, and folders here were removed.
        ("--text ''", "--text '': name a file or a folder"),
        ("--out ''", "--out is empty: name a folder"),
        # Tracebacks of all ranks, half a minute later, in the router or the attention.
        ("--set moe-router-topk=9", "moe-router-topk 9 is more than num-experts 8"),
        (
            "--set moe-router-num-groups=4 moe-router-group-topk=1 moe-router-topk=4",
            "moe-router-group-topk 1 of 4 groups have 2",
        ),
        ("--set moe-router-num-groups=3", "moe-router-num-groups 3 must divide num-experts 8"),
        ("--set kv-channels=7", "rotates pairs, and a head has 7 channels"),
        (
            "--set group-query-attention=true num-query-groups=3",
            "num-query-groups 3 must divide num-attention-heads 2",
        ),
        ("--set hidden-dropout=1.5", "hidden-dropout 1.5: must be in [0, 1)"),
        ("--set min-lr=1.0", "min-lr 1.0 is more than lr 0.005"),
        ("--set moe-router-load-balancing-type=all", "must be one of ('aux_loss', 'seq_aux"),
        ("--set num-layers=two", "num-layers: 'two' is str, must be int"),
        ("--set seq-length=64", "more than max-position-embeddings 32"),
        ("--set num-experts=7", "num-experts 7 cannot be divided among 2"),
        ("--set global-batch-size=6", "must be a multiple of micro-batch-size 2 x 2 ranks = 4"),
        ("--set moe-layer-freq=([0]*3)", "names 3 layers, num-layers is 2"),
        ("--set q-lora-rank=8", "needs multi-latent-attention"),
        ("--set num-query-groups=1", "need each other"),
        ("--steps 0", "train-iters 0: must be from 1 to"),
        ("--steps 3 --set train-iters=4", "contradict"),
        ("--exit-at-step 0", "--exit-at-step 0"),
        ("--expert-parallel 0", "--expert-parallel 0: must be at least 1"),
        ("--expert-parallel 3", "must divide the 2 ranks"),
        ("--resume --overwrite", "contradict"),
    ],
)
def test_wrong_arguments(
    arguments: tuple[str, ...], out: tuple[str, str], capsys, extra: str, message: str
):
    assert message in refusal(capsys, *arguments, *out, *shlex.split(extra))
    assert not Path(out[1], "log.jsonl").exists()


def test_a_dispatcher_that_a_variable_replaces(
    arguments: tuple[str, ...], out: tuple[str, str], capsys, monkeypatch: pytest.MonkeyPatch
):
    """A comparison with `alltoall` was one of `ncclep` with itself, under both names."""
    monkeypatch.setenv("NCCLEP_IN_PLACE_OF", "alltoall")
    for asked in ("--dispatcher alltoall", "--compare alltoall"):
        message = refusal(capsys, *arguments, *out, *asked.split())
        assert "NCCLEP_IN_PLACE_OF=alltoall puts ncclep in the place of alltoall" in message


def test_models_that_are_refused(tmp_path: Path):
    """Megatron's checks of its own configuration were tracebacks of all ranks."""
    model = tmp_path / "model.yaml"
    model.write_text(yaml.safe_dump({k: v for k, v in MODEL.items() if k != "lr"}))
    with pytest.raises(InputError, match="'lr' is missing"):
        Settings.load(str(model), {})
    model.write_text(yaml.safe_dump(MODEL | {"moe-router-group-topk": 2}))
    with pytest.raises(InputError, match=r"Megatron-Core refuses the model.s settings: .*groups"):
        transformer_config(Settings.load(str(model), {}), "alltoall", 1, None)
    for text, pattern in (("1", [1, 1, 1]), ("2", [1, 0, 1]), ("([0]*1+[1]*2)", [0, 1, 1])):
        assert layer_pattern(text, 3) == pattern
    with pytest.raises(InputError, match="must be a number or a sum"):
        layer_pattern("__import__('os')", 2)


def test_overwrite_leaves_other_files_alone(
    arguments: tuple[str, ...], out: tuple[str, str], capsys
):
    """It removes a run's results before it finds the text missing, and nothing else."""
    folder = Path(out[1])
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "log.jsonl").touch()
    (folder / "notes.txt").write_text("mine")
    refusal(capsys, *arguments, *out, "--overwrite", "--text", "/no/such/place")
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", sorted(config_files.names("model")))
def test_shipped_models(name: str):
    """TransformerConfig takes every value; tests/test_render.py asks Megatron-LM's parser."""
    if name == "gpt-oss-120b":  # `ncclep train` has no window attention, no YaRN and no sinks
        with pytest.raises(InputError, match="gpt-oss-120b: unknown key 'window-size'"):
            Settings.load(name, {})
        return
    settings = Settings.load(name, {})
    config = transformer_config(settings, "alltoall", 1, None)
    assert config.num_layers == settings["num-layers"]
    assert config.num_moe_experts == settings["num-experts"]
    assert config.gated_linear_unit == settings["swiglu"]
    if settings["multi-latent-attention"]:  # Megatron-Core's own default would be another model
        assert config.q_lora_rank == settings.values.get("q-lora-rank")


@pytest.mark.since("0.19.2")
@pytest.mark.parametrize(
    "name", ["deepseek-v3", "mixtral-8x7b", "moonlight-16b-a3b", "qwen3-30b-a3b", "tiny"]
)
def test_flops_are_counted_as_megatron_lm_does(name: str):
    from megatron.training import training

    settings = Settings.load(name, {})
    fields = {key.replace("-", "_"): value for key, value in settings.values.items()}
    # It asks for much that these models do not have.
    missing = {"__getattr__": lambda args, name: None}
    args = type("Args", (), missing | fields | {"padded_vocab_size": 1000})()
    args.kv_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    args.moe_layer_freq = layer_pattern(args.moe_layer_freq, args.num_layers)
    of_one_sample = training.num_floating_point_operations(args, 1)
    assert flops_per_token(settings, 1000) * args.seq_length == pytest.approx(of_one_sample)


def test_text_without_tests_and_hidden_files_in_order(tmp_path: Path):
    library = corpus.standard_library()
    assert {"argparse.py", "typing.py"} <= {path.name for path in library}
    assert not any("test" in path.parts for path in library)
    assert sum(path.stat().st_size for path in library) > 1_000_000
    for name in ("b.txt", "a/z.txt", ".hidden/c.txt", "a/.d.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    files = corpus.text_files([str(tmp_path)])
    assert [path.relative_to(tmp_path).as_posix() for path in files] == ["a/z.txt", "b.txt"]


def test_corpus_is_reused_until_the_text_changes(tmp_path: Path):
    """Old archives have file names that are not UTF-8: with one in the folder of --text, training
    ended in a UnicodeEncodeError of the first rank.
    """
    text = write_text(tmp_path / os.fsdecode(b"caf\xe9.txt"))
    first = corpus.prepare([str(text)], tmp_path / "data")
    written = (tmp_path / "data" / "text.bin").stat().st_mtime_ns
    assert corpus.prepare([str(text)], tmp_path / "data") == first
    assert (tmp_path / "data" / "text.bin").stat().st_mtime_ns == written
    text.write_text("x" * 5000)
    second = corpus.prepare([str(text)], tmp_path / "data")
    assert second.fingerprint != first.fingerprint
    assert second.num_train_tokens < first.num_train_tokens


def test_samples_of_a_step_do_not_depend_on_the_ranks():
    import torch

    from megatron_ncclep.training.data import batches

    class Numbers:
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            names = ("tokens", "labels", "loss_mask", "position_ids")
            return {name: torch.tensor([index]) for name in names}

    def samples(num_ranks: int, micro_batch_size: int) -> list[int]:
        settings = Settings({"global-batch-size": 24, "micro-batch-size": micro_batch_size})
        return [
            int(value)
            for rank in range(num_ranks)
            for batch in batches(Numbers(), settings, 4, rank, num_ranks, torch.device("cpu"))
            for value in batch["tokens"]
        ]

    for num_ranks, micro_batch_size in ((1, 1), (2, 3), (4, 2), (3, 8)):
        assert sorted(samples(num_ranks, micro_batch_size)) == list(range(96, 120))
