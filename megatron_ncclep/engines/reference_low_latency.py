"""Low-latency mode of the reference engine: its meaning in plain torch.distributed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_ncclep.engines import checks
from megatron_ncclep.engines.engine import NOT_ROUTED, EngineCaps
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.engines.low_latency import LowLatency, LowLatencyRows, LowLatencySizes
from megatron_ncclep.errors import InputError

# What is undefined is NaN here, so that who uses it sees it.
UNDEFINED = 0xFF


class ReferenceLowLatency(LowLatency):
    """See `LowLatency`.  First halves do all of the work; every call waits for all hosts.

    Rows of an earlier dispatch become NaN at the next one.
    """

    def __init__(
        self,
        group: EpGroup,
        num_experts: int,
        caps: EngineCaps,
        sizes: LowLatencySizes,
        timeout_s: float,
    ) -> None:
        super().__init__(group, num_experts, caps, sizes)
        self._timeout_s = timeout_s
        self._received: LowLatencyRows | None = None
        self._tokens_of = torch.zeros(0)  # bool [R, T]: this rank's tokens that go to each rank
        self._out = torch.zeros(0)

    def _begin(self, phase: str, problem: str | None, sends: bool) -> None:
        self._require_open()
        if sends:
            self.group.agree(phase, {}, problem, self._timeout_s)
        elif problem is not None:
            raise InputError(f"{phase}: {problem}")

    def _dispatch_problem(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
    ) -> str | None:
        return super()._dispatch_problem(x, topk_idx, weights, scales) or checks.topk_value_problem(
            topk_idx, self.num_experts
        )

    @torch.no_grad()
    def _dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        weights: torch.Tensor,
        scales: torch.Tensor | None,
        completes: bool,
    ) -> None:
        self._spoil()
        num_local, ranks = self.num_local_experts, range(self.group.size)
        is_routed = topk_idx != NOT_ROUTED
        rank_of = topk_idx.div(num_local, rounding_mode="floor")
        here = [is_routed & (rank_of == rank) for rank in ranks]  # [T, K] each
        self._tokens_of = torch.stack([picks.any(dim=1) for picks in here])
        # Of each rank: its tokens' rows, experts and weights, behind each other.
        local = [
            torch.where(picks, topk_idx - rank * num_local, NOT_ROUTED).int()
            for rank, picks in enumerate(here)
        ]
        w = [torch.where(picks, weights, 0) for picks in here]
        counts = self._exchange(self._tokens_of.sum(dim=1).int().view(-1, 1)).view(-1)
        topk = self._bring(local)
        place = torch.arange(self.sizes.max_tokens, device=topk.device)
        topk.masked_fill_((place >= counts.view(-1, 1))[:, :, None], NOT_ROUTED)
        self._received = LowLatencyRows(
            rows=self._bring([x] * self.group.size),
            topk_idx=topk,
            weights=self._bring(w),
            counts=counts,
            num_local_experts=num_local,
            scales=None if scales is None else self._bring([scales] * self.group.size),
        )

    def _complete_dispatch(self) -> None:
        pass

    def _rows(self) -> LowLatencyRows:
        assert self._received is not None  # dispatched
        return self._received

    @torch.no_grad()
    def _combine(
        self, y: torch.Tensor, rows_of: torch.Tensor | None, completes: bool
    ) -> torch.Tensor:
        rank, counts = self.group.rank, self._rows().counts.tolist()
        places = (self.group.size, self.sizes.max_tokens, self.sizes.hidden)
        partial = torch.zeros(places, device=y.device)
        for source, count in enumerate(counts):
            if rows_of is None:
                partial[source, :count] += y[source, :count].float()
                continue
            for k in range(self.sizes.top_k):
                row = rows_of[source, :count, k].long()
                is_some = (row >= 0) & (row < len(y))
                partial[source, :count][is_some] += y[row[is_some]].float()
        theirs = self._exchange(partial.to(y.dtype))
        out = torch.zeros(self._num_tokens, self.sizes.hidden, device=y.device)
        for peer, tokens in enumerate(self._tokens_of):
            num_rows = int(tokens.sum())
            part = partial[peer] if peer == rank else theirs[peer].float()
            out[tokens] += part[:num_rows]
        self._out = out.to(y.dtype)
        return self._out

    def _complete_combine(self) -> torch.Tensor:
        return self._out

    def _close(self) -> None:
        self._spoil()

    def _spoil(self) -> None:
        if self._received is not None:
            self._received.rows.view(torch.uint8).fill_(UNDEFINED)

    def _bring(self, of_rank: list[torch.Tensor]) -> torch.Tensor:
        """Send each rank its tokens' rows of a tensor [T, ...] for it: [R, max_tokens, ...]."""
        dtype, device = of_rank[0].dtype, of_rank[0].device
        carried = torch.uint8 if dtype.itemsize == 1 else dtype  # torch indexes no FP8
        places = (self.group.size, self.sizes.max_tokens, of_rank[0].shape[1] * dtype.itemsize)
        sent = torch.full(places, UNDEFINED, dtype=torch.uint8, device=device).view(carried)
        for rank, (tensor, tokens) in enumerate(zip(of_rank, self._tokens_of, strict=True)):
            sent[rank, : int(tokens.sum())] = tensor.view(carried)[tokens]
        return self._exchange(sent).view(dtype)

    def _exchange(self, sent: torch.Tensor) -> torch.Tensor:
        """Send sent[r] to rank r, as bytes; return what comes, by source."""
        # Fresh strides, which a view of bytes needs where a size is 1.
        flat = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device).copy_(sent)
        flat = flat.view(torch.uint8)
        received = torch.empty_like(flat)
        self.group.wait(
            lambda group: dist.all_to_all_single(received, flat, group=group, async_op=True),
            "a low-latency call",
            self._timeout_s,
        )
        return received.view(sent.dtype)
