"""Step 3, combine: return the experts' rows and add them up; differentiable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ncclep.engines.checks import Wrong, type_problem
from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.ops.dispatch import send
from megatron_ncclep.ops.nvtx import step_range
from megatron_ncclep.ops.packed_rows import Packing


class Combine(torch.autograd.Function):
    """Forward: `engine.combine`.  Its backward is a dispatch of gradients over the same plan."""

    @staticmethod
    def forward(
        ctx: Any,
        y: torch.Tensor,
        engine: Engine,
        plan: RoutePlan,
        shape: Sequence[int] | None,
        packing: Packing | None,
    ) -> torch.Tensor:
        """Add up the rows `y` at their tokens' source ranks."""
        ctx.engine, ctx.plan, ctx.packing = engine, plan, packing
        with step_range("combine", y):
            out = engine.combine(plan, y)[0]
        return out if shape is None else out.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        """Send each token's gradient to the slots of its experts."""
        engine: Engine = ctx.engine
        with step_range("combine backward", grad_out):
            grad_y, _ = send(engine, ctx.plan, grad_out, None, ctx.packing)
        return grad_y, None, None, None, None


@torch.compiler.disable
def combine(
    engine: Engine,
    plan: RoutePlan,
    y: torch.Tensor,
    shape: Sequence[int] | None = None,
    packing: Packing | None = None,
) -> torch.Tensor:
    """Add up every token's expert outputs, unweighted.  Collective, differentiable.

    The backward pass is collective too: it is a dispatch over the same plan.  `engine.combine` is
    the same without gradients, and can also return a value for each row.

    Args:
        engine: the one that made `plan`.
        plan: routes of this micro-batch.
        y: [plan.num_rows, hidden]; padding rows are not read.
        shape: of the result, [..., hidden]; the leading dimensions together are the tokens.
        packing: sends gradients as bytes, with an engine that moves them; who made `y` gets what it
            returns in their place.  All ranks give one that packs alike, or none.

    Returns:
        [plan.num_tokens, hidden], or of `shape`; zero for a token without experts.

    Raises:
        InputError, PeerError, GroupClosedError: as `dispatch`.
    """
    problem = type_problem("y", y) or _shape_problem(plan, y, shape)
    if problem is not None:
        engine.combine(plan, Wrong(problem))  # type: ignore[arg-type]  # raises on all ranks
    out: torch.Tensor = Combine.apply(y, engine, plan, shape, packing)
    return out


def _shape_problem(plan: RoutePlan, y: torch.Tensor, shape: Sequence[int] | None) -> str | None:
    """Say what is wrong with the `shape` of a result, if anything is."""
    if shape is None or y.dim() != 2 or not isinstance(plan, RoutePlan):
        return None  # the engine refuses what is wrong with the others
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) for size in shape):
        return f"shape is {shape!r}: give the sizes of the result, such as those of the tokens"
    if (math.prod(shape[:-1]), *shape[-1:]) == (plan.num_tokens, y.shape[1]):
        return None
    return (
        f"shape is {list(shape)}: the result has {plan.num_tokens} tokens of {y.shape[1]}, so it "
        f"must be [..., {y.shape[1]}], with {plan.num_tokens} as the product of the others"
    )
