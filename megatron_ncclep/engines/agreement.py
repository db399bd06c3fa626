"""What the ranks agree on before an engine moves anything: the same call, with arguments that fit.

All functions are collective, and raise the same on every rank when something is wrong on any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import checks
from megatron_ncclep.engines.engine import BYTES, EngineCaps, RoutePlan
from megatron_ncclep.engines.group import Agreement, EpGroup
from megatron_ncclep.engines.rows_limit import agreed_values
from megatron_ncclep.errors import (
    EngineUnavailableError,
    EpError,
    InputError,
    LibraryError,
    PeerError,
)

# The numbers that stand for dtypes when ranks compare them.
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, BYTES)
OTHER_DTYPE = -2

# What a step raises on all ranks when it raised it on one; anything else counts as the first.  If
# ranks differ, the first of these: a rank that was late may have waited for one that failed.
STEP_ERRORS: tuple[type[EpError], ...] = (
    LibraryError,
    InputError,
    EngineUnavailableError,
    PeerError,
)

_Plan = TypeVar("_Plan", bound=RoutePlan)
_Result = TypeVar("_Result")


def on_all_ranks(
    group: EpGroup, what: str, step: Callable[[], _Result], timeout_s: float
) -> _Result:
    """Take a step that may fail on one rank alone; when it does on any, raise on all.

    For what a rank does by itself between two exchanges, as opening a library: if it just raised,
    the others would wait for it in the next exchange, and never hear why it does not come.

    Args:
        group: the ranks.
        what: names the step in errors.
        step: not collective.
        timeout_s: seconds to wait for the other ranks.

    Returns:
        what `step` returned here, when it went well on all ranks.

    Raises:
        one of STEP_ERRORS: on every rank, with the reasons of all that failed.
        PeerError: a rank did not come in time.
    """
    failure: Exception | None = None
    try:
        result = step()
    except Exception as error:  # whatever it is, the other ranks have to know
        failure = error
    problem = None if failure is None else _reason(failure)
    if problems := group.gather_problems(problem, what, timeout_s):
        kinds = [k for k, kind in enumerate(STEP_ERRORS) if isinstance(failure, kind)]
        mine = -1 if failure is None else (kinds or [0])[0]
        all_kinds = group.gather(torch.tensor([mine]), what, timeout_s).flatten().tolist()
        raised = STEP_ERRORS[min(kind for kind in all_kinds if kind >= 0)]
        # An error of this package says all there is, and would only be printed twice.
        cause = None if isinstance(failure, EpError) else failure
        raise raised(f"{what}: {problems}") from cause
    return result


def _reason(error: Exception) -> str:
    """What an exception says; for one that is not this package's, its type too."""
    text = str(error)
    return text if text and isinstance(error, EpError) else f"{type(error).__name__}: {text}"


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
            **agreed_values(config, topk_idx),
            "num_sms": config.num_sms,
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
    values: dict[str, int | None] = {}
    problem = checks.plan_problem(plan, kind, num_experts)
    if problem is None:  # otherwise it need not even be a plan
        problem = (
            checks.rows_problem(phase == "dispatch", plan, rows, w, caps, group.device)
            or find_problem()
        )
        values = {
            "plan": plan.plan_id,
            "hidden size": rows.shape[-1] if rows.dim() else 0,
            "dtype": DTYPES.index(rows.dtype) if rows.dtype in DTYPES else OTHER_DTYPE,
            "presence of weights": int(w is not None),
        }
    group.agree(phase, values, problem, timeout_s)
    assert isinstance(plan, kind)  # agreed on
    return plan
