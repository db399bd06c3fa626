"""Where quack-kernels' products can run; tests/gpu/test_gpu_quack.py tests what they compute."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch_products import TorchProducts

from megatron_ncclep.integration.experts import fused_swiglu
from megatron_ncclep.integration.experts.adapter_product import LowRank
from megatron_ncclep.integration.experts.expert_stack import lay_out, with_room
from megatron_ncclep.integration.experts.main_grad import GradientTarget

ROOT = Path(__file__).resolve().parents[3]
LACKS = "is not installed: pip install 'megatron-ncc"
UNTRIED = "is installed.*only 0.6.5 with 4.7.1 or 4.8.0 was tried: pip install 'megatron-ncclep.exp"
BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("pair", "capability", "dtype", "problem"),
    [
        (("0.6.5", "4.7.1"), (9, 0), BF16, None),
        (("0.6.5", "4.8.0"), (9, 0), BF16, None),
        ((), (9, 0), BF16, f"quack-kernels {LACKS}"),
        (("0.6.5",), (9, 0), BF16, f"nvidia-cutlass-dsl {LACKS}"),
        (("0.6.5", "4.7.1"), (10, 0), BF16, "9.x, and NVIDIA B200 has 10.0"),
        (("0.6.5", "4.7.1"), (9, 0), torch.float16, "and the experts compute in torch.float16"),
        # vLLM 0.24 brings nvidia-cutlass-dsl 4.5.2: nothing looked at it, and the first step of a
        # training, or a compiler in it, would have failed.
        (("0.7.0", "4.8.0"), (9, 0), BF16, f"0.7.0 with nvidia-cutlass-dsl 4.8.0 {UNTRIED}"),
        (("0.6.5", "4.7.0"), (9, 0), BF16, f"0.6.5 with nvidia-cutlass-dsl 4.7.0 {UNTRIED}"),
        (("0.6.5", "4.8.0rc1"), (9, 0), BF16, f"0.6.5 with nvidia-cutlass-dsl 4.8.0rc1 {UNTRIED}"),
        (("0.3.11", "4.5.2"), (9, 0), BF16, f"0.3.11 with nvidia-cutlass-dsl 4.5.2 {UNTRIED}"),
    ],
)
def test_where_it_can_run(
    pair: tuple[str, ...], capability: tuple[int, int], dtype: torch.dtype, problem: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install_pair(monkeypatch, *pair)
    lacking = [] if find_spec("triton") else ["triton"]  # pip's torch for Linux brings it
    install_stand_ins(tmp_path / "site-packages", "quack", "cutlass", *lacking)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = fused_swiglu.unavailable_reason(torch.device("cuda"), dtype)
    assert reason is None if problem is None else re.search(problem, str(reason))
    cpu = fused_swiglu.unavailable_reason(torch.device("cpu"), BF16)
    assert cpu == "quack-kernels has no kernels for a CPU"


def test_its_stand_in_has_the_same_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument had a default in the stand-in only: here all tests passed, and on GPUs the first
    backward pass of adapters ended in a TypeError.
    """
    pytest.importorskip("triton", reason="torch for this machine brings no Triton")
    parts = ("activation", "epilogue", "epilogue.library", "epilogue.ops", "gemm", "gemm_runtime",
             "gemm_runtime.host")  # fmt: skip
    for name in ("quack", *(f"quack.{part}" for part in parts)):
        monkeypatch.setitem(sys.modules, name, mock.MagicMock())
    module = "megatron_ncclep.integration.experts.quack_products"
    monkeypatch.delitem(sys.modules, module, raising=False)
    real = importlib.import_module(module).QuackProducts()
    monkeypatch.delitem(sys.modules, module)

    def arguments(method: Any) -> list[tuple[str, Any]]:
        return [(one.name, one.default) for one in inspect.signature(method).parameters.values()]

    methods = [name for name in vars(TorchProducts) if not name.startswith("_")]
    assert "factor_gradients" in methods
    for name in methods:
        assert arguments(getattr(real, name)) == arguments(getattr(TorchProducts(), name)), name


def install_pair(monkeypatch: pytest.MonkeyPatch, *pair: str) -> None:
    """quack-kernels and nvidia-cutlass-dsl of these versions; those left out are missing."""
    found = dict(zip(("quack-kernels", "nvidia-cutlass-dsl"), pair, strict=False))

    def version(name: str) -> str:
        if name in found:
            return found[name]
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)


def test_pip_installs_what_is_taken() -> None:
    """The extra `experts` names the versions that ran, which the check at run time takes."""
    declared = re.search(r"^experts = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert ast.literal_eval(declared[1]) == [
        f"{fused_swiglu.PACKAGE}=={fused_swiglu.VERSION}",
        f"{fused_swiglu.COMPILER}[cu13]=={fused_swiglu.COMPILERS[0]}",
    ]


def install_stand_ins(folder: Path, *modules: str) -> None:
    for module in modules:
        (folder / module).mkdir(parents=True)
        (folder / module / "__init__.py").touch()


@pytest.mark.parametrize("elsewhere", ["quack", "cutlass"])
def test_where_its_functions_look_like_a_users(
    elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `pip install --target FOLDER`, `auto` chose quack-kernels, and the first step of a
    training ended in a TypeError of quack-kernels: only a page of the documentation knew why.
    """
    install_pair(monkeypatch, fused_swiglu.VERSION, fused_swiglu.COMPILERS[0])
    (other,) = {"quack", "cutlass"} - {elsewhere}
    install_stand_ins(tmp_path / "site-packages", other)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    gpu = torch.device("cuda")
    lacks = fused_swiglu.unavailable_reason(gpu, torch.bfloat16)
    assert f"lacks its module {elsewhere}: pip install" in str(lacks)
    install_stand_ins(tmp_path / "kernels", elsewhere)
    monkeypatch.syspath_prepend(tmp_path / "kernels")
    reason = str(fused_swiglu.unavailable_reason(gpu, torch.bfloat16))
    assert f"called site-packages or dist-packages, and its module {elsewhere} is " in reason
    assert f"{tmp_path}/kernels/{elsewhere}/__init__.py: install it where pip does" in reason


def test_other_activations() -> None:
    swiglu = {"activation_func": F.silu, "gated_linear_unit": True}
    assert fused_swiglu.other_activation(SimpleNamespace(**swiglu)) is None
    for change, problem in [
        ({"gated_linear_unit": False}, "not SwiGLU"),
        ({"activation_func": F.gelu}, "not SwiGLU"),
        ({"activation_func_clamp_value": 7.0}, "clamp_value is set"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset is set"),
    ]:
        found = fused_swiglu.other_activation(SimpleNamespace(**(swiglu | change)))
        assert found is not None
        assert problem in found


@pytest.mark.parametrize("ends", [[4, 4, 12], [12]], ids=["three", "one"])
def test_room_for_an_adapters_factor(ends: list[int]) -> None:
    """Backward of fc2 reads the factor behind each expert's weights; writing it there is no change
    of the weights for passes that are still to come, and without room the results are the same.

    The room of ranks with one expert, such as Mixtral's on 8 GPUs, was not found again, so their
    backward passes copied all weights.
    """
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator).double()  # noqa: E731
    number, hidden, ffn, rank = len(ends), 8, 6, 2
    offsets = torch.tensor(ends, dtype=torch.int32)
    fc1, fc2 = (
        [torch.nn.Parameter(draw(*shape), requires_grad=False) for _ in range(number)]
        for shape in ((2 * ffn, hidden), (hidden, ffn))
    )
    values = [weight.clone() for weight in fc2]
    rows, probs = draw(12, hidden).requires_grad_(), draw(12).abs().requires_grad_()
    a, b = draw(number, rank, ffn).requires_grad_(), draw(number, hidden, rank).requires_grad_()
    wanted, grad = (rows, probs, a, b), draw(12, hidden)

    def forward() -> torch.Tensor:
        gemms: Any = (TorchProducts(), GradientTarget())
        adapters = ((None, LowRank(a, b, 0.5)), room)
        return fused_swiglu.swiglu_experts(rows, probs, offsets, fc1, fc2, *gemms, *adapters)

    room = 0
    copied = torch.autograd.grad(forward(), wanted, grad)
    for room in (1, rank + 1):  # too little, and more than is needed
        lay_out(fc2, room)
        assert with_room(fc2, room + 1) is None
        first, second = forward(), forward()
        for out in (second, first):
            assert all(map(torch.equal, copied, torch.autograd.grad(out, wanted, grad)))
    assert all(map(torch.equal, values, fc2))
    assert all(weight.is_contiguous() for weight in fc2)
    stack = with_room(fc2, room)
    assert stack is not None
    assert torch.equal(stack[:, hidden : hidden + rank], a)  # where backward has read it
