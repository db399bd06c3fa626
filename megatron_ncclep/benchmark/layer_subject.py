"""A whole MoELayer of Megatron-Core, forward and backward: router, dispatcher and experts.

What training adds is not in it: weight gradients are made and not added to others, nor reduced over
the ranks.  Shared experts, auxiliary losses and recomputation are off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_ncclep.benchmark.layer import shared_layer
from megatron_ncclep.benchmark.layer_reference import (
    HIDDEN_GRADIENT,
    OUTPUT,
    PROBS_GRADIENT,
    expected_results,
    results_problem,
    routing_problem,
    weight_gradient,
)
from megatron_ncclep.benchmark.megatron_setup import (
    DispatcherChoice,
    build_dispatcher,
    close_dispatcher,
    excused,
    initialize,
)
from megatron_ncclep.benchmark.subjects import WHOLE, Setting, Workload


class LayerSubject:
    """See `Subject`.

    Args:
        name: as on the command line.
        choice: the layer's dispatcher.
    """

    kind = "layer"
    checked = (
        "output and all gradients, to a few roundings, against the experts called on the right "
        "rows without a dispatcher"
    )

    def __init__(self, name: str, choice: DispatcherChoice) -> None:
        self.name = name
        self._choice = choice

    def prepare(self, setting: Setting, workload: Workload) -> PreparedLayer:
        """See `Subject.prepare`.  Over Megatron's own process groups."""
        with excused(Exception):  # none of this is ours
            initialize(setting)
            layer, shared_bytes = shared_layer(setting, workload)
        with excused(*self._choice.excuses):
            dispatcher = build_dispatcher(self._choice, setting, workload)
            prepared = PreparedLayer(layer, dispatcher, setting, workload, shared_bytes)
            prepared.passes["forward"]()  # some fail at first use only
            prepared.passes["backward"]()
        return prepared


class PreparedLayer:
    """See `Prepared`.

    Args:
        layer: a MoELayer, which other subjects use with dispatchers of their own.
        dispatcher: of this subject.
        setting, workload: where and what.
        shared_bytes: of the layer, made by another subject.
    """

    sms = "-"

    def __init__(
        self, layer: Any, dispatcher: Any, setting: Setting, workload: Workload, shared_bytes: int
    ) -> None:
        self.shared_bytes = shared_bytes
        self._layer = layer
        self._dispatcher = dispatcher
        self._rank = setting.rank
        self._workload = workload
        # MoELayer's shape is [sequence, batch, hidden].
        self._x = workload.x.detach()[:, None].requires_grad_()
        self._out: torch.Tensor | None = None
        calls: tuple[Callable[[], Any], ...] = (self._forward, self._backward)
        self.passes = dict(zip(WHOLE, calls, strict=True))

    def _run(self) -> torch.Tensor:
        self._layer.token_dispatcher = self._dispatcher
        out: torch.Tensor = self._layer(self._x)[0]
        return out

    def _gradients(self, out: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the hidden states, of `more` and of all weights.

        Returned, not added to `.grad`: nothing piles up from sample to sample or has to be cleared.
        """
        return torch.autograd.grad(
            out,
            [self._x, *more, *self._layer.parameters()],
            self._workload.grad_out.view_as(out),
            allow_unused=True,
        )

    def _forward(self) -> None:
        self._out = self._run()

    def _backward(self) -> None:
        """Backward of the last forward; the gradients go when all kernels are queued."""
        assert self._out is not None  # the passes run in order
        self._gradients(self._out)
        self._out = None

    def problem(self) -> str | None:
        """See `Prepared.problem`."""
        work, layer = self._workload, self._layer
        decisions: list[tuple[torch.Tensor, torch.Tensor]] = []
        hook = layer.router.register_forward_hook(lambda *called: decisions.append(called[-1]))
        try:
            out = self._run()
        finally:
            hook.remove()
        (probs, routing_map), *_ = decisions
        grad_x, grad_probs, *grads = self._gradients(out, probs)
        assert grad_x is not None
        names = [weight_gradient(name) for name, _ in layer.named_parameters()]
        actual: dict[str, torch.Tensor | None] = {
            OUTPUT: out.detach().reshape(work.x.shape),
            HIDDEN_GRADIENT: grad_x.reshape(work.x.shape),
            # Of experts that a token does not go to, it is whatever a dispatcher likes.
            PROBS_GRADIENT: None if grad_probs is None else grad_probs * routing_map,
            **dict(zip(names, grads, strict=True)),
        }
        expected = expected_results(layer, work, self._rank)
        return routing_problem(work, self._rank, probs, routing_map) or results_problem(
            work, self._rank, actual, expected
        )

    def close(self) -> None:
        """See `Prepared.close`.  The last one to let go of the layer frees its weights."""
        close_dispatcher(self._dispatcher)
        self._layer = self._out = None
