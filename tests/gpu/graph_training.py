"""Trains a small GPTModel as megatron.training would, with CUDA graphs of any kind or without.

Everything here runs on a rank of its own (test_megatron_graphs.py), on a CPU too, without graphs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.ranks.pool import RankContext

SEQUENCE, BATCH, EXPERTS, TOP_K, VOCABULARY = 64, 2, 8, 2, 96
LONGEST = 2 * SEQUENCE
MICRO_BATCHES = 2
# Steps before graphs are captured, and all of them: at least two replays.
WARMUP, STEPS = 2, 5
# What all assignments need at most, with every block padded to 16 rows.
ALL_ROWS = 384
NONE = {"cuda_graph_impl": "none"}


@dataclass(frozen=True)
class Job:
    """One way to train.

    Attributes:
        name: of it.
        graphs: TransformerConfig's fields for CUDA graphs.
        ncclep: fields of EpConfig.
        options: further fields of TransformerConfig.
        holds_dispatch: a graph holds the dispatch, so that replays do not call the dispatcher.
        hybrid: the layers are MoETransformerLayers, as those of hybrid models.
        eval_sequence: length of the sequences that are evaluated between steps.
    """

    name: str
    graphs: dict[str, Any]
    ncclep: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    holds_dispatch: bool = True
    hybrid: bool = False
    eval_sequence: int = SEQUENCE // 2


@dataclass
class Trained:
    """What a training leaves behind.

    Attributes:
        values: losses of all steps and evaluations, gradients of all steps, weights, and how many
            rows were dropped, by name.
        dispatches: calls of token_dispatch in each step.
        training: the object itself; while it lives, so do its graphs.
    """

    values: dict[str, torch.Tensor]
    dispatches: list[int]
    training: Any


def start(ctx: RankContext) -> None:
    """Set Megatron up in this process: once, before anything of it is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what it would compile takes longer than all the rest
    import megatron_ncclep

    if ctx.device == "cpu":
        from megatron_ncclep import cpu

        cpu.enable()
    megatron_ncclep.install()
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=ctx.num_ranks, create_gloo_process_groups=False
    )
    if ctx.device == "cuda":  # as megatron.training does for graphs
        torch.cuda.set_stream(torch.cuda.Stream())


def train(ctx: RankContext, engine: str, job: Job, *, with_graphs: bool) -> Trained:
    """Train from the same weights on the same data, evaluating after each step."""
    training = Training(ctx, engine, job, job.graphs if with_graphs else NONE)
    values: dict[str, torch.Tensor] = {}
    dispatches = []
    for step in range(STEPS):
        before = training.num_dispatches
        values[f"losses of step {step}"] = training.step(step)
        dispatches.append(training.num_dispatches - before)
        for index, buffer in enumerate(training.gradients()):
            values[f"gradients {index} of step {step}"] = buffer.clone()
        training.optimizer.step()
        values[f"losses evaluated after step {step}"] = training.evaluate(step)
    for name, parameter in training.model.named_parameters():
        values[name] = parameter.detach().clone()
    for index, layer in enumerate(training.gpt.decoder.layers):
        if (dropped := layer.mlp.token_dispatcher.num_dropped) is not None:
            values[f"rows dropped in layer {index}"] = dropped.clone()
    return Trained(values, dispatches, training)


class Training:
    """Model, optimizer, and what captures and replays their graphs."""

    def __init__(self, ctx: RankContext, engine: str, job: Job, graphs: dict[str, Any]) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self.ctx, self.job, self.impl = ctx, job, graphs["cuda_graph_impl"]
        on_gpu = ctx.device == "cuda"
        torch.manual_seed(1)
        # The tracker that graphs need serves without them too.
        model_parallel_cuda_manual_seed(
            1, te_rng_tracker=on_gpu, use_cudagraphable_rng=on_gpu, force_reset_rng=True
        )
        self.config = self._config(engine, graphs)
        self.gpt = self._gpt().to(ctx.device)
        self.model = self._distributed()
        optimizer = OptimizerConfig(
            optimizer="adam", lr=0.01, bf16=True, params_dtype=torch.bfloat16
        )
        self.optimizer = get_megatron_optimizer(
            optimizer, [self.model], use_gloo_process_groups=False
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self.forward_backward = {
            stage: self._wrapped(get_forward_backward_func())
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

    def _config(self, engine: str, graphs: dict[str, Any]) -> Any:
        from megatron.core.transformer.enums import AttnBackend
        from megatron.core.transformer.transformer_config import TransformerConfig

        fields: dict[str, Any] = {
            "num_layers": 2,
            "hidden_size": 128,
            "num_attention_heads": 4,
            "moe_ffn_hidden_size": 64,
            "num_moe_experts": EXPERTS,
            "moe_router_topk": TOP_K,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": self.ctx.device == "cuda",
            "moe_token_dispatcher_type": "ncclep",
            "expert_model_parallel_size": self.ctx.num_ranks,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            # The others add up in whatever order their blocks come, run by run.
            "attention_backend": AttnBackend.unfused,
            "bf16": True,
            "params_dtype": torch.bfloat16,
            "pipeline_dtype": torch.bfloat16,
            "cuda_graph_warmup_steps": WARMUP,
        }
        fields |= {**self.job.options, **graphs}
        return TransformerConfig(
            ncclep=EpConfig(**{"engine": engine, "experts": "megatron", **self.job.ncclep}),
            **fields,
        )

    def _gpt(self) -> Any:
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_layer import MoETransformerLayer

        if self.ctx.device == "cuda":
            spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
                num_experts=EXPERTS, moe_grouped_gemm=True
            )
        else:
            spec = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=EXPERTS)
        if self.job.hybrid:
            spec = dataclasses.replace(spec, module=MoETransformerLayer)
        return GPTModel(self.config, spec, VOCABULARY, LONGEST)

    def _distributed(self) -> Any:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.transformer.module import Float16Module

        stream: Any = nullcontext()
        if self.ctx.device == "cuda":
            from megatron.core.full_cuda_graph import get_shared_capture_stream

            full = self.impl == "full_iteration"
            side = get_shared_capture_stream() if full else torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            stream = torch.cuda.stream(side)
        with stream:
            model = DistributedDataParallel(
                self.config,
                DistributedDataParallelConfig(grad_reduce_in_fp32=True),
                Float16Module(self.config, self.gpt),
            )
        if self.ctx.device == "cuda":
            torch.cuda.current_stream().wait_stream(side)
        return model

    def _wrapped(self, forward_backward: Any) -> Any:
        if self.impl != "full_iteration":
            return forward_backward
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper

        return FullCudaGraphWrapper(
            forward_backward,
            cuda_graph_warmup_steps=WARMUP,
            use_single_mempool=self.config.cuda_graph_use_single_mempool,
        )

    def _keep_graphs(self) -> None:
        """Begin anew with graphs of whole iterations, and keep those that are there alive.

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

    def gradients(self) -> Iterator[torch.Tensor]:
        for buffer in self.model.buffers + self.model.expert_parallel_buffers:
            yield buffer.grad_data

    def step(self, step: int) -> torch.Tensor:
        """Forward and backward of all micro-batches; their losses."""
        if self.helper is not None and step == WARMUP:
            self.helper.create_cudagraphs()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        return self._run("training", step, SEQUENCE)

    def evaluate(self, step: int, sequence: int | None = None) -> torch.Tensor:
        """Losses of micro-batches of another length."""
        self.model.eval()
        try:
            with torch.no_grad():
                return self._run("validation", 100 + step, sequence or self.job.eval_sequence)
        finally:
            self.model.train()

    def _run(self, stage: str, seed: int, sequence: int) -> torch.Tensor:
        results = self.forward_backward[stage](
            forward_step_func=_forward_step,
            data_iterator=iter(self._batches(seed, sequence)),
            model=[self.model],
            num_microbatches=MICRO_BATCHES,
            seq_length=sequence,
            micro_batch_size=BATCH,
            forward_only=stage == "validation",
        )
        return torch.stack([result["loss"] for result in results]).clone()

    def _batches(self, seed: int, sequence: int) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1000 * seed + self.ctx.rank)
        size = (MICRO_BATCHES, BATCH, sequence + 1)
        tokens = torch.randint(VOCABULARY, size, generator=generator).to(self.ctx.device)
        positions = torch.arange(sequence, device=self.ctx.device).expand(BATCH, -1)
        mask = None  # TransformerEngine has a causal one of its own
        if self.ctx.device == "cpu":
            mask = torch.triu(torch.ones(1, 1, sequence, sequence, dtype=torch.bool), 1)
        return [
            {
                "tokens": both[:, :-1].contiguous(),
                "labels": both[:, 1:].contiguous(),
                "position_ids": positions,
                "attention_mask": mask,
            }
            for both in tokens
        ]

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


def _forward_step(
    batches: Iterator[dict[str, torch.Tensor]], model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    batch = next(batches)
    mask = batch["attention_mask"]
    # Micro-batches that overlap are run in parts, by a plan.
    call = model.build_schedule_plan if return_schedule_plan else model
    return call(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"]), _mean


def _mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}
