"""vLLM's layers over our backend: its own classes and calls, on a CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import real_vllm
import torch
from imports import NO_GPU
from rank_pool import RankContext
from timeouts import PatientPool

from megatron_ncclep.errors import InputError, IntegrationError, PeerError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource

PAIR = "megatron_ncclep.vllm.pair"
PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
NUM_LOCAL, TOP_K, HIDDEN, BLOCK = 3, 2, 256, 128
SIZES = {
    "experts_per_token": TOP_K, "hidden_dim": HIDDEN, "max_num_tokens": 700,
    "in_dtype": torch.float32,
}  # fmt: skip
# Of both ranks; the fourth and the last have more than low-latency mode takes.
BATCHES = ((6, 0), (3, 8), (9, 33), (2, 513), (0, 0), (700, 600))


@pytest.fixture(scope="module", params=real_vllm.RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Two ranks, on which the tests run (tests/on_ranks.py): new ones for each release.
@pytest.fixture(scope="module")
def ctx(release: str) -> Iterator[PatientPool]:
    prepare = partial(real_vllm.load, release)
    with closing(PatientPool(2, environment=NO_GPU, prepare=prepare)) as made:
        yield made


def batch(number: int, rank: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Numbers whose products and sums are exact in every dtype here."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randint(-2, 3, (BATCHES[number][rank], HIDDEN), generator=generator).to(dtype) * 4
    scores = torch.rand(len(x), NUM_LOCAL * 2, generator=generator)
    if number == len(BATCHES) - 1:
        scores[:, NUM_LOCAL:] += 1  # all are the first rank's
    assignments = scores.argsort(dim=1)[:, :TOP_K].int()
    assignments[torch.rand(assignments.shape, generator=generator) < 0.2] = -1
    weights = 0.5 ** torch.randint(0, 3, assignments.shape, generator=generator)
    return x, assignments, weights


def experts_class() -> Any:
    """Experts for vLLM's modular kernel: expert e multiplies a row by e + 1.

    They drop what `expert_map` drops.
    """
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceNoOP,
    )

    class Experts(mk.FusedMoEExpertsModular):
        first, defers = 0, False

        @property
        def expects_unquantized_inputs(self) -> bool:
            return self.defers

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        def workspace_shapes(self, M: int, N: int, K: int, topk: int, *rest: Any) -> Any:
            return (M, topk, K), (M, topk, N), (M, K)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def apply(self, output: Any, hidden_states: Any, **given: Any) -> None:
            rows, scales, ids = hidden_states.float(), given["a1q_scale"], given["topk_ids"]
            if scales is not None:
                rows = (rows.view(*scales.shape, -1) * scales[:, :, None]).view(rows.shape)
            # Where there is no row, it is anything.
            self.seen = given["expert_tokens_meta"].expert_num_tokens.tolist()
            assert ids.numel() == 0 or ids.min() >= 0  # some of vLLM's experts do not take -1
            local = given["expert_map"][ids.long()]
            factors = torch.where(local >= 0, (ids + 1) * given["topk_weights"], 0).sum(1)
            used = (local >= 0).any(1)
            output[used] = (rows[used] * factors[used].view(-1, 1)).to(output.dtype)

    Experts.__abstractmethods__ = frozenset()  # those by which vLLM chooses experts
    return Experts


def quantized(a: torch.Tensor, scale: Any, **given: Any) -> Any:
    """Stands for vLLM's kernel; divides blocks by 1, 2, 1, 2: exact, and different."""
    blocks = a.float().view(len(a), HIDDEN // BLOCK, BLOCK)
    scales = (2.0 ** (torch.arange(blocks.shape[1]) % 2)).expand(len(a), -1).contiguous()
    return (blocks / scales[:, :, None]).view(a.shape).to(torch.float8_e4m3fn), scales


def make_kernel(ctx: RankContext, release: str, kind: str, dtype: torch.dtype, **asked: Any) -> Any:
    """A layer's kernel, made as vLLM makes it, and its experts."""
    pairs = real_vllm.load(release, ctx.group)
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk

    asked = {**SIZES, "in_dtype": dtype, **asked}
    moe = real_vllm.moe_config(NUM_LOCAL, ctx.num_ranks, ctx.rank, **asked)
    quant = quant_config(kind)
    pair = pairs.maybe_make_prepare_finalize(moe, quant, allow_new_interface=True)
    experts = experts_class()(moe, quant)
    experts.defers = kind == "deferred"
    return mk.FusedMoEKernel(pair, experts), experts


def quant_config(kind: str) -> Any:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    if kind == "plain":
        return FusedMoEQuantConfig.make()
    if kind == "fp8 of whole tensors":
        return FusedMoEQuantConfig.make(torch.float8_e4m3fn)
    return FusedMoEQuantConfig.make(torch.float8_e4m3fn, block_shape=[BLOCK, BLOCK])


def forward(ctx: RankContext, kernel: Any, number: int, dtype: torch.dtype) -> torch.Tensor:
    """One call of a layer, in vLLM's context of a forward pass; returns its output."""
    from vllm import forward_context as contexts

    x, assignments, weights = batch(number, ctx.rank, dtype)
    metadata = contexts.DPMetadata(torch.tensor(BATCHES[number]))
    context = mock.Mock(dp_metadata=metadata)
    first, total = ctx.rank * NUM_LOCAL, NUM_LOCAL * ctx.num_ranks
    expert_map = torch.full((total,), -1, dtype=torch.int32)
    expert_map[first : first + NUM_LOCAL] = torch.arange(NUM_LOCAL, dtype=torch.int32)
    w1, w2 = torch.empty(NUM_LOCAL, 128, HIDDEN), torch.empty(NUM_LOCAL, HIDDEN, 64)
    with contexts.override_forward_context(context), metadata.sp_local_sizes(1):
        return kernel.apply(
            x, w1, w2, topk_weights=weights, topk_ids=assignments,
            activation=kernel.moe_config.activation, global_num_experts=total,
            expert_map=expert_map, apply_router_weight_on_input=False,
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "fp8", "deferred"])
def test_a_layers_output(ctx: RankContext, release: str, kind: str) -> None:
    """Two layers in turns, as a model has them, and batches of both modes."""
    real_vllm.load(release, ctx.group)
    from vllm.v1.worker import workspace

    from megatron_ncclep.serving import modes
    from megatron_ncclep.vllm import pair

    dtype = torch.bfloat16 if kind == "fp8" else torch.float32
    made = [make_kernel(ctx, release, kind, dtype) for _ in range(2)]
    used = []
    workspace.lock_workspace()  # as vLLM does after its warm-up: from now on it must not grow
    for number in range(len(BATCHES)):
        kernel, experts = made[number % 2]
        with mock.patch.object(pair, "moe_kernel_quantize_input", quantized):
            out = forward(ctx, kernel, number, dtype)
        x, assignments, weights = batch(number, ctx.rank, dtype)
        factors = torch.where(assignments >= 0, (assignments + 1) * weights, 0).sum(1, keepdim=True)
        assert torch.equal(out.float(), x.float() * factors), f"batch {number}"
        every = torch.cat([batch(number, rank, dtype)[1] for rank in (0, 1)])
        first = ctx.rank * NUM_LOCAL
        counts = [int((every == expert).sum()) for expert in range(first, first + NUM_LOCAL)]
        if any(counts):
            assert experts.seen == counts
        used.append(kernel.prepare_finalize._modes.of(max(BATCHES[number]), ""))
    few = [mode._calls.sizes.max_tokens for mode in used if isinstance(mode, modes.FewTokens)]
    assert few == [8, 8, 128, 8]


def test_what_the_pair_does_not_do_is_refused(ctx: RankContext, release: str) -> None:
    for asked, words in (
        ({"enable_eplb": True}, "redundant experts"),
        ({"is_lora_enabled": True}, "LoRA"),
        ({"pcp_size": 2}, "prefill context parallelism"),
        ({"num_local_experts": NUM_LOCAL + 1}, "6 experts, 4 on this rank of 2"),
        ({"dp_size": 1}, "data-parallel-size 1 and --enable-expert-parallel"),
        ({"dp_size": 1, "use_ep": False}, "without --enable-expert-parallel"),
        ({"in_dtype": torch.float64}, "dtype torch.float64"),
    ):
        dtype = asked.pop("in_dtype", torch.float32)
        with pytest.raises(InputError, match=words):
            make_kernel(ctx, release, "plain", dtype, **asked)
    pairs = real_vllm.load(release, ctx.group)
    moe = real_vllm.moe_config(NUM_LOCAL, 2, ctx.rank, **SIZES)
    for asked, words in (
        ({"routing_tables": (torch.zeros(1),) * 3}, "round-robin"),
        ({"use_monolithic": True}, "monolithic"),
    ):
        with pytest.raises(InputError, match=words):
            pairs.maybe_make_prepare_finalize(moe, None, **asked)
    for option, words in (("enable_elastic_ep", "elastic"), ("use_ubatching", "--enable-dbo")):
        config = mock.Mock(parallel_config=SimpleNamespace(**{option: True}))
        with (
            mock.patch(f"{PAIR}.get_current_vllm_config_or_none", return_value=config),
            pytest.raises(InputError, match=words),
        ):
            pairs.maybe_make_prepare_finalize(moe, None)
    with pytest.raises(InputError, match=r"experts with inputs of .*float8"):
        make_kernel(ctx, release, "fp8 of whole tensors", torch.float32)
    with (
        mock.patch.dict("os.environ", NCCLEP_MAX_RECV_ROWS="worst"),
        pytest.raises(InputError, match="NCCLEP_MAX_RECV_ROWS"),
    ):
        make_kernel(ctx, release, "plain", torch.float16, num_experts=4, num_local_experts=2)
    kernel, _ = make_kernel(ctx, release, "plain", torch.float32)
    pair, (x, assignments, weights) = kernel.prepare_finalize, batch(1, 0, torch.float32)
    with pytest.raises(InputError, match="8 experts: this pair was made for 6"):
        pair.prepare(x, weights, assignments, 8, None, False, None, False)
    with pytest.raises(InputError, match="top_k 2: only with top_k 1"):
        pair.prepare(x, weights, assignments, 6, None, True, None, False)
    from vllm import forward_context as contexts

    with (
        contexts.override_forward_context(mock.Mock(dp_metadata=None)),
        pytest.raises(InputError, match="without the ranks' numbers of tokens"),
    ):
        pair.prepare(x, weights, assignments, 6, None, False, None, False)
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.is_current_stream_capturing", return_value=True),
        pytest.raises(InputError, match=r"graph of 513 tokens: .* up to 512: set --max-cudagraph"),
    ):
        pair._modes.of(513, "--max-cudagraph-capture-size 512")


def test_the_option_takes_the_name(ctx: RankContext, release: str) -> None:
    """In code and on the command line; vLLM's other backends get what they got."""
    pairs = real_vllm.load(release, ctx.group)
    from vllm.config import ParallelConfig
    from vllm.engine import arg_utils
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    page = PAGE.read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^vllm serve MODEL (.*)", page, re.M)
    parser = arg_utils.AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(command.split())
    assert (parsed.all2all_backend, parsed.enable_expert_parallel) == ("ncclep", True)
    with pytest.raises(ValueError, match="'ncclep'"):
        ParallelConfig(all2all_backend="nccl-ep")
    ranks = {"data_parallel_size": 2, "enable_expert_parallel": True, "is_moe_model": True}
    for backend, num_tp, splits in (
        ("ncclep", 2, True), ("ncclep", 1, False), ("deepep_low_latency", 2, True),
        ("flashinfer_nvlink_two_sided", 2, False),
    ):  # fmt: skip
        config = ParallelConfig(all2all_backend=backend, tensor_parallel_size=num_tp, **ranks)
        assert (config.all2all_backend, config.use_sequence_parallel_moe) == (backend, splits)
    moe = real_vllm.moe_config(
        NUM_LOCAL, 2, ctx.rank, **SIZES, all2all_backend="allgather_reducescatter", dp_size=1
    )
    given = pairs.maybe_make_prepare_finalize(moe, None, allow_new_interface=True)
    assert type(given).__name__ == "MoEPrepareAndFinalizeNoDPEPModular"
    from vllm.model_executor.layers.fused_moe.oracle import unquantized

    assert unquantized.maybe_make_prepare_finalize is pairs.maybe_make_prepare_finalize


def test_the_group_gets_a_manager(ctx: RankContext, release: str) -> None:
    """vLLM's communicator looks for one in its own list, and would not find this name."""
    real_vllm.load(release, ctx.group)
    from vllm.distributed import parallel_state
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )

    parallel_state._DP = parallel_state._TP = mock.Mock(rank_in_group=ctx.rank, world_size=2)
    names = signature(DeviceCommunicatorBase).parameters
    asked = {"use_all2all": True} if "use_all2all" in names else {}
    for backend, manager in (
        ("ncclep", "NcclEpAll2AllManager"), ("deepep_low_latency", "NoneType"),
    ):  # fmt: skip
        parallel = mock.Mock(all2all_backend=backend, data_parallel_size=2)
        config = mock.Mock(parallel_config=parallel)
        with mock.patch("vllm.config.get_current_vllm_config_or_none", return_value=config):
            made = DeviceCommunicatorBase(ctx.group, unique_name="ep:0", **asked)
        assert type(made.all2all_manager).__name__ == manager
        assert made.use_all2all == (backend != "ncclep")


def test_no_tokens_of_a_failed_step_are_handed_out(ctx: RankContext, release: str) -> None:
    """Replayed CUDA graphs call nothing of the pair: once, tokens made of NaN were served.

    vLLM's worker hands tokens out itself, or later, when they have reached the host.
    """
    real_vllm.load(release, ctx.group)
    from megatron_ncclep.vllm import hooks

    worker = mock.Mock()
    worker.vllm_config.parallel_config.all2all_backend = "ncclep"
    failed = PeerError("rank 1 did not come in low-latency combine")
    device = mock.Mock(Resource)
    group = EpGroup.of(ctx.group)
    group.resources.share("device", lambda: device)

    class Later:
        get_output = staticmethod(lambda: "tokens")

    class Worker:
        def execute_model(self) -> Any:
            return Later()

        def execute_dummy_batch(self) -> None:
            device.raise_failure.configure_mock(side_effect=failed)

        def compile_or_warm_up_model(self) -> str:
            return "seconds"

        sample_tokens = execute_model

    names = {name for name in vars(Worker) if not name.startswith("_")}
    assert len(names) == 4
    assert names <= real_vllm.methods(release, "Worker")

    place = type(hooks)("vllm.v1.worker.gpu_worker")
    vars(place)["Worker"] = Worker
    hooks.HOOKS.change(place)
    later = Worker.execute_model(worker)
    assert later.get_output() == "tokens"
    with pytest.raises(PeerError, match="rank 1 did not come"):
        Worker.execute_dummy_batch(worker)
    for hand_out in (later.get_output, lambda: Worker.sample_tokens(worker)):
        with pytest.raises(PeerError, match="rank 1 did not come"):
            hand_out()
    device.raise_failure.configure_mock(side_effect=None)
    assert Worker.compile_or_warm_up_model(worker) == "seconds"
    device.check.assert_called_once_with()
    broken = hooks._checked(mock.Mock(side_effect=RuntimeError("Connection closed"), __name__="x"))
    lost = mock.patch(
        "megatron_ncclep.serving.failures.lost_ranks", side_effect=["", "rank 1 has died"]
    )
    with lost:
        with pytest.raises(RuntimeError, match=r"^Connection closed"):
            broken(worker)
        with pytest.raises(PeerError, match=r"^rank 1 has died; .* Connection closed"):
            broken(worker)
    worker.vllm_config.parallel_config.all2all_backend = "deepep_low_latency"
    device.raise_failure.configure_mock(side_effect=failed)
    assert Worker.sample_tokens(worker).get_output() == "tokens"
    group.resources.release("device", timeout_s=60)


def test_a_vllm_that_has_changed_is_named(ctx: RankContext, release: str) -> None:
    """With another backend it runs on, with a warning."""
    pairs = real_vllm.load(release, ctx.group)
    from megatron_ncclep.vllm import hooks

    for name, module, words in (
        ("config.parallel", {"ParallelConfig": object}, "ParallelConfig.all2all_backend is not"),
        (
            "model_executor.layers.fused_moe.all2all_utils",
            {"maybe_make_prepare_finalize": print},
            "parameter 'moe'",
        ),
        ("v1.worker.gpu_worker", {"Worker": object}, "Worker.execute_model is not a function"),
    ):
        place = type(hooks)(f"vllm.{name}")
        vars(place).update(module)
        with pytest.raises(IntegrationError, match=rf"{words}.*\(0.24 to 0.33\)"):
            hooks.HOOKS.change(place)
    moe = real_vllm.moe_config(NUM_LOCAL, 2, ctx.rank, **SIZES)
    with (
        mock.patch.dict("sys.modules", {place.__name__: place}),
        pytest.raises(IntegrationError, match="execute_model"),
    ):
        pairs.maybe_make_prepare_finalize(moe, None)
