"""How evenly the routers spread the tokens over the experts, whichever dispatcher moves them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class BalanceMeter:
    """Counts tokens per expert with a forward hook on every router of a model.

    Only training forwards count.  A recomputed forward counts its tokens twice, which leaves the
    ratio as it is.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        from megatron.core.transformer.moe.router import Router

        self._counts: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def count(router: torch.nn.Module, inputs: Any, output: Any) -> None:
            if router.training:
                _, routing_map = output  # bool [num_tokens, num_experts]
                here = routing_map.detach().sum(dim=0)
                before = self._counts.get(name)
                self._counts[name] = here if before is None else before + here

        return count

    def take(self) -> float:
        """Balance since the last call, and start again.  Collective over all ranks.

        Returns:
            float: tokens of the busiest expert over the mean of its layer, in the worst layer;
            1 is perfectly even, num_experts is one expert doing everything.
        """
        counts = torch.stack([self._counts[name] for name in sorted(self._counts)]).double()
        self._counts.clear()
        dist.all_reduce(counts)
        return (counts.amax(dim=1) / counts.mean(dim=1)).max().item()
