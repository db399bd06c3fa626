"""Where quack-kernels' products can run; tests/gpu/test_gpu_quack.py tests what they compute."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megatron_ncclep.integration.experts import fused_swiglu


@pytest.mark.parametrize(
    ("version", "capability", "dtype", "problem"),
    [
        ("0.6.5", (9, 0), torch.bfloat16, None),
        (None, (9, 0), torch.bfloat16, "not installed: pip install 'megatron-ncclep[experts]'"),
        ("0.7.0", (9, 0), torch.bfloat16, "quack-kernels 0.7.0 is installed, and only 0.6.5 was"),
        ("0.6.5", (10, 0), torch.bfloat16, "on compute capability 9.x, and NVIDIA B200 has 10.0"),
        ("0.6.5", (9, 0), torch.float16, "in bf16, and the experts compute in torch.float16"),
    ],
)
def test_where_it_can_run(
    version: str | None, capability: tuple[int, int], dtype: torch.dtype, problem: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    missing = mock.Mock(side_effect=metadata.PackageNotFoundError("quack-kernels"))
    found = mock.Mock(return_value=version)
    monkeypatch.setattr(metadata, "version", missing if version is None else found)
    install_stand_ins(tmp_path / "site-packages", "quack", "cutlass")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = fused_swiglu.unavailable_reason(torch.device("cuda"), dtype)
    assert reason is None if problem is None else problem in reason
    cpu = fused_swiglu.unavailable_reason(torch.device("cpu"), torch.bfloat16)
    assert cpu == "quack-kernels has no kernels for a CPU"


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
    monkeypatch.setattr(metadata, "version", lambda name: fused_swiglu.VERSION)
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
