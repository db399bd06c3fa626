"""A Megatron-Core dispatcher, through the six hooks that MoELayer calls, forward and backward.

The experts are the identity, so that what is timed is the dispatcher's work and nothing else.  Its
launch by the host is part of it: Megatron's own dispatchers wait for the host between their steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ncclep.benchmark.check import deviation
from megatron_ncclep.benchmark.megatron_setup import build_dispatcher, close_dispatcher, initialize
from megatron_ncclep.benchmark.names import DISPATCHERS
from megatron_ncclep.benchmark.subjects import WHOLE, Setting, Subject, excused
from megatron_ncclep.benchmark.workload import Workload


class MegatronSubject(Subject):
    """See `Subject`.  Over Megatron's own process groups."""

    _host_counts = True

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        super().__init__(name, setting, workload)
        choice = DISPATCHERS[name]
        with excused(Exception):  # none of this is ours
            initialize(setting)
        # MoELayer's shape is [sequence, batch, hidden].
        self._x = workload.x.detach()[:, None].requires_grad_()
        chosen = workload.topk_idx
        probs = torch.zeros(len(chosen), workload.case.num_experts, device=chosen.device)
        self._map = torch.zeros_like(probs, dtype=torch.bool).scatter_(1, chosen, True)
        self._probs = probs.scatter_(1, chosen, workload.w).requires_grad_()
        self._grad_probs: torch.Tensor | None = None
        self._results: tuple[torch.Tensor, torch.Tensor] | None = None
        self.passes = dict(zip(WHOLE, (self._forward, self._backward), strict=True))
        with excused(*choice.excuses):
            self._dispatcher = build_dispatcher(choice, setting, workload)
            for call in self.passes.values():
                call()  # some fail at first use only

    def _run(
        self, experts: Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the six hooks; return the output and the rows' probabilities."""
        hooks = self._dispatcher
        hidden, probs = hooks.dispatch_preprocess(self._x, self._map, self._probs)
        hidden, probs = hooks.token_dispatch(hidden, probs)
        rows, counts, row_probs = hooks.dispatch_postprocess(hidden, probs)
        hidden = hooks.combine_preprocess(experts(rows, counts, row_probs))
        return hooks.combine_postprocess(hooks.token_combine(hidden)), row_probs

    def _forward(self) -> None:
        self._results = self._run(lambda rows, counts, row_probs: rows)

    def _backward(self) -> None:
        """Backward of the last forward: gradients of hidden states and of probabilities."""
        assert self._results is not None  # the passes run in order
        out, row_probs = self._results
        if self._grad_probs is None or self._grad_probs.shape != row_probs.shape:
            self._grad_probs = torch.ones_like(row_probs)
        self._x.grad = self._probs.grad = None
        torch.autograd.backward(
            [out, row_probs], [self._workload.grad_out.view_as(out), self._grad_probs]
        )
        self._results = None

    def problem(self) -> str | None:
        """See `Subject.problem`.

        Every expert multiplies its rows by their probabilities and by a factor of its own, so that
        a row at the wrong expert or with another row's probability changes the result.  Sums are
        rounded in the dispatcher's own order: compared to a few roundings, all terms positive.
        """
        case, work = self._workload.case, self._workload
        num_local = case.num_experts // case.num_ranks
        device = work.x.device
        factor = 1 + torch.arange(case.num_experts, device=device) / case.num_experts
        mine = factor[self._rank * num_local : (self._rank + 1) * num_local]
        seen: list[torch.Tensor] = []

        def experts(rows: torch.Tensor, counts: Any, row_probs: torch.Tensor) -> torch.Tensor:
            seen.append(torch.as_tensor(counts).to(device))
            scale = mine.repeat_interleave(seen[0])
            scale = torch.cat([scale, scale.new_zeros(len(rows) - len(scale))])
            return (rows.float() * (scale * row_probs.float())[:, None]).to(rows.dtype)

        self._x.grad = self._probs.grad = None
        out, _ = self._run(experts)
        torch.autograd.backward(out, work.grad_out.view_as(out))

        weight = (factor[work.topk_idx] * work.w).sum(dim=1)[:, None]
        x, grad = work.x.float(), work.grad_out.float()
        # Each row is rounded once, and the sum after each of its terms; one more for the wire.
        tolerance = (case.top_k + 2) * torch.finfo(case.dtype).eps / 2
        grad_probs = self._map * factor * (x * grad).sum(dim=1)[:, None]
        assert self._x.grad is not None
        assert self._probs.grad is not None
        comparisons = (
            ("output", out.detach().reshape(x.shape), x * weight),
            ("gradient of the hidden states", self._x.grad.reshape(x.shape), grad * weight),
            ("gradient of the probabilities", self._probs.grad * self._map, grad_probs),
        )
        table = work.tables[self._rank]
        if not any(torch.equal(seen[0].long(), counts) for counts in (table.routed, table.padded)):
            return (
                f"rank {self._rank}: rows of each expert are {seen[0].tolist()}, expected "
                f"{table.routed.tolist()}"
            )
        for what, actual, expected in comparisons:
            bound = tolerance * expected.abs()
            if problem := deviation(actual.float(), expected, bound, f"{tolerance:.1%}"):
                return f"rank {self._rank}, {what}: {problem}"
        return None

    def close(self) -> None:
        """See `Subject.close`."""
        close_dispatcher(self._dispatcher)
