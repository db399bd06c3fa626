"""The table and the plot: every number is the JSON's."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from sample_result import SHAPE, sample_result, training_settings

from benchmarks import plot
from benchmarks.flops import flops_per_token
from benchmarks.table import render
from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.benchmark.result import ShapeResult
from megatron_ncclep.benchmark.shapes import Workload, tables_of
from megatron_ncclep.training.settings import Settings


def row(text: str, start: str) -> list[str]:
    """The cells of the first line that starts with `start`; two blanks end a cell."""
    line = next(line for line in text.splitlines() if line.startswith(f"{start}  "))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_numbers_of_the_table() -> None:
    """159 MB at 350 GB/s take 454.3 us; 500 us make 318 GB/s, 91 % of it; 212 logical MB, 424."""
    text = render(sample_result())
    assert row(text, "native@24") == [
        "native@24", "24", "20", "500", "530", "510", "540", "2100", "0.67",
        "318 (91%)", "300 (86%)", "424/400", "1.2+9.8", "ok",
    ]  # fmt: skip
    assert row(text, "nccl_ep (library)")[7:9] == ["3130", "1.00"]
    assert row(text, "limit")[:7] == ["limit", "-", "454", "454", "454", "454", "1817"]
    assert row(text, "alltoall") == ["alltoall", "5001", "4002", "9003", "1.2+9.8", "ok"]
    head = row(text, "whole MoELayer, F 2048; static: 1.5x rows")[1:]
    assert head == ["forward", "backward", "sum", "GB held", "check"]
    graph = "layer:ncclep:native:grouped:full_iteration"  # has no passes, and one time
    assert row(text, graph) == [graph, "-", "-", "12005", "1.2+9.8", "ok"]
    assert row(text, "layer:alltoall")[1:] == ["9003", "16004", "25007", "1.2+9.8", "ok"]
    assert "flex_deepep: not measured: ImportError: no DeepEP" in text
    assert "push 350 GB/s (96 SMs), pull 318 GB/s (24 SMs)" in text
    assert "494-506" in text  # 10th to 90th percentile of 492, 496, 500, 504, 508
    # 40000 rows of 7168 by 3 x 2048 at 790 TFLOP/s take 4.459 ms, and twice that.
    assert row(text, "experts alone, F 2048, 40000 rows")[1:] == [
        "forward", "backward", "sum", "of Megatron's", "GB held", "check",
    ]  # fmt: skip
    assert row(text, "experts:megatron")[1:5] == ["6003", "12004", "18007", "1.00"]
    assert row(text, "experts:grouped")[1:5] == ["5003", "10004", "15007", "0.83"]
    limits = [line.split() for line in text.splitlines() if line.startswith("limit ")]
    assert limits[-2:] == [["limit", "4459", "8919", "13378"]] * 2
    assert "have no plan" not in text
    # DeepEP's has no plan of its own, which a column with nothing does not explain.
    result = sample_result()
    deepep = result["shapes"][0]["subjects"][1]
    deepep |= {"name": "deepep", "kind": "deepep"}
    del deepep["passes"]["plan"]
    text = render(result)
    assert row(text, "deepep")[1:4] == ["16", "-", "800"]
    assert "have no plan" in text


def test_time_of_the_products() -> None:
    """Rank 1 has most rows: two of top-1's three tokens, with 2 x 3 products of 64 x 16 each."""
    case = Case("a", (2, 1), 2, top_k=1, hidden=64, dtype=torch.bfloat16)
    work = Workload(case, 0, ffn_hidden_size=16)
    work.tables = tables_of([torch.tensor([[0], [1]]), torch.tensor([[1]])], 2, alignment=16)
    shape = ShapeResult.of(SHAPE)
    shape.set_products(work)
    assert (shape.expert_rows, shape.products_us) == (2, None)  # no GPU
    shape.on_gpu = True
    shape.set_products(work)
    forward = 2 * 2 * 3 * 64 * 16 / 790e12 * 1e6
    assert shape.products_us == pytest.approx({"forward": forward, "backward": 2 * forward})
    work.ffn_hidden_size = None
    other = ShapeResult.of(SHAPE)
    other.set_products(work)
    assert other.expert_rows is None


def test_ranks_that_share_a_gpu_have_no_ratios() -> None:
    result = sample_result()
    ratios = {"of lib.", "speed", "limit", "of Megatron's"}
    assert ratios <= set(render(result).replace("  ", "\n").split("\n"))
    result["machine"]["ranks_per_gpu"] = 4
    text = render(result)
    assert "RANKS SHARE A GPU, up to 4 of them" in text
    assert row(text, "native@24")[:7] == ["native@24", "24", "20", "500", "530", "510", "540"]
    tables = text.partition("Times are microseconds")[0].partition("NVIDIA H")[2]
    for ratio in (*ratios - {"speed", "limit"}, "disp GB/s", "(91%)", "  speed", "\nlimit"):
        assert ratio not in tables, ratio


def test_the_yardstick_is_the_quickest_of_nvidias() -> None:
    """With the longest title that there is, in the longest form that a number has."""
    result = sample_result()
    subjects = result["shapes"][0]["subjects"]
    quick = copy.deepcopy(subjects[1])
    quick["name"] = "nccl_ep_library:transformer-engine+pull_push+fixed_order@64"
    quick["sum_us"], quick["sms"] = 1500.0, "64"
    subjects.insert(2, quick)
    text = render(result)
    assert row(text, "native@24")[7:9] == ["2100", "1.40"]
    assert row(text, "nccl_ep (library)")[7:9] == ["3130", "2.09"]
    assert row(text, "lib:TE+pull-push+fixed@64")[7:9] == ["1500", "1.00"]


def test_numbers_of_training_steps() -> None:
    """160 and 164 ms, 60 of them in kernels; 8192 tokens in 65.5 ms are 125,069 a second."""
    result = sample_result()
    text = render(result)
    assert row(text, "training steps")[1:] == [
        "ms", "turns", "tokens/s", "TFLOP/s", "speed", "busy", "host", "GB held", "loss", "apart",
        "layer", "check",
    ]  # fmt: skip
    of_one_token = flops_per_token(Settings(training_settings()), 384)
    assert row(text, "alltoall_fused") == [
        "alltoall_fused", "162.0", "160.0 164.0", "50,568", f"{of_one_token * 50568e-12:.1f}",
        "1.00", "37%", "120.0", "41.0+0.3",
        "5.2500", "0.002", "0.004", "ok",
    ]  # fmt: skip
    graph = row(text, "ncclep:native:grouped:full_iteration")
    assert graph[1:4] == ["65.5", "65.0 66.0", "125,069"]
    assert graph[5:7] == ["2.47", "92%"]
    assert row(text, "ms of GPU time")[1:] == [
        "attention", "GEMM", "dispatch", "combine", "rest", "busy", "idle",
    ]  # fmt: skip
    *_, last = [line for line in text.splitlines() if line.startswith("ncclep:native:grouped")]
    assert last.split()[1:] == ["9.00", "40.0", "3.00", "2.00", "6.00", "60.0", "5.50"]
    assert "static: 1.5x received rows" in " ".join(text.split())
    # They were compared with the first subject: one that careful users have left behind.
    training = result["trainings"][0]
    careful = copy.deepcopy(training["subjects"][0]) | {
        "name": "train:alltoall_fused:router_fusion"
    }
    careful["step"]["median_us"] = 98.25e3
    training["subjects"].append(careful)
    training["load"], training["shape"]["published"] = 1.5, "299 on 16 GPUs"
    text = render(result)
    head = " ".join(text.split())
    assert "natural routing, rows of the busiest rank 1.50 of the mean" in head
    assert "published: 299 on 16 GPUs; speed: times as fast as alltoall_fused:router_fus" in head
    assert row(text, "alltoall_fused:router_fusion")[5] == "1.00"
    assert row(text, "ncclep:native:grouped:full_iteration")[5] == "1.50"


def test_failures() -> None:
    """Wrong subjects stand out; one that cannot run is a failure only when it was asked for."""
    result = sample_result()
    assert result["failures"] == []
    (failure,) = sample_result(required=("flex_deepep", "alltoall"))["failures"]
    assert "flex_deepep was requested and cannot run: ImportError: no DeepEP" in failure
    subject, training = result["shapes"][0]["subjects"][0], result["trainings"][0]["subjects"][1]
    reason = "[bold]rows[3, 4][/bold] of :full_moon:"  # not markup
    subject |= {"status": "wrong", "reason": reason, "passes": {}}
    training |= {"status": "wrong", "reason": "step 2: loss ...", "step": {}}
    text = render(result)
    assert f"native@24: WRONG: {reason}" in text
    assert "train:ncclep:native:grouped:full_iteration: WRONG: step 2: loss ..." in text
    assert not any(line.startswith("ncclep:native:grouped") for line in text.splitlines())
    assert not any(line.startswith("native@24  ") for line in text.splitlines())


# --- plot ----------------------------------------------------------------------------------------


def test_plot_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, other = tmp_path / "bench.json", tmp_path / "folder" / "other.png"
    source.write_text(json.dumps(sample_result()))
    for words, plotted in (
        ([], tmp_path / "bench.png"), (["-o", str(other), "--subjects", "alltoall"], other)
    ):  # fmt: skip
        assert plot.main([str(source), *words]) == 0
        assert plotted.read_bytes().startswith(b"\x89PNG")
        assert capsys.readouterr().out.strip() == str(plotted)
    for content, message in (
        ("{", "not JSON"), ("[]", "not a result of `ncclep bench`"),
        ('{"format": 99}', "not a result of `ncclep bench`"),
        ('{"format": 1, "shapes": []}', "holds no times"),
    ):  # fmt: skip
        source.write_text(content)
        assert plot.main([str(source)]) == 2
        assert message in capsys.readouterr().err
    source.unlink()
    assert plot.main([str(source)]) == 2
    assert "give the bench.json of a run" in capsys.readouterr().err


def test_bars_are_the_jsons_times(tmp_path: Path) -> None:
    from matplotlib.axes import Axes

    with (
        mock.patch.object(Axes, "barh", autospec=True, side_effect=Axes.barh) as barh,
        mock.patch.object(Axes, "axvline", autospec=True, side_effect=Axes.axvline) as axvline,
    ):
        plot.draw(sample_result(), tmp_path / "x.png")
    bars = [(call.kwargs["left"], call.args[2]) for call in barh.call_args_list]
    lines = [call.args[1] for call in axvline.call_args_list]
    rows = [(20, 500, 530, 510, 540), (140, 800, 700, 720, 770), (5001, 4002)]
    rows += [(12005,), (9003, 16004)]
    rows += [(6003, 12004), (5003, 10004)]
    rows += [(9, 40, 3, 2, 6, 102), (9, 40, 3, 2, 6, 5.5)]  # milliseconds, with idle
    # Each piece of a row begins where the one before it ends.
    assert bars == [(sum(row[:i]), width) for row in rows for i, width in enumerate(row)]
    assert lines == pytest.approx([4 * 159e6 / 350e3])  # not in those of layers and experts
