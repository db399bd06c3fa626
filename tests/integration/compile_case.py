"""A layer with our dispatcher, compiled by torch as a whole, against the same run eagerly."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from megatron_setup import BATCH, HIDDEN, SEQUENCE, drawn, new_layer
from rank_pool import RankContext
from trainer import differences

STEPS = 5


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


AS_IT_IS = Compiler()


def assert_compiles(
    ctx: RankContext, options: dict[str, Any], compiler: Compiler = AS_IT_IS
) -> None:
    """Train a layer eagerly, and compiled as a whole on rank 0; torch must not remark on our code.

    There are few cores: the other ranks run eagerly again, and wait for rank 0 while it compiles.
    `options` are fields of TransformerConfig.
    """
    import torch._dynamo

    graphs: list[Any] = []
    num_graphs: list[int] = []  # after each step
    traced: list[bool] = []
    results: list[dict[str, Any]] = []
    said = mock.Mock(level=logging.NOTSET)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return compiler.compile(graph, inputs)

    def watch(original: Any) -> Any:
        def call(*args: Any) -> Any:
            traced.append(torch.compiler.is_compiling())
            return original(*args)

        return call

    with (
        # Compiling is off where Megatron is made to run on a CPU.
        mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"),
        torch._dynamo.config.patch(disable=False),
        mock.patch.object(logging.getLogger("torch._dynamo"), "handlers", [said]),
    ):
        for is_compiled in (False, ctx.rank == 0):
            layer = new_layer(ctx.num_ranks, compiler.dtype, ctx.device, **options)
            run = torch.compile(layer, backend=backend) if is_compiled else layer
            engine = layer.token_dispatcher.engine
            for name in ("plan", "dispatch", "combine"):
                setattr(engine, name, watch(getattr(engine, name)))
            found: dict[str, Any] = {}
            for step in range(STEPS):
                hidden = drawn(10 * step + ctx.rank, SEQUENCE, BATCH, HIDDEN)
                hidden = hidden.to(ctx.device, compiler.dtype)
                out, _ = run(hidden.requires_grad_())
                out.square().sum().backward()
                found |= {f"output {step}": out.detach(), f"input {step}": hidden.grad}
                num_graphs.append(len(graphs))
            # An expert without rows may have no gradient.
            found |= {name: parameter.grad for name, parameter in layer.named_parameters()}
            results.append(found)
    assert differences(results[1], results[0], compiler.bound, least=0.0) == []
    if ctx.rank == 0:
        # Other numbers of rows come in every step: experts are compiled for any number, once.
        assert 0 < num_graphs[STEPS] <= num_graphs[-3] == num_graphs[-1]
    # The ranks' hosts agree inside; a rank that compiles while others wait is late.
    assert traced
    assert not any(traced)
    remarks = [call.args[0].getMessage() for call in said.handle.call_args_list]
    assert not [text for text in remarks if "dispatcher.py" in text or "engines" in text]
