"""vLLM's MoE layers over low-latency mode: a prepare/finalize pair, for decoding.

Written for vLLM 0.26, as a `FusedMoEPrepareAndFinalizeModular`.  vLLM chooses these pairs from a
fixed list; `register` adds this one if vLLM has the registry that is proposed in
https://github.com/vllm-project/vllm/pull/50556, and refuses otherwise.  docs/vllm.md says what that
means.  This module imports vLLM; no other module of this package imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk

import megatron_ncclep
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import NOT_ROUTED
from megatron_ncclep.engines.low_latency import LowLatency, create_low_latency
from megatron_ncclep.engines.low_latency_types import LowLatencyRows
from megatron_ncclep.errors import EngineUnavailableError, InputError
from megatron_ncclep.ranks.group import EpGroup

BACKEND = "ncclep"  # the value of vLLM's --all2all-backend
TIMEOUT_S = 60.0


class NcclEpPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """Tokens to their experts' ranks and back, over a `LowLatency` object.

    Experts get rank-major rows, [num_ranks * max_tokens, hidden] in vLLM's standard format, one for
    each token that has an expert here.  Assignments of other ranks, and all assignments of empty
    rows, name an expert of another rank, so `expert_map` drops them: vLLM's kernels support that.
    No call waits for a host, so CUDA graphs can hold them.

    Outside of graphs each half first checks, without waiting, whether something has failed on the
    device, and raises it as `LowLatency` does.  No call of the pair can raise a failure in a graph
    or in the last layers of a step: for that, the model runner calls `check`.

    Layers of the same sizes share one object, because they take turns.

    Args:
        group: the ranks that share the experts.
        moe: vLLM's FusedMoEConfig.

    Raises:
        InputError: the ranks have different numbers of experts.
    """

    def __init__(self, group: EpGroup, moe: Any) -> None:
        super().__init__()
        if moe.num_experts != moe.num_local_experts * group.size:
            raise InputError(
                f"{moe.num_experts} experts, {moe.num_local_experts} on this rank of {group.size}: "
                "every rank must have equally many, in order"
            )
        self._group, self._moe = group, moe
        self._num_experts: int = moe.num_experts
        self._made: LowLatency | None = None

    @property
    def _object(self) -> LowLatency:
        assert self._made is not None, "vLLM calls post_init_setup first"
        return self._made

    def post_init_setup(self, fused_experts: Any) -> None:
        """Make the object, for the inputs of these experts.  Collective.

        Raises:
            InputError: on all ranks, for sizes that low-latency mode does not support.
            EngineUnavailableError: for example, the GPUs are not in one NVLink domain.
        """
        group, moe = self._group, self._moe
        payload = payload_of(
            fused_experts.quant_config, moe.hidden_dim, fused_experts.expects_unquantized_inputs
        )
        sizes: dict[str, Any] = {
            "max_tokens": moe.max_num_tokens,
            "hidden": moe.hidden_dim,
            "top_k": moe.experts_per_token,
            "dtype": moe.in_dtype,
            "payload": payload.dtype,
            "num_scales": payload.num_scales,
        }

        def make() -> LowLatency:
            name = "native" if group.device.type == "cuda" else "reference"
            # vLLM's steps do not end with a check, so the first step would never end.
            config = EpConfig(engine=name, timeout_s=TIMEOUT_S, first_timeout_s=TIMEOUT_S)
            engine = create_engine(group.process_group, self._num_experts, config)
            return create_low_latency(engine, **sizes)

        self._made = group.share(f"vllm {self._num_experts} {sizes}", make)

    # --- vLLM's queries ---------------------------------------------------------------------------

    @property
    def activation_format(self) -> Any:
        """[num_tokens, hidden], not a block for each expert."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """int32; int64 would work too."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """The number of tokens that the object is made for."""
        most: int = self._moe.max_num_tokens
        return most

    def num_dispatchers(self) -> int:
        """Ranks of the expert-parallel group."""
        return self._group.size

    def output_is_reduced(self) -> bool:
        """Yes: the source rank has added up all ranks' parts."""
        return True

    def supports_async(self) -> bool:
        """Yes: shared experts run between the halves of a combine."""
        return True

    # --- the two steps, in halves -----------------------------------------------------------------

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> Any:
        """Both halves of a dispatch; see `prepare_async`."""
        receive = self.prepare_async(
            a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input,
            quant_config, defer_input_quant,
        )  # fmt: skip
        return receive()

    def prepare_async(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> Callable[[], Any]:
        """Send this rank's tokens.  Collective.

        Args:
            a1: [num_tokens, hidden], not quantised.
            topk_weights, topk_ids: [num_tokens, top_k]; -1: not routed.
            num_experts: of the whole group.
            expert_map: not needed.
            apply_router_weight_on_input: for top-1 only.
            quant_config: of the experts.
            defer_input_quant: the experts quantise; the same as in `post_init_setup`.

        Returns:
            a function that waits for the other ranks' tokens and returns vLLM's PrepareResultType.

        Raises:
            InputError: the pair does not support this; docs/vllm.md has the list.
        """
        if num_experts != self._num_experts:
            raise InputError(
                f"vLLM's layer has {num_experts} experts: this pair was made for "
                f"{self._num_experts}; redundant experts (EPLB) are not supported"
            )
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise InputError(
                    f"router weights on the input with top_k {topk_ids.shape[1]}: only with top_k 1"
                )
            a1 = a1 * topk_weights.to(a1.dtype)
        scales = None
        if self._object.sizes.num_scales:
            a1, scales = _quantized(a1, quant_config)
        self._object.send_dispatch(a1, topk_ids, topk_weights.float(), scales)
        return lambda: self._received(self._object.complete_dispatch())

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Both halves of a combine; see `finalize_async`."""
        self.finalize_async(
            output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input,
            weight_and_reduce_impl,
        )()  # fmt: skip

    def finalize_async(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> Callable[[], None]:
        """Send back the experts' output for each row.  Collective.

        Args:
            output: [num_tokens, hidden], written by the function that is returned.
            fused_expert_output: for the rows from `prepare`, per assignment or already added up.
            topk_weights, topk_ids: those from `prepare`.
            apply_router_weight_on_input: as in `prepare`.
            weight_and_reduce_impl: the experts'; it multiplies by the weights and adds up a row's
                assignments on this rank, in vLLM's order.

        Returns:
            a function that waits for the other ranks' parts.
        """
        sizes = self._object.sizes
        rows = _weight_and_reduce(weight_and_reduce_impl).apply(
            output=None,
            fused_expert_output=fused_expert_output,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )
        self._object.send_combine(rows.view(-1, sizes.max_tokens, sizes.hidden))

        def receive() -> None:
            output.copy_(self._object.complete_combine())

        return receive

    def _received(self, rows: LowLatencyRows) -> Any:
        """The rows in vLLM's format."""
        sizes, num_local = self._object.sizes, rows.num_local_experts
        first = self._group.rank * num_local
        elsewhere = self._num_experts - 1 if first == 0 else 0
        if self._group.size == 1:
            elsewhere = NOT_ROUTED
        local = rows.topk_idx.view(-1, sizes.top_k)
        is_here = local >= 0
        counts = torch.zeros(num_local + 1, dtype=torch.int32, device=local.device)
        counts.scatter_add_(
            0, torch.where(is_here, local, num_local).view(-1).long(), local.new_ones(local.numel())
        )
        return (
            rows.rows.view(-1, sizes.hidden),
            None if rows.scales is None else rows.scales.view(-1, sizes.num_scales),
            mk.ExpertTokensMetadata(
                expert_num_tokens=counts[:num_local], expert_num_tokens_cpu=None
            ),
            torch.where(is_here, local + first, elsewhere),
            rows.weights.view(-1, sizes.top_k),
        )


@dataclass(frozen=True)
class Payload:
    """How rows are dispatched: as they are (`dtype` None), or quantised in blocks."""

    dtype: torch.dtype | None
    num_scales: int


def payload_of(quant_config: Any, hidden: int, defer_input_quant: bool) -> Payload:
    """Choose how rows are dispatched for a layer's experts.

    Raises:
        InputError: the experts need rows that would have to be quantised after the dispatch, where
            empty rows are undefined.
    """
    if quant_config is None or quant_config.quant_dtype is None or defer_input_quant:
        return Payload(None, 0)
    if quant_config.quant_dtype != torch.float8_e4m3fn or quant_config.block_shape is None:
        raise InputError(
            f"experts with inputs of {quant_config.quant_dtype} in blocks of "
            f"{quant_config.block_shape}: vLLM's backend ncclep dispatches rows as they are, and "
            "float8_e4m3fn in blocks; "
            "choose experts that quantise themselves, or another --all2all-backend"
        )
    return Payload(quant_config.quant_dtype, -(-hidden // quant_config.block_shape[1]))


def check() -> None:
    """Raise the errors of this rank's device so far.  Not collective.

    Each rank's model runner calls it once in each step, after the forward pass and before tokens
    are sampled, on the stream of the forward pass: after a failed dispatch or combine, hidden
    states and logits are NaN, and a replayed CUDA graph calls nothing that could raise.  It waits
    for the forward pass. docs/vllm.md has a worker that does so.

    Raises:
        PeerError, RefusedError: a rank did not come, or refused a call.  Serve nothing from this
            step; the group is unusable.
        InputError: a routing named something other than an expert; the same on all ranks.
    """
    megatron_ncclep.check()


def register() -> type[Any]:
    """Add the backend `ncclep` to vLLM's registry; returns the factory class.

    Call it in every process of vLLM before it makes a model, from a plugin of the entry-point group
    vllm.general_plugins.

    Raises:
        EngineUnavailableError: this vLLM has no such registry.
    """
    try:
        from vllm.model_executor.layers.fused_moe.all2all_utils import (
            register_moe_prepare_finalize_factory,
        )
        from vllm.model_executor.layers.fused_moe.prepare_finalize import (
            MoEPrepareFinalizeFactory,
        )
    except ImportError as error:
        raise EngineUnavailableError(
            "this vLLM has no registry of prepare/finalize pairs: it is proposed in "
            "https://github.com/vllm-project/vllm/pull/50556 and not in any release up to 0.26; "
            f"install a vLLM with that change ({error})"
        ) from error
    from vllm.distributed import get_ep_group

    class NcclEpPrepareFinalizeFactory(MoEPrepareFinalizeFactory):
        backend_name = BACKEND
        # With this, every rank of the expert-parallel group brings its own tokens.
        supports_sequence_parallel = True

        @classmethod
        def create(
            cls,
            *,
            moe: Any,
            quant_config: Any,
            routing_tables: Any,
            allow_new_interface: bool,
            use_monolithic: bool,
            eep_stage: bool,
            all2all_manager: Any,
        ) -> NcclEpPrepareAndFinalize:
            """Make the pair; refuse features that it does not support."""
            for what, asked in (
                ("monolithic experts, which route themselves", use_monolithic),
                ("redundant experts (EPLB)", routing_tables is not None),
                ("elastic expert parallelism", eep_stage),
            ):
                if asked:
                    raise InputError(
                        f"vLLM's backend {BACKEND} has no {what}: choose another --all2all-backend"
                    )
            return NcclEpPrepareAndFinalize(EpGroup.of(get_ep_group().device_group), moe)

    register_moe_prepare_finalize_factory(NcclEpPrepareFinalizeFactory)
    return NcclEpPrepareFinalizeFactory


def _quantized(a1: torch.Tensor, quant_config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

    rows, scales = moe_kernel_quantize_input(
        a1,
        quant_config.a1_scale,
        quant_dtype=quant_config.quant_dtype,
        per_act_token_quant=quant_config.per_act_token_quant,
        block_shape=quant_config.block_shape,
    )
    return rows, scales


def _weight_and_reduce(impl: Any) -> Any:
    """The experts' own implementation, or vLLM's for one output per assignment."""
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
        TopKWeightAndReduceContiguous,
        TopKWeightAndReduceDelegate,
    )

    return (
        TopKWeightAndReduceContiguous() if isinstance(impl, TopKWeightAndReduceDelegate) else impl
    )
