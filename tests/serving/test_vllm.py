"""vLLM's prepare/finalize pair over low-latency mode: a layer's output, in vLLM's own sequence.

vLLM is not installed where these tests run: stand_in.py is as much of vLLM 0.26 as the pair uses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import stand_in
import torch
from fixtures import closed
from patience import PatientPool

from megatron_ncclep.errors import EngineUnavailableError, InputError, PeerError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.pool import RankContext

NUM_LOCAL, TOP_K, HIDDEN, MAX_TOKENS = 3, 2, 512, 6
BLOCK = [128, 128]
NO_QUANT = SimpleNamespace(quant_dtype=None, block_shape=None)
FP8 = SimpleNamespace(
    quant_dtype=torch.float8_e4m3fn, block_shape=BLOCK, a1_scale=None, per_act_token_quant=False
)


# Two ranks, on which the tests run (tests/on_ranks.py).
ctx = closed(lambda: PatientPool(2, folders=[str(Path(__file__).parent)]), "module")


class Experts:
    """Expert e multiplies a row by e + 1, and drops what `expert_map` drops."""

    def __init__(self, quant_config: Any, reduces: bool, expects_unquantized: bool) -> None:
        self.quant_config = quant_config
        self.expects_unquantized_inputs = expects_unquantized
        self._reduces = reduces

    def finalize_weight_and_reduce_impl(self) -> Any:
        if self._reduces:
            return stand_in.TopKWeightAndReduceNoOP()
        return stand_in.TopKWeightAndReduceDelegate()

    def __call__(self, rows, scales, topk_ids, topk_weights, expert_map, first: int, dtype):
        if scales is not None:
            blocks = rows.float().view(len(rows), scales.shape[1], -1) * scales[:, :, None]
            rows = blocks.view(rows.shape)
        local = torch.where(topk_ids >= 0, expert_map[topk_ids.clamp(min=0).long()], -1)
        out = torch.zeros(*topk_ids.shape, rows.shape[1], dtype=dtype)
        place, assignment = (local >= 0).nonzero(as_tuple=True)
        factor = (local[place, assignment] + first + 1).view(-1, 1)
        out[place, assignment] = (rows[place].float() * factor).to(dtype)
        if not self._reduces:
            return out
        return (out.float() * topk_weights[:, :, None]).sum(dim=1).to(dtype)


def batch(number: int, rank: int, num_ranks: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Numbers whose products and sums are exact in every dtype here."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    num_tokens = (0, MAX_TOKENS, 3, 1)[(number + rank) % 4]
    x = torch.randint(-2, 3, (num_tokens, HIDDEN), generator=generator).to(dtype) * 4
    scores = torch.rand(num_tokens, NUM_LOCAL * num_ranks, generator=generator)
    assignments = scores.argsort(dim=1)[:, :TOP_K].int()
    assignments[torch.rand(assignments.shape, generator=generator) < 0.2] = -1
    weights = 0.5 ** torch.randint(0, 3, assignments.shape, generator=generator)
    return x, assignments, weights


def expected(x: torch.Tensor, assignments: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    factors = torch.where(assignments >= 0, (assignments + 1) * weights, 0).sum(dim=1, keepdim=True)
    return x.float() * factors


def moe(num_ranks: int, dtype: torch.dtype, **changed: Any) -> SimpleNamespace:
    sizes = {
        "num_experts": NUM_LOCAL * num_ranks, "num_local_experts": NUM_LOCAL,
        "experts_per_token": TOP_K, "hidden_dim": HIDDEN, "max_num_tokens": MAX_TOKENS,
        "in_dtype": dtype,
    }  # fmt: skip
    return SimpleNamespace(**{**sizes, **changed})


def register(ctx: RankContext) -> Callable[..., Any]:
    """Register the backend; returns what vLLM's maybe_make_prepare_finalize does then."""
    registered = stand_in.install(ctx.group)
    import megatron_ncclep.vllm as pairs

    pairs.register()

    def make(sizes: Any, **changed: Any) -> Any:
        asked = {
            "quant_config": None, "routing_tables": None, "allow_new_interface": True,
            "use_monolithic": False, "eep_stage": False, "all2all_manager": None,
        }  # fmt: skip
        return registered["ncclep"].create(moe=sizes, **{**asked, **changed})

    return make


@pytest.mark.parametrize("is_async", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize(
    ("kind", "reduces"), [("plain", False), ("fp8", True), ("fp8", False), ("deferred", True)]
)
def test_a_layers_output(ctx: RankContext, kind: str, reduces: bool, is_async: bool) -> None:
    """Two layers that share one object, in turns, as a model has them."""
    make = register(ctx)
    dtype = torch.bfloat16 if kind == "fp8" else torch.float32
    quant_config = NO_QUANT if kind == "plain" else FP8
    experts = Experts(quant_config, reduces, expects_unquantized=kind == "deferred")
    layers = [make(moe(ctx.num_ranks, dtype)) for _ in range(2)]
    for pair in layers:
        pair.post_init_setup(experts)
    assert layers[0]._object is layers[1]._object
    assert (layers[0].num_dispatchers(), layers[0].max_num_tokens_per_rank()) == (2, MAX_TOKENS)
    first = ctx.rank * NUM_LOCAL
    expert_map = torch.full((NUM_LOCAL * ctx.num_ranks,), -1, dtype=torch.int32)
    expert_map[first : first + NUM_LOCAL] = torch.arange(NUM_LOCAL, dtype=torch.int32)
    for number in range(4):
        pair = layers[number % 2]
        x, assignments, weights = batch(number, ctx.rank, ctx.num_ranks, dtype)
        arguments = (x, weights, assignments, NUM_LOCAL * ctx.num_ranks, expert_map, False,
                     quant_config, experts.expects_unquantized_inputs)  # fmt: skip
        prepared = pair.prepare_async(*arguments)() if is_async else pair.prepare(*arguments)
        rows, scales, metadata, topk_ids, topk_weights = prepared
        every = torch.cat([batch(number, rank, 2, dtype)[1] for rank in (0, 1)])
        counts = [int((every == expert).sum()) for expert in range(first, first + NUM_LOCAL)]
        assert metadata.expert_num_tokens.tolist() == counts
        # All that is not this rank's is dropped, so that nothing is multiplied for it.
        assert int((expert_map[topk_ids.long()] >= 0).sum()) == sum(counts)
        out = experts(rows, scales, topk_ids, topk_weights, expert_map, first, dtype)
        output = torch.full_like(x, float("nan"))
        arguments = (output, out, topk_weights, topk_ids, False,
                     experts.finalize_weight_and_reduce_impl())  # fmt: skip
        if is_async:
            pair.finalize_async(*arguments)()
        else:
            pair.finalize(*arguments)
        assert torch.equal(output.float(), expected(x, assignments, weights)), f"batch {number}"


def test_a_failure_is_raised_before_tokens_are_sampled(ctx: RankContext) -> None:
    """Layers in CUDA graphs call nothing of the pair: without the check, tokens made of NaN were
    served.
    """
    stand_in.install(ctx.group)
    import megatron_ncclep.vllm as pairs

    group = EpGroup.of(ctx.group)
    pairs.check()
    failed = {"check.side_effect": PeerError("rank 1 did not come in low-latency combine")}
    group.share("device", lambda: mock.Mock(("check", "close"), **failed))
    with pytest.raises(PeerError, match="rank 1 did not come in low-latency combine"):
        pairs.check()
    group.release("device", timeout_s=60)


def test_what_the_pair_does_not_do_is_refused(ctx: RankContext) -> None:
    make = register(ctx)
    sizes = moe(2, torch.bfloat16)
    for asked, words in (
        ({"routing_tables": (torch.zeros(1),) * 3}, "redundant experts"),
        ({"use_monolithic": True}, "monolithic"),
        ({"eep_stage": True}, "elastic"),
    ):
        with pytest.raises(InputError, match=words):
            make(sizes, **asked)
    with pytest.raises(InputError, match="6 experts, 4 on this rank of 2"):
        make(moe(2, torch.bfloat16, num_local_experts=NUM_LOCAL + 1))
    static = SimpleNamespace(quant_dtype=torch.float8_e4m3fn, block_shape=None)
    pair = make(sizes)
    with pytest.raises(InputError, match=r"experts with inputs of .*float8"):
        pair.post_init_setup(Experts(static, False, False))
    unquantised = Experts(NO_QUANT, False, False)
    with pytest.raises(InputError, match="max_tokens 100000"):
        make(moe(2, torch.bfloat16, max_num_tokens=100_000)).post_init_setup(unquantised)
    pair.post_init_setup(unquantised)
    x, assignments, weights = batch(1, 0, 2, torch.bfloat16)
    with pytest.raises(InputError, match="8 experts: this pair was made for 6"):
        pair.prepare(x, weights, assignments, 8, None, False, NO_QUANT, False)
    with pytest.raises(InputError, match="top_k 2: only with top_k 1"):
        pair.prepare(x, weights, assignments, 6, None, True, NO_QUANT, False)
    stand_in.install(ctx.group, registry=False)
    import megatron_ncclep.vllm as pairs

    with pytest.raises(EngineUnavailableError, match="pull/50556"):
        pairs.register()
