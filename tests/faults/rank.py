"""A rank of a job in which one rank goes wrong; the tests beside this file start all of them.

python tests/faults/rank.py BACKEND ENGINE FAULT

The other ranks get an exception that nobody catches, and so end as a training would.
"""

from __future__ import annotations

import os
import sys
import time

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.testing.launcher import RankContext
from megatron_ncclep.testing.processes import join

# For starting and compiling, and for what comes after.
LONG_S, DEADLINE_S = 60.0, 3.0
# Late by more than one deadline and less than two, at a clock of 1.5 to 3 GHz.
LATE_CYCLES = 9_000_000_000
# For gloo's threads to let go of what they had.
GLOO_S = 0.2
NUM_TOKENS, HIDDEN = 3, 64
# What the rank that goes wrong exits with when it dies.
DEATH = 9


class Job:
    """Plan, dispatch and combine over one engine; every token has an expert on every rank.

    Attributes:
        is_culprit: whether this rank, the last one, is the one that goes wrong.
    """

    def __init__(self, ctx: RankContext, engine: Engine) -> None:
        self.ctx, self.engine = ctx, engine
        self.is_culprit = ctx.rank == ctx.num_ranks - 1

    def plan(self) -> RoutePlan:
        experts = 4 * torch.arange(self.ctx.num_ranks, device=self.ctx.device)
        return self.engine.plan(experts.repeat(NUM_TOKENS, 1))

    def dispatch(self, plan: RoutePlan) -> None:
        self.engine.dispatch(plan, torch.ones(NUM_TOKENS, HIDDEN, device=self.ctx.device))

    def combine(self, plan: RoutePlan) -> None:
        self.engine.combine(plan, torch.ones(plan.num_rows, HIDDEN, device=self.ctx.device))

    def steps(self) -> None:
        """All of them, as it should be."""
        plan = self.plan()
        self.dispatch(plan)
        self.combine(plan)
        self.wait()

    def wait(self) -> None:
        """For the device."""
        if self.ctx.device == "cuda":
            torch.cuda.synchronize()


def dies(job: Job) -> None:
    """A rank dies before a dispatch."""
    plan = job.plan()
    job.wait()
    if job.is_culprit:
        os._exit(DEATH)
    job.dispatch(plan)


def skips(job: Job) -> None:
    """A rank leaves out a combine and goes on."""
    plan = job.plan()
    job.dispatch(plan)
    if job.is_culprit:
        job.plan()
    job.combine(plan)


def stops(job: Job) -> None:
    """A rank makes no further call, but lives."""
    plan = job.plan()
    if job.is_culprit:
        time.sleep(2 * DEADLINE_S)
        return
    job.dispatch(plan)


def late_plan(job: Job) -> None:
    """The hosts agree, but one device comes to plan after the deadline."""
    if job.is_culprit:
        torch.cuda._sleep(LATE_CYCLES)
    plan = job.plan()
    job.dispatch(plan)


def late_dispatch(job: Job) -> None:
    """The same in dispatch; the error is that of the next call, whichever it is."""
    plan = job.plan()
    if job.is_culprit:
        torch.cuda._sleep(LATE_CYCLES)
    job.dispatch(plan)
    job.wait()
    job.plan()


def late_combine(job: Job) -> None:
    plan = job.plan()
    job.dispatch(plan)
    if job.is_culprit:
        torch.cuda._sleep(LATE_CYCLES)
    job.combine(plan)
    job.wait()
    job.dispatch(plan)


def dies_late(job: Job) -> None:
    """A rank dies with its dispatch queued: the hosts have agreed, and its kernel never runs."""
    plan = job.plan()
    if job.is_culprit:
        job.wait()
        torch.cuda._sleep(LATE_CYCLES)
        job.dispatch(plan)
        os._exit(DEATH)
    job.dispatch(plan)
    job.wait()
    job.combine(plan)


FAULTS = {
    fault.__name__: fault
    for fault in (dies, skips, stops, late_plan, late_dispatch, late_combine, dies_late)
}


def main(backend: str, engine_name: str, fault: str) -> None:
    ctx = join(backend)
    num_experts = 4 * ctx.num_ranks
    # The first engine makes and compiles what the second finds.
    engine = create_engine(ctx.group, num_experts, EpConfig(engine=engine_name, timeout_s=LONG_S))
    Job(ctx, engine).steps()
    engine.close()
    config = EpConfig(engine=engine_name, timeout_s=DEADLINE_S)
    job = Job(ctx, create_engine(ctx.group, num_experts, config))
    job.steps()
    start = time.monotonic()
    try:
        FAULTS[fault](job)
    finally:
        print(f"over after {time.monotonic() - start:.1f} s", flush=True)
        if backend == "gloo":
            # torch aborts a process whose interpreter ends while a thread of gloo still holds the
            # tensors of the last collective (https://github.com/pytorch/pytorch/pull/179291).
            time.sleep(GLOO_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
