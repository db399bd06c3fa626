"""Whole MoE layers as in fine-tuning: the experts' weights are frozen, without or with adapters.

The adapters are Megatron-Bridge's LoRA with a pair of factors for each expert, around linear_fc1
and linear_fc2.  The router is trained as in the other layers.  Gradients of adapters stay in
`grad`, which every pass adds to; in training, DistributedDataParallel's hooks add them to fp32.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from benchmarks import layer_model as model
from benchmarks.layers import LayerSubject
from megatron_ncclep.benchmark import UnavailableError
from megatron_ncclep.benchmark.shapes import Workload

LORA = "megatron.bridge.peft.lora"
# Name of an expert's weight -> its two factors, [rank, in] and [out, rank], and their gradients.
Factors = dict[str, Callable[[], tuple[torch.Tensor | None, ...]]]


class AdaptedLayerSubject(LayerSubject):
    """See `Subject`.  A layer whose experts are frozen, with adapters if the variant has a rank."""

    _factors: Factors

    def _megatrons_experts(self) -> Any:
        return frozen(super()._megatrons_experts())

    def _experts_of(self) -> Any:
        experts, self._factors = super()._experts_of(), {}
        if rank := self._variant.lora_rank:
            self._factors = put_on(experts, rank, self._rank)
        if self._variant.grouped and (problem := experts.as_built.change()):
            raise UnavailableError(f"grouped experts do not compute these adapters: {problem}")
        return experts

    def _zero_gradients(self) -> None:
        super()._zero_gradients()
        for parameter in self._layer.experts.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()  # a graph holds its address

    def _gradients(self) -> dict[str, Any]:
        router = {name: p for name, p in super()._gradients().items() if "experts." not in name}
        for name, factors in self._factors.items():
            *_, a, b = factors()
            router |= {f"{name}, first factor": a, f"{name}, second factor": b}
        return router

    def _expected(self, workload: Workload) -> Any:
        layer, received = copy.copy(self._shared.module), model.received_rows(workload, self._rank)
        layer._modules = {**layer._modules, "experts": frozen(layer.experts, self._adapted)}
        results, of_router = model.layer_results(layer, workload, self._rank, received)

        def gradients() -> Iterator[tuple[str, torch.Tensor]]:
            for name, grad in model.expert_gradients(layer, received) if self._factors else ():
                a, b = self._both(name)
                yield f"{name}, first factor", b.t() @ grad
                yield f"{name}, second factor", grad @ a.t()

        def all_gradients() -> Iterable[tuple[str, torch.Tensor]]:
            return chain(of_router.items(), gradients())

        return results, all_gradients

    def _adapted(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """An expert's weight with its adapter, in fp32; its scale is 1, as alpha is the rank."""
        if name not in self._factors:
            return weight
        a, b = self._both(name)
        return weight.float() + b @ a

    def _both(self, name: str) -> list[torch.Tensor]:
        a, b, *_ = self._factors[name]()
        return [factor.detach().float() for factor in (a, b) if factor is not None]


def frozen(
    module: Any,
    value: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, weight: weight,
    name: str = "experts",
) -> Any:
    """The module with frozen parameters, in the same memory or of `value(name, weight)`."""
    made = copy.copy(module)
    made._parameters = dict(module._parameters)
    for own, weight in module._parameters.items():
        if weight is not None:
            of_weight = value(f"{name}.{own}", weight.detach())
            made._parameters[own] = nn.Parameter(of_weight, requires_grad=False)
    children = module._modules.items()
    made._modules = {own: frozen(child, value, f"{name}.{own}") for own, child in children}
    return made


def put_on(experts: Any, lora_rank: int, rank: int) -> Factors:
    """Have Megatron-Bridge put adapters on all experts; their values differ everywhere.

    Raises:
        UnavailableError: Megatron-Bridge cannot be imported.
    """
    try:
        lora = importlib.import_module(LORA).LoRA
    except ImportError as error:
        raise UnavailableError(
            f"adapters need Megatron-Bridge, whose import fails: {error}"
        ) from None
    whole = nn.Module()
    whole.mlp = nn.Module()  # it finds experts by their names
    whole.mlp.experts = experts
    settings = {"dim": lora_rank, "alpha": lora_rank, "share_expert_adapters": False}
    lora(target_modules=["linear_fc1", "linear_fc2"], **settings)(whole)
    generator = torch.Generator(next(experts.parameters()).device).manual_seed(rank)
    factors: Factors = {}
    for name, module in experts.named_modules(prefix="experts"):
        if not hasattr(module, "to_wrap"):
            continue
        a, b = (module.adapter._modules[half].weight for half in ("linear_in", "linear_out"))
        for factor in (a, b):
            with torch.no_grad():
                factor.normal_(0, factor.shape[-1] ** -0.5 / 2, generator=generator)
        for index, weight in enumerate(dict(module.to_wrap.named_parameters())):
            factors[f"{name}.{weight}"] = _of_expert(a, b, index)
    return factors


def _of_expert(a: Any, b: Any, index: int) -> Callable[[], tuple[torch.Tensor | None, ...]]:
    """One expert's factors and gradients: a whole parameter, or part of one for all experts."""
    of = lambda tensor: tensor if tensor is None or tensor.dim() == 2 else tensor[index]  # noqa: E731
    return lambda: tuple(map(of, (a, b, a.grad, b.grad)))
