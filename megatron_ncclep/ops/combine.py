"""Step 3, combine: return the experts' rows and add them up; differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.ops.dispatch import as_rows
from megatron_ncclep.ops.nvtx import step_range


class Combine(torch.autograd.Function):
    """Forward: `engine.combine`.  Its backward is a dispatch of gradients over the same plan."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, engine: Engine, plan: RoutePlan, shape: torch.Size | None
    ) -> torch.Tensor:
        """Add up the rows `y` at their tokens' source ranks."""
        ctx.engine, ctx.plan = engine, plan
        with step_range("combine", y):
            out = engine.combine(plan, y)[0]
        return out if shape is None else out.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        """Send each token's gradient to the slots of its experts."""
        with step_range("combine backward", grad_out):
            return ctx.engine.dispatch(ctx.plan, as_rows(grad_out))[0], None, None, None


def combine(
    engine: Engine, plan: RoutePlan, y: torch.Tensor, shape: torch.Size | None = None
) -> torch.Tensor:
    """Add up every token's expert outputs, unweighted.  Collective, differentiable.

    The backward pass is collective too: it is a dispatch over the same plan.  `engine.combine` is
    the same without gradients, and can also return a value for each row.

    Args:
        engine: the one that made `plan`.
        plan: routes of this micro-batch.
        y: [plan.num_rows, hidden]; padding rows are not read.
        shape: of the result, [..., hidden]; the leading dimensions together are the tokens.

    Returns:
        [plan.num_tokens, hidden], or of `shape`; zero for a token without experts.

    Raises:
        InputError, PeerError, GroupClosedError: as `dispatch`.
    """
    if not isinstance(y, torch.Tensor):
        engine.combine(plan, y)  # refuses it on all ranks
    out: torch.Tensor = Combine.apply(y, engine, plan, shape)
    return out
