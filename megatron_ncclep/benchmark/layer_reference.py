"""What a MoELayer and its experts must give, worked out without either, and the comparison with it.

The payload says what any rank's tokens are, so each rank can compute with its experts' weights on
the right rows without having them sent.  Every rank adds its experts' results to those of all
tokens of the group, and an all-reduce in fp32 adds up the ranks: nothing of a dispatcher is in it,
and of the experts only their weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ncclep.benchmark.check import deviation
from megatron_ncclep.benchmark.workload import GRAD_OUT, WEIGHTS, Workload, X

OUTPUT = "output"
HIDDEN_GRADIENT = "gradient of the hidden states"
ROWS_GRADIENT = "gradient of the rows"
PROBS_GRADIENT = "gradient of the probabilities"
# fp32 probabilities after log, exp and division.
PROBS_TOLERANCE = 1e-5


def expected_probs(workload: Workload) -> torch.Tensor:
    """fp32 [G, K]: the probabilities of the assignments of all tokens of the group.

    The router's softmax over a token's assignments makes them add up to one.
    """
    w = torch.cat(workload.every(WEIGHTS))
    return w / w.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class Received:
    """The rows that a rank's experts are given, R of them, in the order of experts; no padding.

    Attributes:
        token: int64 [R], among those of the group.
        assignment: int64 [R], among those of all these tokens.
        rows, grad: [R, H]; the gradient is that of the experts' output.
        probs: fp32 [R].
        counts: rows of each expert, int64 [num_local_experts], on the CPU.
    """

    token: torch.Tensor
    assignment: torch.Tensor
    rows: torch.Tensor
    grad: torch.Tensor
    probs: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class Expected:
    """What comes out of a layer on a rank.

    Attributes:
        results: name -> [n, width].
        router_gradients: parameter -> gradient; those of experts are in `expert_gradients`.
        received: what the rank's experts are given.
    """

    results: dict[str, torch.Tensor]
    router_gradients: dict[str, torch.Tensor]
    received: Received


def received_rows(workload: Workload, rank: int) -> Received:
    """Write down what `rank` receives."""
    table = workload.tables[rank]
    is_row = table.token_of_row >= 0
    token, k = table.token_of_row[is_row], table.assignment_of_row[is_row]
    return Received(
        token=token,
        assignment=token * workload.case.top_k + k,
        rows=torch.cat(workload.every(X))[token],
        grad=torch.cat(workload.every(GRAD_OUT))[token],
        probs=expected_probs(workload)[token, k],
        counts=table.routed.cpu(),
    )


def _each_expert(
    layer: Any, received: Received
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Compute with one expert after the other, in fp32 and with nothing but torch's products.

    Yields:
        result -> what comes out for the expert's rows, and parameter -> gradient.
    """
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
    """What comes out of the layer's experts for all rows: fp32, [R, H] or [R, 1]."""
    parts = [results for results, _ in _each_expert(layer, received)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def expert_gradients(layer: Any, received: Received) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameter of the layer and its gradient, fp32, for all parameters of its experts.

    One expert after the other: those of all would take as much memory as the main_grads.
    """
    for _, gradients in _each_expert(layer, received):
        yield from gradients.items()


def expected_results(layer: Any, workload: Workload, rank: int) -> Expected:
    """Work out everything that comes out of forward and backward on `rank`.  Collective."""
    case, device = workload.case, workload.x.device
    received = received_rows(workload, rank)
    of_rows = experts_results(layer, received)

    def sum_up(index: torch.Tensor, part: torch.Tensor, length: int) -> torch.Tensor:
        total = torch.zeros(length, part.shape[1], device=device)
        total.index_add_(0, index, part)
        dist.all_reduce(total, group=layer.ep_group)
        return total

    mine = workload.tokens_of(rank)
    num_tokens = sum(case.tokens)
    output = sum_up(received.token, of_rows[OUTPUT], num_tokens)[mine]
    grad_x = sum_up(received.token, of_rows[ROWS_GRADIENT], num_tokens)[mine]
    grad_w = sum_up(received.assignment, of_rows[PROBS_GRADIENT], num_tokens * case.top_k)
    grad_map = torch.zeros(len(grad_x), case.num_experts, device=device)
    grad_map.scatter_(1, workload.topk_idx, grad_w.view(num_tokens, -1)[mine])

    x = workload.x.detach()[:, None].requires_grad_()
    routers = dict(layer.router.named_parameters(prefix="router"))
    routed, _ = layer.router(x)
    grad_routed, *router_grads = torch.autograd.grad(
        routed, [x, *routers.values()], grad_map.to(routed.dtype).view_as(routed)
    )
    results = {
        OUTPUT: output,
        PROBS_GRADIENT: grad_map,
        HIDDEN_GRADIENT: grad_x + grad_routed.reshape(grad_x.shape).float(),
    }
    return Expected(results, dict(zip(routers, router_grads, strict=True)), received)


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
    workload: Workload,
    rank: int,
    actual: dict[str, torch.Tensor | None],
    expected: dict[str, torch.Tensor],
) -> str | None:
    """Say what is wrong with the results of a layer or its experts on `rank`, if anything is."""
    tolerance = _tolerance(workload, rank)
    for name, want in expected.items():
        if problem := _difference(actual[name], want, tolerance):
            return f"rank {rank}, {name}: {problem}"
    return None


def gradients_problem(
    layer: Any,
    workload: Workload,
    rank: int,
    expected: Iterable[tuple[str, torch.Tensor]],
    passes: int,
) -> str | None:
    """Say what is wrong with main_grads that were zero, `passes` passes ago, if anything is.

    Args:
        layer: that has them.
        workload, rank: what it ran.
        expected: parameter and gradient of one pass.
        passes: at least one.
    """
    tolerance = _tolerance(workload, rank)
    named = dict(layer.named_parameters())
    for name, gradient in expected:
        if problem := _difference(named[name].main_grad, gradient.mul(passes), tolerance):
            return f"rank {rank}, gradient of {name}, sum of {passes}: {problem}"
    return None


def _tolerance(workload: Workload, rank: int) -> float:
    """How far a value may be off, as a part of the largest of its tensor.

    What is measured rounds where fp32 does not: dispatchers may after each of the K terms, at the
    wire and when the router's gradient is added, and the result is rounded; inside of an expert a
    row is rounded a few times, which moves sums of many such rows by less.  A GEMM may add its
    products up in another order, in fp32: random walks of at most this many steps.  Terms of both
    signs: compared with the largest value, not with the sum that they leave.
    """
    case = workload.case
    assert workload.ffn_hidden_size is not None  # the layer could not be made without it
    steps = max(case.hidden, 2 * workload.ffn_hidden_size, workload.tables[rank].num_rows)
    rounding = (case.top_k + 3) * torch.finfo(case.dtype).eps / 2
    return rounding + math.sqrt(steps) * torch.finfo(torch.float32).eps


def _difference(
    actual: torch.Tensor | None, expected: torch.Tensor, tolerance: float
) -> str | None:
    """Say where two [n, width] tensors first differ too much; None stands for zeros."""
    if actual is None:
        actual = torch.zeros_like(expected)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    within = f"{tolerance:.2%} of {largest:.3g}"
    # Below the smallest normal number there are fewer bits: the router's gradients with top-1.
    bound = tolerance * largest + torch.finfo(torch.float32).tiny
    return deviation(actual.float(), expected.float(), bound, within)
