"""On GPUs one kernel reads the routing map; it must say what the steps on a CPU say."""

from __future__ import annotations

import pytest
import torch

from megatron_ncclep.route_plan import topk_from_routing_map


@pytest.mark.parametrize("num_experts", [1, 8, 31, 64, 130])
@pytest.mark.parametrize("top_k", [1, 4, 40])
def test_same_as_on_a_cpu(num_experts: int, top_k: int):
    """With rows without experts, full rows, and rows with more than top_k."""
    generator = torch.Generator().manual_seed(num_experts * 100 + top_k)
    share = torch.rand(777, 1, generator=generator)
    routing_map = torch.rand(777, num_experts, generator=generator) < share
    routing_map[0], routing_map[1] = False, True
    expected = topk_from_routing_map(routing_map, top_k)
    assert torch.equal(topk_from_routing_map(routing_map.cuda(), top_k).cpu(), expected)
    # A map that is not contiguous, and no tokens at all.
    turned = routing_map.cuda().t().contiguous().t()
    assert torch.equal(topk_from_routing_map(turned, top_k).cpu(), expected)
    assert topk_from_routing_map(routing_map[:0].cuda(), top_k).shape == (0, top_k)
