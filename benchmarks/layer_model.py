"""Megatron-Core's MoE layer for the subjects that need it, and its expected results.

All subjects of layers and experts share one layer.  Its experts are Megatron-Core's, gated with
SwiGLU and without bias: on a GPU TEGroupedMLP, with TransformerEngine's grouped GEMM, on a CPU
SequentialMLP; this package's experts run over the same weights.  Its router is Megatron-Core's
TopKRouter with all its work forward and backward; only the values of its logits are fixed, so that
every subject routes as the workload says.  The layer is in DistributedDataParallel, as in training:
every weight has a `main_grad` in fp32, to which TransformerEngine's layers and this package's add
their gradients themselves (`gradient_accumulation_fusion`, on a GPU), and its hooks all others.

The expected results are computed without dispatcher or experts.  Each rank knows the tokens of all
ranks from the payload and computes with its experts' weights on the right rows, and an all-reduce
in fp32 adds up the ranks.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks import catalogue
from benchmarks.catalogue import DispatcherChoice
from benchmarks.routers import UNPICKED, with_values
from megatron_ncclep import cpu
from megatron_ncclep.benchmark import Setting, UnavailableError
from megatron_ncclep.benchmark.engines import deviation
from megatron_ncclep.benchmark.shapes import GRAD_OUT, WEIGHTS, Workload, X
from megatron_ncclep.config import EpConfig
from megatron_ncclep.logs import remarks_hidden

MEGATRONS = "megatron.core.transformer.moe.token_dispatcher"
BUFFERS = "megatron.core.transformer.moe.fused_a2a"  # of the flex dispatcher's libraries
CLASSES = {
    "alltoall": (MEGATRONS, "MoEAlltoAllTokenDispatcher"),
    "allgather": (MEGATRONS, "MoEAllGatherTokenDispatcher"),
    "flex": (MEGATRONS, "MoEFlexTokenDispatcher"),
    "ncclep": ("megatron_ncclep.integration.dispatcher", "NcclEpTokenDispatcher"),
}
# The results to compare.
OUTPUT, HIDDEN_GRADIENT = "output", "gradient of the hidden states"
ROWS_GRADIENT, PROBS_GRADIENT = "gradient of the rows", "gradient of the probabilities"
PROBS_TOLERANCE = 1e-5  # of fp32 probabilities after log, exp and division


def is_installed() -> bool:
    """Whether Megatron-Core is installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("megatron", "megatron.core"))


def import_on_cpu() -> None:
    """Import Megatron-Core, if it is installed, for ranks without GPUs that are forks of this."""
    if is_installed():
        with remarks_hidden():
            cpu.enable()


def initialize(setting: Setting) -> None:
    """Set up Megatron's process groups, once: all ranks expert-parallel.  Collective.

    Raises:
        UnavailableError: Megatron-Core is not installed.
    """
    if not is_installed():
        raise UnavailableError(catalogue.INSTALL_MEGATRON)
    if setting.device == "cpu":
        cpu.enable()
    from megatron.core import parallel_state

    from megatron_ncclep.integration.hooks import install

    install()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=setting.num_ranks,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,  # only the distributed optimizer needs them
            distributed_timeout_minutes=math.ceil(setting.timeout_s / 60),
        )


def _make_config(
    choice: DispatcherChoice, setting: Setting, workload: Workload, options: Mapping[str, Any],
    **more: Any,
) -> Any:  # fmt: skip
    """Make a TransformerConfig for one MoE layer of the workload's sizes.

    `options`: further fields of EpConfig, for our own dispatcher; `more`: of TransformerConfig.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    case = workload.case
    config = TransformerConfig(
        num_layers=1, hidden_size=case.hidden, num_attention_heads=1,
        num_moe_experts=case.num_experts, moe_router_topk=case.top_k, moe_router_dtype="fp32",
        moe_router_load_balancing_type="none",
        moe_router_pre_softmax=case.top_k == 1,  # Megatron refuses a softmax over one assignment
        moe_token_dispatcher_type=choice.dispatcher, expert_model_parallel_size=case.num_ranks,
        expert_tensor_parallel_size=1, add_bias_linear=False, params_dtype=case.dtype,
        bf16=case.dtype == torch.bfloat16, fp16=case.dtype == torch.float16,
        **choice.options, **more,
    )  # fmt: skip
    if choice.engine is not None:
        # Without an alignment, experts get the one they need.
        alignment = None if case.alignment == 1 else case.alignment
        wanted = setting.options(engine=choice.engine, alignment=alignment, **options)
        config.ncclep = EpConfig(**wanted)
    return config


def build_dispatcher(
    choice: DispatcherChoice, setting: Setting, workload: Workload,
    options: Mapping[str, Any] | None = None, **wanted: Any,
) -> Any:  # fmt: skip
    """Make a dispatcher as MoELayer does; collective for some.

    `options`: further fields of EpConfig, for our own dispatcher; `wanted`: further arguments of
    the dispatcher, which the experts need.
    """
    from megatron.core.transformer.moe.moe_layer import get_default_pg_collection

    module, name = CLASSES[choice.dispatcher]
    num_local = workload.case.num_experts // workload.case.num_ranks
    first = setting.rank * num_local
    return getattr(importlib.import_module(module), name)(
        num_local, list(range(first, first + num_local)),
        config=_make_config(choice, setting, workload, options or {}),
        pg_collection=get_default_pg_collection(), **wanted,
    )  # fmt: skip


def close_dispatcher(dispatcher: Any) -> None:
    """Release the engine of our own dispatcher, and what Megatron's own keep for a process.

    The latter is made again when it is next used, as it must be for a shape of other sizes.
    """
    if engine := getattr(dispatcher, "engine", None):
        engine.close()
    buffers = sys.modules.get(BUFFERS)  # absent: nothing has used it
    for name in ("reset_hybrid_ep_buffer", "nccl_ep_finalize"):
        if release := getattr(buffers, name, None):
            release()


def shared_layer(setting: Setting, workload: Workload) -> tuple[Any, int]:
    """Give the MoELayer of a workload; the first subject makes it, the last one releases it.

    Returns:
        Megatron's DistributedDataParallel, whose `module` is the layer with Megatron-Core's
        experts, and how many bytes of weights and gradients existed before this call.

    Raises:
        UnavailableError: the shape has no expert size, or TransformerEngine is missing on a GPU.
    """
    shared = workload.shared.get("layer")
    if shared is not None:
        weights = shared.module.parameters()
        return shared, sum(weight.nbytes + weight.main_grad.nbytes for weight in weights)
    layer = _build(setting, workload)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    # Not for the distributed optimizer: that would move the weights into a buffer, which grouped
    # experts move too, and there would be two copies of them.
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    workload.shared["layer"] = shared = DistributedDataParallel(layer.config, ddp, layer)
    return shared, 0


def route(shared: Any, workload: Workload) -> None:
    """Make every subject's router decide as `workload` says, including in replayed CUDA graphs."""
    shared.module.router.given_logits.copy_(_logits(workload))


def _build(setting: Setting, workload: Workload) -> Any:
    """Make the layer, with Megatron's `alltoall` until a subject has its own dispatcher."""
    on_gpu = setting.device == "cuda"
    if workload.ffn_hidden_size is None:
        raise UnavailableError("the shape does not give ffn_hidden_size, the size of an expert")
    if on_gpu and importlib.util.find_spec("transformer_engine") is None:
        raise UnavailableError(f"the experts need {catalogue.INSTALL_ENGINE}")
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    case = workload.case
    config = _make_config(
        catalogue.DISPATCHERS["alltoall"], setting, workload, {},
        moe_ffn_hidden_size=workload.ffn_hidden_size, activation_func=F.silu,
        gated_linear_unit=True,
        bias_activation_fusion=on_gpu,  # as --swiglu does; on a CPU it would need a compiler
        moe_grouped_gemm=on_gpu,
        use_cpu_initialization=not on_gpu,
        gradient_accumulation_fusion=on_gpu,  # Megatron's layers on a CPU would need Apex
    )  # fmt: skip
    spec = get_moe_module_spec(use_te=on_gpu, num_experts=case.num_experts, moe_grouped_gemm=on_gpu)
    # A ModuleSpec in old versions, a functools.partial of MoELayer in new ones.
    submodules = spec.submodules if hasattr(spec, "submodules") else spec.keywords["submodules"]
    submodules = dataclasses.replace(submodules, router=_router_class())
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    layer = MoELayer(config, submodules=submodules, layer_number=1)
    layer.set_layer_number(1)
    wanted = TEGroupedMLP if on_gpu else SequentialMLP
    if type(layer.experts) is not wanted:
        made = f"Megatron-Core makes {type(layer.experts).__name__}, not {wanted.__name__}"
        raise UnavailableError(f"{made}: TransformerEngine is too old")
    layer.to(setting.device, case.dtype)
    layer.router.given_logits = _logits(workload)
    _set_weights(layer, setting.rank)
    return layer


def _router_class() -> type:
    """TopKRouter with given logits; defined here, because Megatron is imported late."""
    from megatron.core.transformer.moe.router import TopKRouter

    class GivenRouter(TopKRouter):
        given_logits: torch.Tensor

        def gating(self, hidden: torch.Tensor) -> Any:
            return with_values(super().gating(hidden), self.given_logits)

    return GivenRouter


def _logits(workload: Workload) -> torch.Tensor:
    """fp32 [T, E]: logits whose top-k are the assignments and whose softmax is their weights."""
    chosen = workload.topk_idx
    logits = torch.full((len(chosen), workload.case.num_experts), UNPICKED, device=chosen.device)
    return logits.scatter(1, chosen, workload.w.log())


def _set_weights(layer: Any, rank: int) -> None:
    """Give every weight different values, also across ranks, that keep activations near one."""
    # On a CPU, Megatron initializes the experts of all ranks alike: a token at the right expert of
    # the wrong rank would go unnoticed.
    parameters = list(layer.named_parameters())
    for index, (name, weight) in enumerate(parameters):
        owner = 1 + rank if "experts." in name else 0  # ranks have the same router
        generator = torch.Generator(weight.device).manual_seed(index + owner * len(parameters))
        with torch.no_grad():
            weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)


def expected_probs(workload: Workload) -> torch.Tensor:
    """fp32 [G, K]: probabilities of the assignments of the group's tokens, after the softmax."""
    w = torch.cat(workload.every(WEIGHTS))
    return w / w.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class Received:
    """The rows that a rank's experts get, R of them, in the order of experts, without padding."""

    token: torch.Tensor  # int64 [R], among those of the group
    assignment: torch.Tensor  # int64 [R], among those of all these tokens
    rows: torch.Tensor  # [R, H]
    grad: torch.Tensor  # [R, H], of the experts' output
    probs: torch.Tensor  # fp32 [R]
    counts: torch.Tensor  # rows of each expert, int64 [num_local_experts], on the CPU


def received_rows(workload: Workload, rank: int) -> Received:
    """Compute the rows that `rank` receives."""
    table = workload.tables[rank]
    is_row = table.token_of_row >= 0
    token, k = table.token_of_row[is_row], table.assignment_of_row[is_row]
    return Received(
        token=token, assignment=token * workload.case.top_k + k,
        rows=torch.cat(workload.every(X))[token],
        grad=torch.cat(workload.every(GRAD_OUT))[token],
        probs=expected_probs(workload)[token, k], counts=table.routed.cpu(),
    )  # fmt: skip


def _each_expert(
    layer: Any, received: Received
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """For one expert after the other, in fp32: name -> result, and parameter -> gradient."""
    named = dict(layer.experts.named_parameters(prefix="experts"))
    fc1, fc2 = ([name for name in named if linear in name] for linear in ("fc1", "fc2"))
    tensors = (received.rows, received.probs, received.grad)
    parts = zip(*(tensor.split(received.counts.tolist()) for tensor in tensors), strict=True)
    for names, (rows, probs, grad) in zip(zip(fc1, fc2, strict=True), parts, strict=True):
        weights = [named[name] for name in names]
        leaves = [t.detach().float().requires_grad_() for t in (rows, probs, *weights)]
        x, p, w1, w2 = leaves
        gate, value = (x @ w1.t()).chunk(2, dim=1)
        out = (F.silu(gate) * value * p[:, None]) @ w2.t()
        grad_x, grad_p, *grads = torch.autograd.grad(out, leaves, grad.float())
        results = {OUTPUT: out.detach(), ROWS_GRADIENT: grad_x, PROBS_GRADIENT: grad_p[:, None]}
        yield results, dict(zip(names, grads, strict=True))


def experts_results(layer: Any, received: Received) -> dict[str, torch.Tensor]:
    """The results of the layer's experts for all rows: fp32, [R, H] or [R, 1]."""
    parts = [results for results, _ in _each_expert(layer, received)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def expert_gradients(layer: Any, received: Received) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameter and gradient, fp32, one expert at a time: all would take much memory."""
    for _, gradients in _each_expert(layer, received):
        yield from gradients.items()


def layer_results(
    layer: Any, workload: Workload, rank: int, received: Received
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A layer's results on `rank`, [T, width], and its router's gradients.  Collective."""
    case, device = workload.case, workload.x.device
    of_rows = experts_results(layer, received)

    def sum_up(index: torch.Tensor, part: torch.Tensor, length: int) -> torch.Tensor:
        total = torch.zeros(length, part.shape[1], device=device)
        total.index_add_(0, index, part)
        dist.all_reduce(total, group=layer.ep_group)
        return total

    mine, num_tokens = workload.tokens_of(rank), sum(case.tokens)
    output, grad_x = (
        sum_up(received.token, of_rows[name], num_tokens)[mine] for name in (OUTPUT, ROWS_GRADIENT)
    )
    grad_w = sum_up(received.assignment, of_rows[PROBS_GRADIENT], num_tokens * case.top_k)
    grad_map = torch.zeros(len(grad_x), case.num_experts, device=device)
    grad_map.scatter_(1, workload.topk_idx, grad_w.view(num_tokens, -1)[mine])

    x = workload.x.detach()[:, None].requires_grad_()
    routers = dict(layer.router.named_parameters(prefix="router"))
    routed, _ = layer.router(x)
    grad_routed, *router_grads = torch.autograd.grad(
        routed, [x, *routers.values()], grad_map.to(routed.dtype).view_as(routed)
    )
    grad_x += grad_routed.reshape(grad_x.shape).float()
    results = {OUTPUT: output, PROBS_GRADIENT: grad_map, HIDDEN_GRADIENT: grad_x}
    return results, dict(zip(routers, router_grads, strict=True))


def routing_problem(
    workload: Workload, rank: int, probs: torch.Tensor, routing_map: torch.Tensor
) -> str | None:
    """Say how a router's decision on `rank`, [T, E] each, differs from the workload's."""
    expected = torch.zeros(probs.shape, device=probs.device)
    expected.scatter_(1, workload.topk_idx, expected_probs(workload)[workload.tokens_of(rank)])
    if not torch.equal(routing_map, expected > 0):
        return f"rank {rank}: the router's map is not the shape's routing"
    if not bool(((probs.detach() - expected).abs() <= PROBS_TOLERANCE).all()):
        return f"rank {rank}: the router's probabilities are not those of the shape's routing"
    return None


def results_problem(
    workload: Workload, rank: int, actual: Mapping[str, torch.Tensor | None],
    expected: Iterable[tuple[str, torch.Tensor]], passes: int | None = None, parts: int = 0,
    coarse: float = 0.0,
) -> str | None:  # fmt: skip
    """Say what is wrong with results of a layer or its experts on `rank`, if anything is.

    Args:
        workload, rank: what ran.
        actual: name -> [n, width]; None means zeros.
        expected: name and result; of main_grads, which were zero before, that of one pass.
        passes: number of passes that are added up in `actual`; None: it holds results.
        parts: of which the sums of one pass consist, if they are added in the shape's dtype.
        coarse: a further fraction, of products whose factors are coarser than the shape's dtype.

    A value may be off by a fraction of its tensor's largest value, because terms have both signs.
    The subjects round where fp32 does not: dispatchers after each of the K terms, at the wire and
    when the router's gradient is added; experts round a row a few times, which affects sums of many
    rows less.  A GEMM may add its products in another order, in fp32: random walks of at most
    `steps` steps.
    """
    case = workload.case
    assert workload.ffn_hidden_size is not None  # the layer could not be made without it
    steps = max(case.hidden, 2 * workload.ffn_hidden_size, workload.tables[rank].num_rows)
    rounding = (case.top_k + 3 + math.sqrt(parts)) * torch.finfo(case.dtype).eps / 2
    tolerance = coarse + rounding + math.sqrt(steps) * torch.finfo(torch.float32).eps
    for name, of_one in expected:
        want, found = of_one.float() * (passes or 1), actual[name]
        found = torch.zeros_like(want) if found is None else found.float()
        largest = float(want.abs().max()) if want.numel() else 0.0
        # Below the smallest normal number there are fewer bits: the router's gradients with top-1.
        bound = tolerance * largest + torch.finfo(torch.float32).tiny
        if problem := deviation(found, want, bound, f"{tolerance:.2%} of {largest:.3g}"):
            what = name if passes is None else f"gradient of {name}, sum of {passes}"
            return f"rank {rank}, {what}: {problem}"
    return None
