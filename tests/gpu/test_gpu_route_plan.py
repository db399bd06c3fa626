"""On GPUs one kernel each way reads the routes; it must say what the steps on a CPU say."""

from __future__ import annotations

import pytest
import torch
from compare import assert_same_bits

from megatron_ncclep.libraries import extension
from megatron_ncclep.ops.routing import routes_and_weights

# Tokens, experts, top_k: warps that are not full, one assignment, more assignments than lanes, no
# tokens.
SHAPES = [
    (777, 1, 1),
    (777, 8, 2),
    (5, 31, 4),
    (777, 64, 1),
    (777, 130, 40),
    (300, 512, 32),
    (0, 8, 2),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
NAN = float("nan")


def case(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Map, probabilities and gradient of the weights, where what goes nowhere is NaN.

    With rows without experts, full rows, and rows with more than top_k.
    """
    num_tokens, num_experts, top_k = shape
    generator = torch.Generator().manual_seed(num_experts * 100 + top_k)
    share = torch.rand(num_tokens, 1, generator=generator) * min(1, 2 * top_k / num_experts)
    routing_map = torch.rand(num_tokens, num_experts, generator=generator) < share
    routing_map[:1], routing_map[1:2] = False, True
    probs = torch.rand(num_tokens, num_experts, generator=generator).to(dtype)
    grad = torch.rand(num_tokens, top_k, generator=generator).to(dtype)
    unused = routes_and_weights(routing_map, probs, top_k)[0].topk_idx < 0
    return routing_map, probs.masked_fill(~routing_map, NAN), grad.masked_fill(unused, NAN)


def turned(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with other strides."""
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_reversed", [False, True], ids=["", "reversed"])
def test_same_bits_as_on_a_cpu(
    shape: tuple[int, int, int], dtype: torch.dtype, is_reversed: bool
) -> None:
    routing_map, probs, grad = case(shape, dtype)
    block = max(n for n in (1, 2, 3, 4) if shape[1] % n == 0) if is_reversed else 1
    if is_reversed:  # what goes nowhere is elsewhere then
        grad = grad.nan_to_num(1.0)
    top_k = shape[2]

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        routing_map, probs, grad = inputs
        routes, weights = routes_and_weights(routing_map, probs.requires_grad_(), top_k, block)
        assert not weights.requires_grad
        return routes.topk_idx, weights, routes.probs_gradient(grad)

    expected = run(routing_map, probs, grad)
    on_gpu = [tensor.cuda() for tensor in (routing_map, probs, grad)]
    assert extension.kernels_on(on_gpu[0].device) is not None
    for inputs in (on_gpu, [turned(tensor) for tensor in on_gpu]):
        names = ("topk_idx", "weights", "gradient")
        for name, actual, wanted in zip(names, run(*inputs), expected, strict=True):
            assert_same_bits(actual, wanted, name)
