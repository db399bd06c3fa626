"""The experts of one rank alone, forward and backward, on the rows that the rank receives.

Rows and probabilities are where a dispatcher would leave them: expert by expert, without gaps and
with their numbers on the host for Megatron-Core's experts (TransformerEngine's grouped GEMM on a
GPU); for this package's, last expert first, in blocks of a multiple of GROUPED_ALIGNMENT rows, and
with the numbers on the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_ncclep.benchmark.accumulating_subject import AccumulatingSubject, Results
from megatron_ncclep.benchmark.layer_reference import (
    OUTPUT,
    PROBS_GRADIENT,
    ROWS_GRADIENT,
    Received,
    expert_gradients,
    experts_results,
    received_rows,
    results_problem,
)
from megatron_ncclep.benchmark.names import EXPERTS, unavailable_reason
from megatron_ncclep.benchmark.shared_layer import experts_of_subject
from megatron_ncclep.benchmark.subjects import Setting, UnavailableError, excused
from megatron_ncclep.benchmark.workload import Workload
from megatron_ncclep.config import GROUPED_ALIGNMENT
from megatron_ncclep.errors import UnsupportedError


class ExpertsSubject(AccumulatingSubject):
    """See `Subject`; arguments as of any."""

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        variant = EXPERTS[name]
        if reason := unavailable_reason(variant, setting.device):
            raise UnavailableError(reason)
        super().__init__(name, setting, workload)
        self._grouped = variant.grouped
        received = received_rows(workload, setting.rank)
        with excused(UnsupportedError if variant.grouped else Exception):
            self._experts = experts_of_subject(self._shared, variant.grouped)
            self._place, self._counts = blocks_of(received.counts, variant.grouped)
            self._place = self._place.to(setting.device)
            if variant.grouped:
                self._counts = self._counts.to(setting.device)
            self._rows, self._probs, self._grad_out = (
                self._laid_out(tensor) for tensor in (received.rows, received.probs, received.grad)
            )
            self._inputs = (self._rows.requires_grad_(), self._probs.requires_grad_())
            self._start(variant.graphs is not None)

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put rows, in the order of experts, where they belong; zeros fill up the blocks."""
        out = tensor.new_zeros(int(self._counts.sum()), *tensor.shape[1:])
        out[self._place] = tensor
        return out

    def _run(self) -> torch.Tensor:
        out: torch.Tensor = self._experts(self._rows, self._counts, self._probs)[0]
        return out

    def _everything(self) -> Results:
        out = self._run()
        grad_rows, grad_probs = self._add_gradients(out)
        return {OUTPUT: out.detach(), ROWS_GRADIENT: grad_rows, PROBS_GRADIENT: grad_probs}

    def _expected(self, workload: Workload) -> tuple[Received, dict[str, torch.Tensor]]:
        received = received_rows(workload, self._rank)
        return received, experts_results(self._shared.module, received)

    def _expected_gradients(
        self, workload: Workload, expected: tuple[Received, dict[str, torch.Tensor]]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        return expert_gradients(self._shared.module, expected[0])

    def _results_problem(
        self,
        results: Results,
        expected: tuple[Received, dict[str, torch.Tensor]],
        workload: Workload,
    ) -> str | None:
        wanted = expected[1]
        actual = {
            name: None if found is None else found[self._place].view_as(wanted[name])
            for name, found in results.items()
        }
        return results_problem(workload, self._rank, actual, wanted)

    def close(self) -> None:
        """See `Subject.close`."""
        super().close()
        self._experts = None


def blocks_of(counts: torch.Tensor, grouped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Where rows in the order of experts stand, and the rows of each block.

    Args:
        counts: rows of each expert, int64 [num_local_experts], on the CPU.
        grouped: for this package's experts.

    Returns:
        place of each row, int64 [num_rows], and the blocks' lengths in the order in which they
        stand, int64 [num_local_experts].

    Example: of counts 2 and 3 the places are 16, 17, 0, 1 and 2 with `grouped`, where blocks have
    16 rows each and the last expert is the first; else they are 0 to 4.
    """
    if not grouped:
        return torch.arange(int(counts.sum())), counts
    lengths = -(-counts // GROUPED_ALIGNMENT) * GROUPED_ALIGNMENT
    reversed_lengths = lengths.flip(0)
    starts = (reversed_lengths.cumsum(0) - reversed_lengths).flip(0)
    ranges = [
        torch.arange(start, start + count)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
    ]
    return torch.cat(ranges), reversed_lengths
