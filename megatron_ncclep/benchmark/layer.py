"""A whole MoELayer of Megatron-Core, forward and backward: router, dispatcher and experts.

Its experts are Megatron-Core's, gated with SwiGLU and without bias: on a GPU TEGroupedMLP, with
TransformerEngine's grouped GEMM, on a CPU SequentialMLP; or this package's, over the same weights.
Its router is Megatron-Core's TopKRouter with all its work forward and backward; only the values of
its logits are given, so that every subject routes as the workload says.

What training adds is not in it: weight gradients are made and not added to others, nor reduced over
the ranks.  Shared experts, auxiliary losses and recomputation are off.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

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
    initialize,
    make_config,
)
from megatron_ncclep.benchmark.names import (
    DISPATCHERS,
    INSTALL_ENGINE,
    LAYERS,
    dropped_problem,
    unavailable_reason,
)
from megatron_ncclep.benchmark.subjects import (
    BOTH,
    WHOLE,
    Setting,
    Subject,
    UnavailableError,
    excused,
)
from megatron_ncclep.benchmark.workload import Workload

# Key in Workload.shared.
SHARED = "layer"
# Logit of experts that a token does not go to; those of its assignments are at least log(0.5).
UNPICKED = -100.0
# Runs before a graph is captured, as torch advises.
WARMUP = 3
Results = dict[str, Any]


class LayerSubject(Subject):
    """See `Subject`.  Over Megatron's own process groups; other subjects use the same weights.

    Args:
        name, setting, workload: as of any subject.
        max_recv_rows: of a variant with a fixed number of received rows.
    """

    _host_counts = True

    def __init__(
        self, name: str, setting: Setting, workload: Workload, max_recv_rows: Any = None
    ) -> None:
        super().__init__(name, setting, workload)
        variant = LAYERS.parse(name)
        if reason := unavailable_reason(variant, setting.device):
            raise UnavailableError(reason)
        with excused(Exception):  # none of this is ours
            initialize(setting)
            self._shared, self.shared_bytes = shared_layer(setting, workload)
        # MoELayer's shape is [sequence, batch, hidden].
        self._x = workload.x.detach()[:, None].requires_grad_()
        self._out: torch.Tensor | None = None
        self._captured: Results | None = None
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
            self._weights = dict(self._layer.named_parameters())
            self.passes = dict(zip(WHOLE, (self._forward, self._backward), strict=True))
            for call in self.passes.values():
                call()  # some fail at first use only
            if variant.graphs:  # one graph takes the place of the two passes
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
        """See `Subject.problem`: output and all gradients, to a few roundings.

        A graph is also replayed with a routing that it was not captured with.
        """
        if self._captured is None:
            return self._problem_of(self._everything(), self._workload)
        if problem := self._replay_problem(self._captured, self._workload):
            return problem
        # Tokens, their hidden states and gradients stay; where they go changes.
        work = self._workload
        case = dataclasses.replace(work.case, seed=work.case.seed + 1)
        other = Workload(case, self._rank, work.ffn_hidden_size)
        route(self._shared, other)
        try:
            problem = self._replay_problem(self._captured, other)
        finally:
            route(self._shared, work)
        return None if problem is None else f"replayed with another routing: {problem}"

    def _replay_problem(self, results: Results, workload: Workload) -> str | None:
        """Replay the graph, which leaves `results`, and compare with what `workload` must give."""
        self.passes[BOTH]()
        return self._problem_of(results, workload)

    def _problem_of(self, results: Results, workload: Workload) -> str | None:
        """Compare results of `_everything` with what they must be."""
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
        expected = expected_results(self._shared, workload, self._rank)
        return routing_problem(workload, self._rank, probs, routing_map) or results_problem(
            workload, self._rank, actual, expected
        )

    def close(self) -> None:
        """See `Subject.close`.  The last one to let go of the layer frees its weights."""
        self.passes, self._captured, self._out = {}, None, None  # a graph before its engine
        close_dispatcher(self._dispatcher)
        self._layer = self._shared = None
        self._weights = {}


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


# --- the layer that all subjects share -----------------------------------------------------------


def shared_layer(setting: Setting, workload: Workload) -> tuple[Any, int]:
    """Give the MoELayer of a workload, made by the first subject that needs it.

    It goes when the last subject lets go of it.  Subjects run copies of it (`layer_of_subject`).

    Returns:
        the layer, with Megatron-Core's experts, and how many bytes of it were there already.

    Raises:
        UnavailableError: the shape does not say how large experts are, or the GPU's experts need
            TransformerEngine, which is not installed.
    """
    layer = workload.shared.get(SHARED)
    if layer is not None:
        return layer, sum(weight.nbytes for weight in layer.parameters())
    layer = _build(setting, workload)
    workload.shared[SHARED] = layer
    return layer, 0


def layer_of_subject(shared: Any, dispatcher: Any, grouped: bool) -> Any:
    """Make a MoELayer with the router and the weights of `shared`.

    Args:
        shared: what `shared_layer` gives.
        dispatcher: of the new one.
        grouped: its experts are this package's.  They lay the weights out as Megatron's buffers do,
            behind one another, for all subjects.

    Raises:
        UnsupportedError: the GPU has no grouped GEMM.
    """
    layer = copy.copy(shared)
    layer._modules = dict(shared._modules)
    layer.token_dispatcher = dispatcher
    if grouped:
        from megatron_ncclep.integration.experts.grouped import group_experts

        layer.experts = copy.copy(shared.experts)
        group_experts(layer.experts, last_expert_first=True)
    return layer


def route(shared: Any, workload: Workload) -> None:
    """Have every subject's router decide as `workload` says; CUDA graphs too, when replayed."""
    shared.router.given_logits.copy_(_logits(workload))


def _build(setting: Setting, workload: Workload) -> Any:
    """Make the layer, with Megatron's `alltoall` for the time being."""
    import torch.nn.functional as F

    on_gpu = setting.device == "cuda"
    if workload.ffn_hidden_size is None:
        raise UnavailableError("the shape does not give ffn_hidden_size, the size of an expert")
    if on_gpu and importlib.util.find_spec("transformer_engine") is None:
        raise UnavailableError(f"the experts need {INSTALL_ENGINE}")
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    case = workload.case
    config = make_config(
        DISPATCHERS["alltoall"],
        setting,
        workload,
        moe_ffn_hidden_size=workload.ffn_hidden_size,
        activation_func=F.silu,
        gated_linear_unit=True,
        bias_activation_fusion=on_gpu,  # as --swiglu does; on a CPU it would need a compiler
        moe_grouped_gemm=on_gpu,
        use_cpu_initialization=not on_gpu,
    )
    spec = get_moe_module_spec(use_te=on_gpu, num_experts=case.num_experts, moe_grouped_gemm=on_gpu)
    # A ModuleSpec in old versions, a functools.partial of MoELayer in new ones.
    submodules = spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]
    submodules = dataclasses.replace(submodules, router=_router_class())
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    layer = MoELayer(config, submodules=submodules, layer_number=1)
    layer.set_layer_number(1)
    wanted = TEGroupedMLP if on_gpu else SequentialMLP
    if type(layer.experts) is not wanted:
        raise UnavailableError(
            f"Megatron-Core makes {type(layer.experts).__name__}, not {wanted.__name__}: "
            "TransformerEngine is too old"
        )
    layer.to(setting.device, case.dtype)
    layer.router.given_logits = _logits(workload)
    _set_weights(layer, setting.rank)
    return layer


def _router_class() -> type:
    """TopKRouter with given logits; a class of its own, since Megatron is imported late."""
    from megatron.core.transformer.moe.router import TopKRouter

    class GivenRouter(TopKRouter):
        given_logits: torch.Tensor

        def gating(self, hidden: torch.Tensor) -> Any:
            return _Given.apply(super().gating(hidden), self.given_logits)

    return GivenRouter


class _Given(torch.autograd.Function):
    """Values of one tensor, and its gradient to another one that takes part in nothing else."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return given.to(own.dtype).view_as(own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _logits(workload: Workload) -> torch.Tensor:
    """fp32 [T, E]: logits whose top-k are the assignments and whose softmax is their weights."""
    chosen = workload.topk_idx
    logits = torch.full((len(chosen), workload.case.num_experts), UNPICKED, device=chosen.device)
    return logits.scatter(1, chosen, workload.w.log())


def _set_weights(layer: Any, rank: int) -> None:
    """Give every weight values of its own, also across ranks, that keep activations near one.

    On a CPU, Megatron initialises the experts of all ranks alike: a token at the right expert of
    the wrong rank would not be noticed.
    """
    parameters = list(layer.named_parameters())
    for index, (name, weight) in enumerate(parameters):
        owner = 1 + rank if "experts." in name else 0  # ranks have the same router
        generator = torch.Generator(weight.device).manual_seed(index + owner * len(parameters))
        with torch.no_grad():
            weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
