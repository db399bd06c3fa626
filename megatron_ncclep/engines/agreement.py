"""What the ranks agree on before an engine moves anything: the same call, with arguments that fit.

Both functions are collective, and raise InputError on every rank when something is wrong on any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import checks
from megatron_ncclep.engines.engine import EngineCaps, RoutePlan
from megatron_ncclep.engines.group import Agreement, EpGroup

# The numbers that stand for dtypes when ranks compare them.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
OTHER_DTYPE = -2

_Plan = TypeVar("_Plan", bound=RoutePlan)


def agree_on_routes(
    group: EpGroup,
    topk_idx: torch.Tensor,
    num_experts: int,
    caps: EngineCaps,
    config: EpConfig,
    find_problem: Callable[..., str | None] = checks.topk_problem,
) -> Agreement:
    """Check the arguments of `Engine.plan` on all ranks; tells every rank all numbers of tokens.

    An engine that checks values on the device has its own `find_problem`.
    """
    return group.agree(
        "plan",
        {
            "top_k": topk_idx.shape[-1] if topk_idx.dim() else 0,
            "num_experts": num_experts,
            "alignment": config.alignment,
            "max_recv_rows": config.max_recv_rows,
        },
        find_problem(topk_idx, num_experts, group.device, caps),
        config.timeout_s,
        told=topk_idx.shape[0] if topk_idx.dim() else 0,
    )


def agree_on_rows(
    phase: str,
    group: EpGroup,
    plan: RoutePlan,
    kind: type[_Plan],
    rows: torch.Tensor,
    w: torch.Tensor | None,
    num_experts: int,
    caps: EngineCaps,
    timeout_s: float,
    find_problem: Callable[[], str | None] = lambda: None,
) -> _Plan:
    """Check the arguments of `Engine.dispatch` or `Engine.combine` (`phase`) on all ranks.

    Args:
        phase: "dispatch", where `rows` is x at the tokens' home, or "combine", where it is y.
        group: whose ranks agree.
        plan: what the caller passed as plan; must be a `kind` for `num_experts` experts.
        kind: class of the engine's plans.
        rows: the payload.
        w: weights beside it, or None.
        num_experts: of the engine.
        caps: of the engine.
        timeout_s: seconds to wait for the other ranks.
        find_problem: says what else is wrong on this rank; asked when the arguments are right.

    Returns:
        plan.
    """
    home = phase == "dispatch"
    num_rows = plan.num_tokens if home else plan.num_rows
    w_shape = (plan.num_tokens, plan.top_k) if home else (plan.num_rows,)
    group.agree(
        phase,
        {
            "plan": plan.plan_id,
            "hidden size": rows.shape[-1] if rows.dim() else 0,
            "dtype": DTYPES.index(rows.dtype) if rows.dtype in DTYPES else OTHER_DTYPE,
            "presence of weights": int(w is not None),
        },
        checks.plan_problem(plan, kind, num_experts)
        or checks.payload_problem("x" if home else "y", rows, num_rows, caps, group.device)
        or checks.weights_problem(w, w_shape, rows, group.device)
        or find_problem(),
        timeout_s,
    )
    assert isinstance(plan, kind)  # agreed on
    return plan
