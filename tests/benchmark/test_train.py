"""Training steps: what trains alike passes the check, and what does not is found."""

from __future__ import annotations

import dataclasses
import weakref
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dispatcher_bugs import put_into
from imports import import_megatron_on_cpu
from patience import PatientPool

from megatron_ncclep.benchmark import train_profile
from megatron_ncclep.benchmark.megatron_setup import initialize
from megatron_ncclep.benchmark.names import TRAININGS
from megatron_ncclep.benchmark.ranks import Ranks
from megatron_ncclep.benchmark.shapes import load
from megatron_ncclep.benchmark.train_check import bits_problem, curve_problem
from megatron_ncclep.benchmark.train_model import Curve, SubjectModel, fusions, load_text
from megatron_ncclep.ranks.pool import RankContext

if find_spec("megatron") is None:
    pytest.skip("Megatron-Core is not installed", allow_module_level=True)

STEPS = 3
LAYER = "the output of the first MoE layer"
EXPECTED = {
    "swapped rows": LAYER,
    "reversed probabilities": LAYER,
    "wrong counts": LAYER,
    "half the gradient of probabilities": "the gradient of the first MoE layer",
    "a row without gradient": "the gradient of the first MoE layer",
}


def problems_on_rank(context: RankContext, folder: str) -> dict[str, str | None]:
    """Train alltoall, and ncclep with each bug in rank 1's dispatchers; what the check says.

    Also whether a model was still there after it was closed, memory of 18 bytes a parameter.
    """
    (shape,) = load("smoke").trainings
    settings = shape.settings(context.num_ranks)
    ranks = Ranks(context, 60, "test")
    initialize(ranks.setting)
    text = load_text(settings, ranks, Path(folder))
    curves: dict[str, Curve] = {}
    alive: list[str] = []
    for name in ("control", "none", *EXPECTED):
        choice = TRAININGS.parse(
            "train:alltoall" if name == "control" else "train:ncclep:reference"
        )
        model = SubjectModel(choice, settings, ranks.setting, text, None)
        if context.rank == 1 and name != "control":
            for module in model.gpt.modules():
                if hasattr(module, "token_dispatcher"):
                    put_into(module.token_dispatcher, name)
            del module
        curves[name] = model.first_steps(STEPS, ranks.deadline)
        gpt = weakref.ref(model.gpt)
        model.close()
        if gpt() is not None:
            alive.append(name)
    ranks.close()
    control = curves.pop("control")
    top_k = settings["moe-router-topk"]
    found = {name: curve_problem(curve, control, top_k) for name, curve in curves.items()}
    found["learns"] = None if control.losses[-1] < control.losses[0] - 0.05 else str(control.losses)
    found["alive"] = ", ".join(alive) or None
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """What the check says on each of two ranks, by bug."""
    pool = PatientPool(2, prepare=import_megatron_on_cpu)
    try:
        return pool.run(problems_on_rank, str(tmp_path_factory.mktemp("data")))
    finally:
        pool.close()


def test_right_results_pass(found: list[dict[str, str | None]]) -> None:
    assert [(here["none"], here["learns"]) for here in found] == [(None, None)] * 2


def test_a_model_goes_when_it_is_closed(found: list[dict[str, str | None]]) -> None:
    """Under torchrun, several shapes in one process left 132 GB behind: one after the other, the
    models of Megatron's own dispatchers.
    """
    assert [here["alive"] for here in found] == [None] * 2


@pytest.mark.parametrize("bug", EXPECTED)
def test_wrong_results_are_rejected(found: list[dict[str, str | None]], bug: str) -> None:
    said = [here[bug] for here in found]
    assert any(EXPECTED[bug] in problem for problem in said if problem), said


def test_layers_add_their_gradients_themselves_where_transformer_engine_can() -> None:
    """It was off but where Apex is installed, which is seldom."""
    (small,), (large, _) = load("smoke").trainings, load("training").trainings
    assert fusions(large.settings(1), on_gpu=True)["gradient_accumulation_fusion"] is True
    assert fusions(small.settings(1), on_gpu=True)["gradient_accumulation_fusion"] is False
    assert fusions(small.settings(1), on_gpu=False) == {}


# --- what is compared ----------------------------------------------------------------------------

CURVE = Curve(
    {"a": (1.0, 2.0), "b": (3.0, 4.0)},
    output=torch.linspace(-1, 1, 64).view(2, 32).bfloat16(),
    gradient=torch.linspace(2, 3, 64).view(2, 32).bfloat16(),
    losses=[5.0, 4.5],
    grad_norms=[2.0, 1.5],
)


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
        (changed(weights={"a": (1.0, 2.0)}), "other parameters than it is compared with: b"),
        (changed(weights={**CURVE.weights, "b": (3.0, 4.1)}), "b starts from other values"),
    ],
)
def test_against_the_control(curve: Curve, problem: str | None) -> None:
    said = curve_problem(curve, CURVE, 8)
    assert said is None if problem is None else problem in str(said)


def test_fp32_may_part_by_less() -> None:
    control = changed(output=CURVE.output.float(), gradient=CURVE.gradient.float())
    near = dataclasses.replace(control, losses=[5.0 * (1 + 1e-6), 4.5])
    far = dataclasses.replace(control, losses=[5.0 * (1 + 1e-5), 4.5])
    assert curve_problem(near, control, 8) is None
    assert "step 1: loss" in str(curve_problem(far, control, 8))


def test_graphs_must_give_the_bits() -> None:
    last_bit = changed(losses=[5.0, float(torch.tensor(4.5).nextafter(torch.tensor(5.0)))])
    assert bits_problem(CURVE, CURVE) is None
    assert "step 2: loss 4.5000" in str(bits_problem(last_bit, CURVE))
    assert "step 1: gradient norm" in str(bits_problem(changed(grad_norms=[2.1, 1.5]), CURVE))
    # A NaN is not equal to itself, and nothing to be content with.
    nothing = changed(losses=[5.0, float("nan")])
    assert "step 2: loss nan" in str(bits_problem(nothing, nothing))


# --- the profile ---------------------------------------------------------------------------------


def event(name: str, device: str, start: float, end: float) -> Any:
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=name == "nccl:all_reduce",
        time_range=SimpleNamespace(start=start, end=end),
    )


RECORDED = [
    event("cudaLaunchKernel", "CPU", 0, 5),
    event("nvjet_tst", "CUDA", 10, 110),
    event("nccl:all_reduce", "CUDA", 10, 500),  # a range around kernels, no kernel
    event("cudaStreamSynchronize", "CPU", 20, 50),
    event("cudaEventSynchronize", "CPU", 40, 60),  # of another thread
    event("cudaDeviceSynchronize", "CPU", 900, 950),  # after the call
    event("cudaDeviceSynchronize", "CPU", 950, 990),  # of the profiler
]


def test_profile_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two phases of 100 us of a kernel and 40 us of waits each; the second is the optimizer's."""

    class Profile:
        def __init__(self, activities: Any) -> None:
            assert [activity.name for activity in activities] == ["CUDA"]

        def __enter__(self) -> Any:
            return SimpleNamespace(events=lambda: RECORDED[::-1])

        def __exit__(self, *args: object) -> None: ...

    now = iter(range(1000))
    clock = SimpleNamespace(perf_counter=lambda: next(now) * 1e-4)  # a call takes 100 us
    monkeypatch.setattr(train_profile, "time", clock)
    monkeypatch.setattr("torch.profiler.profile", Profile)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    called: list[str] = []
    phases: list[Any] = [
        (lambda: called.append("forward"), False),
        (lambda: called.append("step"), True),
    ]
    profile = train_profile.profile_steps(phases)
    assert called == ["forward", "step"] * train_profile.STEPS
    assert {k: v for k, v in profile.kinds_us.items() if v} == {"GEMM": 100, "optimizer": 100}
    assert profile.host_us == pytest.approx(2 * (100 - 40))
