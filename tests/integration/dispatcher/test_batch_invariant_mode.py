"""`batch_invariant_mode`: with Megatron's router and experts too, other tokens change no bit.

The rounding of a matrix product depends on its number of rows, on a CPU as on a GPU.  On a GPU,
Megatron's option replaces the products; in these tests, a stand-in adds up each row separately.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_setup import HIDDEN, ep_config, initialize, make_config, new_layer
from on_ranks import IS_RANK
from rank_pool import RankContext

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.checks.batch_invariance import warn_of_experts
from megatron_ncclep.ranks.group import EpGroup

pytestmark = pytest.mark.each_release

WATCHED = 3
COMPANY = ((0, 0, 0, 0), (9, 1, 4, 0), (1, 30, 0, 2), (17, 17, 17, 17))

if IS_RANK:
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig


def mode_dtype() -> torch.dtype:
    """A dtype that the mode supports; from 0.20 on only bf16, which hides more changes of order."""
    is_newer = hasattr(TransformerConfig, "batch_invariant_backend")
    return torch.bfloat16 if is_newer else torch.float32


def options(**others: Any) -> dict[str, Any]:
    """The options that turn the mode on in this release."""
    version = {"flash_attention_version": 3}
    known = {name: value for name, value in version.items() if hasattr(TransformerConfig, name)}
    return {"batch_invariant_mode": True, "attention_backend": AttnBackend.flash, **known, **others}


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a[:, None, :] * b.t().contiguous()).sum(-1)


@contextmanager
def products_by_row() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("aten::mm", product, "CPU")
    try:
        yield
    finally:
        library._destroy()


@pytest.mark.supports(
    "batch_invariant_mode",
    compared="outputs and gradients of the same tokens in batches of different sizes and contents, "
    "in training and in evaluation, to the bit",
)
def test_company_changes_no_bit(ctx: RankContext) -> None:
    # In 0.18 and 0.19 the router does not sort the chosen experts when there are no gradients, and
    # a softmax over them adds in another order; so the softmax has to come before the choice.
    many = {"num_moe_experts": 24, "moe_router_topk": 20, "moe_router_pre_softmax": True}
    layer = new_layer(4, mode_dtype(), **options(**many, ncclep=ep_config("reference")))
    seen: list[tuple[torch.Tensor, ...]] = []
    with products_by_row():
        for batch, numbers in enumerate(COMPANY):
            drawn = [torch.Generator().manual_seed(97 * s + ctx.rank) for s in (0, batch + 1)]
            sizes = (WATCHED, numbers[ctx.rank])
            parts = [
                torch.randn(2, n, 1, HIDDEN, generator=g) for n, g in zip(sizes, drawn, strict=True)
            ]
            order = torch.randperm(sum(sizes), generator=drawn[1])
            places = order.argsort()[:WATCHED]
            hidden, probe = torch.cat(parts, dim=1)[:, order].to(mode_dtype())
            with torch.no_grad():
                evaluated = layer.eval()(hidden)[0][places]
            out = layer.train()(hidden.requires_grad_())[0]
            out.backward(probe)
            seen.append((out.detach()[places], evaluated, hidden.grad[places]))
    for out, evaluated, gradient in seen:
        assert torch.equal(out, seen[0][0])
        assert torch.equal(evaluated, seen[0][0])
        assert torch.equal(gradient, seen[0][2])
    assert seen[0][0].any()


@pytest.mark.refuses(
    "batch_invariant_mode",
    words="rows may be dropped: set `--ncclep-max-recv-rows worst` or `--ncclep-on-overflow raise`",
)
def test_what_would_depend_on_company_is_refused(ctx: RankContext) -> None:
    with pytest.raises(UnsupportedError, match="output would depend on the other"):
        new_layer(4, mode_dtype(), **options(ncclep=EpConfig(max_recv_rows="1.25x")))
    for own in ({"max_recv_rows": "1.25x", "on_overflow": "raise"}, {"max_recv_rows": "worst"}):
        new_layer(4, mode_dtype(), **options(ncclep=EpConfig(**own)))


@pytest.mark.since("0.18")
def test_generating_text_is_refused(ctx: RankContext) -> None:
    initialize(ep=4)
    generates = {
        "transformer_impl": "inference_optimized",
        "inference_moe_token_dispatcher_type": "ncclep",
    }
    with pytest.raises(UnsupportedError, match="batch_invariant_mode=True: the size of a batch"):
        make_config("ncclep", torch.bfloat16, 4, **options(**generates))


@pytest.mark.parametrize(("release", "warns"), [("0.19.2", True), ("0.20.0rc1", False)])
def test_experts_that_are_not_invariant(ctx: RankContext, release: str, warns: bool) -> None:
    """They are warned about once, on the group's first rank, and only in releases before 0.20."""
    import megatron.core

    group = EpGroup.of(ctx.group)
    with (
        mock.patch.object(megatron.core, "__version__", release),
        mock.patch.object(group, "log_once") as log_once,
    ):
        for kind in ("TEGroupedMLP", "GroupedTEExperts"):
            experts = type(kind, (), {})()
            for mode in ({"batch_invariant_mode": True}, {"batch_invariant_mode": False}, {}):
                warn_of_experts(SimpleNamespace(**mode), experts, ctx.group)
    assert log_once.call_count == (warns and ctx.rank == 0)
    for level, _, text in (call.args for call in log_once.call_args_list):
        assert level == logging.WARNING
        assert "TEGroupedMLP's GEMMs are not batch-invariant in Megatron-Core 0.19.2" in text
