"""Step 2, dispatch: every token's row goes to a slot of each of its experts; differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ncclep.engines.checks import weight_dtype
from megatron_ncclep.engines.engine import Engine, RoutePlan


class Dispatch(torch.autograd.Function):
    """Forward: `engine.dispatch`.  Its backward is a combine of gradients over the same plan."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, engine: Engine, plan: RoutePlan
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send the rows `x` and the weights `w`."""
        ctx.engine, ctx.plan = engine, plan
        return engine.dispatch(plan, x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_row_w: torch.Tensor) -> tuple[Any, ...]:
        """Add the gradients of a token's rows up; bring each weight's gradient to its pick."""
        grad_x, grad_w = ctx.engine.combine(ctx.plan, grad_rows, grad_row_w)
        return grad_x, grad_w, None, None


def dispatch(
    engine: Engine, plan: RoutePlan, x: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move every token to its experts, with the weight of each pick.  Collective, differentiable.

    Args:
        engine: that made `plan`.
        plan: routes of this micro-batch.
        x: [num_tokens, hidden].
        w: [num_tokens, top_k] of any floating dtype.  Weights travel as fp32 (as fp64 beside an
            fp64 `x`) and come back in their own dtype.

    Returns:
        rows [plan.num_rows, hidden] in slot order and their weights [plan.num_rows]; padding rows
        and their weights are zero, and get no gradient.
    """
    rows, row_w = Dispatch.apply(x, w.to(weight_dtype(x)), engine, plan)
    return rows, row_w.to(w.dtype)
