"""Sizes, arguments and results of low-latency mode; `low_latency.py` explains how it works."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ncclep.engines.engine import NOT_ROUTED, EngineCaps

# Dtypes of combined rows, and one-byte dtypes of rows that are only dispatched.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ONE_BYTE = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)


@dataclass(frozen=True)
class LowLatencySizes:
    """The sizes that an object is made for; the same on all ranks.

    Attributes:
        max_tokens: the most tokens of any rank.
        hidden: numbers in a row.
        top_k: assignments of a token.
        dtype: dtype of combined rows: bf16, fp16 or fp32.
        payload: dtype of dispatched rows: the same, or one of `ONE_BYTE`.
        num_scales: fp32 numbers that travel with each dispatched row.
    """

    max_tokens: int
    hidden: int
    top_k: int
    dtype: torch.dtype
    payload: torch.dtype
    num_scales: int = 0

    def problem(self, caps: EngineCaps) -> str | None:
        """Say which size an engine does not support, if any."""
        limits = {
            "max_tokens": (self.max_tokens, caps.low_latency_tokens),
            "top_k": (self.top_k, caps.max_top_k or 2**31 - 1),
            "hidden": (self.hidden, 2**20),
        }
        for name, (value, most) in limits.items():
            if not isinstance(value, int) or not 1 <= value <= most:
                return f"{name} {value}: low-latency mode of {caps.name!r} takes 1 to {most}"
        if self.dtype not in DTYPES:
            return f"dtype {self.dtype}: low-latency mode combines {', '.join(map(str, DTYPES))}"
        if self.payload not in (self.dtype, *ONE_BYTE):
            return (
                f"payload {self.payload}: rows must be {self.dtype}, like combined rows, or one of "
                f"{', '.join(map(str, ONE_BYTE))}"
            )
        if not isinstance(self.num_scales, int) or self.num_scales < 0:
            return f"num_scales {self.num_scales}: must be 0 or more"
        for name, num_bytes in (
            ("a row", self.hidden * self.payload.itemsize),
            ("a row's result", self.hidden * self.dtype.itemsize),
            ("a row's scales", self.num_scales * 4),
        ):
            if num_bytes % caps.row_bytes_multiple:
                return (
                    f"{name} has {num_bytes} bytes: engine {caps.name!r} needs a multiple of "
                    f"{caps.row_bytes_multiple}"
                )
        return None

    def values(self) -> dict[str, int | str | None]:
        """The values that must be equal on all ranks."""
        return {
            "max_tokens": self.max_tokens,
            "hidden size": self.hidden,
            "top_k": self.top_k,
            "dtype": str(self.dtype).removeprefix("torch."),
            "payload dtype": str(self.payload).removeprefix("torch."),
            "num_scales": self.num_scales,
        }


@dataclass(frozen=True)
class Tokens:
    """What a rank dispatches; see `LowLatency.dispatch`."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    weights: torch.Tensor
    scales: torch.Tensor | None = None


@dataclass(frozen=True)
class ExpertRows:
    """Dispatched rows by expert; see `LowLatencyRows.by_expert` and `packed_by_expert`.

    Attributes:
        rows: by_expert: [num_local_experts, num_ranks * max_tokens, hidden]; those beyond an
            expert's count are undefined. packed_by_expert: [num_ranks * max_tokens * min(top_k,
            num_local_experts), hidden]; those beyond the sum of counts are undefined.
        counts: int32 [num_local_experts]: rows of each expert.
        rows_of: int32 [num_ranks, max_tokens, top_k]: for `combine` of rows in this layout: the
            indices of the rows for a place, as if all dimensions of `rows` but the last were one.
    """

    rows: torch.Tensor
    counts: torch.Tensor
    rows_of: torch.Tensor


@dataclass(frozen=True)
class LowLatencyRows:
    """The result of a dispatch, by source rank; on this rank's device.

    It is valid until the object's next dispatch or its close: an engine may return the memory that
    the other ranks write to.  `topk_idx` is to be read only: a dispatch may write just the places
    that get a row, or had one.

    Attributes:
        rows: [num_ranks, max_tokens, hidden]; a source's rows in the order of its tokens, one for
            each token that has an expert here.  Those from `counts` on are undefined.
        topk_idx: int32 [num_ranks, max_tokens, top_k]: the assignments of each row as this rank's
            expert numbers, 0 to num_local_experts - 1, in the token's own order; -1 for experts of
            other ranks, for assignments that are not routed, and where there is no row.
        weights: fp32 [num_ranks, max_tokens, top_k]: weights of these assignments; 0 where a row
            has no assignment, undefined where there is no row.
        counts: int32 [num_ranks]: rows from each rank.
        num_local_experts: experts of this rank.
        scales: fp32 [num_ranks, max_tokens, num_scales], or None.
    """

    rows: torch.Tensor
    topk_idx: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    num_local_experts: int
    scales: torch.Tensor | None = None

    def by_expert(self) -> ExpertRows:
        """Copy the rows to blocks of experts, in the order of source rank and token in each.

        Does not wait; a CUDA graph can capture it.
        """
        num_places, top_k = self.counts.numel() * self.topk_idx.shape[1], self.topk_idx.shape[2]
        num_local = self.num_local_experts
        expert = torch.arange(num_local, device=self.topk_idx.device)
        assignments = self.topk_idx.view(num_places, top_k, 1)
        has_expert = (assignments == expert).any(dim=1)  # [places, experts]
        nowhere = num_local * num_places
        row = expert * num_places + has_expert.cumsum(0) - 1
        row = torch.where(has_expert, row, nowhere)
        # A place's rows in ascending order of experts, which is the order of additions.
        rows_of = row.sort(dim=1).values[:, :top_k]
        rows_of = torch.where(rows_of == nowhere, NOT_ROUTED, rows_of).int()
        if top_k > num_local:
            rows_of = torch.nn.functional.pad(rows_of, (0, top_k - num_local), value=NOT_ROUTED)
        order = (~has_expert).int().argsort(dim=0, stable=True).T  # [experts, places]
        return self._by_place(order, has_expert.sum(0), rows_of)

    def packed_by_expert(self) -> ExpertRows:
        """Copy the rows to contiguous blocks of experts, as grouped GEMMs take them.

        The order is that of `by_expert`.  The copy has min(top_k, num_local_experts) rows for each
        place, where `by_expert` has num_local_experts.  Does not wait; a CUDA graph can capture it.
        """
        num_places, top_k = self.counts.numel() * self.topk_idx.shape[1], self.topk_idx.shape[2]
        num_local = self.num_local_experts
        kept, nowhere = min(top_k, num_local), num_local * num_places
        assignments = self.topk_idx.view(num_places, top_k).long()
        row_index = torch.arange(num_places, device=assignments.device).view(-1, 1)
        key = torch.where(assignments >= 0, assignments * num_places + row_index, nowhere)
        # Each place's assignments in ascending order of experts, which is the order of additions.
        key = key.sort(dim=1).values[:, :kept].reshape(-1)
        order = key.argsort(stable=True)
        row = torch.empty_like(order)
        row[order] = torch.arange(len(order), device=order.device)
        rows_of = torch.where(key < nowhere, row, NOT_ROUTED).int().view(num_places, kept)
        rows_of = torch.nn.functional.pad(rows_of, (0, top_k - kept), value=NOT_ROUTED)
        counts = key.new_zeros(num_local + 1).scatter_add_(
            0, key.div(num_places, rounding_mode="floor"), torch.ones_like(key)
        )
        place = order.div(kept, rounding_mode="floor")
        return self._by_place(place, counts[:num_local], rows_of)

    def _by_place(
        self, place: torch.Tensor, counts: torch.Tensor, rows_of: torch.Tensor
    ) -> ExpertRows:
        """Rows with a copy of the row at each `place`."""
        flat = self.rows.view(-1, self.rows.shape[-1])
        rows = flat.view(torch.uint8)[place].view(flat.dtype)
        return ExpertRows(rows, counts.int(), rows_of.view(*self.topk_idx.shape))
