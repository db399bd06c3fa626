"""A whole MoELayer of Megatron-Core, forward and backward: router, dispatcher and experts.

The layer is the one of shared_layer.py, with a dispatcher of the subject's own and, where it says
so, this package's experts.  Shared experts, auxiliary losses and recomputation are off.  What is
done with the weights' gradients is told in accumulating_subject.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from megatron_ncclep.benchmark.accumulating_subject import AccumulatingSubject, Results
from megatron_ncclep.benchmark.layer_reference import (
    HIDDEN_GRADIENT,
    OUTPUT,
    PROBS_GRADIENT,
    Expected,
    expected_results,
    expert_gradients,
    results_problem,
    routing_problem,
)
from megatron_ncclep.benchmark.megatron_setup import build_dispatcher, close_dispatcher
from megatron_ncclep.benchmark.names import LAYERS, dropped_problem, unavailable_reason
from megatron_ncclep.benchmark.shared_layer import layer_of_subject, route
from megatron_ncclep.benchmark.subjects import Setting, UnavailableError, excused
from megatron_ncclep.benchmark.workload import Workload


class LayerSubject(AccumulatingSubject):
    """See `Subject`.

    Args:
        name, setting, workload: as of any subject.
        max_recv_rows: of a variant with a fixed number of received rows.
    """

    def __init__(
        self, name: str, setting: Setting, workload: Workload, max_recv_rows: Any = None
    ) -> None:
        variant = LAYERS.parse(name)
        if reason := unavailable_reason(variant, setting.device):
            raise UnavailableError(reason)
        super().__init__(name, setting, workload)
        self._grouped = variant.grouped
        # MoELayer's shape is [sequence, batch, hidden].
        self._x = workload.x.detach()[:, None].requires_grad_()
        self._inputs, self._grad_out = (self._x,), workload.grad_out
        with excused(*variant.dispatcher.excuses):
            wanted = {"counts_on_device": True, "last_expert_first": True}  # by grouped experts
            self._dispatcher = build_dispatcher(
                variant.dispatcher,
                setting,
                workload,
                variant.options(max_recv_rows),
                **(wanted if variant.grouped else {}),
            )
            self._layer = layer_of_subject(self._shared, self._dispatcher, variant.grouped)
            self._start(variant.graphs is not None)

    def _run(self) -> torch.Tensor:
        out: torch.Tensor = self._layer(self._x)[0]
        return out

    def _everything(self) -> Results:
        """Run forward and backward; what comes out, and the router's decision."""
        decisions: list[tuple[torch.Tensor, torch.Tensor]] = []
        hook = self._layer.router.register_forward_hook(
            lambda *called: decisions.append(called[-1])
        )
        try:
            out = self._run()
        finally:
            hook.remove()
        (probs, routing_map), *_ = decisions
        grads_probs: list[torch.Tensor] = []
        probs.register_hook(grads_probs.append)
        (grad_x,) = self._add_gradients(out)
        return {
            "probs": probs.detach(),
            "routing_map": routing_map,
            OUTPUT: out.detach(),
            HIDDEN_GRADIENT: grad_x,
            PROBS_GRADIENT: next(iter(grads_probs), None),
        }

    def problem(self) -> str | None:
        """See `Subject.problem`.

        A graph is also replayed with a routing that it was not captured with.
        """
        found = self._problem_with(self._workload)
        if self._captured is None:
            return found
        # Tokens, their hidden states and gradients stay; where they go changes.
        work = self._workload
        case = dataclasses.replace(work.case, seed=work.case.seed + 1)
        other = Workload(case, self._rank, work.ffn_hidden_size)
        route(self._shared, other)
        try:
            problem = self._problem_with(other)
        finally:
            route(self._shared, work)
        if found is None and problem is not None:
            found = f"replayed with another routing: {problem}"
        return found

    def _expected(self, workload: Workload) -> Expected:
        return expected_results(self._shared.module, workload, self._rank)

    def _expected_gradients(
        self, workload: Workload, expected: Expected
    ) -> Iterable[tuple[str, torch.Tensor]]:
        yield from expected.router_gradients.items()
        yield from expert_gradients(self._shared.module, expected.received)

    def _results_problem(
        self, results: Results, expected: Expected, workload: Workload
    ) -> str | None:
        dropped = getattr(self._dispatcher, "num_dropped", None)
        if dropped is not None:
            max_recv_rows = self._dispatcher.engine.config.max_recv_rows
            if problem := dropped_problem(int(dropped), max_recv_rows):
                return problem
        probs, routing_map = results["probs"], results["routing_map"]
        actual = dict(results)
        for name in (OUTPUT, HIDDEN_GRADIENT):
            actual[name] = results[name].reshape(workload.x.shape)
        if results[PROBS_GRADIENT] is not None:
            # Of experts that a token does not go to, it is whatever a dispatcher likes.
            actual[PROBS_GRADIENT] = results[PROBS_GRADIENT] * routing_map
        return routing_problem(workload, self._rank, probs, routing_map) or results_problem(
            workload, self._rank, actual, expected.results
        )

    def close(self) -> None:
        """See `Subject.close`."""
        super().close()  # a graph before its engine
        close_dispatcher(self._dispatcher)
        # Megatron's own dispatchers keep tensors of the last pass, which lead to the weights' hooks
        # and with them to the shared layer.
        self._layer = self._dispatcher = None
