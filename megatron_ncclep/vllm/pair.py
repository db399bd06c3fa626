"""vLLM's prepare/finalize pair for a MoE layer: tokens to their experts' ranks, and back.

This module imports vLLM; of this package, only a hook imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from megatron_ncclep.engines.low_latency_types import Tokens
from megatron_ncclep.errors import InputError
from megatron_ncclep.integration.releases import VLLM
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.serving.modes import MOST_TOKENS, Mode, Modes
from megatron_ncclep.vllm import BACKEND

# Limits the CUDA graphs to what low-latency mode takes.
GRAPH_OPTION = f"--max-cudagraph-capture-size {MOST_TOKENS[-1]}"


def make_pair(arguments: dict[str, Any]) -> NcclEpPrepareAndFinalize:
    """Make the pair of one layer, from the arguments of vLLM's `maybe_make_prepare_finalize`.

    Raises:
        InputError: the layer needs something that the pair does not support.
    """
    moe = arguments["moe"]
    config = get_current_vllm_config_or_none()
    parallel = None if config is None else config.parallel_config
    for what, asked in (
        ("monolithic experts, which route themselves", arguments["use_monolithic"]),
        ("redundant experts (--enable-eplb)", moe.moe_parallel_config.enable_eplb),
        ("round-robin expert placement", arguments["routing_tables"] is not None),
        ("elastic expert parallelism", getattr(parallel, "enable_elastic_ep", False)),
        ("dual-batch overlap (--enable-dbo)", getattr(parallel, "use_ubatching", False)),
        ("prefill context parallelism", moe.moe_parallel_config.pcp_size > 1),
        ("LoRA", moe.is_lora_enabled),
    ):
        if asked:
            raise InputError(f"vLLM's backend {BACKEND} has no {what}: choose another one")
    return NcclEpPrepareAndFinalize(EpGroup.of(get_ep_group().device_group), moe)


class NcclEpPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """Tokens to their experts' ranks and back, in one of two modes (megatron_ncclep.serving)."""

    def __init__(self, group: EpGroup, moe: Any) -> None:
        super().__init__()
        self._group, self._moe = group, moe
        self._num_experts: int = moe.num_experts
        self._num_scales = 0  # of a row as it is dispatched
        self._modes: Modes | None = None
        self._mode: Mode | None = None  # between prepare and finalize

    def post_init_setup(self, fused_experts: Any) -> None:
        """Make the modes' objects, for the inputs of these experts.  Collective.

        Raises:
            as `Modes`.
        """
        moe = self._moe
        payload, self._num_scales = payload_of(
            fused_experts.quant_config, moe.hidden_dim, fused_experts.expects_unquantized_inputs
        )
        self._modes = Modes(
            self._group, VLLM, self._num_experts, moe.num_local_experts, hidden=moe.hidden_dim,
            top_k=moe.experts_per_token, dtype=moe.in_dtype,
            payload=payload, num_scales=self._num_scales,
        )  # fmt: skip
        self._reserve_workspace(fused_experts)

    def _reserve_workspace(self, experts: Any) -> None:
        """Make vLLM's workspace large enough for any routing: after warm-up it must not grow.

        Most rows arrive if all tokens of all ranks are routed to this one, as vLLM's own gathering
        of all tokens needs always.
        """
        if not is_workspace_manager_initialized():  # in vLLM's own tests, for example
            return
        moe, num_ranks = self._moe, self._group.size
        inner = moe.intermediate_size_per_partition * (2 if moe.is_act_and_mul else 1)
        tokens = -(-moe.max_num_tokens // moe.sp_size)
        per_token = min(moe.experts_per_token, moe.num_local_experts)
        few = min([most for most in MOST_TOKENS if most >= tokens] or [MOST_TOKENS[-1]])
        for num_rows, top_k in (
            (num_ranks * few, moe.experts_per_token),
            (num_ranks * tokens * per_token, 1),
        ):
            first, second, out = experts.workspace_shapes(
                num_rows, inner, moe.hidden_dim, top_k, self._num_experts, moe.num_local_experts,
                None, moe.activation,
            )  # fmt: skip
            dtype = experts.workspace_dtype(moe.in_dtype)
            current_workspace_manager().get_simultaneous(
                ((max(prod(first), prod(out)),), dtype), (second, dtype)
            )

    # --- vLLM's queries ---------------------------------------------------------------------------

    @property
    def activation_format(self) -> Any:
        """[num_tokens, hidden], not a block for each expert."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """int32; int64 would work too."""
        return torch.int32

    def max_num_tokens_per_rank(self) -> int | None:
        """None: there is no limit."""
        return None

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

    def prepare(self, *arguments: Any, **named: Any) -> Any:
        """Both halves of a dispatch; see `prepare_async`."""
        return self.prepare_async(*arguments, **named)()

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
            PeerError: a rank did not come.
        """
        if num_experts != self._num_experts:
            raise InputError(
                f"vLLM's layer has {num_experts} experts: this pair was made for "
                f"{self._num_experts}"
            )
        if apply_router_weight_on_input:
            if topk_ids.shape[1] != 1:
                raise InputError(
                    f"router weights on the input with top_k {topk_ids.shape[1]}: only with top_k 1"
                )
            a1 = a1 * topk_weights.to(a1.dtype)
        scales = None
        if self._num_scales:
            a1, scales = moe_kernel_quantize_input(
                a1,
                quant_config.a1_scale,
                quant_dtype=quant_config.quant_dtype,
                per_act_token_quant=quant_config.per_act_token_quant,
                block_shape=quant_config.block_shape,
            )
        assert self._modes is not None, "vLLM calls post_init_setup first"
        self._mode = self._modes.of(max(tokens_of_ranks()), GRAPH_OPTION)
        wait = self._mode.dispatch(Tokens(a1, topk_ids, topk_weights.float(), scales))

        def receive() -> Any:
            inputs = wait()
            return (
                inputs.rows,
                inputs.scales,
                mk.ExpertTokensMetadata(
                    expert_num_tokens=inputs.counts, expert_num_tokens_cpu=None
                ),
                inputs.topk_ids,
                inputs.topk_weights,
            )

        return receive

    def finalize(self, *arguments: Any, **named: Any) -> None:
        """Both halves of a combine; see `finalize_async`."""
        self.finalize_async(*arguments, **named)()

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
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        rows = fused_expert_output
        if len(topk_ids):  # vLLM's kernels are not made for none
            rows = weight_and_reduce_impl.apply(
                output=None,
                fused_expert_output=fused_expert_output,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                apply_router_weight_on_input=apply_router_weight_on_input,
            )
        mode, self._mode = self._mode, None
        assert mode is not None, "vLLM calls prepare first"
        wait = mode.combine(rows)

        def receive() -> None:
            output.copy_(wait())

        return receive


def payload_of(
    quant_config: Any, hidden: int, defer_input_quant: bool
) -> tuple[torch.dtype | None, int]:
    """Choose how rows are dispatched for a layer's experts.

    Returns:
        their dtype and the number of their scales; None and 0: as they are.

    Raises:
        InputError: the experts need rows that would have to be quantised after the dispatch, where
            empty rows are undefined.
    """
    if quant_config is None or quant_config.quant_dtype is None or defer_input_quant:
        return None, 0
    if quant_config.quant_dtype != torch.float8_e4m3fn or quant_config.block_shape is None:
        raise InputError(
            f"experts with inputs of {quant_config.quant_dtype} in blocks of "
            f"{quant_config.block_shape}: vLLM's backend {BACKEND} dispatches rows as they are, "
            "and float8_e4m3fn in blocks; "
            "choose experts that quantise themselves, or another --all2all-backend"
        )
    return quant_config.quant_dtype, -(-hidden // quant_config.block_shape[1])


def tokens_of_ranks() -> list[int]:
    """The number of tokens of each rank in this forward pass, as vLLM's ranks have agreed on it."""
    metadata = get_forward_context().dp_metadata
    sizes = None if metadata is None else metadata.get_chunk_sizes_across_dp_rank()
    if not sizes:
        raise InputError(
            f"vLLM's backend {BACKEND} was called without the ranks' numbers of tokens "
            "(DPMetadata): this model does not call its MoE layers as vLLM's own runner does"
        )
    return [int(size) for size in sizes]
