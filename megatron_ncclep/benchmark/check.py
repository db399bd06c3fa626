"""Check: compare what dispatch and combine gave on this rank with what they must give, bit by bit.

The payload is that of payload.py, so what any rank sent is known here without communication.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_ncclep.benchmark import payload
from megatron_ncclep.benchmark.routes import Routes
from megatron_ncclep.engines.engine import EVERY_PART_ROUNDED, MACHINE_SUMS_ROUNDED

_BITS = {2: torch.int16, 4: torch.int32}
# Elements that are compared at a time; the hash takes 8 bytes for each, several times over.
CHUNK = 2**25


def dispatch_problem(
    routes: Routes, rank: int, actual: torch.Tensor, row_w: torch.Tensor | None, kind: int
) -> str | None:
    """Say what is wrong with the rows that `rank` received, if anything is.  All rows are compared.

    Args:
        routes: of the group.
        rank: whose rows they are.
        actual: [num_rows, hidden]: payload of `kind`, dispatched.
        row_w: fp32 [num_rows]: payload.WEIGHTS, dispatched; None: there were no weights.
        kind: of the payload.
    """
    picks = routes.picks_on(rank)
    if problem := _shape_problem("rows", actual, len(picks)):
        return f"rank {rank}: {problem}"
    top_k, hidden = routes.expert.shape[1], actual.shape[1]

    def describe(row: int) -> str:
        return f"rank {rank}, row {row} ({_owner(routes, int(picks[row]))})"

    for chunk in chunks(len(picks), hidden, actual.device):
        token = picks[chunk].clamp(min=0) // top_k
        expected = rows_of(routes, kind, token, hidden, actual.dtype)
        expected[picks[chunk] < 0] = 0
        if problem := _difference(actual[chunk], expected, chunk, describe):
            return problem
    if row_w is None:
        return None
    if problem := _shape_problem("weights", row_w, len(picks)):
        return f"rank {rank}: {problem}"
    pick = picks.clamp(min=0)
    expected_w = rows_of(routes, payload.WEIGHTS, pick // top_k, top_k, row_w.dtype)
    expected_w = expected_w.gather(1, (pick % top_k)[:, None])
    expected_w[picks < 0] = 0
    every = torch.arange(len(picks), device=actual.device)
    return _difference(row_w[:, None], expected_w, every, lambda row: f"{describe(row)}, weight")


def combine_problem(
    routes: Routes,
    rank: int,
    actual: torch.Tensor,
    home_w: torch.Tensor | None,
    kind: int,
    reduction: str,
    ranks_on_machine: int | None = None,
) -> str | None:
    """Say what is wrong with the rows that came home to `rank`, if anything is.

    All tokens are compared, with sums in the order that docs/contract.md gives: fp32 from +0, over
    a rank's experts upwards, then over ranks upwards.

    Args:
        routes: of the group.
        rank: whose tokens they are.
        actual: [num_tokens, hidden]: sums of payload of `kind`, which rank r had in its rows.
        home_w: fp32 [num_tokens, top_k]: payload.GRAD_WEIGHTS of the rows, at the picks; or None.
        kind: of the payload.
        reduction: what the engine declares, one of engine.REDUCTIONS.
        ranks_on_machine: for MACHINE_SUMS_ROUNDED.
    """
    by_machine = reduction == MACHINE_SUMS_ROUNDED and ranks_on_machine is not None
    most = ranks_on_machine if by_machine and ranks_on_machine else routes.num_ranks
    mine = routes.tokens(rank)
    # In the order of experts, hence of ranks; picks that go nowhere are first.
    expert, order = routes.expert[mine].sort(dim=1)
    slot = routes.slot[mine].gather(1, order)
    destination = routes.destination[mine].gather(1, order)
    if problem := _shape_problem("sums", actual, len(slot)):
        return f"rank {rank}: {problem}"
    hidden, dtype = actual.shape[1], actual.dtype

    def describe(token: int) -> str:
        return f"rank {rank}, token {token} (experts {expert[token].tolist()})"

    for chunk in chunks(len(slot), hidden, actual.device):
        total = torch.zeros(len(chunk), hidden, device=actual.device)
        of_machine = torch.zeros_like(total)
        for expert_rank in range(routes.num_ranks):
            part = torch.zeros_like(total)
            for k in range(slot.shape[1]):
                here = (destination[chunk, k] == expert_rank).nonzero().squeeze(1)
                row = slot[chunk[here], k]
                owner = torch.full_like(row, expert_rank)
                part[here] += payload.rows(kind, owner, row, hidden, dtype).float()
            if expert_rank % most != rank % most or reduction == EVERY_PART_ROUNDED:
                part = part.to(dtype).float()
            of_machine += part
            if expert_rank % most == most - 1:  # the machine's last
                total += of_machine.to(dtype).float() if by_machine else of_machine
                of_machine.zero_()
        if problem := _difference(actual[chunk], total.to(dtype), chunk, describe):
            return problem
    if home_w is None:
        return None
    if problem := _shape_problem("weights", home_w, len(slot)):
        return f"rank {rank}: {problem}"
    slot, destination = routes.slot[mine], routes.destination[mine]
    sent = payload.rows(
        payload.GRAD_WEIGHTS, destination.reshape(-1), slot.reshape(-1), 1, home_w.dtype
    ).view_as(home_w)
    every = torch.arange(len(slot), device=actual.device)
    return _difference(
        home_w, sent.masked_fill(slot < 0, 0), every, lambda token: f"{describe(token)}, weights"
    )


def rows_of(
    routes: Routes, kind: int, token: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """The payload of `kind` of tokens that are numbered over the whole group, [n, width]."""
    first = torch.tensor(routes.first, device=token.device)
    source = routes.source[token]
    return payload.rows(kind, source, token - first[source], width, dtype)


def deviation(
    actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | float, within: str
) -> str | None:
    """Say where two [n, width] tensors first differ by more than `bound`.

    Args:
        actual, expected: of a dtype in which they can be subtracted from each other.
        bound: one number, or [n, width].
        within: what the bound is, in words.
    """
    # Not `>`: a NaN is within nothing.
    far = ~((actual - expected).abs() <= bound)
    if not bool(far.any()):
        return None
    row, column = (int(i) for i in far.nonzero()[0])
    return (
        f"[{row}, {column}] is {actual[row, column].item()!r}, expected "
        f"{expected[row, column].item()!r} within {within}; {int(far.any(dim=1).sum())} of "
        f"{len(far)} rows differ"
    )


def chunks(num_rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Row numbers in pieces of at most `CHUNK` elements."""
    every = torch.arange(num_rows, device=device)
    return every.split(max(1, CHUNK // max(1, width)))


def _owner(routes: Routes, pick: int) -> str:
    """Who should sit in a row."""
    if pick < 0:
        return "padding"
    token, k = divmod(pick, routes.expert.shape[1])
    source = int(routes.source[token])
    return (
        f"rank {source}'s token {token - routes.first[source]} for expert "
        f"{int(routes.expert[token, k])}"
    )


def _shape_problem(what: str, actual: torch.Tensor, num_rows: int) -> str | None:
    if len(actual) == num_rows:
        return None
    return f"{len(actual)} {what}, expected {num_rows}"


def _difference(
    actual: torch.Tensor,
    expected: torch.Tensor,
    rows: torch.Tensor,
    describe: Callable[[int], str],
) -> str | None:
    """Say where two [n, width] tensors first differ; `rows` are the numbers of their rows."""
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    bits = _BITS[actual.element_size()]
    different = actual.contiguous().view(bits) != expected.contiguous().view(bits)
    if not bool(different.any()):
        return None
    row, column = (int(i) for i in different.nonzero()[0])
    return (
        f"{describe(int(rows[row]))}: column {column} is {actual[row, column].item()!r}, expected "
        f"{expected[row, column].item()!r}; {int(different.any(dim=1).sum())} of the {len(rows)} "
        "rows compared with it differ"
    )
