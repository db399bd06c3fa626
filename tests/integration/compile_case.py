"""A layer with our dispatcher, compiled by torch as a whole, against the same run eagerly."""

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

from megatron_ncclep.config import FIRST_TIMEOUT_S
from megatron_ncclep.ranks.pool import RankContext

STEPS = 5
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


def assert_compiles(
    ctx: RankContext, options: dict[str, Any], compiler: Compiler = AS_IT_IS
) -> None:
    """Train a layer eagerly, and compiled as a whole on rank 0; torch must have no remarks on our
    code.

    Ranks compile for themselves, and there are few cores: the others run eagerly again, and wait
    for rank 0 while it compiles.

    `options`: fields of TransformerConfig.
    """
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
    for is_compiled in (False, ctx.rank == 0):
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
    if ctx.rank == 0:
        # Other numbers of rows come in every step: experts are compiled for any number, once.
        assert 0 < num_graphs[0] <= num_graphs[-3] == num_graphs[-1]
        # The ranks' hosts agree inside; a rank that compiles while others wait is late.
        assert traced
        assert not any(traced)
    logging.getLogger("torch._dynamo").removeHandler(handler)
    assert not [text for text in said if "dispatcher.py" in text or "engines" in text]
