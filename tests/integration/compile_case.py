"""A layer with our dispatcher, or a model, compiled by torch as a whole, against it run eagerly."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from megatron_setup import BATCH, HIDDEN, SEQUENCE, build_layer, initialize, make_config
from patience import patient

from megatron_ncclep.config import FIRST_TIMEOUT_S, EpConfig
from megatron_ncclep.ranks.pool import RankContext

STEPS, VOCABULARY = 5, 48
# What users have in the first step: a rank that compiles takes minutes where there is much else to
# do, and the others wait for it in every call.
COMPILES_S = patient(FIRST_TIMEOUT_S)


@contextmanager
def compiling() -> Iterator[None]:
    """Let torch compile, which is off where Megatron is made to run on a CPU."""
    import torch._dynamo

    with (
        mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"),
        torch._dynamo.config.patch(disable=False),
    ):
        yield


@dataclass(frozen=True)
class Compiler:
    """What becomes of torch's graphs.

    Attributes:
        inductor: torch's own compiler gets them; otherwise they run as they are, to eager's bits.
        dtype: of the model.
        bound: of differences from eager, as a part of a tensor's largest value; 0: none.
    """

    inductor: bool = False
    dtype: torch.dtype = torch.bfloat16
    bound: float = 0.0

    def compile(self, graph: Any, inputs: Any) -> Any:
        """The function that torch calls in the place of a graph."""
        if not self.inductor:
            return graph.forward
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)

    def check(self, eager: list[Any], compiled: list[Any]) -> None:
        """Compare results and gradients; an expert without rows may have no gradient."""
        for expected, found in zip(eager, compiled, strict=True):
            assert (expected is None) == (found is None)
            if expected is None:
                continue
            assert torch.isfinite(found).all()
            allowed = self.bound * expected.abs().max()
            assert ((found - expected).abs() <= allowed).all(), (found - expected).abs().max()


AS_IT_IS = Compiler()


def compiled_on_rank(
    ctx: RankContext, options: dict[str, Any], compiler: Compiler = AS_IT_IS
) -> list[str]:
    """Train a layer eagerly, and compiled as a whole; returns what torch says of our code."""
    initialize(ctx.num_ranks, device=ctx.device)
    graphs: list[Any] = []
    traced: list[bool] = []
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch._dynamo").addHandler(handler)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return compiler.compile(graph, inputs)

    def watch(original: Any) -> Any:
        def call(*args: Any) -> Any:
            traced.append(torch.compiler.is_compiling())
            return original(*args)

        return call

    results = []
    for is_compiled in (False, True):
        torch.manual_seed(1)
        config = make_config("ncclep", compiler.dtype, ctx.num_ranks, **options)
        layer = build_layer(config, ctx.device)
        run, num_graphs = layer, []
        with compiling():
            if is_compiled:
                engine = layer.token_dispatcher.engine
                for step in ("plan", "dispatch", "combine"):
                    setattr(engine, step, watch(getattr(engine, step)))
                run = torch.compile(layer, backend=backend)
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(10 * step + ctx.rank)
                hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)
                hidden = hidden.to(ctx.device, compiler.dtype)
                out, _ = run(hidden.requires_grad_())
                out.square().sum().backward()
                results += [out.detach(), hidden.grad]
                num_graphs.append(len(graphs))
        results += [parameter.grad for parameter in layer.parameters()]
    half = len(results) // 2
    compiler.check(results[:half], results[half:])
    # Other numbers of rows come in every step: experts are compiled for any number, and that is it.
    assert 0 < num_graphs[0] <= num_graphs[-3] == num_graphs[-1]
    # The ranks' hosts agree inside; a rank that compiles while others wait is late.
    assert traced
    assert not any(traced)
    logging.getLogger("torch._dynamo").removeHandler(handler)
    return [text for text in said if "token_dispatcher.py" in text or "engines" in text]


def compiled_model_on_rank(ctx: RankContext, compiler: Compiler = AS_IT_IS) -> list[int]:
    """Train a GPTModel eagerly, and compiled as a whole on rank 0; returns how many graphs torch
    had made there after each step, and nothing elsewhere.

    Ranks compile for themselves, and there are few cores: the others run eagerly again, and are
    there while rank 0 is late.
    """
    initialize(ctx.num_ranks, device=ctx.device)
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    graphs: list[Any] = []
    num_graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return compiler.compile(graph, inputs)

    results: list[list[torch.Tensor | None]] = [[], []]
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1).to(ctx.device)
    positions = torch.arange(SEQUENCE, device=ctx.device).expand(BATCH, -1)
    for is_compiled, found in zip((False, ctx.rank == 0), results, strict=True):
        torch.manual_seed(1)
        options = EpConfig(first_timeout_s=COMPILES_S)
        config = make_config("ncclep", compiler.dtype, ctx.num_ranks, num_layers=2, ncclep=options)
        layer = gpt_layer_specs.get_gpt_layer_local_spec(config.num_moe_experts, False)
        model = GPTModel(config, layer, VOCABULARY, SEQUENCE)
        model.to(ctx.device, compiler.dtype)
        with compiling():
            run = torch.compile(model, backend=backend) if is_compiled else model
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(10 * step + ctx.rank)
                tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
                tokens, labels = tokens[:, :-1].to(ctx.device), tokens[:, 1:].to(ctx.device)
                losses = run(tokens, positions, mask, labels=labels)
                losses.mean().backward()
                found.append(losses.detach())
                if is_compiled:
                    num_graphs.append(len(graphs))
        found += [parameter.grad for parameter in model.parameters()]
        for layer in model.decoder.layers:  # the first step has not ended
            assert layer.mlp.token_dispatcher.engine.timeout_s == COMPILES_S
    compiler.check(*results)
    return num_graphs
