"""Calls that bypass autograd, torch's function modes and torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Call = TypeVar("_Call", bound=Callable[..., Any])


def plain_torch(call: _Call) -> _Call:
    """Let a function run without autograd, torch's function modes and torch.compile.

    torch asks a mode, such as the one in `cpu/`, about each operation on a tensor and each access
    to its attributes: half the time of a call of the reference engine.
    """

    @functools.wraps(call)
    def run(*args: Any, **named: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return call(*args, **named)

    return cast(_Call, torch.compiler.disable(run))
