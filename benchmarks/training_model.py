"""The model of one subject that trains, on one rank: built as in training, stepped, closed.

Every subject has its own model, gradients and optimizer, and only one of them exists at a time:
with Adam's moments and everything in fp32 a parameter takes 18 bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch

from benchmarks import routers
from benchmarks.catalogue import (
    BLOCKWISE,
    FULL_ITERATION,
    OPTIMIZER_GRAPH,
    PARTIAL_GRAPHS,
    Variant,
)
from benchmarks.layer_model import close_dispatcher
from megatron_ncclep.benchmark import Setting, UnavailableError
from megatron_ncclep.benchmark.ranks import Ranks
from megatron_ncclep.config import EpConfig
from megatron_ncclep.training import corpus, data
from megatron_ncclep.training.data import Batch
from megatron_ncclep.training.model import TrainedModel, seed_everything, transformer_config
from megatron_ncclep.training.settings import Settings

# The default number of steps with different batches; later steps reuse them.
NUM_BATCHES = 8
# By default Megatron-LM pads the vocabulary to a multiple of this.
VOCABULARY_MULTIPLE = 128
# Steps before a graph is captured: the second finds everything allocated and compiled.
EAGER_STEPS = 2
PARTS = ("attn", "moe_router", "moe_preprocess")  # that `partial_graphs` captures
# Owners of the function that adds the output layer's weight gradients.
APEX, STAND_IN = "Apex", "ncclep bench"


@dataclass(frozen=True)
class Text:
    """Batches of one rank, on its device, so that reading them is not part of a step."""

    source: str  # description of the text
    vocab_size: int  # rows of the embedding
    steps: list[list[Batch]]  # the micro-batches of each step


@dataclass(frozen=True)
class Curve:
    """The start of a training on this rank."""

    weights: dict[str, tuple[float, float]]  # parameter -> initial sum, and of magnitudes, in fp64
    # Of the first MoE layer before the first step, on the CPU, [seq_length, micro_batch, hidden]:
    output: torch.Tensor  # for given hidden states,
    gradient: torch.Tensor  # and of these, for a given gradient of the output
    losses: list[float]  # the mean loss of each of the first steps
    grad_norms: list[float]
    load: float = 1.0  # of the busiest rank in the first step, in multiples of the mean


def load_text(
    settings: Settings, ranks: Ranks, folder: Path, num_steps: int = NUM_BATCHES,
    vocab_size: int | None = None,
) -> Text:  # fmt: skip
    """Make the corpus in `folder` and read the batches of `num_steps` steps.  Collective.

    `vocab_size`: that of the model, if it is not the text's.

    Raises:
        RuntimeError: the text is too short, or the folder cannot be written to.
    """

    def prepare() -> None:
        if ranks.rank == 0:
            corpus.prepare([], folder).check_length(settings["seq-length"])

    status, reason = ranks.attempt(prepare)
    if status != "ok":
        raise RuntimeError(f"no text: {reason}")
    found, where = corpus.load(folder), (ranks.rank, ranks.num_ranks)
    dataset, _ = data.build_datasets(folder, settings, num_steps, 1, settings["seed"])
    device = torch.device(ranks.setting.device)
    steps = [data.batches(dataset, settings, n, *where, device) for n in range(num_steps)]
    padded = -(-(vocab_size or found.vocab_size) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return Text(found.source, padded, steps)


class SubjectModel(TrainedModel):
    """One subject's model, its optimizer and its graphs.  Every method is collective.

    Args:
        max_recv_rows: of a static subject.
        balanced: routing is even, see `routers.balance`.
        start: `values` that it begins with, instead of Megatron's initialization.

    Attributes:
        fused_by: whose function adds the output layer's weight gradients to main_grad, see
            `provide_fusion`; None: no layer adds its own, DistributedDataParallel's hooks do.

    Raises:
        EngineUnavailableError, InputError, UnsupportedError: it cannot be built here.
    """

    fused_by: str | None = None

    def __init__(
        self, choice: Variant, settings: Settings, setting: Setting, text: Text,
        max_recv_rows: Any, balanced: bool = False,
        start: dict[str, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        on_gpu = setting.device == "cuda"
        # On a GPU with a tracker that CUDA graphs can hold.
        seed_everything(
            settings["seed"], te_rng_tracker=settings.uses_engine, use_cudagraphable_rng=on_gpu,
            force_reset_rng=True,
        )  # fmt: skip
        options = None  # Megatron-Core's own dispatchers have none
        if engine := choice.dispatcher.engine:
            wanted = setting.options(engine=engine, **choice.options(max_recv_rows))
            options = EpConfig(**wanted)
        fused = fusions(settings, on_gpu)
        if fused.get("gradient_accumulation_fusion"):
            self.fused_by = provide_fusion()
        config = transformer_config(
            settings, choice.dispatcher.dispatcher, setting.num_ranks, options,
            **fused, **choice.dispatcher.options, **graph_fields(choice.graphs),
            **({"moe_router_fusion": True} if choice.router_fusion else {}),
            **(BLOCKWISE if choice.fp8 else {}),
        )  # fmt: skip
        super().__init__(
            settings, config, text.vocab_size, torch.device(setting.device),
            wrapping_stream(choice.graphs, on_gpu), distributed=True,
            **_optimizer_fields(choice.optimizer_graph),
        )  # fmt: skip
        if balanced:
            tokens = settings["seq-length"] * settings["micro-batch-size"]
            routers.balance(self.gpt, tokens, setting.rank)
        if start is not None:
            for name, value in self.values().items():
                value.copy_(start[name])
            self.optimizer.reload_model_params()
        self._graphs = _Graphs(choice, self, setting.num_ranks)
        self._batches, self._done = text.steps, 0

    @property
    def num_dropped(self) -> int:
        """Rows that did not fit on this rank so far, in forward passes; waits for the device."""
        dispatchers = (getattr(m, "token_dispatcher", None) for m in self.gpt.modules())
        return sum(int(getattr(dispatcher, "num_dropped", None) or 0) for dispatcher in dispatchers)

    @property
    def phases(self) -> list[tuple[Callable[[], Any], bool]]:
        """A step's functions, in order, and whether each is the optimizer."""
        return [(self.zero, True), (self._next_batch, False), (self._update, True)]

    def step(self) -> None:
        """Train on the next batch; sets `loss`, the mean of this rank, and `grad_norm`."""
        for call, _ in self.phases:
            call()

    def _next_batch(self) -> None:
        self._graphs.before_step(self._done)
        self.loss = self.forward_backward(self._batches[self._done % len(self._batches)]).mean()
        self._done += 1

    def _update(self) -> None:
        self.grad_norm = self.update()

    def first_steps(self, count: int, after_each: Callable[[], Any]) -> Curve:
        """Train `count` steps from the start and record the results."""
        weights = self._weights()
        output, gradient = self._first_layer()
        losses, grad_norms, load = [], [], 0.0
        for step in range(count):
            if step == 0:
                with routers.watched(self.gpt) as counts:
                    self.step()
                load = routers.load_of_busiest(counts)
            else:
                self.step()
            losses.append(float(self.loss))
            grad_norms.append(float(self.grad_norm))
            after_each()
        return Curve(weights, output, gradient, losses, grad_norms, load)

    def values(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this rank by name, which may be written to."""
        named = chain(self.gpt.named_parameters(), self.gpt.named_buffers())
        return {name: value.detach() for name, value in named}

    def close(self, engines: bool = True) -> None:
        """Release the graphs, the memory and, if nothing has failed, the engines."""
        # Python cannot see cycles through autograd's nodes: Megatron's own dispatchers keep
        # probabilities of the last forward pass, which lead to the nodes that take the weights'
        # gradients and, with DistributedDataParallel's hooks on these, to the model; with the
        # distributed optimizer the config leads to it, and it to these nodes.
        self._graphs.close()
        self.gpt.config.grad_scale_func = None
        for module in self.gpt.modules():
            if hasattr(module, "token_dispatcher"):
                if engines:
                    close_dispatcher(module.token_dispatcher)
                del module.token_dispatcher
        del self.gpt, self.model, self.optimizer, self.optimizer_step, self.schedule, self._graphs
        gc.collect()
        # A graph cannot use memory in the allocator's cache.
        torch.cuda.empty_cache()

    def _first_layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first MoE layer's output and gradient, see `Curve`; no weight changes."""
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        layer = next(m for m in self.gpt.modules() if isinstance(m, MoELayer))
        settings, device = self.settings, next(layer.parameters()).device
        shape = (2, settings["seq-length"], settings["micro-batch-size"], settings["hidden-size"])
        generator = torch.Generator(device).manual_seed(settings["seed"])
        values = torch.randn(shape, generator=generator, device=device)
        hidden, grad = values.to(self.gpt.config.params_dtype).unbind()
        # As megatron.training does at the start; an earlier step may have left another value.
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=device))
        output = layer(hidden.requires_grad_())[0]
        (gradient,) = torch.autograd.grad(output, hidden, grad)
        return output.detach().cpu(), gradient.cpu()

    def _weights(self) -> dict[str, tuple[float, float]]:
        # Without copies in fp64, for which a model that fills the memory leaves no room.
        wide = {"dtype": torch.float64}
        return {
            name: (float(weight.sum(**wide)), float(weight.abs().sum(**wide)))
            for name, weight in self.gpt.named_parameters()
        }


def fusions(settings: Settings, on_gpu: bool) -> dict[str, Any]:
    """The fusions that Megatron-LM enables by default, where they are available."""
    if not on_gpu:
        return {}  # they would need a compiler
    return {
        "bias_activation_fusion": settings["swiglu"],
        "bias_dropout_fusion": True,
        "apply_rope_fusion": settings.uses_engine,
        # Without TransformerEngine every layer would need Apex or its stand-in.
        "gradient_accumulation_fusion": settings.uses_engine,
    }


def provide_fusion() -> str:
    """Enable `gradient_accumulation_fusion` in Megatron-Core's own linear layers, in this process.

    They call a function of Apex' extension `fused_weight_gradient_mlp_cuda`, and refuse the option
    without it; TransformerEngine's layers need none.  Apex has to be compiled, so it is missing on
    many machines.  Without the option, all of a model's gradients would be written, read and added
    once more than in training; hence this stand-in, the same for all subjects.

    Returns:
        whose function they call: `APEX` or `STAND_IN`.
    """
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:
        stand_in = SimpleNamespace(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)
        layers.fused_weight_gradient_mlp_cuda = stand_in
        layers._grad_accum_fusion_available = True
    function = layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
    return STAND_IN if function is wgrad_gemm_accum_fp32 else APEX


@torch.no_grad()
def wgrad_gemm_accum_fp32(
    rows: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add grad_output^T @ rows to `main_grad`, fp32 [out_features, in_features].

    `rows` [num_rows, in_features] and `grad_output` [num_rows, out_features] are bf16 or fp16.  On
    a GPU one call of cuBLAS, with sums in fp32.  Where torch has none for these dtypes, before 2.8
    and on a CPU, the product is rounded to the rows' dtype and added.
    """
    if rows.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.addmm(main_grad, grad_output.t(), rows, out_dtype=torch.float32, out=main_grad)
    else:
        main_grad.add_(grad_output.t() @ rows)


def graph_fields(graphs: str | None) -> dict[str, Any]:
    """The TransformerConfig fields that ask for `graphs`."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    if graphs is None:
        return {}
    known = TransformerConfig.__dataclass_fields__
    parts = "cuda_graph_modules" if "cuda_graph_modules" in known else "cuda_graph_scope"
    fields: dict[str, Any] = {"cuda_graph_warmup_steps": EAGER_STEPS}
    if graphs == PARTIAL_GRAPHS:
        return {**fields, "cuda_graph_impl": "transformer_engine", parts: list(PARTS)}
    if FULL_ITERATION in get_args(known["cuda_graph_impl"].type):
        return {**fields, "cuda_graph_impl": FULL_ITERATION, parts: []}
    return {**fields, "cuda_graph_impl": "local", parts: [FULL_ITERATION]}  # before 0.18


@contextmanager
def wrapping_stream(graphs: str | None, on_gpu: bool) -> Iterator[None]:
    """The stream that DistributedDataParallel's hooks remember, as in megatron.training.

    That of the whole graph, or else one of their own: the default stream must not wait for one that
    captures, which hooks that remember it would have it do.
    """
    from megatron.core import full_cuda_graph

    whole = graphs == FULL_ITERATION
    # Before 0.18 there is none.
    if not on_gpu or (whole and not hasattr(full_cuda_graph, "get_shared_capture_stream")):
        yield
        return
    stream = full_cuda_graph.get_shared_capture_stream() if whole else torch.cuda.Stream()
    current = torch.cuda.current_stream()
    stream.wait_stream(current)  # which initializes the weights that are copied
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)  # the optimizer copies the copies


def _optimizer_fields(optimizer_graph: bool) -> dict[str, Any]:
    """The fields of OptimizerConfig that ask for an optimizer that can be captured."""
    from megatron.core.optimizer import OptimizerConfig

    if not optimizer_graph:
        return {}
    if "optimizer_cuda_graph" not in OptimizerConfig.__dataclass_fields__:
        raise UnavailableError(f"{OPTIMIZER_GRAPH} needs Megatron-Core 0.17 or newer")
    return {"optimizer_cuda_graph": True}


class _Graphs:
    """The CUDA graphs of a subject, if any.  Only one subject at a time has some in a process."""

    def __init__(self, choice: Variant, model: TrainedModel, num_ranks: int) -> None:
        self._choice = choice
        self._partial = self._captured = None
        self._clear()  # graphs left behind by a failed subject
        warmup = {"cuda_graph_warmup_steps": EAGER_STEPS}
        if choice.graphs == FULL_ITERATION:
            from megatron.core.full_cuda_graph import FullCudaGraphWrapper

            model.schedule = FullCudaGraphWrapper(model.schedule, **warmup)
        elif choice.graphs == PARTIAL_GRAPHS:
            self._partial = _partial_graphs(model, num_ranks)
        if choice.captures_optimizer:
            from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

            model.optimizer_step = OptimizerCudaGraphWrapper(model.optimizer_step, **warmup)

    def before_step(self, step: int) -> None:
        if self._partial is not None and step == EAGER_STEPS:
            try:
                self._partial.create_cudagraphs()
            except BaseException:
                _abandon_capture()
                raise
            self._captured = self._partial

    def close(self) -> None:
        if self._captured is not None:
            self._captured.delete_cuda_graphs()
        self._clear()

    def _clear(self) -> None:
        if self._choice.graphs == FULL_ITERATION:
            clear_full_iteration()
        if self._choice.captures_optimizer:
            from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

            OptimizerCudaGraphWrapper.cuda_graph = OptimizerCudaGraphWrapper.result = None
            OptimizerCudaGraphWrapper.curr_iteration = 0
        if self._choice.fp8:
            from megatron_ncclep.integration.experts.fp8_recipe import autocast_state

            # TransformerEngine's own graphs leave a flag on the device that keeps weights in FP8 as
            # they are, which other graphs heed too.
            autocast_state().reset()


def clear_full_iteration() -> None:
    """Release the graphs and batches that Megatron-Core keeps in classes."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

    for name, nothing in (("cuda_graph", None), ("result", None), ("curr_iteration", 0)):
        getattr(FullCudaGraphWrapper, name).update(training=nothing, validation=nothing)
    StaticBufferLoader.static_buffers = {"training": [], "validation": []}


def _abandon_capture() -> None:
    """Let the subjects after one whose capture failed run: Megatron-Core leaves all of this set."""
    from megatron.core.transformer import cuda_graphs

    cuda_graphs._set_capture_end()
    if cuda_graphs.HAVE_TE_GRAPHS:
        cuda_graphs.te_set_capture_end()
    gc.unfreeze()


def _partial_graphs(model: TrainedModel, num_ranks: int) -> Any:
    from megatron.core import num_microbatches_calculator
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    settings = model.settings
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        0, None, settings["global-batch-size"], settings["micro-batch-size"], num_ranks
    )
    return TECudaGraphHelper(
        model=[model.model], config=model.gpt.config, seq_length=settings["seq-length"],
        micro_batch_size=settings["micro-batch-size"], optimizers=[model.optimizer],
    )  # fmt: skip
