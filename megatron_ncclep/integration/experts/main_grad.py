"""Where the experts' weight gradients go: into Megatron's `main_grad`, or to autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_ncclep.integration.experts.expert_stack import view_of


class WeightProduct(Protocol):
    """Makes the weights' gradients of one layer."""

    def __call__(
        self, out: Tensor | Sequence[Tensor] | None = None, adds: bool = False
    ) -> Tensor | Sequence[Tensor]:
        """Compute them for all experts.

        Args:
            out: the destination: one tensor of all experts [num_experts, out_features,
                in_features], or, where memory allows no such view, one [out_features, in_features]
                for each; None: a new tensor of all, in the operands' dtype.
            adds: add to the contents of `out`.

        Returns:
            out, or the new tensor.
        """


@dataclass(frozen=True)
class GradientTarget:
    """Where weight gradients go.

    Attributes:
        into_main_grad: they are added to the parameters' `main_grad`, if these have one, and
            autograd does not get them (`gradient_accumulation_fusion`).  Otherwise it does, so
            that hooks of the weights and other losses on them count, and DDP's hooks add.
        may_overwrite: DDP resets a parameter's flag when it resets `main_grad`, so a step's first
            micro-batch can be recognised.
        holds_iteration: a CUDA graph that is being captured holds every micro-batch of a step.  Any
            other graph is captured with one micro-batch and replayed for all.
    """

    into_main_grad: bool = False
    may_overwrite: bool = False
    holds_iteration: bool = False


def store_weight_gradients(
    weights: Sequence[Any], is_trained: Sequence[bool], product: WeightProduct,
    target: GradientTarget,
) -> list[Tensor | None]:  # fmt: skip
    """Compute the weights' gradients where they belong; return the tensors to give to autograd.

    Megatron's DDP has a hook behind every parameter that reduces gradients when all are there.  It
    runs after autograd has set `.grad`, and adds that itself unless the parameter's
    `grad_added_to_main_grad` is set. So autograd gets a placeholder: memory of the right shape that
    is never read, or zeros where Megatron asks for them.  For a parameter without the flag it gets
    nothing, because a placeholder would be taken for a gradient.

    The gradient of a step's first micro-batch is stored instead of added: `zero_grad_buffer` has
    just reset both the buffer and the flag, and reading zeros takes as long as writing them.

    Args:
        weights: one parameter [out_features, in_features] for each expert.
        is_trained: whether each of them is; some experts may be frozen, before or after DDP has
            given them a main_grad.
        product: computes the gradients of all of them.
        target: where they go.
    """
    trained = [weight for weight, is_one in zip(weights, is_trained, strict=True) if is_one]
    if not (target.into_main_grad and all(hasattr(weight, "main_grad") for weight in trained)):
        return list(product())  # autograd drops the gradients of frozen ones
    main_grads = [weight.main_grad for weight in trained]
    if len(trained) < len(weights):
        unread = torch.empty_like(main_grads[0])
        main_grads = [
            weight.main_grad if is_one else unread
            for weight, is_one in zip(weights, is_trained, strict=True)
        ]
    may_overwrite = target.may_overwrite and (target.holds_iteration or not _is_captured(weights))
    is_first = may_overwrite and all(
        getattr(weight, "grad_added_to_main_grad", None) is False for weight in trained
    )
    whole = view_of(main_grads)
    # Experts that share a weight add to its gradient one after the other.
    is_first = is_first and (whole is not None or len({*map(id, trained)}) == len(trained))
    product(main_grads if whole is None else whole, adds=not is_first)
    placeholder = torch.empty_like(trained[0])
    results: list[Tensor | None] = []
    for weight, is_one in zip(weights, is_trained, strict=True):
        if not is_one or not hasattr(weight, "grad_added_to_main_grad"):
            results.append(None)
            continue
        weight.grad_added_to_main_grad = True
        wants_zeros = getattr(weight, "zero_out_wgrad", False)
        # A separate tensor object for each: autograd copies one that has another owner.
        results.append(torch.zeros_like(weight) if wants_zeros else placeholder.detach())
    return results


def _is_captured(weights: Sequence[Any]) -> bool:
    """Whether work queued now becomes part of a CUDA graph."""
    return weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
