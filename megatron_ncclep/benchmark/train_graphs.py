"""CUDA graphs as Megatron-Core makes them in training, under the names that each release uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import torch

from megatron_ncclep.benchmark.subjects import UnavailableError
from megatron_ncclep.benchmark.variants import FULL_ITERATION, OPTIMIZER_GRAPH, PARTIAL_GRAPHS
from megatron_ncclep.training.settings import Settings

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


class NoGraphs:
    """Forward and backward of one step, kernel by kernel."""

    def __init__(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.forward_backward: Callable[..., Any] = get_forward_backward_func()

    def before_step(self, step: int) -> None:
        """Called before step number `step`, from 0."""

    def close(self) -> None:
        """Release the graphs."""


class FullIteration(NoGraphs):
    """Forward and backward of a step as one graph.  One of them at a time in a process."""

    def __init__(self) -> None:
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        super().__init__()
        self.close()  # what a subject that failed left behind
        self.forward_backward = FullCudaGraphWrapper(
            self.forward_backward, cuda_graph_warmup_steps=EAGER_STEPS
        )

    def close(self) -> None:
        """See `NoGraphs.close`.  Megatron-Core keeps graph and batches in classes."""
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

        for name, nothing in (("cuda_graph", None), ("result", None), ("curr_iteration", 0)):
            getattr(FullCudaGraphWrapper, name).update(training=nothing, validation=nothing)
        StaticBufferLoader.static_buffers = {"training": [], "validation": []}


class PartialGraphs(NoGraphs):
    """Attention, router and preprocessing of each layer as graphs."""

    def __init__(self, settings: Settings, num_ranks: int, config: Any, built: Any) -> None:
        from megatron.core import num_microbatches_calculator
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        super().__init__()
        num_microbatches_calculator.unset_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(
            0, None, settings["global-batch-size"], settings["micro-batch-size"], num_ranks
        )
        self._helper = TECudaGraphHelper(
            model=[built.model],
            config=config,
            seq_length=settings["seq-length"],
            micro_batch_size=settings["micro-batch-size"],
            optimizers=[built.optimizer],
        )
        self._captured = False

    def before_step(self, step: int) -> None:
        """See `NoGraphs.before_step`."""
        if step == EAGER_STEPS:
            self._helper.create_cudagraphs()
            self._captured = True

    def close(self) -> None:
        """See `NoGraphs.close`."""
        if self._captured:
            self._helper.delete_cuda_graphs()


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


class OptimizerGraph:
    """The optimizer's step as one graph.  One of them at a time in a process."""

    def __init__(self, step: Callable[[], Any]) -> None:
        from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

        self.close()  # what a subject that failed left behind
        self.step: Callable[[], Any] = OptimizerCudaGraphWrapper(
            step, cuda_graph_warmup_steps=EAGER_STEPS
        )

    def close(self) -> None:
        """Release the graph.  Megatron-Core keeps it in the class."""
        from megatron.core.optimizer.optimizer_cuda_graph import OptimizerCudaGraphWrapper

        OptimizerCudaGraphWrapper.cuda_graph = OptimizerCudaGraphWrapper.result = None
        OptimizerCudaGraphWrapper.curr_iteration = 0


def make_graphs(
    graphs: str | None, settings: Settings, num_ranks: int, config: Any, built: Any
) -> NoGraphs:
    """Make what runs forward and backward.

    Args:
        graphs: of a Variant.
        settings, config: of the model.
        num_ranks: all of them are data-parallel.
        built: the TrainedModel.
    """
    if graphs == FULL_ITERATION:
        return FullIteration()
    if graphs == PARTIAL_GRAPHS:
        return PartialGraphs(settings, num_ranks, config, built)
    return NoGraphs()
