"""Which engine each number of ranks would get on this machine, and why the others cannot run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep import cpu
from megatron_ncclep.config import EpConfig
from megatron_ncclep.cpu import torch_calls
from megatron_ncclep.doctor.packages import has_megatron
from megatron_ncclep.doctor.report import Finding, by_num_ranks
from megatron_ncclep.engines import ENGINES, choose_engine
from megatron_ncclep.errors import InputError
from megatron_ncclep.libraries import extension
from megatron_ncclep.libraries.tested import NEWEST_TORCH, OLDEST_TORCH
from megatron_ncclep.logs import remarks_hidden
from megatron_ncclep.ranks import topology
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.launch import LocalRanks, RankContext, RankError
from megatron_ncclep.ranks.nodes import find_nodes

# Seconds for all ranks to start and to answer one question.
DEADLINE_S = 180.0
# Seconds that one rank waits for another; shorter, so the error says which one is missing.
WAIT_S = 60.0
# Ranks of the group that is made on a machine without GPUs.
CPU_RANKS = 2
# How to learn more about a failure, or to get around it, by backend.
REMEDIES = {
    "nccl": "NCCL says more with NCCL_DEBUG=INFO in the environment",
    "gloo": f"training on a CPU needs such a process group: torch {OLDEST_TORCH} to {NEWEST_TORCH} "
    "are tested, install one of these",
}


Answer = dict[str, str]  # of a rank: subject of a finding -> its state


def engines(num_ranks: int | None = None) -> Iterator[Finding]:
    """Each engine and why it cannot run, and which one `auto` takes.

    With GPUs: for 1 to N ranks, in N processes with one GPU each, or in `num_ranks` processes that
    share GPUs.  Without GPUs: for 1 and 2 ranks over gloo, set up as for training on a CPU.

    Raises:
        InputError: there are fewer GPUs than `num_ranks`, and NCCL does not let ranks share them.
    """
    num_gpus = torch.cuda.device_count()
    if num_ranks is not None and num_ranks > num_gpus and not topology.may_share_gpu():
        raise InputError(
            f"--ranks {num_ranks}: {num_gpus} GPU(s) are visible; {topology.HOW_TO_SHARE}"
        )
    if torch.cuda.is_available():
        size, backend, prepare = num_ranks or num_gpus, "nccl", None
    else:
        size, backend, prepare = CPU_RANKS, "gloo", use_cpu
    if backend == "nccl" and size > 1 and extension.unavailable_reason() is None:
        # Processes of their own: a communicator that fails says nothing about the reference engine.
        with LocalRanks(size, backend, tell_reach) as ranks:
            yield from lsa_domain(size, partial(ranks.receive, DEADLINE_S))
    with LocalRanks(size, backend, tell_answers, prepare=prepare) as ranks:
        yield from answers_of_ranks(size, backend, partial(ranks.receive, DEADLINE_S))


def use_cpu() -> None:
    """Put the stand-ins for training on a CPU in place, Megatron-Core's only where it is."""
    if has_megatron():
        with remarks_hidden():
            cpu.enable()
    else:
        torch_calls.replace_all()


def lsa_domain(size: int, receive: Callable[[], list[Any]]) -> Iterator[Finding]:
    """How many of `size` ranks reach each other's memory by load and store, and whether NCCL offers
    kernels a network, for groups of several nodes.  `receive`: the next answers of the ranks.
    """
    subject = "LSA domain"
    try:
        sizes, problems = zip(*receive(), strict=True)
    except RankError as error:
        yield Finding(subject, "not known", _failed("making an NCCL communicator", error, "nccl"))
        return
    yield Finding(
        subject,
        f"{min(sizes)} of {size} GPUs reach each other's memory by load and store (NVLink)",
    )
    problem = next(filter(None, problems), None)
    offer = f"for groups of several nodes: {problem}" if problem else "NCCL offers one (GIN)"
    yield Finding("network for kernels", offer)


def answers_of_ranks(
    size: int, backend: str, receive: Callable[[], list[Answer | None]]
) -> Iterator[Finding]:
    """The findings for the first 1 to `size` ranks; `receive`: the next answers of the ranks.

    It stops at the first number of ranks that fails: the next would take as long to fail.
    """
    texts: dict[str, dict[int, str]] = {}  # of each subject, by number of ranks
    failure = None
    for num_ranks in range(1, size + 1):
        try:
            answers = [answer for answer in receive() if answer is not None]
        except RankError as error:
            reason = _failed("a process group and the choice", error, backend)
            failure = Finding(f"engines for {num_ranks} ranks", "not known", reason)
            break
        for subject in answers[0]:
            merged = _merged([answer[subject] for answer in answers])
            texts.setdefault(subject, {})[num_ranks] = merged
    for subject, of in texts.items():
        yield Finding(subject, of[max(of)] if subject == "nodes" else by_num_ranks(of))
    if failure is not None:
        yield failure


def answer(group: EpGroup) -> Answer:
    """Ask every engine whether it can run on this rank of `group`.  Collective."""
    config = EpConfig(engine="auto", timeout_s=WAIT_S, first_timeout_s=WAIT_S)
    told = {"nodes": str(find_nodes(group, WAIT_S))}
    for name, entry in ENGINES.items():
        reason = entry.unavailable_reason(group, config, None)
        if reason is None and group.size < entry.caps.min_ranks:
            reason = f"it needs at least {entry.caps.min_ranks} ranks"
        backend = "gloo" if group.device.type == "cpu" else "nccl"
        told[f"engine {name}"] = reason or f"can run over {backend}"
    chosen, _ = choose_engine(group, config)
    return {**told, "engine auto": f"takes {chosen}"}


def tell_answers(context: RankContext, send: Callable[[Any], None]) -> None:
    """Send an Answer for the first 1 to N ranks each; None if this rank is not one of them."""
    for num_ranks in range(1, context.num_ranks + 1):
        group = dist.new_group(list(range(num_ranks)))
        send(answer(EpGroup.of(group)) if context.rank < num_ranks else None)


def tell_reach(context: RankContext, send: Callable[[Any], None]) -> None:
    """Send the size of this rank's NVLink domain, and why its kernels have no network, if so."""
    communicator = communicator_of(EpGroup.of(context.group), WAIT_S)
    send((communicator.lsa_size, communicator.network_problem()))


def _merged(texts: Sequence[str]) -> str:
    """The ranks' texts as one; if they differ, with the rank of each."""
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))


def _failed(what: str, error: RankError, backend: str) -> str:
    """Say that `what` failed, with the first line of the error that a traceback ends with."""
    lines = str(error).strip().splitlines()
    reason = next((line for line in reversed(lines) if re.match(r"[\w.]+: ", line)), lines[-1])
    return f"{what} failed: {reason}; {REMEDIES[backend]}"
