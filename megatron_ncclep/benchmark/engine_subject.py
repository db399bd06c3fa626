"""An engine of this package, through the engine interface: plan and the four passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ncclep.benchmark.check import results_problem
from megatron_ncclep.benchmark.names import split_name
from megatron_ncclep.benchmark.subjects import STEPS, Setting, Subject, check_limits, excused
from megatron_ncclep.benchmark.workload import Workload
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES, create_engine
from megatron_ncclep.errors import EngineUnavailableError, InputError
from megatron_ncclep.ranks.nodes import Nodes

# What the engines' documentation says of kernels whose number of SMs nobody chose.
DEFAULT_SMS = {"reference": "NCCL's", "nccl_ep": "16"}


class EngineSubject(Subject):
    """See `Subject`.  Over a process group of its own."""

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        super().__init__(name, setting, workload)
        base, num_sms = split_name(name)
        case, work = workload.case, workload
        check_limits(workload, ENGINES[base].caps)
        with excused(EngineUnavailableError, InputError):
            # Made in full, so that options of the environment do not change what is measured.
            config = EpConfig(
                engine=base,
                alignment=case.alignment,
                num_sms=num_sms,
                timeout_s=setting.timeout_s,
                first_timeout_s=setting.timeout_s,
            )
            engine = create_engine(setting.new_group(), case.num_experts, config)
        self._engine = engine
        self.sms = str(getattr(engine, "num_sms", None) or num_sms or DEFAULT_SMS.get(base, "-"))
        # On which the order of rows depends, for an engine that knows several.
        self.nodes: Nodes | None = getattr(engine, "nodes", None)
        self._plan = engine.plan(work.topk_idx)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: engine.plan(work.topk_idx),
            lambda: engine.dispatch(self._plan, work.x, work.w),
            lambda: engine.combine(self._plan, work.y),
            lambda: engine.dispatch(self._plan, work.grad_out),
            lambda: engine.combine(self._plan, work.grad_rows, work.grad_row_w),
        )
        self.passes = dict(zip(STEPS, calls, strict=True))

    def problem(self) -> str | None:
        """See `Subject.problem`.  From a new plan; all passes run before anything is compared."""
        self._plan = self.passes["plan"]()
        results = {name: self.passes[name]() for name in STEPS[1:]}
        return results_problem(results, self._workload, self._engine.caps.reduction, self.nodes)

    def close(self) -> None:
        """See `Subject.close`."""
        self._engine.close()
