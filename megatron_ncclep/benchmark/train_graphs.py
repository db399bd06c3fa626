"""CUDA graphs as Megatron-Core makes them in training, under the names that each release uses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import torch

from megatron_ncclep.benchmark.names import (
    FULL_ITERATION,
    OPTIMIZER_GRAPH,
    PARTIAL_GRAPHS,
    Variant,
)
from megatron_ncclep.benchmark.subjects import UnavailableError
from megatron_ncclep.training.model import TrainedModel

# Steps before a graph is captured: the second finds everything allocated and compiled.
EAGER_STEPS = 2
PARTS = ("attn", "moe_router", "moe_preprocess")


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


def wrapping_stream(graphs: str | None) -> AbstractContextManager[Any]:
    """The stream on which the model is put into DistributedDataParallel, as in megatron.training.

    Its hooks remember the stream, which must be the one that a whole iteration is captured on.
    """
    if graphs != FULL_ITERATION:
        return nullcontext()
    from megatron.core import full_cuda_graph

    if not hasattr(full_cuda_graph, "get_shared_capture_stream"):  # before 0.18
        return nullcontext()
    stream = full_cuda_graph.get_shared_capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def optimizer_fields(optimizer_graph: bool) -> dict[str, Any]:
    """The fields of OptimizerConfig that ask for an optimizer that can be captured.

    Raises:
        UnavailableError: Megatron-Core has none before 0.17.
    """
    from megatron.core.optimizer import OptimizerConfig

    if not optimizer_graph:
        return {}
    if "optimizer_cuda_graph" not in OptimizerConfig.__dataclass_fields__:
        raise UnavailableError(f"{OPTIMIZER_GRAPH} needs Megatron-Core 0.17 or newer")
    return {"optimizer_cuda_graph": True}


class Graphs:
    """The CUDA graphs of a subject, if any.  Those of one subject at a time in a process.

    Forward and backward of a step as one graph, or attention, router and preprocessing of each
    layer as graphs; and the optimizer's step as one.

    Args:
        choice: of the subject.
        model: whose schedule and optimizer step become graphs' that replay them.
        config: the model's TransformerConfig.
        num_ranks: all of them are data-parallel.
    """

    def __init__(self, choice: Variant, model: TrainedModel, config: Any, num_ranks: int) -> None:
        self._choice = choice
        self._partial: Any = None
        self._has_captured = False
        if choice.graphs == FULL_ITERATION:
            from megatron.core.full_cuda_graph import FullCudaGraphWrapper

            clear_full_iteration()  # what a subject that failed left behind
            model.schedule = FullCudaGraphWrapper(
                model.schedule, cuda_graph_warmup_steps=EAGER_STEPS
            )
        elif choice.graphs == PARTIAL_GRAPHS:
            self._partial = _partial_graphs(model, config, num_ranks)
        if choice.captures_optimizer:
            from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

            clear_optimizer()
            model.optimizer_step = OptimizerCudaGraphWrapper(
                model.optimizer_step, cuda_graph_warmup_steps=EAGER_STEPS
            )

    def before_step(self, step: int) -> None:
        """Called before step number `step`, from 0."""
        if self._partial is not None and step == EAGER_STEPS:
            self._partial.create_cudagraphs()
            self._has_captured = True

    def close(self) -> None:
        """Release the graphs."""
        if self._has_captured:
            self._partial.delete_cuda_graphs()
        if self._choice.graphs == FULL_ITERATION:
            clear_full_iteration()
        if self._choice.captures_optimizer:
            clear_optimizer()


def _partial_graphs(model: TrainedModel, config: Any, num_ranks: int) -> Any:
    from megatron.core import num_microbatches_calculator
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    settings = model.settings
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        0, None, settings["global-batch-size"], settings["micro-batch-size"], num_ranks
    )
    return TECudaGraphHelper(
        model=[model.model],
        config=config,
        seq_length=settings["seq-length"],
        micro_batch_size=settings["micro-batch-size"],
        optimizers=[model.optimizer],
    )


def clear_full_iteration() -> None:
    """Release the graph and the batches, which Megatron-Core keeps in classes."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

    for name, nothing in (("cuda_graph", None), ("result", None), ("curr_iteration", 0)):
        getattr(FullCudaGraphWrapper, name).update(training=nothing, validation=nothing)
    StaticBufferLoader.static_buffers = {"training": [], "validation": []}


def clear_optimizer() -> None:
    """Release the graph of the optimizer's step, which Megatron-Core keeps in the class."""
    from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

    OptimizerCudaGraphWrapper.cuda_graph = OptimizerCudaGraphWrapper.result = None
    OptimizerCudaGraphWrapper.curr_iteration = 0
