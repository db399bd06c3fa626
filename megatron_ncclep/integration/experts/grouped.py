"""Megatron's experts with another `forward`: grouped GEMMs over offsets on the device.

Megatron builds the experts as usual, so parameters, their names and values, random states and
checkpoints are Megatron's own; then `group_experts` changes their class to a derived one.  They
compute known adapters (adapters.py).  When anything else has been put on their modules since
(as_built.py), they compute as Megatron's again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from torch import Tensor

from megatron_ncclep.config import GROUPED_ALIGNMENT
from megatron_ncclep.integration.checks.cuda_graphs import flags_tell_of_the_step, holds_iteration
from megatron_ncclep.integration.experts.activation import activate
from megatron_ncclep.integration.experts.adapter_product import LowRank, add_adapter, low_rank
from megatron_ncclep.integration.experts.adapters import weights_in
from megatron_ncclep.integration.experts.as_built import AsBuilt
from megatron_ncclep.integration.experts.expert_stack import lay_out, view_of, with_room
from megatron_ncclep.integration.experts.fp8_crossing import Fp8Crossing
from megatron_ncclep.integration.experts.fp8_products import Fp8Products
from megatron_ncclep.integration.experts.fp8_recipe import powers_of_two_in_use
from megatron_ncclep.integration.experts.fp8_recipe import unavailable_reason as fp8_unavailable
from megatron_ncclep.integration.experts.fp8_swiglu import Fp8Layer, fp8_swiglu_experts
from megatron_ncclep.integration.experts.fp8_weights import StepWeights
from megatron_ncclep.integration.experts.fused_swiglu import (
    other_activation,
    swiglu_experts,
)
from megatron_ncclep.integration.experts.fused_swiglu import unavailable_reason as fused_unavailable
from megatron_ncclep.integration.experts.grouped_gemm import unavailable_reason
from megatron_ncclep.integration.experts.grouped_linear import grouped_linear
from megatron_ncclep.integration.experts.main_grad import GradientTarget
from megatron_ncclep.integration.experts.refusals import recomputes_activation, unsupported

if TYPE_CHECKING:
    from megatron_ncclep.integration.experts.quack_products import QuackProducts


class GroupedExperts:
    """The part that both classes below share; each of them knows where its weights are.

    Attributes:
        takes_counts_on_device: `tokens_per_expert` may be on the device; the host does not read it.
        alignment_needed: blocks have a multiple of this many rows.
        reverse_local_experts: the rows' blocks, and `tokens_per_expert`, begin with the rank's last
            expert, as in the dispatcher made for these experts; expert_stack.py says why.
        as_built: the modules; the dispatcher asks it for changes before each pass.
    """

    takes_counts_on_device = True
    alignment_needed = GROUPED_ALIGNMENT
    reverse_local_experts = False
    as_built: AsBuilt

    config: Any
    num_local_experts: int
    training: bool
    _products: QuackProducts | None = None
    _has_products: bool | None = None
    _step_weights: StepWeights | None = None  # in FP8
    _crossing: Fp8Crossing | None = None  # of the pass that has begun
    _laid_out: tuple[int, ...] = ()
    _room = 0  # behind the weights of fc2 of each expert, in rows
    _in_graph: tuple[int, ...] = ()

    def weights_of(self, layer: str) -> list[torch.nn.Parameter]:
        """The weights of `linear_fc1` or `linear_fc2`, in the blocks' order."""
        weights = weights_in(self.as_built.linears[layer])
        return weights[::-1] if self.reverse_local_experts else weights

    def rows_cross(self, tokens: Tensor, computes: bool) -> Fp8Crossing | None:
        """Begin a pass: say how its rows reach these experts.  The dispatcher asks before it sends.

        They cross in FP8 if the pass is in FP8 with scales that are powers of two: then quantising
        the values again by columns changes only what is far below a block's largest.  The answer
        follows from the config and the recipe, so it is the same on all ranks.

        Args:
            tokens: [..., hidden], of this rank.
            computes: these experts will compute the pass on this rank, not Megatron's.

        Returns:
            what packs them and hands them to `forward`; None: they cross in their own dtype.

        Raises:
            UnsupportedError: the pass is in FP8, and there are no products in FP8 here.
        """
        self._crossing = None
        # The experts would multiply what crossed by the probabilities before they quantise it.
        if not self.config.moe_apply_probs_on_input and powers_of_two_in_use(self.config):
            if problem := fp8_unavailable(tokens.device, tokens.dtype):
                raise unsupported(problem)
            self._crossing = Fp8Crossing(Fp8Products(True), tokens.shape[-1], stands_in=computes)
        return self._crossing

    # Backward adds to main_grad behind autograd's back, which cannot be traced.
    @torch.compiler.disable
    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply every expert to its block of rows.

        If a change of the modules was found, Megatron's own forward does, with its arguments.

        Args:
            permuted_local_hidden_states: [num_rows, hidden]; rows after the last block may hold
                anything.  What stands in for them if they crossed in FP8.
            tokens_per_expert: rows of each block, integers [num_local_experts], on the rows' device
                or on the CPU, in the blocks' order.
            permuted_probs: [num_rows].

        Returns:
            [num_rows, hidden], undefined after the last block, and no bias.

        Raises:
            UnsupportedError: the rows' device or dtype has no grouped GEMM, or none in FP8 where
                the pass is in FP8, or the weights are sharded; or rows crossed in FP8 and are not
                what arrives.
        """
        rows, probs = permuted_local_hidden_states, permuted_probs
        crossing = self._crossing  # kept: a second call must not take the stand-in for rows
        if self.as_built.found is not None:
            forward: Any = super().forward  # type: ignore[misc]
            result: tuple[Tensor, Tensor | None] = forward(rows, tokens_per_expert, probs)
            return result
        fc1, fc2 = self.weights_of("linear_fc1"), self.weights_of("linear_fc2")
        if problem := unavailable_reason(rows.device, rows.dtype):
            raise unsupported(problem)
        if hasattr(fc1[0], "get_main_grad") or hasattr(fc1[0], "device_mesh"):
            raise unsupported("FSDP: use DistributedDataParallel, with the distributed optimizer")
        # The hooks that wait for the weights: DDP's, with overlap_param_gather.
        for module in self.as_built.modules():
            for hook in module._forward_pre_hooks.values() if module is not self else ():
                hook(module, ())
        # A copy from the CPU runs before the following work, and the host does not wait for it.
        counts = tokens_per_expert.to(rows.device, non_blocking=True)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        config = self.config
        if config.moe_apply_probs_on_input:  # Megatron allows it with top-1 only
            rows = (probs.unsqueeze(-1) * rows).to(rows.dtype)
            probs = torch.ones_like(probs)

        target = GradientTarget(
            config.gradient_accumulation_fusion,
            flags_tell_of_the_step(config),
            holds_iteration(config),
        )
        if (powers_of_two := powers_of_two_in_use(config)) is not None:
            layer = self._fp8_layer(rows, fc1, fc2, target, powers_of_two)
            return fp8_swiglu_experts(rows, probs, offsets, fc1, fc2, layer, crossing), None
        if crossing is not None:
            raise unsupported("fp8_autocast that ends between a layer's dispatch and its experts")
        products, adapters = self._products_of(rows), self.as_built.adapters
        factors = self._factors(rows) if products else None
        self._lay_out_frozen(fc1, fc2, factors[1].a.shape[1] if factors and factors[1] else 0)
        if products and factors:
            gemms = (products, target)
            layout = (factors, self._room)
            return swiglu_experts(rows, probs, offsets, fc1, fc2, *gemms, *layout), None
        hidden = grouped_linear(rows, offsets, fc1, target, products=products)
        for adapter in adapters.get("linear_fc1", ()):
            add_adapter(hidden, rows, offsets, adapter, self.reverse_local_experts)
        activated = activate(config, hidden, probs)
        again = None
        if recomputes_activation(config):
            again = partial(activate, config, hidden.detach(), probs.detach())
        out = grouped_linear(activated, offsets, fc2, target, again, products)
        for adapter in adapters.get("linear_fc2", ()):
            add_adapter(out, activated, offsets, adapter, self.reverse_local_experts, again)
        return out, None

    def _fp8_layer(
        self,
        rows: Tensor,
        fc1: list[torch.nn.Parameter],
        fc2: list[torch.nn.Parameter],
        target: GradientTarget,
        powers_of_two: bool,
    ) -> Fp8Layer:
        """What a pass in FP8 computes with; quantises the weights if they may have changed."""
        if problem := fp8_unavailable(rows.device, rows.dtype):
            raise unsupported(problem)
        self._lay_out_frozen(fc1, fc2, 0)
        if self._step_weights is None:
            self._step_weights = StepWeights()
        linears = [linear for of_layer in self.as_built.linears.values() for linear in of_layer]
        products, state = Fp8Products(powers_of_two), (self.config, self.training)
        weights = self._step_weights.of(fc1, fc2, linears, products, *state)
        return Fp8Layer(products, *weights, target, recomputes_activation(self.config))

    def lay_out_weights(self, room: int = 0) -> None:
        """Put the experts' weights one behind the other, as Megatron's buffers do.

        If they already are, they stay: a CUDA graph may hold their addresses.  `room`: of fc2, with
        so many free rows behind each expert's.
        """
        for layer, rows in (("linear_fc1", 0), ("linear_fc2", room)):
            weights = self.weights_of(layer)
            if view_of(weights) is None or (rows and with_room(weights, rows) is None):
                lay_out(weights, rows)

    def _lay_out_frozen(
        self, fc1: list[torch.nn.Parameter], fc2: list[torch.nn.Parameter], rank: int
    ) -> None:
        """Lay frozen weights out again after something has moved them: `cuda()`, merged adapters.

        No buffer of Megatron's holds them, and without a view each product would copy them.  So it
        would without room for an adapter's factor of this `rank`, which is left when it is first
        needed.  Once a CUDA graph holds the addresses, nothing is moved here.
        """
        addresses = (fc1[0].data_ptr(), fc2[0].data_ptr())
        if fc1[0].is_cuda and torch.cuda.is_current_stream_capturing():
            self._in_graph = addresses  # not those of a copy of this layer
        if addresses == self._in_graph or (*addresses, rank) == self._laid_out:
            return
        if not any(w.requires_grad or hasattr(w, "main_grad") for w in (*fc1, *fc2)):
            self._room = max(self._room, rank)
            self.lay_out_weights(self._room)
            self._laid_out = (fc1[0].data_ptr(), fc2[0].data_ptr(), rank)

    def _factors(self, rows: Tensor) -> tuple[LowRank | None, LowRank | None] | None:
        """The adapters on fc1 and fc2 for `swiglu_experts`; None where it cannot compute these."""
        if other_activation(self.config) is not None:
            return None
        found: list[LowRank | None] = []
        for layer in ("linear_fc1", "linear_fc2"):
            pair = None
            if adapters := self.as_built.adapters.get(layer):
                order = (self.num_local_experts, self.reverse_local_experts)
                if (pair := low_rank(adapters, *order, rows.dtype)) is None:
                    return None
            found.append(pair)
        return found[0], found[1]

    def _products_of(self, rows: Tensor) -> QuackProducts | None:
        """quack-kernels' GEMMs, if they can run there; the first call's answer stays."""
        if self._has_products is None:
            self._has_products = fused_unavailable(rows.device, rows.dtype) is None
            if self._has_products:
                from megatron_ncclep.integration.experts.quack_products import QuackProducts

                self._products = QuackProducts()
        return self._products


class GroupedTEExperts(GroupedExperts, TEGroupedMLP):
    """TransformerEngine's experts: linear_fc1.weight0, ..., linear_fc2.weight0, ..."""


class GroupedLocalExperts(GroupedExperts, SequentialMLP):
    """Megatron's own experts: local_experts.0.linear_fc1.weight, ..."""


# Where the classes of experts' modules are that grouped experts know.
_KNOWN_MODULES = ("megatron.core.", "transformer_engine.", "torch.nn.")
_GROUPED = {TEGroupedMLP: GroupedTEExperts, SequentialMLP: GroupedLocalExperts}


def class_problem(experts: Any) -> str | None:
    """Say so if the experts or their linears are of a class whose `forward` would be lost."""
    names = " and ".join(known.__name__ for known in _GROUPED)
    if type(experts) not in _GROUPED:
        return (
            f"experts of the class {type(experts).__name__}: it replaces {names}, which "
            "Megatron's own layer specs build"
        )
    for name, module in experts.named_modules():
        kind = type(module)
        if not kind.__module__.startswith(_KNOWN_MODULES):
            return f"{name} of the class {kind.__name__} in the experts of a layer's spec"
        for forward in (vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)):
            if origin := _foreign(forward):
                return f"{name or 'experts'} ({kind.__name__}) has another forward, of {origin}"
    return AsBuilt(experts).change()


def _foreign(forward: Any) -> str | None:
    """The module that `forward` is of, if none of those that define the classes; else None.

    Each layer of its decorators has the name of what it wraps, but its own module's globals.
    """
    while forward is not None:
        origin = str(getattr(forward, "__globals__", {}).get("__name__"))
        if not origin.startswith((*_KNOWN_MODULES, "torch.")):
            return origin
        forward = getattr(forward, "__wrapped__", None)
    return None


def group_experts(experts: Any, reverse_local_experts: bool = False) -> None:
    """Make experts that Megatron has just built compute with grouped GEMMs.

    Args:
        experts: TEGroupedMLP or SequentialMLP.
        reverse_local_experts: the dispatcher gives them their blocks in descending order.

    Raises:
        UnsupportedError: they are of a class whose `forward` would be lost, or on a GPU that has no
            grouped GEMM, or none in FP8 where the config asks for that.
    """
    if problem := class_problem(experts):
        raise unsupported(problem)
    experts.__class__ = _GROUPED[type(experts)]
    experts.reverse_local_experts = reverse_local_experts
    in_fp8 = bool(getattr(experts.config, "fp8", None))
    experts.as_built = AsBuilt(experts, takes_adapters=not in_fp8)
    weight = experts.weights_of("linear_fc1")[0]
    if weight.is_cuda:
        dtype = torch.bfloat16 if experts.config.bf16 else weight.dtype
        problem = unavailable_reason(weight.device, dtype)
        if problem := problem or (fp8_unavailable(weight.device, dtype) if in_fp8 else None):
            raise unsupported(problem)
    experts.lay_out_weights()
