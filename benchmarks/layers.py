"""Megatron-Core's dispatchers alone, its whole MoELayer, and its experts alone; forward, backward.

Launches by the host are part of the time: Megatron's own dispatchers wait for the host between
steps.  Layers and experts add weight gradients to fp32 main_grads, as in any micro-batch except the
first, which overwrites them; their reduction over the ranks is not included.  Shared experts,
auxiliary losses and recomputation are off.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch

from benchmarks import catalogue
from benchmarks import layer_model as model
from megatron_ncclep.benchmark import BOTH, WHOLE, Setting, Subject, UnavailableError, excused
from megatron_ncclep.benchmark.engines import deviation
from megatron_ncclep.benchmark.ranks import Clock, Timer
from megatron_ncclep.benchmark.shapes import Workload
from megatron_ncclep.config import GROUPED_ALIGNMENT
from megatron_ncclep.errors import UnsupportedError

WARMUP = 3  # runs before a graph is captured, as torch advises
# Passes after which the check looks at the weights' gradients: the second one adds to the first's.
CHECKED_PASSES = (1, 2)
Results = dict[str, Any]


class DispatcherSubject(Subject):
    """See `Subject`.  A dispatcher through the six hooks that MoELayer calls.

    The experts are the identity, so that only the dispatcher's work is timed.
    """

    _host_counts = True

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        super().__init__(name, setting, workload)
        choice = catalogue.DISPATCHERS[name]
        with excused(Exception):  # none of this is ours
            model.initialize(setting)
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
            self._dispatcher = model.build_dispatcher(choice, setting, workload)
            for call in self.passes.values():
                call()  # some fail at first use only

    def _run(self, experts: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
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
        gradients = [self._workload.grad_out.view_as(out), self._grad_probs]
        torch.autograd.backward([out, row_probs], gradients)
        self._results = None

    def problem(self) -> str | None:
        """Compare with experts that multiply rows by their probabilities and by distinct factors.

        So a row at the wrong expert or with another row's probability changes the result.  The
        dispatcher rounds sums in its own order: a few roundings may differ.  Terms are positive.
        """
        work, case, device = self._workload, self._workload.case, self._workload.x.device
        num_local = case.num_experts // case.num_ranks
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
        grads: Any = (self._x.grad, self._probs.grad)  # set by the passes
        comparisons = (
            (model.OUTPUT, out.detach().reshape(x.shape), x * weight),
            (model.HIDDEN_GRADIENT, grads[0].reshape(x.shape), grad * weight),
            (model.PROBS_GRADIENT, grads[1] * self._map, grad_probs),
        )
        table, rows = work.tables[self._rank], seen[0].long()
        if not any(torch.equal(rows, counts) for counts in (table.routed, table.padded)):
            said = f"are {rows.tolist()}, expected {table.routed.tolist()}"
            return f"rank {self._rank}: rows of each expert {said}"
        for what, actual, expected in comparisons:
            bound = tolerance * expected.abs()
            if problem := deviation(actual.float(), expected, bound, f"{tolerance:.1%}"):
                return f"rank {self._rank}, {what}: {problem}"
        return None

    def close(self) -> None:
        model.close_dispatcher(self._dispatcher)


class _Accumulating(Subject):
    """The common part of layers and experts alone.  A derived class ends with `_start`."""

    _host_counts = True
    _parts = 0  # of gradients, see `results_problem`
    _compare = staticmethod(model.results_problem)
    _shared: Any  # the layer in DistributedDataParallel
    _inputs: tuple[torch.Tensor, ...]  # leaves whose gradients are results
    _grad_out: torch.Tensor

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        self._variant = catalogue.known_variant(name)
        if reason := catalogue.unavailable_reason(self._variant, setting.device):
            raise UnavailableError(reason)
        super().__init__(name, setting, workload)
        with excused(Exception):  # none of this is ours
            model.initialize(setting)
            self._shared, self.shared_bytes = model.shared_layer(setting, workload)
        self._out: torch.Tensor | None = None
        self._captured: Results | None = None  # where a CUDA graph leaves its results

    def _start(self) -> None:
        """Make the passes; one CUDA graph replaces both in a variant that asks for it."""
        self.passes = dict(zip(WHOLE, (self._forward, self._backward), strict=True))
        for call in self.passes.values():
            call()  # some fail at first use only
        if self._variant.graphs is not None:
            replay, self._captured = captured(self._everything)
            self.passes = {BOTH: replay}

    def _megatrons_experts(self) -> Any:
        """Megatron-Core's experts, with the shared weights."""
        return self._shared.module.experts

    def _experts_of(self) -> Any:
        """Megatron-Core's experts, or this package's over the same weights, last expert first."""
        experts = self._megatrons_experts()
        if self._variant.grouped:
            from megatron_ncclep.integration.experts.grouped import group_experts

            experts = copy.copy(experts)
            group_experts(experts, reverse_local_experts=True)
        return experts

    def clock(self, timer: Timer) -> Clock:
        """See `Subject.clock`.  Gradients begin at zero, as in each step of training; not timed."""
        # `grad_added_to_main_grad` stays set on a weight until gradients are cleared, and the next
        # subject may leave adding to the hooks.  Grouped experts find it as a first micro-batch
        # leaves it: they would not add to main_grads that have just been reset.
        timed = super().clock(timer)

        def clock() -> Any:
            self._zero_gradients()
            module = self._shared.module
            if self._variant.grouped and module.config.gradient_accumulation_fusion:
                for weight in module.experts.parameters():
                    weight.grad_added_to_main_grad = True
            return timed()

        return clock

    def _zero_gradients(self) -> None:
        self._shared.zero_grad_buffer()

    def _gradients(self) -> Results:
        """The gradients that passes have added to, by name."""
        return {name: w.main_grad for name, w in self._shared.module.named_parameters()}

    def _run(self) -> torch.Tensor:
        raise NotImplementedError

    def _everything(self) -> Results:
        """Run forward and backward; all results but the main_grads."""
        raise NotImplementedError

    def _expected(
        self, workload: Workload
    ) -> tuple[dict[str, torch.Tensor], Callable[[], Iterable[tuple[str, torch.Tensor]]]]:
        """The expected results of `_everything`; yields gradients one by one.  Collective."""
        raise NotImplementedError

    def _compared(self, results: Results, workload: Workload) -> tuple[str | None, Results]:
        """Problems other than values, and `results` in the form of the expected ones."""
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

    def problem(self) -> str | None:
        return self._problem_with(self._workload)

    def _problem_with(self, workload: Workload) -> str | None:
        """Run two passes, as for two micro-batches, and compare with the results for `workload`.

        The ranks run all of it whatever they find, because much of it is collective.
        """
        expected, gradients = self._expected(workload)
        rank = self._rank
        self._zero_gradients()
        problems = []
        for passes in CHECKED_PASSES:
            results = self._captured or self._everything()
            if self._captured is not None:
                self.passes[BOTH]()  # it leaves its results there
            other, found = self._compared(results, workload)
            problems += [
                other,
                self._compare(workload, rank, found, expected.items()),
                self._compare(workload, rank, self._gradients(), gradients(), passes, self._parts),
            ]
        return next(filter(None, problems), None)

    def close(self) -> None:
        """See `Subject.close`.  The layer's weights are freed when its last subject closes."""
        self.passes, self._captured, self._out = {}, None, None
        self._shared = None


class LayerSubject(_Accumulating):
    """See `Subject`.  A whole MoELayer: router, dispatcher and experts."""

    def __init__(
        self, name: str, setting: Setting, workload: Workload, max_recv_rows: Any = None
    ) -> None:
        super().__init__(name, setting, workload)
        variant = self._variant
        # MoELayer's shape is [sequence, batch, hidden].
        self._x = workload.x.detach()[:, None].requires_grad_()
        self._inputs, self._grad_out = (self._x,), workload.grad_out
        with excused(*variant.dispatcher.excuses):
            self._make_layer(setting, max_recv_rows)
            self._start()

    def _make_layer(self, setting: Setting, max_recv_rows: Any) -> None:
        """Make `_layer`, with the router and the weights of the shared one, and `_dispatcher`."""
        variant, wanted = self._variant, {}
        self._layer = copy.copy(self._shared.module)
        self._layer._modules = dict(self._layer._modules)
        self._layer.experts = self._experts_of()
        if variant.grouped:
            from megatron_ncclep.integration.experts.layer_experts import GroupedInLayer

            grouped = GroupedInLayer(self._layer, is_asked_for=True)
            wanted = {"counts_on_device": True, "grouped": grouped}
        self._dispatcher = model.build_dispatcher(
            variant.dispatcher, setting, self._workload, variant.options(max_recv_rows), **wanted
        )
        self._layer.token_dispatcher = self._dispatcher

    def _run(self) -> torch.Tensor:
        out: torch.Tensor = self._layer(self._x)[0]
        return out

    def _everything(self) -> Results:
        """Run forward and backward; all results, and the router's decision."""
        decisions: list[tuple[torch.Tensor, torch.Tensor]] = []
        hook = lambda *called: decisions.append(called[-1])  # noqa: E731
        with self._layer.router.register_forward_hook(hook):
            out = self._run()
        (probs, routing_map), *_ = decisions
        grads_probs: list[torch.Tensor] = []
        probs.register_hook(grads_probs.append)
        (grad_x,) = self._add_gradients(out)
        return {
            "probs": probs.detach(), "routing_map": routing_map, model.OUTPUT: out.detach(),
            model.HIDDEN_GRADIENT: grad_x, model.PROBS_GRADIENT: next(iter(grads_probs), None),
        }  # fmt: skip

    def problem(self) -> str | None:
        """See `Subject.problem`.  A graph is also replayed with another routing than its own."""
        found = self._problem_with(self._workload)
        if self._captured is None:
            return found
        # Tokens, their hidden states and gradients stay; where they go changes.
        work = self._workload
        case = dataclasses.replace(work.case, seed=work.case.seed + 1)
        other = Workload(case, self._rank, work.ffn_hidden_size)
        model.route(self._shared, other)
        try:
            problem = self._problem_with(other)
        finally:
            model.route(self._shared, work)
        return found or (problem and f"replayed with another routing: {problem}")

    def _expected(self, workload: Workload) -> Any:
        layer, received = self._shared.module, model.received_rows(workload, self._rank)
        results, of_router = model.layer_results(layer, workload, self._rank, received)

        return results, lambda: chain(of_router.items(), model.expert_gradients(layer, received))

    def _compared(self, results: Results, workload: Workload) -> tuple[str | None, Results]:
        probs, routing_map = results["probs"], results["routing_map"]
        problem = model.routing_problem(workload, self._rank, probs, routing_map)
        if dropped := getattr(self._dispatcher, "num_dropped", None):
            given = self._dispatcher.engine.config.max_recv_rows
            problem = catalogue.dropped_problem(int(dropped), given)
        found, shape = dict(results), self._workload.x.shape
        for name in (model.OUTPUT, model.HIDDEN_GRADIENT):
            found[name] = results[name].reshape(shape)
        if results[model.PROBS_GRADIENT] is not None:
            # For experts that a token does not go to, dispatchers may leave any value there.
            found[model.PROBS_GRADIENT] = results[model.PROBS_GRADIENT] * routing_map
        return problem, found

    def close(self) -> None:
        super().close()  # a graph before its engine
        model.close_dispatcher(self._dispatcher)
        # Megatron's own dispatchers keep tensors of the last pass, which lead to the weights' hooks
        # and with them to the shared layer.
        self._layer = self._dispatcher = None


class ExpertsSubject(_Accumulating):
    """See `Subject`.  The experts of one rank alone, on the rows that the rank receives.

    Rows and probabilities are where a dispatcher would leave them: expert by expert, without gaps
    and with their numbers on the host for Megatron-Core's experts; for this package's, last expert
    first, in blocks of a multiple of GROUPED_ALIGNMENT rows, and with the numbers on the device.
    """

    def __init__(self, name: str, setting: Setting, workload: Workload) -> None:
        super().__init__(name, setting, workload)
        grouped = self._variant.grouped
        received = model.received_rows(workload, setting.rank)
        with excused(UnsupportedError if grouped else Exception):
            self._experts = self._experts_of()
            place, lengths = blocks_of(received.counts, grouped, self._variant.fp8)
            self._place = place.to(setting.device)
            self._counts = lengths.to(setting.device) if grouped else lengths
            size = int(lengths.sum())  # zeros fill up the blocks
            self._rows, self._probs, self._grad_out = (
                rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, self._place, rows)
                for rows in (received.rows, received.probs, received.grad)
            )
            self._inputs = (self._rows.requires_grad_(), self._probs.requires_grad_())
            self._start()

    def _run(self) -> torch.Tensor:
        out: torch.Tensor = self._experts(self._rows, self._counts, self._probs)[0]
        return out

    def _everything(self) -> Results:
        out = self._run()
        names = (model.OUTPUT, model.ROWS_GRADIENT, model.PROBS_GRADIENT)
        return dict(zip(names, (out.detach(), *self._add_gradients(out)), strict=True))

    def _expected(self, workload: Workload) -> Any:
        layer, received = self._shared.module, model.received_rows(workload, self._rank)
        results = model.experts_results(layer, received)
        return results, lambda: model.expert_gradients(layer, received)

    def _compared(self, results: Results, workload: Workload) -> tuple[str | None, Results]:
        found = {name: value for name, value in results.items() if value is not None}
        placed = {
            name: value.view(len(value), *value.shape[1:] or (1,))[self._place]
            for name, value in found.items()
        }
        return None, results | placed

    def close(self) -> None:
        super().close()
        self._experts = None


def blocks_of(
    counts: torch.Tensor, grouped: bool, in_fp8: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Place of each row in the order of experts, int64 [num_rows], and the blocks' lengths.

    `counts`: rows of each expert, int64 [num_local_experts], on the CPU; either option pads blocks.
    Example: with counts 2 and 3 the places are 16, 17, 0, 1 and 2 with `grouped`, where the last
    expert is first; 0, 1, 16, 17 and 18 with only `in_fp8`; otherwise they are 0 to 4.
    """
    alignment = GROUPED_ALIGNMENT if grouped or in_fp8 else 1
    padded = -(-counts // alignment) * alignment
    lengths = padded.flip(0) if grouped else padded
    starts = lengths.cumsum(0) - lengths
    within = torch.cat([torch.arange(count) for count in counts.tolist()])
    return within + (starts.flip(0) if grouped else starts).repeat_interleave(counts), lengths


def captured(call: Callable[[], Results]) -> tuple[Callable[[], None], Results]:
    """Capture `call` in a CUDA graph; return a function that replays it, and its results."""
    # On the stream on which all subjects run.  Megatron's dispatchers keep tensors of their last
    # forward pass, and these the nodes that take the weights' gradients, each with the stream on
    # which it was made: a graph may not wait for another one.
    for _ in range(WARMUP):
        call()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    failure: Exception | None = None
    try:
        # Meanwhile torch's own thread may ask about the progress of a collective.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            try:
                results = call()
            except Exception as error:
                failure = error
                raise
    except Exception:
        # The end of a failed capture raises another error, which says less.
        if failure is not None:
            raise failure from None
        raise
    return graph.replay, results
