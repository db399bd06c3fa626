"""Which engine each number of ranks would get on this machine, and why the others cannot run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_ncclep.config import EpConfig
from megatron_ncclep.doctor.report import Finding, by_num_ranks
from megatron_ncclep.engines import ENGINES, choose_engine
from megatron_ncclep.errors import InputError
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks import place
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.nodes import find_nodes
from megatron_ncclep.ranks.pool import RankContext, RankError, RankPool

# Seconds for all ranks to start and to answer one question.
DEADLINE_S = 180.0
# Seconds that one rank waits for another; shorter, so the error says which one is missing.
WAIT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """The answer of one rank.

    Attributes:
        chosen: the engine that "auto" takes.
        reasons: engine -> why it cannot run; None if it can.
        nodes: the grid of ranks that the engine 'hierarchical' finds, or why there is none.
    """

    chosen: str
    reasons: dict[str, str | None]
    nodes: str = "not known"


def engines(num_ranks: int | None = None) -> Iterator[Finding]:
    """Each engine and why it cannot run, and which one `auto` takes.

    With GPUs: for 1 to N ranks, in N processes with one GPU each, or in `num_ranks` processes that
    share GPUs.  Without GPUs: for this process alone.

    Raises:
        InputError: there are fewer GPUs than `num_ranks`, and NCCL does not let ranks share them.
    """
    num_gpus = torch.cuda.device_count()
    if num_ranks is not None and num_ranks > num_gpus and not place.may_share_gpu():
        raise InputError(
            f"--ranks {num_ranks}: {num_gpus} GPU(s) are visible; {place.HOW_TO_SHARE}"
        )
    if not torch.cuda.is_available():
        yield from describe({1: answer_alone()}, "gloo")
        return
    pool = RankPool(num_ranks or num_gpus, "nccl")
    try:
        yield from lsa_domain(pool)
        yield from answers_of_ranks(pool)
    finally:
        pool.close()


def lsa_domain(pool: RankPool) -> Iterator[Finding]:
    """How many of the pool's ranks reach each other's memory by load and store, and whether NCCL
    offers kernels a network, for groups of several nodes.  Needs GPUs.
    """
    if pool.size == 1 or extension.unavailable_reason() is not None:
        return
    subject = "LSA domain"
    try:
        sizes, problems = zip(*pool.run(_reach, timeout=DEADLINE_S), strict=True)
    except RankError as error:
        yield Finding(subject, "not known", _failed("making an NCCL communicator", error))
        return
    yield Finding(
        subject,
        f"{min(sizes)} of {pool.size} GPUs reach each other's memory by load and store (NVLink)",
    )
    problem = next(filter(None, problems), None)
    offer = f"for groups of several nodes: {problem}" if problem else "NCCL offers one (GIN)"
    yield Finding("network for kernels", offer)


def answers_of_ranks(pool: RankPool) -> Iterator[Finding]:
    """The findings for the first 1 to N ranks of a pool of N.

    It stops at the first number of ranks that fails: the next would take as long to fail.
    """
    answers: dict[int, Answer] = {}
    failure = None
    for num_ranks in range(1, pool.size + 1):
        try:
            answers[num_ranks] = merge(pool.run(answer_rank, ranks=num_ranks, timeout=DEADLINE_S))
        except RankError as error:
            failure = Finding(
                f"engines for {num_ranks} ranks", "not known", _failed("the choice", error)
            )
            break
    if answers:
        yield from describe(answers, pool.backend)
    if failure is not None:
        yield failure


def describe(answers: dict[int, Answer], backend: str) -> Iterator[Finding]:
    """Report the answers by number of ranks, and the grid of the largest number."""
    yield Finding("nodes", answers[max(answers)].nodes)
    for name in ENGINES:
        texts = {n: a.reasons[name] or f"can run over {backend}" for n, a in answers.items()}
        yield Finding(f"engine {name}", by_num_ranks(texts))
    yield Finding("engine auto", by_num_ranks({n: f"takes {a.chosen}" for n, a in answers.items()}))


def answer(group: EpGroup) -> Answer:
    """Ask every engine whether it can run on this rank of `group`.  Collective."""
    config = EpConfig(engine="auto", timeout_s=WAIT_S, first_timeout_s=WAIT_S)
    reasons: dict[str, str | None] = {}
    for name, entry in ENGINES.items():
        reasons[name] = entry.unavailable_reason(group, config, None)
        if reasons[name] is None and group.size < entry.caps.min_ranks:
            reasons[name] = f"it needs at least {entry.caps.min_ranks} ranks"
    chosen, _ = choose_engine(group, config)
    return Answer(chosen, reasons, str(find_nodes(group, WAIT_S)))


def answer_rank(context: RankContext) -> Answer:
    """Answer as a rank of a pool.  Collective."""
    return answer(EpGroup.of(context.group))


def answer_alone() -> Answer:
    """Answer for a group of this process alone, over gloo."""
    # Port 0: any free port.
    dist.init_process_group(
        "gloo",
        init_method="tcp://127.0.0.1:0",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=WAIT_S),
    )
    try:
        assert dist.group.WORLD is not None  # just made
        return answer(EpGroup.of(dist.group.WORLD))
    finally:
        dist.destroy_process_group()


def merge(answers: Sequence[Answer]) -> Answer:
    """Merge the ranks' answers; if they differ, the text names the rank of each."""
    reasons: dict[str, str | None] = {}
    for name in answers[0].reasons:
        texts = [answer.reasons[name] for answer in answers]
        if len(set(texts)) == 1:
            reasons[name] = texts[0]
        else:
            reasons[name] = "; ".join(f"rank {r}: {t}" for r, t in enumerate(texts) if t)
    return Answer(answers[0].chosen, reasons, answers[0].nodes)


def _reach(context: RankContext) -> tuple[int, str]:
    """The size of this rank's NVLink domain, and why its kernels have no network, if so."""
    communicator = communicator_of(EpGroup.of(context.group), WAIT_S)
    return communicator.lsa_size, communicator.network_problem()


def _failed(what: str, error: RankError) -> str:
    """Say that `what` failed, with the last line of the traceback."""
    reason = str(error).strip().splitlines()[-1]
    return f"{what} failed: {reason}; NCCL says more with NCCL_DEBUG=INFO in the environment"
