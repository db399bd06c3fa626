"""Training steps: what trains alike passes the check, and what does not is found."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rank_pool import RankContext
from stand_ins import setting_of

from benchmarks import training_model
from benchmarks.catalogue import known_variant
from benchmarks.layer_model import initialize
from benchmarks.profiles import Interval, kernel_kind, time_shares
from benchmarks.result import KINDS
from benchmarks.routers import even_experts
from benchmarks.shapes import load
from benchmarks.training import bits_problem, curve_problem
from benchmarks.training_model import (
    EAGER_STEPS,
    STAND_IN,
    Curve,
    SubjectModel,
    load_text,
    provide_fusion,
    wrapping_stream,
)
from megatron_ncclep.benchmark.ranks import Ranks

STEPS = 3


# --- routing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "groups", "of_token"),
    [(128, 8, 2, 1, 1), (128, 64, 6, 1, 1), (512, 256, 8, 8, 4), (30, 8, 4, 1, 1)],
)
def test_even_experts(tokens: int, experts: int, top_k: int, groups: int, of_token: int) -> None:
    found = even_experts(tokens, experts, top_k, groups, of_token, seed=3)
    assert found.shape == (tokens, top_k)
    assert all(len(set(row)) == top_k for row in found.tolist())
    assert all(len(set(row)) <= of_token for row in (found // (experts // groups)).tolist())
    whole = found[: tokens // experts * experts]
    assert whole.flatten().bincount(minlength=experts).unique().numel() == 1
    assert torch.equal(found, even_experts(tokens, experts, top_k, groups, of_token, seed=3))
    assert not torch.equal(found, even_experts(tokens, experts, top_k, groups, of_token, seed=4))


class Models:
    """Makes models of the smoke shape."""

    def __init__(self, ctx: RankContext, folder: Path, **changes: Any) -> None:
        (shape,) = load("smoke").trainings
        shape = dataclasses.replace(shape, changes=shape.changes | changes)
        self.settings, self.ranks = shape.settings(ctx.num_ranks), Ranks(ctx, 60, "test")
        initialize(self.ranks.setting)
        self.text = load_text(self.settings, self.ranks, folder, 2 * STEPS, vocab_size=1000)

    def make(self, name: str, first_batch: int = 0, **how: Any) -> SubjectModel:
        text = dataclasses.replace(self.text, steps=self.text.steps[first_batch:])
        variant, setting = known_variant(name), self.ranks.setting
        return SubjectModel(variant, self.settings, setting, text, None, **how)


@pytest.mark.parametrize("balanced", [False, True], ids=["natural", "balanced"])
def test_right_results_pass_and_models_go_when_they_are_closed(
    ctx: RankContext, tmp_path: Path, balanced: bool
) -> None:
    """Under torchrun, several shapes in one process left 132 GB behind, 18 bytes a parameter: one
    after the other, the models of Megatron's own dispatchers.  What is wrong is below, and in
    test_bench.py.
    """
    models = Models(ctx, tmp_path)
    assert models.text.vocab_size == 1024
    curves: list[Curve] = []
    for name in ("train:alltoall", "train:ncclep:reference"):
        model = models.make(name, balanced=balanced)
        curves.append(model.first_steps(STEPS, models.ranks.deadline))
        routers = [m.weight for m in model.gpt.modules() if type(m).__name__ == "TopKRouter"]
        assert all(weight.main_grad.any() for weight in routers), "also with balanced routing"
        gpt = weakref.ref(model.gpt)
        model.close()
        assert gpt() is None, name
    models.ranks.close()
    control, ours = curves
    assert curve_problem(ours, control, models.settings["moe-router-topk"]) is None
    assert control.losses[-1] < control.losses[0] - 0.05
    assert [curve.load == 1.0 for curve in curves] == [balanced] * 2


def test_a_subject_begins_where_the_control_has_ended(ctx: RankContext, tmp_path: Path) -> None:
    """With its optimizer, whose weights in fp32 are others than the model's in bf16."""
    models = Models(ctx, tmp_path, bf16=True)
    control = models.make("train:alltoall")
    assert control.first_steps(STEPS, models.ranks.deadline).load > 1.0
    start = {name: value.clone() for name, value in control.values().items()}
    control.step()
    again = models.make("train:alltoall", STEPS, start=start)
    again.step()
    assert float(again.loss) == pytest.approx(float(control.loss), rel=1e-3)
    for name, value in again.values().items():
        # Adam's first step is at most the learning rate, with the decay of weights near 1.
        rate, spacing = models.settings["lr"], torch.finfo(torch.bfloat16).eps / 2
        assert (value - start[name]).abs().max() < 1.2 * rate + spacing, name
    control.close()
    again.close()
    models.ranks.close()


# --- what is compared ----------------------------------------------------------------------------

CURVE = Curve(
    {"a": (1.0, 2.0), "b": (3.0, 4.0)}, losses=[5.0, 4.5], grad_norms=[2.0, 1.5],
    output=torch.linspace(-1, 1, 64).view(2, 32).bfloat16(),
    gradient=torch.linspace(2, 3, 64).view(2, 32).bfloat16(),
)  # fmt: skip


def changed(**fields: Any) -> Curve:
    return dataclasses.replace(CURVE, **fields)


# A spacing of bf16 is 2^-7 of its value: with 8 experts the output may be 0.0146 away.
@pytest.mark.parametrize(
    ("curve", "problem"),
    [
        (CURVE, None),
        (changed(losses=[5.02, 4.48]), None),
        (changed(losses=[5.0, 4.5 + 0.03]), "step 2: loss 4.53, alltoall's is 4.5, and they may"),
        (changed(losses=[float("nan"), 4.5]), "step 1: loss nan"),
        (changed(grad_norms=[2.0, 1.4]), "step 2: gradient norm 1.4"),
        (changed(output=CURVE.output * 1.01), None),
        (changed(output=CURVE.output * 1.03), "the output of the first MoE layer is 0.03 of its"),
        (changed(output=CURVE.output * float("nan")), "nan of its size away"),
        (changed(gradient=CURVE.gradient.flip(0)), "the gradient of the first MoE layer is 0.2"),
        (changed(weights={"a": (1.0, 2.0)}), "other parameters than in the other run: b"),
        (changed(weights={**CURVE.weights, "b": (3.0, 4.1)}), "b starts from other values"),
    ],
)
def test_against_the_control(curve: Curve, problem: str | None) -> None:
    said = curve_problem(curve, CURVE, 8)
    assert said is None if problem is None else problem in str(said)


def test_graphs_must_give_the_bits() -> None:
    last_bit = changed(losses=[5.0, float(torch.tensor(4.5).nextafter(torch.tensor(5.0)))])
    assert bits_problem(CURVE, CURVE) is None
    assert "step 2: loss 4.5000" in str(bits_problem(last_bit, CURVE))
    assert "step 1: gradient norm" in str(bits_problem(changed(grad_norms=[2.1, 1.5]), CURVE))
    # A NaN is not equal to itself, and nothing to be content with.
    nothing = changed(losses=[5.0, float("nan")])
    assert "step 2: loss nan" in str(bits_problem(nothing, nothing))


# --- graphs ---------------------------------------------------------------------------------------


class Streams:
    """In place of CUDA's: which stream is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = mock.Mock(name="default stream")
        for name, value in (
            ("Stream", lambda: mock.Mock(name="a stream of its own")),
            ("current_stream", lambda: self.current), ("stream", self.within),
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def within(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.mark.parametrize("graphs", [None, "partial_graphs", "full_iteration"])
def test_hooks_remember_a_stream_that_may_capture(
    ctx: RankContext, monkeypatch: pytest.MonkeyPatch, graphs: str | None
) -> None:
    """`alltoall_fused:partial_graphs` failed on every GPU: "operation would make the legacy stream
    depend on a capturing blocking stream".  DDP had been made on the default stream.
    """
    from megatron.core import full_cuda_graph

    shared = mock.Mock(name="the stream of the whole graph")
    monkeypatch.setattr(full_cuda_graph, "get_shared_capture_stream", lambda: shared, raising=False)
    streams = Streams(monkeypatch)
    default = streams.current
    with wrapping_stream(graphs, on_gpu=True):
        inside = streams.current
    assert inside is not default
    assert (inside is shared) == (graphs == "full_iteration")
    # The weights are there before they are copied, and the copies before the optimizer's.
    inside.wait_stream.assert_called_once_with(default)
    default.wait_stream.assert_called_once_with(inside)
    assert streams.current is default
    with wrapping_stream(graphs, on_gpu=False):
        assert streams.current is default


def test_a_capture_that_fails_leaves_nothing_to_the_next_subject(
    ctx: RankContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed capture the next subject with graphs failed in its first layer, "a shape
    mismatch": Megatron-Core still took itself to be capturing, and returned rows for outputs.
    """
    from megatron.core.transformer import cuda_graphs

    class Helper:
        def create_cudagraphs(self) -> None:
            gc.freeze()
            cuda_graphs._set_capture_start()
            raise RuntimeError("cannot be captured")

    monkeypatch.setattr(training_model, "_partial_graphs", lambda *args: Helper())
    variant = known_variant("train:alltoall:partial_graphs")
    graphs = training_model._Graphs(variant, mock.Mock(), num_ranks=1)
    for step in range(EAGER_STEPS):
        graphs.before_step(step)
    with pytest.raises(RuntimeError, match="cannot be captured"):
        graphs.before_step(EAGER_STEPS)
    assert not cuda_graphs.is_graph_capturing()
    assert gc.get_freeze_count() == 0
    graphs.close()  # there are none to delete


# --- weight gradients of the output layer ---------------------------------------------------------

ROWS, IN, OUT = 5, 3, 4


def integers(seed: int, *shape: int) -> torch.Tensor:
    """From -4 to 4: five products of two of them add up to at most 80, which bf16 holds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).bfloat16()


@pytest.mark.each_release
def test_the_output_layer_calls_it(ctx: RankContext) -> None:
    """In two micro-batches of Megatron's output layer in DistributedDataParallel; sums are fp32."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer.transformer_config import TransformerConfig

    initialize(setting_of(ctx))
    config = TransformerConfig(
        num_layers=1, hidden_size=IN, num_attention_heads=1, params_dtype=torch.bfloat16,
        bf16=True, use_cpu_initialization=True, gradient_accumulation_fusion=True,
    )  # fmt: skip
    options = {"config": config, "init_method": torch.nn.init.ones_, "bias": False}
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        layers.ColumnParallelLinear(IN, OUT, **options)
    assert {provide_fusion(), provide_fusion()} == {STAND_IN}
    layer = layers.ColumnParallelLinear(IN, OUT, **options)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, ddp, layer)
    wrapped.zero_grad_buffer()
    layer.weight.main_grad.fill_(1000.0)  # sums of 258 and more need more bits than bf16 has
    expected = torch.full((OUT, IN), 1000.0)
    for step in range(2):
        rows, grad = integers(step, ROWS, 1, IN), integers(10 + step, ROWS, 1, OUT)
        out, _ = wrapped(rows)
        out.backward(grad)
        expected += torch.einsum("nbo,nbi->oi", grad.float(), rows.float())
    assert torch.equal(layer.weight.main_grad, expected)
    assert layer.weight.grad_added_to_main_grad  # tells the hooks


# --- the profile ---------------------------------------------------------------------------------


# Names as CUPTI gives them, of what a training step runs on an H200.
NAMES = {
    "attention": [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1",
        "void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>(...)",
    ],
    "GEMM": [
        "nvjet_tst_256x128_64x4_1x2_h_bz_coopB_TNT",
        "ncclep::experts::multiply_rows_kernel(ncclep::experts::GemmMaps, ncclep::experts::Gemm)",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<Gemm>>(...)",
    ],
    "dispatch": [
        "void ncclep::native::(anonymous namespace)::dispatch_kernel<true>(ncclep::Rank)",
        "nccl_ep_ht_dispatch_kernel",
    ],
    "combine": ["void ncclep::native::(anonymous namespace)::combine_kernel<2>(Rank, Combine)"],
    "plan": [
        "ncclep::native::(anonymous namespace)::count_kernel(Rank, PlanCount)",
        "ncclep::native::(anonymous namespace)::receive_kernel(Rank, ReceivedRoutes)",
        "ncclep::(anonymous namespace)::routes_and_weights_kernel(RoutesAndWeights)",
    ],
    "permute": [
        "_permute_kernel",
        "void at::native::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2>(...)",
    ],
    "collectives": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    ],
    "optimizer": ["void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(...)"],
    "rest": [
        "ncclep::experts::quantize_rows_kernel(ncclep::experts::Rows, ncclep::experts::Fp8Rows)",
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(...)",
        "triton_poi_fused_mul_silu_0",
        "Memset (Device)",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    """In the optimizer all but collectives is its own."""
    assert {name: kernel_kind(name) for name in NAMES[kind]} == dict.fromkeys(NAMES[kind], kind)
    in_optimizer = "collectives" if kind == "collectives" else "optimizer"
    assert {kernel_kind(name, True) for name in NAMES[kind]} == {in_optimizer}


def test_what_overlaps_shares_the_time() -> None:
    """GEMM from 0 to 10 and dispatch from 8 to 12 make 9 and 3, and the device was busy for 12."""
    both = [Interval("x", 8, 12, "dispatch"), Interval("x", 0, 10, "GEMM")]
    shares = {kind: share for kind, share in time_shares(both).items() if share}
    assert shares == {"GEMM": 9.0, "dispatch": 3.0}
    three = [*both, Interval("x", 8, 9, "GEMM")]  # between 8 and 9 two of three are GEMM
    assert time_shares(three)["GEMM"] == pytest.approx(8 + 2 / 3 + 1 / 2)
    assert sum(time_shares(three).values()) == pytest.approx(12)
