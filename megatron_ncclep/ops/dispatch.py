"""Step 2, dispatch: send every token's row to a slot of each of its experts; differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_ncclep.engines.checks import Wrong, type_problem, weight_dtype
from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.ops.nvtx import step_range
from megatron_ncclep.ops.packed_rows import Packing
from megatron_ncclep.ops.routing import Routes


class Dispatch(torch.autograd.Function):
    """Forward: `engine.dispatch`.  Its backward is a combine of gradients over the same plan.

    The conversions that a layer needs (shapes, dtypes, the probabilities' gradient) are done here
    too: an autograd node for each would cost the host more time than its kernel takes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        weights: torch.Tensor | None,
        engine: Engine,
        plan: RoutePlan,
        routes: Routes | None,
        packing: Packing | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send the rows `x` and their weights: `w`, or `weights` if `w` holds probabilities."""
        ctx.engine, ctx.plan, ctx.routes = engine, plan, routes
        ctx.shape, ctx.w_dtype = x.shape, w.dtype
        if weights is None:
            weights = w
        with step_range("dispatch", x):
            rows, row_w = send(engine, plan, x, weights.to(weight_dtype(x)), packing)
        assert row_w is not None  # there were weights
        return rows, row_w.to(w.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_row_w: torch.Tensor) -> tuple[Any, ...]:
        """Add up the gradients of each token's rows; return the weights' gradients."""
        engine: Engine = ctx.engine
        routes: Routes | None = ctx.routes
        with step_range("dispatch backward", grad_rows):
            grad_x, grad_w = engine.combine(
                ctx.plan, grad_rows, grad_row_w.to(weight_dtype(grad_rows))
            )
        assert grad_w is not None  # there were weights
        if routes is not None:
            grad_w = routes.probs_gradient(grad_w)
        return grad_x.view(ctx.shape), grad_w.to(ctx.w_dtype), *(None,) * 5


@torch.compiler.disable
def dispatch(
    engine: Engine,
    plan: RoutePlan,
    x: torch.Tensor,
    w: torch.Tensor,
    chosen: tuple[Routes, torch.Tensor] | None = None,
    packing: Packing | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move every token to its experts, with each assignment's weight.  Collective, differentiable.

    The backward pass is collective too: it is a combine over the same plan.  `engine.dispatch` is
    the same without gradients, and with an optional `w`.

    Args:
        engine: the one that made `plan`.
        plan: routes of this micro-batch.
        x: [..., hidden]; all leading dimensions together are the tokens.
        w: [num_tokens, top_k] of any floating dtype; or with `chosen`, a router's probabilities
            [num_tokens, num_experts].  Weights travel as fp32 (as fp64 with an fp64 `x`) and come
            back in their own dtype.
        chosen: the result of `routes_and_weights` for these probabilities; `plan` was made from its
            `topk_idx`.
        packing: sends rows as bytes, with an engine that moves them; their gradients come back as
            those of `x` without it.  All ranks give one that packs alike, or none.

    Returns:
        rows [plan.num_rows, hidden] in slot order and their weights [plan.num_rows]; padding rows
        and their weights are zero, and get no gradient.  With `packing`, what it returns in place
        of the rows.

    Raises:
        InputError: on every rank, when an argument is wrong on any, or ranks differ in hidden size,
            dtype or plan.  With an engine whose hosts do not wait for each other (`native`) it is a
            RefusedError, on this rank at once and on the others at their next call or
            `megatron_ncclep.check()`, and the group is unusable.
        PeerError: a rank died, did not come in time, or is in a different call.
        GroupClosedError: the engine, its group or the process group was closed.
    """
    problem = type_problem("x", x) or type_problem("w", w)
    if problem is None and not w.is_floating_point():
        problem = f"w is {w.dtype}: weights must be of a floating dtype, such as torch.float32"
    if problem is not None:
        engine.dispatch(plan, Wrong(problem))  # type: ignore[arg-type]  # raises on all ranks
    routes, weights = (None, None) if chosen is None else chosen
    rows, row_w = Dispatch.apply(x, w, weights, engine, plan, routes, packing)
    return rows, row_w


def send(
    engine: Engine,
    plan: RoutePlan,
    x: torch.Tensor,
    w: torch.Tensor | None,
    packing: Packing | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`engine.dispatch` of rows or of gradients, [..., hidden], packed or as they are.  Collective.

    Fewer dimensions than two are left for the engine to refuse.
    """
    rows = x.flatten(0, -2) if x.dim() > 2 else x
    if packing is None:
        return engine.dispatch(plan, rows, w)
    arrived, arrived_w = engine.dispatch(plan, packing.pack(rows), w)
    return packing.deliver(arrived), arrived_w
