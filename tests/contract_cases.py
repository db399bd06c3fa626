"""Cases of the contract: what every engine must do, and how tests fit a case to an engine.

`for_engine` gives a case the shapes that an engine is tested with, and `refusal_words` says what an
engine must say of a limit that a case breaks.
"""

from __future__ import annotations

import dataclasses
import os
import re

import torch
from oracle import oracle_rows_limit
from processes import LOCAL_RANKS
from timeouts import patient

from megatron_ncclep import envs
from megatron_ncclep.benchmark.cases import Case, ignored_options, refusal
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES
from megatron_ncclep.engines.engine import EngineCaps
from megatron_ncclep.engines.native.engine import CAPS_OVER_DOMAINS

# The limits that show when an engine is made for a group,
GROUP_LIMITS = ("min_ranks", "max_local_experts")
# and those that show only when rows are moved: a plan is made without them.
PAYLOAD_LIMITS = ("payload_dtypes", "row_bytes_multiple")

# All that a rank may know of another one that has refused a call, where hosts share no memory.
OF_A_REFUSAL = re.compile(r"\w+: rank \d has refused a call: look at its output")

# Library shapes, what `for_engine` turns a case into: experts on each rank -> dtypes, most wanted
# first, and one hidden size.  Four combinations for each number of ranks; the second number of
# experts is for a top-k that does not fit into the first.
LIBRARY_DTYPES = {4: (torch.float32, torch.bfloat16, torch.float16), 32: (torch.float32,)}
LIBRARY_HIDDEN = 64
# Engines whose kernels are compiled at first use, and their stand-in of test_limits.py.
COMPILING = ("nccl_ep", "restricted")

# Seconds that a rank waits for the others.  What hangs on GPUs should not hang for long; on a CPU
# the ranks share few cores with everything else, and a compiler takes its time.
DEADLINE_S = {"cpu": patient(120.0), "cuda": patient(20.0)}
COMPILER_DEADLINE_S = patient(60.0)


def deadline_s(engine: str, device: str) -> float:
    """The `timeout_s` with which tests make `engine` for tensors on `device`."""
    return COMPILER_DEADLINE_S if engine in COMPILING else DEADLINE_S[device]


def local_ranks() -> int | None:
    """How many ranks a node has; None: one host has them all."""
    made_up = os.environ.get(LOCAL_RANKS)
    return int(made_up) if made_up else envs.get("NCCLEP_LOCAL_RANKS")


def caps_of(engine_name: str, num_ranks: int | None = None) -> EngineCaps:
    """The caps of the engine in a group of `num_ranks`; None: of more than a host has."""
    most = os.environ.get(LOCAL_RANKS)  # on GPUs, where hosts are NVLink domains
    is_whole = most is None or (num_ranks is not None and num_ranks <= int(most))
    is_over_domains = engine_name == "native" and not is_whole
    return CAPS_OVER_DOMAINS if is_over_domains else ENGINES[engine_name].caps


def config_of(case: Case, engine: str = "reference") -> EpConfig:
    """The options of `engine` for the case."""
    return dataclasses.replace(
        case.config(), engine=engine, timeout_s=deadline_s(engine, case.device)
    )


def rows_limit_of(case: Case) -> int | None:
    """What `max_recv_rows` says in rows, as the oracle reads it."""
    return oracle_rows_limit(
        case.max_recv_rows,
        case.num_ranks,
        max(case.tokens),  # of all ranks, where it matters
        case.top_k,
        case.num_experts,
        case.alignment,
    )


def contract_cases(num_ranks: int) -> list[Case]:
    """The cases that every engine must pass exactly, for a group of `num_ranks`."""
    R = num_ranks
    E = 4 * R  # four experts on each rank

    def uneven(most: int) -> tuple[int, ...]:
        return tuple(most * (r + 1) // R for r in range(R))

    many, top_k = (E + R, 6) if E + R >= 6 else (E, 4)
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    return [
        Case("even", (16,) * R, E),
        Case("uneven", uneven(23), E, top_k=3),
        Case("a-rank-without-tokens", (*uneven(20)[:-1], 0), E),
        Case("no-tokens-at-all", (0,) * R, E),
        Case("one-token", (*(0,) * (R - 1), 1), E),
        Case("top-1", uneven(17), E, top_k=1),
        Case("top-k-is-all-experts", uneven(9), E, top_k=E),
        Case("top-k-is-32", uneven(7), 32 * R, top_k=32),
        Case("one-expert-on-each-rank", uneven(14), R, top_k=min(R, 2)),
        Case("masked-assignments", uneven(31), E, top_k=4, dropped=0.4),
        Case("tokens-without-experts", uneven(31), E, top_k=2, dropped=0.8),
        Case("no-token-is-routed", uneven(11), E, dropped=1.1),
        Case("all-to-the-first-experts", uneven(19), E, skew=100.0),
        Case("skewed", uneven(40), 8 * R, top_k=4, skew=1.0),
        Case("hidden-1", uneven(13), E, hidden=1, fixed_payload=True),
        Case("hidden-odd", uneven(13), E, hidden=37, fixed_payload=True),
        *(
            Case(
                f"{str(dtype).removeprefix('torch.')}-top-{top_k}", uneven(25), many, top_k,
                dtype=dtype, fixed_payload=dtype == torch.float64,
            )
            for dtype in dtypes
        ),
        *(
            Case(f"alignment-{a}", uneven(29), E, 3, alignment=a, dropped=0.1)
            for a in (16, 32, 64, 128, 256)
        ),
        Case("static-with-room", uneven(12), E, max_recv_rows=256),
        Case("static-overflow", uneven(40), E, 3, max_recv_rows=48, skew=0.5),
        Case("static-overflow-aligned", uneven(60), E, 3, alignment=16, max_recv_rows=96, skew=0.5),
        Case("static-one-row", uneven(6), E, max_recv_rows=1),
        Case("static-bf16", uneven(30), E, 4, dtype=torch.bfloat16, max_recv_rows=64, dropped=0.2),
        Case("static-worst", (13,) * R, E, 3, alignment=16, max_recv_rows="worst", skew=100.0),
        Case("static-factor", (24,) * R, E, 3, alignment=16, max_recv_rows="1x", skew=0.5),
    ]  # fmt: skip


def refusal_words(limit: str, case: Case, caps: EngineCaps) -> list[str]:
    """What an error about `limit` must say: the value of the limit, whatever the sentence is."""
    if limit == "options":
        return ignored_options(case, caps)
    if limit == "payload_dtypes":
        return [str(dtype).removeprefix("torch.") for dtype in caps.payload_dtypes]
    return [str(getattr(caps, limit))]


def for_engine(case: Case, caps: EngineCaps) -> Case:
    """The case with the same routing features in shapes that the engine can be tested with.

    An engine that compiles at run time needs seconds for each new combination of ranks, experts per
    rank, row bytes and dtype, and nearly every case has its own.  For such an engine experts,
    hidden size and dtype come from the library shapes; tokens, top-k, skew, masks, alignment and
    static rows stay.  One expert on each rank is not tested then.

    For another engine only a payload that it refuses is replaced, by the next one that it moves: a
    case that is about plans, gradients or schedules is none about fp64 or five columns.

    A case with `fixed_payload` stays as it is for every engine, so that its refusal is seen.
    """
    R = case.num_ranks
    if case.fixed_payload:
        return case
    if caps.name in COMPILING:
        few, many = sorted(LIBRARY_DTYPES)
        per_rank = few if case.top_k <= few * R and case.num_experts < 2 * few * R else many
        dtypes, hidden = LIBRARY_DTYPES[per_rank], LIBRARY_HIDDEN
    elif refusal(case, caps) in PAYLOAD_LIMITS:
        per_rank = case.num_experts // R
        dtypes, hidden = (case.dtype, torch.float32, *caps.payload_dtypes), case.hidden
    else:
        return case
    possible = [dtype for dtype in dtypes if dtype in caps.payload_dtypes]
    dtype = case.dtype if case.dtype in possible else possible[0]
    while hidden * dtype.itemsize % caps.row_bytes_multiple:
        hidden += 1
    return dataclasses.replace(case, num_experts=per_rank * R, hidden=hidden, dtype=dtype)
