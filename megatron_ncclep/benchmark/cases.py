"""Cases: routings with a readable name, which any rank makes from the case alone.

Shared with the tests: a measured shape is a case too, and `refusal` says which limit of an engine
it exceeds.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.engine import EngineCaps


@dataclass(frozen=True)
class Case:
    """One routing problem of a whole group.

    Attributes:
        name: readable identity.
        tokens: T of each rank; its length is the number of ranks.
        num_experts: E.
        top_k: K.
        hidden: H.
        dtype: payload dtype.
        alignment, max_recv_rows: as in EpConfig.
        skew: 0 spreads tokens evenly over experts; 1 sends everything to as few as possible.
        dropped: fraction of assignments that are not routed.
        seed: of the routing and the payload.
        device: where the tensors are made; their values do not depend on it.
        fixed_payload: the case is about its hidden size or dtype: `for_engine` does not change it.
    """

    name: str
    tokens: tuple[int, ...]
    num_experts: int = 8
    top_k: int = 2
    hidden: int = 16
    dtype: torch.dtype = torch.float32
    alignment: int = 1
    max_recv_rows: int | str | None = None
    skew: float = 0.0
    dropped: float = 0.0
    seed: int = 0
    device: str = "cpu"
    fixed_payload: bool = False

    def on(self, device: str) -> Case:
        """The same case with its tensors on `device`."""
        return dataclasses.replace(self, device=device)

    @property
    def num_ranks(self) -> int:
        """R, ranks of the group."""
        return len(self.tokens)

    def config(self) -> EpConfig:
        """The case's options, for the default engine."""
        return EpConfig(alignment=self.alignment, max_recv_rows=self.max_recv_rows)

    def topk_idx(self, rank: int) -> torch.Tensor:
        """[tokens[rank], top_k] int64: distinct experts of each token, -1: dropped."""
        generator = self._generator(rank, 1)
        T, K, E = self.tokens[rank], self.top_k, self.num_experts
        scores = torch.rand(T, E, generator=generator)
        scores += self.skew * torch.linspace(1, 0, E)
        topk_idx = scores.argsort(dim=1, descending=True)[:, :K]
        gone = torch.rand(T, K, generator=generator) < self.dropped
        return topk_idx.masked_fill(gone, -1).to(self.device)

    def rows(self, rank: int, num_rows: int, salt: int) -> torch.Tensor:
        """[num_rows, hidden] of the case's dtype: random, and offset by rank.

        The values identify (rank, row, column) up to rounding: sums of rows that were swapped,
        taken from another rank or counted twice differ.
        """
        noise = torch.rand(num_rows, self.hidden, generator=self._generator(rank, salt))
        return (noise + rank + 1).to(self.dtype).to(self.device)

    def weights(self, rank: int) -> torch.Tensor:
        """[tokens[rank], top_k] fp32 in (0, 1); fp64 for fp64 rows; all different."""
        shape = (self.tokens[rank], self.top_k)
        weights = torch.rand(shape, generator=self._generator(rank, 3), dtype=torch.float64)
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return weights.to(dtype).to(self.device)

    def _generator(self, rank: int, salt: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000003 * self.seed + 1009 * rank + salt)

    def __str__(self) -> str:
        return self.name


def refusal(case: Case, caps: EngineCaps) -> str | None:
    """Name the limit of `caps` that `case` exceeds: the first one that an engine checks.

    Returns:
        the name of a field of EngineCaps, or None if the engine must support the case.  Exceeding
        one of the group's limits (`GROUP_LIMITS`) makes the engine unavailable, exceeding any other
        is wrong input.
    """
    if ignored_options(case, caps):
        return "options"
    if case.num_ranks < caps.min_ranks:
        return "min_ranks"
    most = caps.max_local_experts
    if most is not None and case.num_experts > most * case.num_ranks:
        return "max_local_experts"
    if caps.max_tokens is not None and max(case.tokens) > caps.max_tokens:
        return "max_tokens"
    if caps.max_top_k is not None and case.top_k > caps.max_top_k:
        return "max_top_k"
    if case.dtype not in caps.payload_dtypes:
        return "payload_dtypes"
    if case.hidden * case.dtype.itemsize % caps.row_bytes_multiple:
        return "row_bytes_multiple"
    return None


def ignored_options(case: Case, caps: EngineCaps) -> list[str]:
    """The options of the case that the engine does not support."""
    return sorted(set(case.config().non_default()) - caps.options - {"engine"})
