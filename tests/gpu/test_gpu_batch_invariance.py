"""With grouped experts on a GPU too, other tokens change no bit of a token's results.

In both implementations of their GEMMs, the tiles and the order of additions within a tile do not
depend on the number of rows.  The test sets the routing, because the router's GEMM may.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from compare import assert_same_bits
from deselect import needs_te
from megatron_setup import make_experts_differ
from rank_pool import RankContext
from test_batch_invariance import BATCHES, batches
from test_gpu_grouped_experts import build, in_ddp

from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.config import EpConfig

needs_quack = pytest.mark.skipif(
    importlib.util.find_spec("quack") is None, reason="quack-kernels is not installed"
)

MOST = 6000  # other tokens of a rank, at most
SIZES = {"hidden_size": 2048, "ffn_hidden_size": 768, "moe_ffn_hidden_size": 768}


@needs_te
@pytest.mark.supports(
    "--ncclep-experts=grouped",
    compared="outputs and gradients of the same tokens in batches of different sizes and contents, "
    "to the bit",
)
@pytest.mark.parametrize(
    "products", ["torch", pytest.param("quack-kernels", marks=needs_quack), "TransformerEngine"]
)
def test_company_changes_no_bit(ctx: RankContext, engine_name: str, products: str) -> None:
    from megatron_ncclep.integration.experts import grouped

    case = Case(
        "", (MOST,) * ctx.num_ranks, 16, 6, 2048, torch.bfloat16, alignment=16, device="cuda"
    )
    with pytest.MonkeyPatch.context() as patch:
        if products == "torch":
            patch.setattr(grouped, "fused_unavailable", lambda *_: "the test uses those of torch")
        experts = "megatron" if products == "TransformerEngine" else "grouped"
        config = EpConfig(engine=engine_name, experts=experts)
        layer = build(ctx.num_ranks, True, config, moe_router_topk=6, **SIZES)
        make_experts_differ(layer)
        wrapped = in_ddp(layer)
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        for batch, places in batches(case, ctx.rank, MOST):
            probs = torch.zeros(len(batch.x), 16, device="cuda")
            probs.scatter_(1, batch.topk_idx, batch.w)
            layer.router.forward = lambda *_, given=probs, **__: (given, given > 0)
            x = batch.x.unsqueeze(1).requires_grad_()
            out, _ = wrapped(x)
            out.backward(batch.grad.unsqueeze(1))
            if places is not None:
                seen.append((out.detach()[places], x.grad[places]))
        if products == "TransformerEngine":
            assert type(layer.experts).__name__ == "TEGroupedMLP"
        else:
            assert type(layer.experts).__name__ == "GroupedTEExperts"
            assert (layer.experts._products is not None) == (products != "torch")
        layer.token_dispatcher.engine.close()
    for occurrence, (out, gradient) in enumerate(seen):
        where = f"rank {ctx.rank}, occurrence {occurrence}"
        assert_same_bits(out, seen[0][0], f"output, {where}")
        assert_same_bits(gradient, seen[0][1], f"gradient, {where}")
    assert len(seen) > BATCHES // 2
    assert seen[0][0].any()
