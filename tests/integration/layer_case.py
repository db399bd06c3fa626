"""One MoELayer trained with a dispatcher of choice, and the comparison of two such trainings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from megatron_setup import (
    BATCH,
    EXPERTS,
    HIDDEN,
    SEQUENCE,
    build_layer,
    drawn,
    initialize,
    make_config,
)
from on_ranks import gathered
from rank_pool import RankContext

from megatron_ncclep.config import EpConfig

# fp64 sums of at most 9 terms of size ~1 in two orders differ by ~1e-15; 1e-12 leaves room for
# weight gradients of ~100 products.  fp32: the same with 2^-24 instead of 2^-53.  bf16: a few units
# of 2^-8 of the largest terms, because alltoall adds a token's terms up in bf16 or fp32, depending
# on its version, and we round once per rank.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class LayerCase:
    """One layer configuration; `options` are TransformerConfig fields."""

    name: str
    ep: int = 4
    tp: int = 1
    # Ranks that hold slices of one expert.
    etp: int = 1
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    # All forwards before the first backward, as pipelines do: as many plans are alive.
    in_flight: bool = False
    # Whole numbers so small that every sum of them is exact: results must be the same bits.
    integers: bool = False
    # TransformerEngine's modules instead of Megatron's own.
    te: bool = False
    # Sequence length of each rank; ranks of one tensor-parallel group must agree.
    sequences: tuple[int, ...] = (SEQUENCE,) * 4
    batch: int = BATCH
    # Positions at the end of each sequence that are masked as padding.
    padding: int = 0
    # The output's gradient is a view, as that of packed sequences whose samples are a dimension.
    transposed: bool = False
    # Of an evaluation before each micro-batch; ranks with parts of a tensor have the same tokens.
    evaluation: tuple[int, ...] = ()
    # Megatron pads experts to capacity in evaluations, as it does where a CUDA graph decodes.
    pads_decoding: bool = False
    # Results are the same bits: sums of rows have two terms, and those over an expert's rows one
    # order.
    same_bits: bool = False
    # The Megatron-Core release that has the options.
    since: str = "0.16"
    # What it shows in addition to its options.
    shows: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    def options_shown(self) -> list[str]:
        """Names of the options that have other values than their defaults, for docs/support.md."""
        sizes = {"expert": self.ep, "tensor": self.tp}
        shown = [f"{kind}_model_parallel_size" for kind, size in sizes.items() if size > 1]
        shown += self.shows
        if self.etp > 1:
            shown.append("expert_tensor_parallel_size")
        if self.dtype != torch.float64:
            shown.append(f"params_dtype={str(self.dtype).removeprefix('torch.')}")
        if self.te:
            shown.append("transformer_impl=transformer_engine")
        return shown + options_shown(self.options)


def options_shown(options: dict[str, Any]) -> list[str]:
    """Names of these fields of TransformerConfig, and of our options among them.

    A value is part of the name where it is a word: what works with 2 does with 3.
    """
    shown = []
    for name, value in options.items():
        if isinstance(value, EpConfig):
            usual = EpConfig(experts=value.experts).alignment
            for ours, choice in value.non_default().items():
                if ours != "engine" and (ours, choice) != ("alignment", usual):
                    ours = f"--ncclep-{ours.replace('_', '-')}"
                    shown.append(f"{ours}={choice}" if isinstance(choice, str) else ours)
        elif value is not None:
            words = value if isinstance(value, list) else [value]
            shown += [f"{name}={word}" if isinstance(word, str) else name for word in words]
    return shown


def train_on_rank(ctx: RankContext, case: LayerCase, dispatcher: str) -> dict[str, Any]:
    """Forward and backward of a few micro-batches; everything that comes out, by name."""
    initialize(case.ep, case.tp, ctx.device, case.etp)
    options = {"expert_tensor_parallel_size": case.etp, **case.options}
    config = make_config(dispatcher, case.dtype, case.ep, case.tp, **options)
    layer = build_layer(config, ctx.device, case.te)
    if case.integers:
        use_integers(layer, ctx.rank)
    results: dict[str, Any] = {}
    probs_seen: list[torch.Tensor] = []

    def keep_probs(module: Any, inputs: Any, outputs: Any) -> None:
        if outputs[0].requires_grad:  # the first pass of a recomputed layer has no graph
            outputs[0].retain_grad()
            probs_seen.append(outputs[0])

    layer.router.register_forward_hook(keep_probs)
    if 0 in case.sequences + case.evaluation:
        take_empty_batches(layer)
    shape = (case.sequences[ctx.rank] // case.tp, case.batch, config.hidden_size)
    mask = None
    if case.padding:
        is_padding = torch.arange(shape[0], device=ctx.device) >= shape[0] - case.padding
        mask = is_padding.repeat(case.batch, 1)
    waiting: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for number in range(case.micro_batches):
        if case.evaluation:
            results[f"evaluation {number}"] = evaluate(layer, case, ctx, 7 + number)
        values = drawn(97 * number + ctx.rank, 2, *shape)
        values = values.round().clamp(-1, 1) if case.integers else values
        hidden, probe = values.to(ctx.device, case.dtype)
        if case.transposed:
            probe = probe.transpose(0, 1).contiguous().transpose(0, 1)
        out, bias = layer(hidden.requires_grad_(), padding_mask=mask)
        assert bias is None
        waiting.append((number, hidden, out, probe))
        while waiting and not (case.in_flight and number < case.micro_batches - 1):
            index, hidden, out, probe = waiting.pop(0)
            (out * probe).sum().backward()
            results |= {f"output {index}": out.detach(), f"input gradient {index}": hidden.grad}
    for i, probs in enumerate(probs_seen):
        results[f"probability gradient {i}"] = probs.grad
    assert probs_seen
    for name, parameter in layer.named_parameters():
        results[f"gradient of {name}"] = parameter.grad
    used = layer.token_dispatcher
    engine = used.engine.caps.name if dispatcher == "ncclep" else None
    kinds = {"dispatcher": (type(used).__name__, engine), "experts": type(layer.experts).__name__}
    return results | kinds


@torch.inference_mode()
def evaluate(layer: Any, case: LayerCase, ctx: RankContext, seed: int) -> torch.Tensor:
    """The output for other tokens, without gradients, as an inference engine runs it."""
    shape = (case.evaluation[ctx.rank], case.batch, layer.config.hidden_size)
    hidden = drawn(97 * seed + ctx.rank // case.tp, *shape).to(ctx.device, case.dtype)
    layer.eval()
    with every_expert_padded(layer) if case.pads_decoding else nullcontext():
        out, _ = layer(hidden)
    layer.train()
    return out.clone()


@contextmanager
def every_expert_padded(layer: Any) -> Iterator[None]:
    """Have Megatron give every expert as many tokens as there are, as for a graph that decodes."""
    from megatron.core.inference import utils

    with mock.patch.object(utils, "moe_layer_cache", [layer]):  # of the process's one model
        all_tokens = layer.config.num_moe_experts / layer.config.moe_router_topk
        utils.set_decode_expert_padding(layer, True, all_tokens)
        yield
        utils.set_decode_expert_padding(layer, False, None)


def take_empty_batches(layer: Any) -> None:
    """Let the layer's router take a batch without tokens, which Megatron's dispatchers do."""
    route = layer.router.forward

    def route_some(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden.numel():
            return route(hidden, *args, **kwargs)
        probs = hidden.reshape(-1, HIDDEN)[:, :EXPERTS]
        return probs, probs.bool()

    layer.router.forward = route_some


def use_integers(layer: Any, rank: int) -> None:
    """Give the experts whole numbers (in a row of a weight two entries are 1 or -1, the others 0),
    and the layer routes with such probabilities; its router gets no gradient.
    """
    for index, (_, parameter) in enumerate(layer.experts.named_parameters()):
        generator = torch.Generator().manual_seed(100 * rank + index)
        columns = torch.rand(parameter.shape, generator=generator).argsort(dim=1)[:, :2]
        signs = 2.0 * torch.randint(0, 2, columns.shape, generator=generator) - 1
        weight = torch.zeros(parameter.shape).scatter(1, columns, signs)
        with torch.no_grad():
            parameter.copy_(weight)
    generator = torch.Generator().manual_seed(1000 + rank)

    def route(module: Any, inputs: Any, outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        probs, routing_map = outputs
        ranked = torch.rand(probs.shape, generator=generator).argsort(dim=1)
        chosen = ranked < layer.config.moe_router_topk
        values = torch.randint(0, 3, probs.shape, generator=generator) * chosen
        return values.to(probs).requires_grad_(), chosen.to(routing_map.device)

    layer.router.register_forward_hook(route)


def assert_same_training(
    ctx: RankContext, case: LayerCase, engine_name: str, train: Any = train_on_rank
) -> None:
    """Compare our dispatcher, over the engine, with `alltoall`: outputs and all gradients."""
    mine, other = (train(ctx, case, dispatcher) for dispatcher in ("ncclep", "alltoall"))
    tolerance = 0.0 if case.integers or case.same_bits else TOLERANCE[case.dtype]
    experts_moved = 0
    assert mine["dispatcher"] == ("NcclEpTokenDispatcher", engine_name)
    assert other["dispatcher"] == ("MoEAlltoAllTokenDispatcher", None)
    ncclep = case.options.get("ncclep")
    is_grouped = ncclep is not None and ncclep.experts == "grouped"
    ours = "GroupedTEExperts" if case.te else "GroupedLocalExperts"
    assert mine["experts"] == (ours if is_grouped else other["experts"])
    assert mine.keys() == other.keys()
    for name in sorted(mine.keys() - {"dispatcher", "experts"}):
        a, b = mine[name], other[name]
        if a is None or b is None:
            # An expert without rows: no gradient, or one of zeros.
            assert not any(t is not None and t.any() for t in (a, b)), name
            continue
        assert a.dtype == b.dtype, name
        if not b.numel():
            continue  # of a rank without tokens
        largest = b.abs().max().item()
        error = (a - b).abs().max().item() / max(1.0, largest)
        assert error <= tolerance, f"{name}: differs by {error}"
        # Up to 256 a bf16 has every whole number.
        assert not case.integers or largest <= 256, name
        experts_moved += "experts" in name and largest > 0
    # Not a comparison of zeros: several experts of several ranks were trained.
    tokens = sum(case.sequences[: ctx.num_ranks]) // case.tp * case.batch
    of_a_rank = case.options.get("num_moe_experts", EXPERTS) // case.ep
    assert sum(gathered(ctx, experts_moved)) >= min(of_a_rank, tokens)
