"""Trains a small model with Megatron's CUDA graphs of some kind, or without any."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron_setup import ep_config
from rank_pool import RankContext
from trainer import BATCH, Model, ModelCase

SEQUENCE = 64
MICRO_BATCHES = 2
# Steps before graphs are captured, and all of them: at least two replays.
WARMUP, STEPS = 2, 5
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "ffn_hidden_size": 512,
    "moe_ffn_hidden_size": 64,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "bias_activation_fusion": False,
    "moe_grouped_gemm": True,
    "pipeline_dtype": torch.bfloat16,
    "cuda_graph_warmup_steps": WARMUP,
}
NONE = {"cuda_graph_impl": "none"}


@dataclass(frozen=True)
class Job:
    """One way to train.

    Attributes:
        name: of it.
        graphs: TransformerConfig's fields for CUDA graphs.
        ncclep: fields of EpConfig.
        options: further fields of TransformerConfig.
        sizes: those that differ from `SIZES`.
        holds_dispatch: a graph holds the dispatch, so that replays do not call the dispatcher.
        hybrid: the layers are MoETransformerLayers, as those of hybrid models.
        eval_sequence: length of the sequences that are evaluated between steps.
        collapses: steps in which all tokens go to the same two experts; see `Job.is_rerun`.
        steps: of the training.
    """

    name: str
    graphs: dict[str, Any]
    ncclep: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    holds_dispatch: bool = True
    hybrid: bool = False
    eval_sequence: int = SEQUENCE // 2
    collapses: range = range(0)
    steps: int = STEPS

    @property
    def is_rerun(self) -> bool:
        """Whether steps in which rows do not fit are run again: the bits are those of exact mode.

        Then tokens are sent to the same two experts in some steps.  On one rank these need no
        padding, and only the other steps have more rows than fit.
        """
        return self.ncclep.get("on_overflow") == "rerun"


@dataclass
class Trained:
    """What a training leaves behind.

    Attributes:
        training: it keeps its graphs.
        values: losses of all steps and evaluations, gradients of all steps, weights, and how many
            rows were dropped, by name.
        dispatches: calls of token_dispatch in each step.
    """

    training: Any
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    dispatches: list[int] = field(default_factory=list)


def train(ctx: RankContext, engine: str, job: Job, *, with_graphs: bool) -> Trained:
    """Train from the same weights on the same data, evaluating after each step."""
    training = GraphTraining(ctx, engine, job, job.graphs if with_graphs else NONE)
    trained = Trained(training)
    values = trained.values
    for step in range(job.steps):
        training.spread.fill_(step not in job.collapses)
        before = training.num_dispatches
        values[f"losses of step {step}"] = training.step(step)
        trained.dispatches.append(training.num_dispatches - before)
        for index, buffer in enumerate(training.gradient_buffers()):
            # Not on the GPU, whose memory would be asked for more and more of it.
            values[f"gradients {index} of step {step}"] = buffer.cpu()
        training.optimizer.step()
        values[f"losses evaluated after step {step}"] = training.evaluate(step)
    for name, parameter in training.gpt.named_parameters():
        values[name] = parameter.detach().clone()
    for index, layer in enumerate(training.gpt.decoder.layers):
        dropped = layer.mlp.token_dispatcher.num_dropped
        if job.is_rerun:
            assert not dropped
        elif dropped is not None:
            values[f"rows dropped in layer {index}"] = dropped.clone()
    return trained


class GraphTraining(Model):
    """A model with its optimizer, trained as megatron.training does, with graphs of any kind.

    Attributes:
        gpt: the model, without what wraps it.
        num_dispatches: calls of token_dispatch so far.
        routings: numbers of tokens of each expert, of every call of a router.
        spread: on the device, 0 or 1: whether tokens go to experts other than the first two.
    """

    def __init__(self, ctx: RankContext, engine: str, job: Job, graphs: dict[str, Any]) -> None:
        self.job, self.impl = job, graphs["cuda_graph_impl"]
        self.spread = torch.ones((), device=ctx.device)
        is_exact = job.is_rerun and self.impl == "none"
        ncclep = {"experts": "grouped"} if is_exact else job.ncclep
        options = {**job.options, **graphs, "ncclep": ep_config(engine, **ncclep)}
        how = {"te": True, "sequence": SEQUENCE, "micro_batches": MICRO_BATCHES}
        case = ModelCase(
            job.name, options, {**SIZES, **job.sizes}, torch.bfloat16, ctx.num_ranks, **how
        )
        super().__init__(ctx, "ncclep", case)
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        (self.gpt,), (self.model,) = self.chunks, self.wrapped
        optimizer = OptimizerConfig(
            optimizer="adam", lr=0.01, bf16=True, params_dtype=torch.bfloat16
        )
        self.optimizer = get_megatron_optimizer(
            optimizer, [self.model], use_gloo_process_groups=False
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        schedule = super()._schedule
        self.forward_backward = {
            stage: self._captured(schedule(stage == "validation"))
            for stage in ("training", "validation")
        }
        if self.impl == "full_iteration":
            self._keep_graphs()
        self.helper: Any = None
        if self.impl == "transformer_engine":
            from megatron.core.num_microbatches_calculator import (
                init_num_microbatches_calculator,
                unset_num_microbatches_calculator,
            )
            from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

            unset_num_microbatches_calculator()
            init_num_microbatches_calculator(0, None, BATCH * MICRO_BATCHES, BATCH, 1)
            self.helper = TECudaGraphHelper(
                [self.model], self.config, SEQUENCE, BATCH, [self.optimizer]
            )
        self.num_dispatches = 0
        self.routings: set[tuple[int, ...]] = set()
        self._watch()

    def _specs(self, stage: int | None) -> tuple[Any, Any]:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.enums import AttnBackend
        from megatron.core.transformer.transformer_layer import MoETransformerLayer

        # The others add up in whatever order their blocks come, run by run.
        self.config.attention_backend = AttnBackend.unfused
        # The tracker that graphs need serves without them too.
        model_parallel_cuda_manual_seed(
            1, te_rng_tracker=True, use_cudagraphable_rng=True, force_reset_rng=True
        )
        layer, ahead = super()._specs(stage)
        if self.job.hybrid:
            layer = dataclasses.replace(layer, module=MoETransformerLayer)
        return layer, ahead

    def _change(self, chunk: Any) -> None:
        super()._change(chunk)
        for layer in chunk.decoder.layers if self.job.is_rerun else ():
            router = layer.mlp.router
            router.gating = partial(self._collapsing, router.gating)

    def _collapsing(self, gating: Any, *args: Any) -> torch.Tensor:
        logits: torch.Tensor = gating(*args)
        first_two = torch.arange(logits.shape[-1], device=logits.device) < 2
        return logits * self.spread + 10 * first_two * (1 - self.spread)

    def _in_ddp(self, chunk: Any, wrapping: Any) -> Any:
        from megatron.core.transformer.module import Float16Module

        chunk = Float16Module(self.config, chunk)
        from megatron.core.full_cuda_graph import get_shared_capture_stream

        full = self.impl == "full_iteration"
        side = get_shared_capture_stream() if full else torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model = super()._in_ddp(chunk, wrapping)
        torch.cuda.current_stream().wait_stream(side)
        return model

    def _captured(self, forward_backward: Any) -> Any:
        if self.impl != "full_iteration":
            return forward_backward
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        return FullCudaGraphWrapper(
            forward_backward,
            cuda_graph_warmup_steps=WARMUP,
            use_single_mempool=self.config.cuda_graph_use_single_mempool,
        )

    def _schedule(self, forward_only: bool) -> Any:
        return self.forward_backward["validation" if forward_only else "training"]

    def _keep_graphs(self) -> None:
        """Begin without graphs of whole iterations, and keep those that are there alive.

        Megatron has them, and the tensors that they read and write, in classes, once per process.
        """
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader

        kept = (FullCudaGraphWrapper.cuda_graph, FullCudaGraphWrapper.result)
        self.kept = (*kept, StaticBufferLoader.static_buffers)
        FullCudaGraphWrapper.cuda_graph = dict.fromkeys(kept[0])
        FullCudaGraphWrapper.result = dict.fromkeys(kept[1])
        FullCudaGraphWrapper.curr_iteration = dict.fromkeys(kept[0], 0)
        StaticBufferLoader.static_buffers = {stage: [] for stage in kept[0]}

    def _watch(self) -> None:
        """Count dispatches, and look at routings where that does not wait in a graph."""

        def count(original: Any, *args: Any) -> Any:
            self.num_dispatches += 1
            return original(*args)

        for layer in self.gpt.decoder.layers:
            dispatcher = layer.mlp.token_dispatcher
            dispatcher.token_dispatch = partial(count, dispatcher.token_dispatch)
            if self.impl == "none":
                layer.mlp.router.register_forward_hook(
                    lambda module, args, out: self.routings.add(tuple(out[1].sum(0).tolist()))
                )

    def gradient_buffers(self) -> Iterator[torch.Tensor]:
        for buffer in self.model.buffers + self.model.expert_parallel_buffers:
            yield buffer.grad_data

    def step(self, step: int) -> torch.Tensor:
        """Forward and backward of all micro-batches; their losses."""
        if self.helper is not None and step == WARMUP:
            self.helper.create_cudagraphs()
        self.optimizer.zero_grad()
        return self.gradients(step).clone()

    @torch.no_grad()
    def evaluate(self, step: int) -> torch.Tensor:
        """Losses of micro-batches of another length."""
        self.model.eval()
        try:
            length = self.job.eval_sequence
            return self._run(100 + step, length, forward_only=True).clone()
        finally:
            self.model.train()

    def graphs(self) -> list[Any]:
        """The graphs that were captured, by layer where they are a layer's."""
        if self.impl == "full_iteration":
            from megatron.core.full_cuda_graph import FullCudaGraphWrapper

            return [FullCudaGraphWrapper.cuda_graph[stage] for stage in self.forward_backward]
        layers = list(self.gpt.decoder.layers)
        if self.impl == "transformer_engine":
            return [layer.cuda_graphs or None for layer in layers]
        names = ("cudagraph_manager", "cudagraph_manager_router", "cudagraph_manager_postprocess")
        managers = [
            getattr(layer, name) for layer in layers for name in names if hasattr(layer, name)
        ]
        runners = [runner for manager in managers for runner in manager.cudagraph_runners]
        assert managers
        assert len(runners) >= len(managers)
        return [graph for runner in runners for graph in (runner.fwd_graph, runner.bwd_graph)]
