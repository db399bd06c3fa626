"""In place of TransformerEngine's `fp8_autocast` and its state, where it is not installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest


class Float8BlockScaling(SimpleNamespace):
    """TransformerEngine's recipe, which is known by its name."""


class State:
    """TransformerEngine's `FP8GlobalStateManager`."""

    def __init__(self, is_on: bool = True, **changes: Any) -> None:
        powers = changes.pop("powers", (True, True, True))
        of_operands = [SimpleNamespace(power_2_scale=p, amax_epsilon=0.0) for p in powers]
        names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
        values = {
            **dict(zip(names, of_operands, strict=True)),
            "fp8_format": Enum("Format", "E4M3 HYBRID").E4M3,
            "x_block_scaling_dim": 1,
            "w_block_scaling_dim": 2,
            "grad_block_scaling_dim": 1,
            "backward_override": None,
        }
        self.is_fp8_enabled = lambda: is_on
        kind = changes.pop("kind", Float8BlockScaling)
        self.get_fp8_recipe = lambda: kind(**{**values, **changes})


@contextmanager
def autocast(state: Any, module: str = "fp8") -> Iterator[None]:
    """As within `fp8_autocast`."""
    name = f"transformer_engine.pytorch.{module}"
    with pytest.MonkeyPatch.context() as patch:  # what is imported meanwhile stays
        patch.setitem(sys.modules, name, SimpleNamespace(FP8GlobalStateManager=state))
        yield
