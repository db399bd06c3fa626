"""The model of several nodes: its counts against routings that are drawn and numbers by hand."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
import torch

from megatron_ncclep.benchmark import command
from megatron_ncclep.benchmark.network_model import NetworkModel, table
from megatron_ncclep.benchmark.workload import tables_of, wire_rows
from megatron_ncclep.errors import InputError

MODEL = NetworkModel()


@pytest.mark.parametrize(("nodes", "ms", "flat_ms"), [(2, 1.3, 5.1), (4, 3.5, 7.7), (8, 5.9, 8.9)])
def test_rows_once_for_each_node(nodes: int, ms: float, flat_ms: float) -> None:
    """What was worked out by hand when the engine was planned: 46 GB/s, T=4096, H=7168, K=8."""
    nic = 1e9 * MODEL.nic_gb_s
    assert round(1e3 * MODEL.crossing_bytes(nodes) / nic, 1) == ms
    assert round(1e3 * MODEL.flat_bytes(nodes) / nic, 1) == flat_ms


def test_the_counts_are_those_of_random_routings() -> None:
    """Nodes as if each were one rank, and a node's ranks as ranks of their own."""
    tokens, generator = 4000, torch.Generator().manual_seed(0)
    model = dataclasses.replace(
        MODEL, num_tokens=tokens, row_bytes=1, num_experts=32, top_k=3, ranks_on_each=2
    )
    scores = torch.rand(4, tokens, 32, generator=generator)
    picks = list(scores.topk(3, dim=2).indices)
    # The busiest of four; 12000 draws of which a third or more cross differ by about 1 %.
    crossing = wire_rows(tables_of(picks, 32), [tokens] * 4)
    assert crossing == pytest.approx(model.crossing_bytes(4), rel=0.03)
    needs = torch.stack([((picks[0] // 4) == rank).any(dim=1) for rank in range(8)])
    # Over a rail come all four nodes' tokens; one of a node's two ranks is another one.
    assert 4 * float(needs[1].sum()) == pytest.approx(model.inside_bytes(4), rel=0.06)
    flat = float((picks[0] >= 8).sum())
    assert flat == pytest.approx(model.flat_bytes(4), rel=0.03)


def test_chunks_hide_the_shorter_part() -> None:
    crossing = MODEL.crossing_bytes(4) / (1e9 * MODEL.nic_gb_s)
    inside = MODEL.inside_bytes(4) / (1e9 * MODEL.nvlink_gb_s)
    assert MODEL.seconds(4) == pytest.approx(crossing + inside)
    many = dataclasses.replace(MODEL, chunks=1000)
    assert many.seconds(4) == pytest.approx(max(crossing, inside), rel=0.01)


def test_the_table() -> None:
    text = table(MODEL)
    assert text.startswith("A model, not a measurement")
    # 256 experts are at most 32 nodes of 8.
    assert [line.split()[0] for line in text.splitlines()[-5:]] == ["2", "4", "8", "16", "32"]
    two = next(line.split() for line in text.splitlines() if line.startswith("2 "))
    assert two[1] == "16"
    assert (two[3], two[8]) == ("1.27", "5.11")


def bench(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args(words))


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--model-network") == 0
    assert capsys.readouterr().out == table(MODEL) + "\n"
    assert bench("--model-network", "nic_gb_s=92,num_experts=512") == 0
    printed = capsys.readouterr().out
    assert "92 GB/s" in printed
    assert printed.splitlines()[-1].split()[:2] == ["64", "512"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model-network", "nics=8"], "nics=8: the names are num_tokens, row_bytes"),
        (["--model-network", "top_k=two"], "'two' is no number"),
        (["--model-network", "--subjects", "native"], "leave --subjects out"),
        (["--model-network", "--smoke"], "leave --smoke out"),
    ],
)
def test_what_the_command_refuses(words: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench(*words)


@pytest.mark.parametrize("change", [{"nic_gb_s": 0}, {"chunks": -1}, {"top_k": 300}])
def test_what_cannot_be_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(InputError):
        dataclasses.replace(MODEL, **change)
