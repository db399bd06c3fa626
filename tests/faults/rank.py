"""A rank of a job in which one rank goes wrong; `fork_server.py` starts all of them.

The other ranks get an exception that is not caught, so they end as a training would.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from processes import join
from rank_pool import RankContext
from timeouts import patient

import megatron_ncclep
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import Engine, RoutePlan
from megatron_ncclep.engines.native.engine import NativeEngine
from megatron_ncclep.engines.native.host_protocol import HostProtocol
from megatron_ncclep.ranks import shared_memory
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.hosts import Hosts

# For starting and compiling, and for what comes after.
LONG_S, DEADLINE_S = patient(60.0), 3.0
# Late by more than one deadline and less than two, at a clock of 1.5 to 3 GHz.
LATE_CYCLES = 9_000_000_000
NUM_TOKENS, HIDDEN = 3, 64
# Hidden size of rows that need more memory than there is, and bytes that there are.  On GPUs what a
# rank dispatches takes more than the 10 MiB up to which torch's allocator has room to spare.
LARGE_HIDDEN, ROOM_BYTES = 2**20, 2**23


class Job:
    """Plan, dispatch and combine over one engine; every token has an expert on every rank.

    Attributes:
        is_culprit: whether this rank is the one that goes wrong.
        has_entry: no host waits for the others' in dispatch and combine: devices do.
    """

    def __init__(self, ctx: RankContext, engine: Engine, is_culprit: bool) -> None:
        self.ctx, self.engine, self.is_culprit = ctx, engine, is_culprit
        self.has_entry = isinstance(engine, NativeEngine)

    def plan(self) -> RoutePlan:
        experts = 4 * torch.arange(self.ctx.num_ranks, device=self.ctx.device)
        return self.engine.plan(experts.repeat(NUM_TOKENS, 1))

    def dispatch(self, plan: RoutePlan) -> None:
        self.engine.dispatch(plan, torch.ones(NUM_TOKENS, HIDDEN, device=self.ctx.device))

    def combine(self, plan: RoutePlan) -> None:
        self.engine.combine(plan, torch.ones(plan.num_rows, HIDDEN, device=self.ctx.device))

    def steps(self) -> None:
        """Make all of them, as a rank should."""
        plan = self.plan()
        self.dispatch(plan)
        self.combine(plan)
        self.wait()

    def wait(self) -> None:
        """For the device."""
        if self.ctx.device == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def inside(self, phase: str, act: Callable[[], None]) -> Iterator[None]:
        """Have the culprit act when it has entered a `phase`, before its own part.

        The others count on it by then: the hosts have agreed, or, with `native`, do without.
        """
        owner, name = (HostProtocol, "begin_rows") if self.has_entry else (Hosts, "agree")
        enter = getattr(owner, name)

        def enter_and_act(of_whom: Any, of: str, *args: Any, **kwargs: Any) -> Any:
            entered = enter(of_whom, of, *args, **kwargs)
            if self.is_culprit and of == phase:
                act()
            return entered

        with mock.patch.object(owner, name, enter_and_act):
            yield


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_dispatch(act: Callable[[], None]) -> Callable[[Job], None]:
    """A rank acts before a dispatch, for which the others wait, and continues if it can."""

    def happens(job: Job) -> None:
        plan = job.plan()
        job.wait()
        if job.is_culprit:
            act()
        job.dispatch(plan)
        megatron_ncclep.check()
        job.plan()

    return happens


def raise_own_error() -> None:
    raise ArithmeticError("the loss is NaN")


def dies_in_dispatch(job: Job) -> None:
    """A rank dies when the others already count on its rows."""
    plan = job.plan()
    with job.inside("dispatch", die):
        job.dispatch(plan)
    job.wait()
    job.combine(plan)


def dies_while_opening(job: Job) -> None:
    """Rank 0 dies while it waits for the others to share its memory.

    It used to leave a file in /dev/shm: only the last rank to open the memory removed its name.
    """
    group = dist.new_group(list(range(job.ctx.num_ranks)))
    dist.barrier(group)  # what the backend makes for its first collective takes its time
    send = shared_memory._Opening.send

    def send_and_die(opening: Any) -> None:
        send(opening)
        if job.is_culprit:
            die()

    with mock.patch.object(shared_memory._Opening, "send", send_and_die):
        create_engine(group, 4 * job.ctx.num_ranks, job.engine.config)


def runs_out_of_memory(job: Job) -> None:
    """A rank has no room for the rows that it receives."""
    plan = job.plan()
    x = torch.ones(NUM_TOKENS, LARGE_HIDDEN, device=job.ctx.device)
    if job.is_culprit and job.has_entry:
        take_memory_away()  # what comes after the entry needs no more
    with job.inside("dispatch", take_memory_away):
        job.engine.dispatch(plan, x)
    job.wait()
    job.combine(plan)


def take_memory_away() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-9)
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + ROOM_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def skips(job: Job) -> None:
    """A rank skips a combine and continues."""
    plan = job.plan()
    job.dispatch(plan)
    if job.is_culprit:
        job.plan()
    job.combine(plan)


def all_are_interrupted(job: Job) -> None:
    """A user types Ctrl-C: every rank gets a signal, and all but one wait by then."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    mine = torch.tensor([os.getpid()])
    processes = EpGroup.of(job.ctx.group).hosts.gather(mine, "processes", LONG_S).flatten().tolist()
    if not job.is_culprit:
        job.plan()
    time.sleep(DEADLINE_S / 6)  # they wait by now; if not, they see less
    for process in processes:
        os.kill(process, signal.SIGINT)
    job.plan()


def dies_late(job: Job) -> None:
    """A rank dies with its dispatch queued: the hosts have agreed, and its kernel never runs."""
    plan = job.plan()
    if job.is_culprit:
        job.wait()
        torch.cuda._sleep(LATE_CYCLES)
        job.dispatch(plan)
        die()
    job.dispatch(plan)
    job.wait()
    job.combine(plan)


class Fault(NamedTuple):
    """What happens on every rank, which one goes wrong, and the signal that ends it, or all."""

    happens: Callable[[Job], None]
    culprit: int = -1
    ends: signal.Signals | None = None
    ends_all: bool = False


KILLED = signal.SIGKILL
FAULTS = {
    "dies": Fault(before_dispatch(die), ends=KILLED),
    "raises": Fault(before_dispatch(raise_own_error)),
    "destroys": Fault(before_dispatch(dist.destroy_process_group)),
    "comes_late": Fault(before_dispatch(lambda: time.sleep(1.5 * DEADLINE_S))),
    "dies_in_dispatch": Fault(dies_in_dispatch, ends=KILLED),
    "dies_while_opening": Fault(dies_while_opening, culprit=0, ends=KILLED),
    "dies_late": Fault(dies_late, ends=KILLED),
    "runs_out_of_memory": Fault(runs_out_of_memory),
    "skips": Fault(skips),
    "all_are_interrupted": Fault(all_are_interrupted, ends=signal.SIGINT, ends_all=True),
}


def main(backend: str, engine_name: str, name: str) -> None:
    """Be a rank in the job with the fault `name`."""
    ctx = join(backend)
    fault = FAULTS[name]
    is_culprit = ctx.rank == fault.culprit % ctx.num_ranks
    num_experts = 4 * ctx.num_ranks
    # The first engine makes and compiles what the second finds.
    patient = EpConfig(engine=engine_name, timeout_s=LONG_S, first_timeout_s=LONG_S)
    engine = create_engine(ctx.group, num_experts, patient)
    Job(ctx, engine, is_culprit).steps()
    engine.close()
    # On a CPU, waiting ranks notice a rank that ends, which takes a while on a busy machine.
    is_reported = fault.ends_all or (backend == "gloo" and name != "comes_late")
    config = patient if is_reported else EpConfig(engine=engine_name, timeout_s=DEADLINE_S)
    job = Job(ctx, create_engine(ctx.group, num_experts, config), is_culprit)
    job.steps()
    start = time.monotonic()
    try:
        fault.happens(job)
        megatron_ncclep.check()  # as before an optimizer takes the gradients
    finally:
        print(f"over after {time.monotonic() - start:.1f} s", flush=True)
        if backend == "gloo":
            # torch aborts a process whose interpreter ends while a thread of gloo still holds the
            # tensors of the last collective (https://github.com/pytorch/pytorch/pull/179291).
            time.sleep(0.2)
