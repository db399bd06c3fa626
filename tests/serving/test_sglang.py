"""SGLang's layers over our backend: its own classes and calls, on a CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import real_sglang
import torch
from imports import NO_GPU
from rank_pool import RankContext
from timeouts import PatientPool

from megatron_ncclep.errors import InputError, IntegrationError, PeerError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
NUM_LOCAL, TOP_K, HIDDEN = 3, 2, 256
# Of both ranks; the fourth and the last have more than low-latency mode takes.
BATCHES = ((6, 0), (3, 8), (9, 33), (2, 513), (0, 0), (700, 600))


# Two ranks, on which the tests run (tests/on_ranks.py).
@pytest.fixture(scope="module")
def ctx() -> Iterator[PatientPool]:
    with closing(PatientPool(2, environment=NO_GPU, prepare=real_sglang.prepare)) as made:
        yield made


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers whose products and sums are exact."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randint(-2, 3, (BATCHES[number][rank], HIDDEN), generator=generator).float() * 4
    scores = torch.rand(len(x), NUM_LOCAL * 2, generator=generator)
    if number == len(BATCHES) - 1:
        scores[:, NUM_LOCAL:] += 1  # all are the second rank's, and the first gets no row
    assignments = scores.argsort(dim=1, descending=True)[:, :TOP_K].int()
    assignments[torch.rand(assignments.shape, generator=generator) < 0.2] = -1
    weights = 0.5 ** torch.randint(0, 3, assignments.shape, generator=generator)
    return x, assignments, weights


def runner_config(**changed: Any) -> Any:
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    sizes: dict[str, Any] = {
        "num_experts": NUM_LOCAL * 2, "num_local_experts": NUM_LOCAL, "hidden_size": HIDDEN,
        "top_k": TOP_K, "params_dtype": torch.float32, "num_fused_shared_experts": 0,
        "runner_backend": MoeRunnerBackend.TRITON,
    }  # fmt: skip
    return MoeRunnerConfig(**{**sizes, **changed})


def make_layer(config: Any) -> tuple[Any, Any]:
    """A layer's runner and its dispatcher, in the order in which SGLang's FusedMoE makes them."""
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.moe_runner import MoeRunner

    runner = MoeRunner(config.runner_backend, config)
    return runner, layer.create_moe_dispatcher(config, quant_method=None)


def experts(first: int) -> Any:
    """Stands for SGLang's Triton kernels: expert e multiplies a row by e + 1."""

    def fused_experts(
        hidden_states: Any, topk_output: Any, moe_runner_config: Any, **_: Any
    ) -> Any:
        weights, ids, _ = topk_output
        assert len(hidden_states), "they are not made for no rows"
        assert not moe_runner_config.inplace
        assert ids.min() >= -1
        assert ids.max() < NUM_LOCAL
        factors = torch.where(ids >= 0, (first + ids + 1) * weights, 0).sum(1, keepdim=True)
        return torch.where((ids >= 0).any(1, keepdim=True), hidden_states * factors, 0)

    return fused_experts


def test_a_layers_output(ctx: RankContext) -> None:
    """Two layers in turns, as a model has them, and batches of both modes."""
    real_sglang.load()
    from sglang.srt.layers.dp_attention import set_dp_buffer_len
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from megatron_ncclep.serving.modes import ManyTokens

    fake = experts(ctx.rank * NUM_LOCAL)
    with (
        real_sglang.running(ctx.group, ctx.rank),
        mock.patch.object(fused_moe, "fused_experts", fake),
    ):
        layers = [make_layer(runner_config()) for _ in range(2)]
        were_many = []
        for number, sizes in enumerate(BATCHES):
            runner, dispatcher = layers[number % 2]
            x, assignments, weights = batch(number, ctx.rank)
            set_dp_buffer_len(sum(sizes), len(x), False, list(sizes))
            rows = dispatcher.dispatch(x, StandardTopKOutput(weights, assignments, None))
            were_many.append(isinstance(dispatcher._mode, ManyTokens))
            out = dispatcher.combine(runner.run(rows, TritonMoeQuantInfo(x, x)))
            factors = torch.where(assignments >= 0, (assignments + 1) * weights, 0).sum(1)
            assert torch.equal(out, x * factors.view(-1, 1)), f"batch {number}"
        assert were_many == [False, False, False, True, False, True]
        set_dp_buffer_len(2, 1, False, None)
        with pytest.raises(InputError, match=r"without the ranks' numbers of tokens \(None\)"):
            dispatcher.dispatch(x, StandardTopKOutput(weights, assignments, None))


def swiglu_experts(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_output: Any, **_: Any
) -> torch.Tensor:
    """What SGLang's Triton kernels compute; experts of other ranks are -1."""
    weights, ids, _ = topk_output
    out = torch.zeros_like(hidden_states)
    for expert in range(len(w1)):
        rows, place = (ids == expert).nonzero(as_tuple=True)
        gate, up = (hidden_states[rows] @ w1[expert].T).chunk(2, dim=1)
        outputs = (torch.nn.functional.silu(gate) * up) @ w2[expert].T
        out.index_add_(0, rows, outputs * weights[rows, place].view(-1, 1))
    return out


def test_a_models_layer(ctx: RankContext) -> None:
    """SGLang resolves the options, and its Qwen3-MoE makes the layer; only kernels are replaced."""
    real_sglang.load()
    command = served()
    for option in ("--tp-size", "--ep-size", "--attn-dp-size"):
        command = command.replace(f"{option} 8", f"{option} 2")
    config = real_sglang.publish(ctx.rank, command)
    from sglang.srt.layers.dp_attention import set_dp_buffer_len
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.quantization import unquant
    from sglang.srt.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    method = unquant.UnquantizedFusedMoEMethod
    generator = torch.Generator().manual_seed(0)
    gate, w13, w2 = (
        torch.randn(6, *shape, generator=generator) / 16
        for shape in ((HIDDEN,), (128, HIDDEN), (HIDDEN, 64))
    )
    tokens = [torch.randn(number, HIDDEN, generator=generator) for number in (5, 9)]
    with (
        real_sglang.running(ctx.group, ctx.rank),
        mock.patch.object(fused_moe, "fused_experts", swiglu_experts),
        mock.patch.object(method, "apply", method.forward_cuda),
    ):
        block = Qwen3MoeSparseMoeBlock(0, config)
        mine = slice(ctx.rank * NUM_LOCAL, (ctx.rank + 1) * NUM_LOCAL)
        for weight, value in (
            (block.gate.weight, gate), (block.experts.w13_weight, w13[mine]),
            (block.experts.w2_weight, w2[mine]),
        ):  # fmt: skip
            weight.data.copy_(value)
        set_dp_buffer_len(14, len(tokens[ctx.rank]), False, [5, 9])
        x = tokens[ctx.rank]
        out = block(x.clone())
    weights, ids = (x @ gate.T).softmax(1).topk(TOP_K, dim=1)
    weights = weights / weights.sum(1, keepdim=True)
    torch.testing.assert_close(out, swiglu_experts(x, w13, w2, (weights, ids, None)))


def test_a_layer_that_is_not_supported_is_refused(ctx: RankContext) -> None:
    real_sglang.load()
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    with real_sglang.running(ctx.group, ctx.rank):
        for changed, words in (
            ({"runner_backend": MoeRunnerBackend.DEEP_GEMM}, "runner deep_gemm: set --moe-runner"),
            ({"runner_backend": None}, "runner of this quantisation"),
            ({"num_local_experts": NUM_LOCAL + 1}, "6 experts, 4 on this rank of 2"),
        ):  # fmt: skip
            with pytest.raises(InputError, match=words):
                layer.create_moe_dispatcher(runner_config(**changed), quant_method=None)
        config = runner_config(num_experts=4, num_local_experts=2)
        with (
            mock.patch.dict("os.environ", NCCLEP_MAX_RECV_ROWS="worst"),
            pytest.raises(InputError, match="NCCLEP_MAX_RECV_ROWS"),
        ):
            layer.create_moe_dispatcher(config, quant_method=None)


def served() -> str:
    """The options of the page's command."""
    (options,) = re.findall(r"^sglang serve MODEL (.*)", PAGE.read_text(), re.M)
    return str(options)


def arguments(*words: str, model: str = "Qwen3MoeForCausalLM") -> Any:
    """SGLang's arguments, after the checks that follow their resolution, which needs a model."""
    from sglang.srt.arg_groups import overrides, validation_hook
    from sglang.srt.server_args import prepare_server_args

    made = prepare_server_args(["--model-path", "none", *words])
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[model]))
    with (
        mock.patch.object(validation_hook, "check_server_args") as original,
        mock.patch.object(overrides, "model_config_of", return_value=config),
    ):
        made.check_server_args()
    original.assert_called_once_with(made)
    return made


def test_the_option_takes_the_name(ctx: RankContext) -> None:
    """As the page says; SGLang's other backends get what they got."""
    real_sglang.load()
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatcher

    from megatron_ncclep.sglang.dispatcher import GRAPH_OPTION

    made = arguments(*served().split())
    assert (made.moe_a2a_backend, made.tp_size) == ("ncclep", 8)
    arguments(*" ".join(re.findall(r"--\S+ \w+", GRAPH_OPTION)).split())
    arguments("--moe-runner-backend", "triton")
    ranks = ["--tp-size", "2", "--ep-size", "2", "--attn-dp-size", "2"]
    ours = ["--moe-a2a-backend", "ncclep"]
    for words, message in (
        ([*ours, "--tp-size", "2"], "--tp-size 2 --ep-size 1 --attn-dp-size 1: set all three"),
        ([*ours], "--tp-size 1 --ep-size 1"),
        ([*ours, *ranks, "--speculative-algorithm", "EAGLE"], "no speculative decoding"),
        ([*ours, *ranks, "--enable-eplb"], "no redundant experts"),
        ([*ours, *ranks, "--enable-two-batch-overlap"], "no two-batch overlap"),
        ([*ours, *ranks, "--enable-lora"], "no LoRA"),
        ([*ours, *ranks, "--enable-pdmux"], "multiplexing"),
    ):
        with pytest.raises(InputError, match=message):
            arguments(*words)
    with pytest.raises(InputError, match="DeepseekV3ForCausalLM: tested with Qwen3MoeForCausalLM"):
        arguments(*ours, *ranks, model="DeepseekV3ForCausalLM")
    assert arguments("--moe-a2a-backend", "deepep").moe_a2a_backend == "deepep"
    with pytest.raises(SystemExit):
        arguments("--moe-a2a-backend", "nccl-ep")
    with pytest.raises(ValueError, match="nccl-ep"):
        utils.MoeA2ABackend("nccl-ep")
    assert utils.MoeA2ABackend("ncclep") is utils.MoeA2ABackend("ncclep")
    for backend, is_complete in (("ncclep", True), ("flashinfer", True), ("none", False)):
        with real_sglang.running(ctx.group, ctx.rank, backend):
            assert utils.get_moe_a2a_backend().value == backend
            assert utils.get_moe_a2a_backend().is_none() == (backend == "none")
            assert utils.is_deepep_class_backend() is False
            assert utils.post_experts_output_is_complete(is_tp_path=False) == is_complete
            if backend == "none":
                given = layer.create_moe_dispatcher(runner_config(), quant_method=None)
                assert type(given) is StandardDispatcher


def test_no_tokens_of_a_failed_batch_are_handed_out(ctx: RankContext) -> None:
    """A replayed CUDA graph calls nothing of the dispatcher, and its kernels' failure is NaN."""
    real_sglang.load()
    from megatron_ncclep.sglang import hooks

    failed = PeerError("rank 1 did not come in low-latency combine")
    device, copied, handed_out = mock.Mock(Resource), mock.Mock(), []
    group = EpGroup.of(ctx.group)
    group.resources.share("device", lambda: device)

    class Scheduler:
        def get_next_batch_to_run(self) -> str:
            return "batch"

        def run_batch(self) -> str:
            return "result"

        def process_batch_result(self, batch: Any, result: Any) -> None:
            handed_out.append(result)

    names = {name for name in vars(Scheduler) if not name.startswith("_")}
    assert names <= real_sglang.methods("Scheduler")
    place = type(hooks)("sglang.srt.managers.scheduler")
    vars(place)["Scheduler"] = Scheduler
    hooks.HOOKS.change(place)
    made, overlapped = Scheduler(), SimpleNamespace(copy_done=copied)
    with real_sglang.running(ctx.group, ctx.rank):
        for _ in range(2):
            made.process_batch_result("batch", overlapped)
        device.check.assert_called_once_with()  # the first batch ends the first step
        made.process_batch_result("batch", "result")
        assert device.check.call_count == 2  # it has no event that says when it has arrived
        assert (made.get_next_batch_to_run(), made.run_batch()) == ("batch", "result")
        # The device fails while the scheduler waits for the batch to arrive.
        copied.synchronize.side_effect = lambda: device.raise_failure.configure_mock(
            side_effect=failed
        )
        for call in (
            lambda: made.process_batch_result("batch", overlapped), made.run_batch,
            made.get_next_batch_to_run,
        ):  # fmt: skip
            with pytest.raises(PeerError, match="rank 1 did not come"):
                call()
    assert handed_out == [overlapped, overlapped, "result"]
    with real_sglang.running(ctx.group, ctx.rank, "flashinfer"):
        made.process_batch_result("batch", "others")
    assert handed_out[-1] == "others"
    device.raise_failure.configure_mock(side_effect=None)
    group.resources.release("device", timeout_s=60)


def test_an_sglang_that_has_changed_is_named(ctx: RankContext) -> None:
    """With another backend it runs on, with a warning."""
    real_sglang.load()
    from sglang.srt.layers.moe.fused_moe_triton import layer

    from megatron_ncclep.sglang import hooks

    for name, module, words in (
        ("server_args", {"ServerArgs": object}, "ServerArgs.add_cli_args is not a function"),
        (
            "layers.moe.utils",
            {"MoeA2ABackend": object},
            "MoeA2ABackend._missing_ is not a function",
        ),
        (
            "layers.moe.fused_moe_triton.layer",
            {"create_moe_dispatcher": print},
            "moe_runner_config",
        ),
        ("layers.moe.moe_runner.triton", {}, "cannot be changed"),
        ("managers.scheduler", {"Scheduler": object}, "Scheduler.get_next_batch_to_run is not"),
    ):
        place = type(hooks)(f"sglang.srt.{name}")
        vars(place).update(module)
        with (
            mock.patch("sglang.srt.layers.moe.moe_runner.base.FusedOpPool._fused_funcs", {}),
            pytest.raises(IntegrationError, match=rf"{words}.*SGLang.*\(0.5.23 to 0.5.23\)"),
        ):
            hooks.HOOKS.change(place)
    with (
        real_sglang.running(ctx.group, ctx.rank),
        mock.patch.dict("sys.modules", {place.__name__: place}),
        pytest.raises(IntegrationError, match="get_next_batch_to_run"),
    ):
        layer.create_moe_dispatcher(runner_config(), quant_method=None)
