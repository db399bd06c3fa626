"""A whole MoELayer of Megatron-Core, forward and backward: router, dispatcher and experts.

What training adds is not in it: weight gradients are made and not added to others, nor reduced over
the ranks.  Shared experts, auxiliary losses and recomputation are off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron_ncclep.benchmark.layer import layer_of_subject, route, shared_layer
from megatron_ncclep.benchmark.layer_names import layer_obstacle
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
    build_dispatcher,
    close_dispatcher,
    excused,
    initialize,
)
from megatron_ncclep.benchmark.subjects import (
    BOTH,
    WHOLE,
    Setting,
    UnavailableError,
    Workload,
    make_workload,
)
from megatron_ncclep.benchmark.variants import Variant, dropped_problem

# Runs before a graph is captured, as torch advises.
WARMUP = 3
CHECKED = (
    "output and all gradients, to a few roundings, against Megatron-Core's experts called on the "
    "right rows without a dispatcher"
)
CHECKED_GRAPH = f"{CHECKED}; the graph also replayed with a routing that it was not captured with"


class LayerSubject:
    """See `Subject`.

    Args:
        variant: the layer's dispatcher, its experts, and whether it is a graph.
        max_recv_rows: of a variant with a fixed number of received rows.
    """

    kind = "layer"

    def __init__(self, variant: Variant, max_recv_rows: Any) -> None:
        self.name = variant.name
        self.checked = CHECKED_GRAPH if variant.graphs else CHECKED
        self._variant = variant
        self._max_recv_rows = max_recv_rows

    def prepare(self, setting: Setting, workload: Workload) -> PreparedLayer:
        """See `Subject.prepare`.  Over Megatron's own process groups."""
        variant = self._variant
        if reason := layer_obstacle(variant, setting.device):
            raise UnavailableError(reason)
        with excused(Exception):  # none of this is ours
            initialize(setting)
            shared, shared_bytes = shared_layer(setting, workload)
        with excused(*variant.dispatcher.excuses):
            wanted = {"counts_on_device": True, "last_expert_first": True}  # by grouped experts
            dispatcher = build_dispatcher(
                variant.dispatcher,
                setting,
                workload,
                variant.options(self._max_recv_rows),
                **(wanted if variant.grouped else {}),
            )
            prepared = PreparedLayer(shared, dispatcher, setting, workload, variant, shared_bytes)
            for call in list(prepared.passes.values()):
                call()  # some fail at first use only
            if variant.graphs:
                prepared.capture()
        return prepared


class PreparedLayer:
    """See `Prepared`.

    Args:
        shared: a MoELayer, whose weights other subjects use with dispatchers of their own.
        dispatcher: of this subject.
        setting, workload: where and what.
        variant: of this subject.
        shared_bytes: of `shared`, made by another subject.
    """

    sms = "-"

    def __init__(
        self,
        shared: Any,
        dispatcher: Any,
        setting: Setting,
        workload: Workload,
        variant: Variant,
        shared_bytes: int,
    ) -> None:
        self.shared_bytes = shared_bytes
        self._shared = shared
        self._layer = layer_of_subject(shared, dispatcher, variant.grouped)
        self._dispatcher = dispatcher
        self._rank = setting.rank
        self._workload = workload
        self._weights = dict(self._layer.named_parameters())
        # MoELayer's shape is [sequence, batch, hidden].
        self._x = workload.x.detach()[:, None].requires_grad_()
        self._out: torch.Tensor | None = None
        self._captured: dict[str, torch.Tensor | None] | None = None
        calls: tuple[Callable[[], Any], ...] = (self._forward, self._backward)
        self.passes: dict[str, Callable[[], Any]] = dict(zip(WHOLE, calls, strict=True))

    def capture(self) -> None:
        """Make forward and backward one CUDA graph, which takes the place of the two passes."""
        replay, self._captured = captured(self._everything)
        self.passes = {BOTH: replay}

    def _run(self) -> torch.Tensor:
        out: torch.Tensor = self._layer(self._x)[0]
        return out

    def _gradients(self, out: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the hidden states, of `more` and of all weights.

        Returned, not added to `.grad`: nothing piles up from sample to sample or has to be cleared.
        """
        return torch.autograd.grad(
            out,
            [self._x, *more, *self._weights.values()],
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

    def _everything(self) -> dict[str, torch.Tensor | None]:
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
        grad_x, grad_probs, *grads = self._gradients(out, probs)
        return {
            "probs": probs.detach(),
            "routing_map": routing_map,
            OUTPUT: out.detach(),
            HIDDEN_GRADIENT: grad_x,
            PROBS_GRADIENT: grad_probs,
            **dict(zip(map(weight_gradient, self._weights), grads, strict=True)),
        }

    def problem(self) -> str | None:
        """See `Prepared.problem`."""
        if self._captured is None:
            return self._problem_of(self._everything(), self._workload)
        if problem := self._replay_problem(self._workload):
            return problem
        # Tokens, their hidden states and gradients stay; where they go changes.
        case = self._workload.case
        other = make_workload(
            dataclasses.replace(case, seed=case.seed + 1),
            self._rank,
            self._workload.ffn_hidden_size,
        )
        route(self._shared, other)
        try:
            problem = self._replay_problem(other)
        finally:
            route(self._shared, self._workload)
        return None if problem is None else f"replayed with another routing: {problem}"

    def _replay_problem(self, workload: Workload) -> str | None:
        """Replay the graph and compare with what `workload` must give."""
        assert self._captured is not None
        self.passes[BOTH]()
        return self._problem_of(self._captured, workload)

    def _problem_of(
        self, results: dict[str, torch.Tensor | None], workload: Workload
    ) -> str | None:
        """Compare results of `_everything` with what they must be."""
        actual = dict(results)
        probs, routing_map = actual.pop("probs"), actual.pop("routing_map")
        out, grad_x, grad_probs = (actual[n] for n in (OUTPUT, HIDDEN_GRADIENT, PROBS_GRADIENT))
        assert probs is not None
        assert routing_map is not None
        assert out is not None
        assert grad_x is not None
        actual[OUTPUT] = out.reshape(workload.x.shape)
        actual[HIDDEN_GRADIENT] = grad_x.reshape(workload.x.shape)
        # Of experts that a token does not go to, it is whatever a dispatcher likes.
        actual[PROBS_GRADIENT] = None if grad_probs is None else grad_probs * routing_map
        expected = expected_results(self._shared, workload, self._rank)
        return (
            self._dropped_problem()
            or routing_problem(workload, self._rank, probs, routing_map)
            or results_problem(workload, self._rank, actual, expected)
        )

    def _dropped_problem(self) -> str | None:
        """Say whether a forward pass of this rank left rows out."""
        dropped = getattr(self._dispatcher, "num_dropped", None)
        if dropped is None:
            return None
        return dropped_problem(int(dropped), self._dispatcher.engine.config.max_recv_rows)

    def close(self) -> None:
        """See `Prepared.close`.  The last one to let go of the layer frees its weights."""
        self.passes, self._captured, self._out = {}, None, None  # a graph before its engine
        close_dispatcher(self._dispatcher)
        self._layer = self._shared = None
        self._weights = {}


Results = dict[str, torch.Tensor | None]


def captured(call: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
    """Capture `call` in a CUDA graph: what replays it, and where it leaves its results.

    On the stream on which all subjects run.  Megatron's dispatchers keep tensors of their last
    forward pass, and these the nodes that take the weights' gradients, each with the stream on
    which it was made: a graph may not wait for another one.
    """
    for _ in range(WARMUP):
        call()
    graph = torch.cuda.CUDAGraph()
    failures: list[Exception] = []
    try:
        # Meanwhile torch's own thread may ask how a collective is getting on.
        with torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            try:
                results = call()
            except Exception as error:
                failures.append(error)
                raise
    except Exception:
        if failures:  # the end of a capture that has failed raises another one, which says less
            raise failures[0] from None
        raise
    return graph.replay, results
