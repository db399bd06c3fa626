"""An engine of this package, through the engine interface: plan and the four passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ncclep.benchmark import payload
from megatron_ncclep.benchmark.check import combine_problem, dispatch_problem
from megatron_ncclep.benchmark.routes import routes_of
from megatron_ncclep.benchmark.subjects import (
    STEPS,
    Setting,
    UnavailableError,
    Workload,
    limits_problem,
)
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES, create_engine
from megatron_ncclep.engines.engine import Engine
from megatron_ncclep.engines.machines import Machines
from megatron_ncclep.errors import EngineUnavailableError, InputError

# What the engines' documentation says of kernels whose number of SMs nobody chose.
DEFAULT_SMS = {"reference": "NCCL's", "nccl_ep": "16"}
CHECKED = "bits of all rows, weights and sums, in the declared reduction"


class EngineSubject:
    """See `Subject`.

    Args:
        name: as on the command line.
        engine: its name in the registry.
        num_sms: SMs that its kernels may use; None: its own choice.
    """

    kind = "engine"
    checked = CHECKED

    def __init__(self, name: str, engine: str, num_sms: int | None) -> None:
        self.name = name
        self._engine = engine
        self._num_sms = num_sms

    def prepare(self, setting: Setting, workload: Workload) -> PreparedEngine:
        """See `Subject.prepare`.  Over a process group of its own."""
        case = workload.case
        if reason := limits_problem(case, ENGINES[self._engine].caps):
            raise UnavailableError(reason)
        try:
            # Made in full, so that options of the environment do not change what is measured.
            config = EpConfig(
                engine=self._engine,
                alignment=case.alignment,
                num_sms=self._num_sms,
                timeout_s=setting.timeout_s,
            )
            engine = create_engine(setting.new_group(), case.num_experts, config)
        except (EngineUnavailableError, InputError) as error:
            raise UnavailableError(str(error)) from error
        default = DEFAULT_SMS.get(self._engine, "-")
        sms = getattr(engine, "num_sms", None) or self._num_sms or default
        return PreparedEngine(engine, setting.rank, workload, str(sms))


class PreparedEngine:
    """See `Prepared`."""

    shared_bytes = 0

    def __init__(self, engine: Engine, rank: int, workload: Workload, sms: str) -> None:
        self._engine = engine
        self._rank = rank
        self._workload = workload
        self.sms = sms
        self._plan = engine.plan(workload.topk_idx)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: engine.plan(workload.topk_idx),
            lambda: engine.dispatch(self._plan, workload.x, workload.w),
            lambda: engine.combine(self._plan, workload.y),
            lambda: engine.dispatch(self._plan, workload.grad_out),
            lambda: engine.combine(self._plan, workload.grad_rows, workload.grad_row_w),
        )
        self.passes = dict(zip(STEPS, calls, strict=True))

    def problem(self) -> str | None:
        """See `Prepared.problem`.  From a new plan; all passes run before anything is compared."""
        self._plan = self.passes["plan"]()
        results = {name: self.passes[name]() for name in STEPS[1:]}
        machines = getattr(self._engine, "machines", None)  # on which its order depends
        reduction = self._engine.caps.reduction
        return results_problem(results, self._workload, self._rank, reduction, machines)

    def close(self) -> None:
        """See `Prepared.close`."""
        self._engine.close()


def results_problem(
    results: dict[str, tuple[Any, Any]],
    workload: Workload,
    rank: int,
    reduction: str,
    machines: Machines | None = None,
) -> str | None:
    """Say what is wrong with the results of the four passes on `rank`, if anything is.

    Args:
        results: pass -> (rows, weights or None), as the engine interface returns them.
        workload: what went in.
        rank: of this process.
        reduction: how combine rounds, one of engine.REDUCTIONS.
        machines: the grid of an engine whose rows stand BY_RAIL.
    """
    routes, on_machine = workload.routes, None
    if machines is not None:
        case, on_machine = workload.case, machines.ranks_on_each
        every = [case.topk_idx(r) for r in range(case.num_ranks)]
        order = machines.ranks_by_rail()
        routes = routes_of(every, case.num_experts, case.alignment, order)
    for name, kind in (("dispatch", payload.X), ("bwd_dispatch", payload.GRAD_OUT)):
        if problem := dispatch_problem(routes, rank, *results[name], kind):
            return f"{name}: {problem}"
    for name, kind in (("combine", payload.Y), ("bwd_combine", payload.GRAD_ROWS)):
        if problem := combine_problem(routes, rank, *results[name], kind, reduction, on_machine):
            return f"{name}: {problem}"
    return None
