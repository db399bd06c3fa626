"""The model of one subject that trains, on one rank: built as training builds it, stepped, closed.

Every subject has a model, gradients and an optimizer of its own, and only one of them is there at
a time: with Adam's moments and everything in fp32 a parameter takes 18 bytes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ncclep.benchmark import gradient_fusion
from megatron_ncclep.benchmark.megatron_setup import close_dispatcher
from megatron_ncclep.benchmark.names import Variant
from megatron_ncclep.benchmark.ranks import Ranks
from megatron_ncclep.benchmark.subjects import Setting
from megatron_ncclep.benchmark.train_graphs import (
    Graphs,
    graph_fields,
    optimizer_fields,
    wrapping_stream,
)
from megatron_ncclep.config import EpConfig
from megatron_ncclep.training import corpus, data
from megatron_ncclep.training.data import Batch
from megatron_ncclep.training.model import TrainedModel, seed_everything, transformer_config
from megatron_ncclep.training.settings import Settings

# Steps with batches of their own, where no more are asked for; later steps take them again.
NUM_BATCHES = 8
# Megatron-LM pads the vocabulary to a multiple of this, unless told otherwise.
VOCABULARY_MULTIPLE = 128


@dataclass(frozen=True)
class TrainingText:
    """Batches of one rank, on its device, so that reading them is no part of a step.

    Attributes:
        source: what the text is, in words.
        vocab_size: rows of the embedding.
        steps: the micro-batches of each step.
    """

    source: str
    vocab_size: int
    steps: list[list[Batch]]


@dataclass(frozen=True)
class Curve:
    """What the start of a training gave on this rank.

    Attributes:
        weights: parameter -> sum and sum of magnitudes at the start, in fp64.
        output: [seq_length, micro_batch, hidden] of the first MoE layer for given hidden states,
            before the first step, on the CPU.
        gradient: likewise, of the hidden states for a given gradient of the output.
        losses: the mean loss of each of the first steps.
        grad_norms: likewise.
    """

    weights: dict[str, tuple[float, float]]
    output: torch.Tensor
    gradient: torch.Tensor
    losses: list[float]
    grad_norms: list[float]


def load_text(
    settings: Settings, ranks: Ranks, folder: Path, num_steps: int = NUM_BATCHES
) -> TrainingText:
    """Make the corpus of the standard library's source and read the batches.  Collective.

    Args:
        settings: of the model.
        ranks: all of them are data-parallel.
        folder: for the corpus and Megatron's sample indices.
        num_steps: steps with batches of their own.

    Raises:
        RuntimeError: the text is too short, or the folder cannot be written to.
    """

    def prepare() -> None:
        if ranks.rank == 0:
            corpus.prepare([], folder).check_length(settings["seq-length"])

    status, reason = ranks.attempt(prepare)
    if status != "ok":
        raise RuntimeError(f"no text: {reason}")
    found, device = corpus.load(folder), torch.device(ranks.setting.device)
    dataset, _ = data.build_datasets(folder, settings, num_steps, 1, settings["seed"])
    steps = [
        data.batches(dataset, settings, step, ranks.rank, ranks.num_ranks, device)
        for step in range(num_steps)
    ]
    padded = -(-found.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return TrainingText(found.source, padded, steps)


class SubjectModel(TrainedModel):
    """One subject's model, its optimizer and its graphs.  Every method is collective.

    Args:
        choice: of the subject.
        settings: of the model and its optimizer.
        setting: where.
        text: what to train on.
        max_recv_rows: option of a static subject.

    Attributes:
        fused_by: whose function adds the output layer's weight gradients to main_grad, see
            gradient_fusion.py; None: no layer adds its own, DistributedDataParallel's hooks do.

    Raises:
        EngineUnavailableError, InputError, UnsupportedError: it cannot be built here.
    """

    fused_by: str | None = None

    def __init__(
        self,
        choice: Variant,
        settings: Settings,
        setting: Setting,
        text: TrainingText,
        max_recv_rows: Any,
    ) -> None:
        on_gpu = setting.device == "cuda"
        # On a GPU with a tracker that CUDA graphs can hold.
        seed_everything(
            settings["seed"],
            te_rng_tracker=settings.uses_engine,
            use_cudagraphable_rng=on_gpu,
            force_reset_rng=True,
        )
        options = None  # Megatron-Core's own dispatchers have none
        if choice.ours:
            options = EpConfig(
                engine=str(choice.dispatcher.engine),
                timeout_s=setting.timeout_s,
                first_timeout_s=setting.timeout_s,
                **choice.options(max_recv_rows),
            )
        fused = fusions(settings, on_gpu)
        if fused.get("gradient_accumulation_fusion"):
            self.fused_by = gradient_fusion.provide()
        config = transformer_config(
            settings,
            choice.dispatcher.dispatcher,
            setting.num_ranks,
            options,
            **fused,
            **choice.dispatcher.options,
            **graph_fields(choice.graphs),
        )
        super().__init__(
            settings,
            config,
            text.vocab_size,
            torch.device(setting.device),
            wrapping_stream(choice.graphs),
            distributed=True,
            **optimizer_fields(choice.optimizer_graph),
        )
        if on_gpu:
            torch.cuda.synchronize()  # it may have been wrapped on another stream
        self._graphs = Graphs(choice, self, config, setting.num_ranks)
        self._batches, self._done = text.steps, 0
        self._loss = self._grad_norm = torch.zeros(())

    @property
    def num_parameters(self) -> int:
        """Parameters of this rank."""
        return sum(weight.numel() for weight in self.gpt.parameters())

    @property
    def loss(self) -> float:
        """Mean loss of the last step on this rank; waits for the device."""
        return float(self._loss)

    @property
    def num_dropped(self) -> int:
        """Rows that did not fit on this rank so far, in forward passes; waits for the device."""
        dispatchers = [getattr(m, "token_dispatcher", None) for m in self.gpt.modules()]
        counts = [getattr(dispatcher, "num_dropped", None) for dispatcher in dispatchers]
        return sum(int(count) for count in counts if count is not None)

    @property
    def phases(self) -> list[tuple[Callable[[], Any], bool]]:
        """What a step calls, in order, and whether that is the optimizer."""
        return [(self.zero, True), (self._next_batch, False), (self._update, True)]

    def step(self) -> None:
        """Train on the next batch."""
        for call, _ in self.phases:
            call()

    def _next_batch(self) -> None:
        self._graphs.before_step(self._done)
        self._loss = self.forward_backward(self._batches[self._done % len(self._batches)]).mean()
        self._done += 1

    def _update(self) -> None:
        self._grad_norm = self.update()

    def first_steps(self, count: int, after_each: Callable[[], Any]) -> Curve:
        """Train `count` steps from the start and note what comes out.

        Args:
            count: of steps.
            after_each: called after each of them.
        """
        weights = self._weights()
        output, gradient = self._first_layer()
        losses, grad_norms = [], []
        for _ in range(count):
            self.step()
            losses.append(self.loss)
            grad_norms.append(float(self._grad_norm))
            after_each()
        return Curve(weights, output, gradient, losses, grad_norms)

    def close(self, engines: bool = True) -> None:
        """Release the graphs, the memory and, where nothing has failed, the engines.

        Python cannot see cycles that pass through autograd's nodes, as these two of Megatron's do:
        its own dispatchers keep probabilities of the last forward pass, which lead to the nodes
        that take the weights' gradients, and with DistributedDataParallel's hooks on these to the
        model; and with the distributed optimizer the config leads to it, and it to these nodes.
        """
        self._graphs.close()
        self.gpt.config.grad_scale_func = None
        for module in self.gpt.modules():
            if hasattr(module, "token_dispatcher"):
                if engines:
                    close_dispatcher(module.token_dispatcher)
                del module.token_dispatcher
        del self.gpt, self.model, self.optimizer, self.optimizer_step, self.schedule, self._graphs
        gc.collect()
        # A graph cannot take over what lies in the allocator's cache.
        torch.cuda.empty_cache()

    def _first_layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first MoE layer's output and gradient, see `Curve`; nothing is learnt from them."""
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        layer = next(m for m in self.gpt.modules() if isinstance(m, MoELayer))
        settings, weight = self.settings, next(layer.parameters())
        dtype = self.gpt.config.params_dtype
        shape = (settings["seq-length"], settings["micro-batch-size"], settings["hidden-size"])
        generator = torch.Generator(weight.device).manual_seed(settings["seed"])
        hidden, grad = (
            torch.randn(shape, generator=generator, device=weight.device).to(dtype)
            for _ in range(2)
        )
        # As megatron.training does at the start; a step before may have left another value.
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1, device=weight.device))
        output = layer(hidden.requires_grad_())[0]
        (gradient,) = torch.autograd.grad(output, hidden, grad)
        return output.detach().cpu(), gradient.cpu()

    def _weights(self) -> dict[str, tuple[float, float]]:
        named = list(self.gpt.named_parameters())
        sums = torch.stack(
            [torch.stack([w.double().sum(), w.double().abs().sum()]) for _, w in named]
        )
        return {
            name: (found[0], found[1])
            for (name, _), found in zip(named, sums.tolist(), strict=True)
        }


def fusions(settings: Settings, on_gpu: bool) -> dict[str, Any]:
    """The fusions that Megatron-LM has on unless told otherwise, where they can be had.

    Without TransformerEngine gradients are left to DistributedDataParallel's hooks: every layer
    would be one of Megatron-Core's own, and call Apex or what stands in for it.
    """
    if not on_gpu:
        return {}  # they would need a compiler
    return {
        "bias_activation_fusion": settings["swiglu"],
        "bias_dropout_fusion": True,
        "apply_rope_fusion": settings.uses_engine,
        "gradient_accumulation_fusion": settings.uses_engine,
    }
