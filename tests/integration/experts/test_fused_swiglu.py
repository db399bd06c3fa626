"""Where quack-kernels' products can run; tests/gpu/test_gpu_quack.py tests what they compute."""

from __future__ import annotations

from importlib import metadata
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    missing = mock.Mock(side_effect=metadata.PackageNotFoundError("quack-kernels"))
    found = mock.Mock(return_value=version)
    monkeypatch.setattr(metadata, "version", missing if version is None else found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    reason = fused_swiglu.unavailable_reason(torch.device("cuda"), dtype)
    assert reason is None if problem is None else problem in reason
    cpu = fused_swiglu.unavailable_reason(torch.device("cpu"), torch.bfloat16)
    assert cpu == "quack-kernels has no kernels for a CPU"


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
