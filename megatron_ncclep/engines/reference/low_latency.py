"""Low-latency mode of the reference engine: defined in plain torch.distributed."""

from __future__ import annotations

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import checks
from megatron_ncclep.engines.engine import NOT_ROUTED
from megatron_ncclep.engines.low_latency_types import LowLatencyRows, LowLatencySizes, Tokens
from megatron_ncclep.errors import InputError
from megatron_ncclep.ranks.all_to_all import exchange
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource

# Undefined rows are NaN here, so a caller that uses them notices.
UNDEFINED = 0xFF


class ReferenceLowLatency(Resource):
    """An engine's part of a `LowLatency`, which has already checked turns and arguments.

    First halves do all the work, and wait for all hosts.  Rows of an earlier dispatch become NaN
    at the next one.
    """

    def __init__(
        self, group: EpGroup, num_experts: int, sizes: LowLatencySizes, config: EpConfig
    ) -> None:
        self._group, self._num_experts, self._sizes = group, num_experts, sizes
        self._config = config
        self._num_tokens = 0  # of the last dispatch
        self._received: LowLatencyRows | None = None
        # bool [R, T]: this rank's tokens that go to each rank.
        self._tokens_of = self._out = torch.zeros(0, device="cpu")

    def begin(self, phase: str, problem: str | None, sends: bool) -> None:
        """Preamble of every call: raise pending errors, and `problem` on all ranks.

        Args:
            phase: "dispatch" or "combine".
            problem: what is wrong on this rank, if anything is.
            sends: the call has a first half.
        """
        if sends:
            self._group.hosts.agree(phase, {}, problem, self._group.deadline_s(self._config))
        elif problem is not None:
            raise InputError(f"{phase}: {problem}")

    def topk_problem(self, topk_idx: torch.Tensor) -> str | None:
        """Say what is wrong with the values of a routing, if the host checks them."""
        return checks.topk_value_problem(topk_idx, self._num_experts)

    @torch.no_grad()
    def dispatch(self, tokens: Tokens, completes: bool) -> LowLatencyRows:
        """Do the first half and, if it `completes`, the second, after which the result is valid."""
        self._fill_nan()
        self._num_tokens = len(tokens.x)
        topk_idx, scales = tokens.topk_idx, tokens.scales
        num_local, ranks = self._num_experts // self._group.size, range(self._group.size)
        is_routed = topk_idx != NOT_ROUTED
        rank_of = topk_idx.div(num_local, rounding_mode="floor")
        here = [is_routed & (rank_of == rank) for rank in ranks]  # [T, K] each
        self._tokens_of = torch.stack([assignments.any(dim=1) for assignments in here])
        # For each rank, the experts and weights of its tokens.
        local = [
            torch.where(assignments, topk_idx - rank * num_local, NOT_ROUTED).int()
            for rank, assignments in enumerate(here)
        ]
        w = [torch.where(assignments, tokens.weights, 0) for assignments in here]
        counts = self._exchange(self._tokens_of.sum(dim=1).int().view(-1, 1)).view(-1)
        topk = self._send_rows(local)
        row_index = torch.arange(self._sizes.max_tokens, device=topk.device)
        topk.masked_fill_((row_index >= counts.view(-1, 1))[:, :, None], NOT_ROUTED)
        self._received = LowLatencyRows(
            rows=self._send_rows([tokens.x] * self._group.size),
            topk_idx=topk,
            weights=self._send_rows(w),
            counts=counts,
            num_local_experts=num_local,
            scales=None if scales is None else self._send_rows([scales] * self._group.size),
        )
        return self._received

    def complete_dispatch(self) -> LowLatencyRows:
        """Do the second half."""
        assert self._received is not None  # dispatched
        return self._received

    @torch.no_grad()
    def combine(
        self, y: torch.Tensor, rows_of: torch.Tensor | None, completes: bool
    ) -> torch.Tensor:
        """Like `dispatch`.  With `rows_of`, y is [rows, hidden]."""
        assert self._received is not None  # dispatched
        rank, counts = self._group.rank, self._received.counts.tolist()
        places = (self._group.size, self._sizes.max_tokens, self._sizes.hidden)
        partial = torch.zeros(places, device=y.device)
        for source, count in enumerate(counts):
            if rows_of is None:
                partial[source, :count] += y[source, :count].float()
                continue
            for k in range(self._sizes.top_k):
                row = rows_of[source, :count, k].long()
                is_some = (row >= 0) & (row < len(y))
                partial[source, :count][is_some] += y[row[is_some]].float()
        theirs = self._exchange(partial.to(y.dtype))
        out = torch.zeros(self._num_tokens, self._sizes.hidden, device=y.device)
        for peer, tokens in enumerate(self._tokens_of):
            num_rows = int(tokens.sum())
            part = partial[peer] if peer == rank else theirs[peer].float()
            out[tokens] += part[:num_rows]
        self._out = out.to(y.dtype)
        return self._out

    def complete_combine(self) -> torch.Tensor:
        """Do the second half."""
        return self._out

    def close(self) -> None:
        """Release its resources.  Called once, when all ranks have agreed or will not come."""
        self._fill_nan()

    def _fill_nan(self) -> None:
        if self._received is not None:
            self._received.rows.view(torch.uint8).fill_(UNDEFINED)

    def _send_rows(self, of_rank: list[torch.Tensor]) -> torch.Tensor:
        """Send each rank the rows of its tokens from its tensor [T, ...]: [R, max_tokens, ...]."""
        dtype, device = of_rank[0].dtype, of_rank[0].device
        carried = torch.uint8 if dtype.itemsize == 1 else dtype  # torch cannot index FP8
        places = (self._group.size, self._sizes.max_tokens, of_rank[0].shape[1] * dtype.itemsize)
        sent = torch.full(places, UNDEFINED, dtype=torch.uint8, device=device).view(carried)
        for rank, (tensor, tokens) in enumerate(zip(of_rank, self._tokens_of, strict=True)):
            sent[rank, : int(tokens.sum())] = tensor.view(carried)[tokens]
        return self._exchange(sent).view(dtype)

    def _exchange(self, sent: torch.Tensor) -> torch.Tensor:
        """Send sent[r] to rank r; return the received rows, by source."""
        each, timeout_s = [1] * self._group.size, self._group.deadline_s(self._config)
        return exchange(self._group, sent, each, each, "a low-latency call", timeout_s)
