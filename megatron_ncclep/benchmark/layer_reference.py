"""What a MoELayer must give, worked out without any dispatcher, and the comparison with it.

The payload says what any rank's tokens are, so each rank can call its experts on the right rows
without having them sent.  Every rank adds its experts' results to those of all tokens of the
group, and an all-reduce in fp32 adds up the ranks: nothing of a dispatcher is in it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.benchmark.check import deviation
from megatron_ncclep.benchmark.workload import GRAD_OUT, WEIGHTS, Workload, X

OUTPUT = "output"
HIDDEN_GRADIENT = "gradient of the hidden states"
PROBS_GRADIENT = "gradient of the probabilities"
# fp32 probabilities after log, exp and division.
PROBS_TOLERANCE = 1e-5


def expected_probs(workload: Workload) -> torch.Tensor:
    """fp32 [G, K]: the probabilities of the assignments of all tokens of the group.

    The router's softmax over a token's assignments makes them add up to one.
    """
    w = torch.cat(workload.every(WEIGHTS))
    return w / w.sum(dim=1, keepdim=True)


def weight_gradient(name: str) -> str:
    """Name of a result: the gradient of the layer's parameter `name`."""
    return f"gradient of {name}"


def expected_results(layer: Any, workload: Workload, rank: int) -> dict[str, torch.Tensor | None]:
    """Work out everything that comes out of forward and backward on `rank`.  Collective.

    Returns:
        name -> [n, width]; None: a weight without gradient.
    """
    case, table = workload.case, workload.tables[rank]
    device = workload.x.device
    is_row = table.token_of_row >= 0  # in the order of experts; no padding
    token, k = table.token_of_row[is_row], table.assignment_of_row[is_row]
    assignment = token * case.top_k + k
    rows = torch.cat(workload.every(X))[token].requires_grad_()
    probs = expected_probs(workload)[token, k].requires_grad_()
    experts = dict(layer.experts.named_parameters(prefix="experts"))
    out, _ = layer.experts(rows, table.routed.cpu(), probs)
    grad_rows, grad_probs, *grads = torch.autograd.grad(
        out,
        [rows, probs, *experts.values()],
        torch.cat(workload.every(GRAD_OUT))[token],
        allow_unused=True,
    )

    def sum_up(index: torch.Tensor, part: torch.Tensor, length: int) -> torch.Tensor:
        total = torch.zeros(length, *part.shape[1:], device=device)
        total.index_add_(0, index, part.float())
        dist.all_reduce(total, group=layer.ep_group)
        return total

    mine = workload.tokens_of(rank)
    num_tokens = sum(case.tokens)
    output = sum_up(token, out.detach(), num_tokens)[mine]
    grad_x = sum_up(token, grad_rows, num_tokens)[mine]
    grad_w = sum_up(assignment, grad_probs, num_tokens * case.top_k).view(num_tokens, -1)[mine]
    grad_map = torch.zeros(len(grad_w), case.num_experts, device=device)
    grad_map.scatter_(1, workload.topk_idx, grad_w)

    x = workload.x.detach()[:, None].requires_grad_()
    routers = dict(layer.router.named_parameters(prefix="router"))
    routed, _ = layer.router(x)
    grad_routed, *router_grads = torch.autograd.grad(
        routed, [x, *routers.values()], grad_map.to(routed.dtype).view_as(routed)
    )
    return {
        OUTPUT: output,
        PROBS_GRADIENT: grad_map,
        HIDDEN_GRADIENT: grad_x + grad_routed.reshape(grad_x.shape).float(),
        **dict(zip(map(weight_gradient, experts), grads, strict=True)),
        **dict(zip(map(weight_gradient, routers), router_grads, strict=True)),
    }


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
    expected: dict[str, torch.Tensor | None],
) -> str | None:
    """Say what is wrong with the results of a layer on `rank`, if anything is."""
    tolerance = _tolerance(workload, rank)
    for name, want in expected.items():
        if problem := _difference(actual[name], want, tolerance):
            return f"rank {rank}, {name}: {problem}"
    return None


def _tolerance(workload: Workload, rank: int) -> float:
    """How far a value may be off, as a part of the largest of its tensor.

    Rows go through the same experts in both computations.  What differs is how rows are added up:
    dispatchers may round after each of the K terms, at the wire and when the router's gradient is
    added, and the result is rounded.  A GEMM over another number of rows may add its products up in
    another order, in fp32: random walks of at most this many steps.  Terms of both signs: compared
    with the largest value, not with the sum that they leave.
    """
    case = workload.case
    assert workload.ffn_hidden_size is not None  # the layer could not be made without it
    steps = max(case.hidden, 2 * workload.ffn_hidden_size, workload.tables[rank].num_rows)
    rounding = (case.top_k + 3) * torch.finfo(case.dtype).eps / 2
    return rounding + math.sqrt(steps) * torch.finfo(torch.float32).eps


def _difference(
    actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float
) -> str | None:
    """Say where two [n, width] tensors first differ too much; None stands for zeros."""
    if expected is None:
        if actual is None:
            return None
        expected = torch.zeros_like(actual)
    if actual is None:
        actual = torch.zeros_like(expected)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    within = f"{tolerance:.2%} of {largest:.3g}"
    return deviation(actual.float(), expected.float(), tolerance * largest, within)
