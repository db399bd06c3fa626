"""What whole layers and experts alone have in common: forward, and backward as in training.

Weight gradients are added to fp32 main_grads, as in a micro-batch that is not the first: in a first
one, TransformerEngine's layers and grouped experts write theirs over what is there.  Reducing
gradients over the ranks, which training does once a step, is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron_ncclep.benchmark.layer_reference import gradients_problem
from megatron_ncclep.benchmark.megatron_setup import initialize
from megatron_ncclep.benchmark.shared_layer import shared_layer
from megatron_ncclep.benchmark.subjects import BOTH, WHOLE, Setting, Subject, excused
from megatron_ncclep.benchmark.timing import Clock, Timer
from megatron_ncclep.benchmark.workload import Workload

# Runs before a graph is captured, as torch advises.
WARMUP = 3
# Passes after which the check looks at the weights' gradients: the second one adds to the first's.
CHECKED_PASSES = (1, 2)
Results = dict[str, Any]


class AccumulatingSubject(Subject):
    """See `Subject`.  Over Megatron's own process groups and the layer that all subjects share.

    A class derived from it sets `_inputs` and `_grad_out`, and calls `_start` when it can run.

    Attributes:
        _shared: see `shared_layer`.
        _inputs: leaves whose gradients are results.
        _grad_out: gradient of the output.
        _captured: where the CUDA graph, if it is one, leaves its results.
        _grouped: its experts are this package's.
    """

    _host_counts = True

    _inputs: tuple[torch.Tensor, ...]
    _grad_out: torch.Tensor
    _grouped = False

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        super().__init__(name, setting, workload)
        with excused(Exception):  # none of this is ours
            initialize(setting)
            self._shared, self.shared_bytes = shared_layer(setting, workload)
        self._out: torch.Tensor | None = None
        self._captured: Results | None = None

    def _start(self, graphed: bool) -> None:
        """Make the passes; `graphed`: one CUDA graph takes the place of the two."""
        self.passes = dict(zip(WHOLE, (self._forward, self._backward), strict=True))
        for call in self.passes.values():
            call()  # some fail at first use only
        if graphed:
            replay, self._captured = captured(self._everything)
            self.passes = {BOTH: replay}

    def clock(self, timer: Timer) -> Clock:
        """See `Subject.clock`.  Gradients begin at zero, as in each step of training; not timed.

        Whoever adds a gradient says so at the weight until then, and the next subject may leave it
        to the hooks.  Grouped experts find what a first micro-batch has left there: they would not
        add to main_grads that have just been reset.
        """
        timed = super().clock(timer)

        def clock() -> Any:
            self._shared.zero_grad_buffer()
            if self._grouped:
                for weight in self._shared.module.experts.parameters():
                    weight.grad_added_to_main_grad = True
            return timed()

        return clock

    def _run(self) -> torch.Tensor:
        """Forward, of what the subject is."""
        raise NotImplementedError

    def _forward(self) -> None:
        self._out = self._run()

    def _backward(self) -> None:
        """Backward of the last forward; the inputs' gradients go when all kernels are queued."""
        assert self._out is not None  # the passes run in order
        self._add_gradients(self._out)
        self._out = None

    def _add_gradients(self, out: torch.Tensor) -> list[torch.Tensor | None]:
        """Add the weights' gradients to their main_grads; return those of the inputs."""
        out.backward(self._grad_out.view_as(out))
        gradients = [leaf.grad for leaf in self._inputs]
        for leaf in self._inputs:
            leaf.grad = None
        return gradients

    def _everything(self) -> Results:
        """Run forward and backward; what comes out, but for the main_grads."""
        raise NotImplementedError

    def problem(self) -> str | None:
        """See `Subject.problem`: output and all gradients, to a few roundings."""
        return self._problem_with(self._workload)

    def _problem_with(self, workload: Workload) -> str | None:
        """Run two passes as of two micro-batches and compare with what `workload` must give.

        The ranks go through all of it whatever they find: much of it is collective.
        """
        expected = self._expected(workload)
        self._shared.zero_grad_buffer()
        problems = []
        for passes in CHECKED_PASSES:
            if self._captured is None:
                results = self._everything()
            else:
                self.passes[BOTH]()
                results = self._captured
            gradients = self._expected_gradients(workload, expected)
            problems += [
                self._results_problem(results, expected, workload),
                gradients_problem(self._shared.module, workload, self._rank, gradients, passes),
            ]
        return next(filter(None, problems), None)

    def _expected(self, workload: Workload) -> Any:
        """What `_everything` must give, for the two methods below.  Collective."""
        raise NotImplementedError

    def _expected_gradients(
        self, workload: Workload, expected: Any
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Parameter and gradient of one pass, one after the other: all would take much memory."""
        raise NotImplementedError

    def _results_problem(self, results: Results, expected: Any, workload: Workload) -> str | None:
        """Compare results of `_everything` with what they must be."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Subject.close`.  The last one to let go of the layer frees its weights."""
        self.passes, self._captured, self._out = {}, None, None
        self._shared = None


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
