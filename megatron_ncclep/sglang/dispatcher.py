"""SGLang's token dispatcher for a MoE layer: tokens to their experts' ranks, and back.

This module imports SGLang; of this package, only a hook imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.runtime_context import get_parallel

from megatron_ncclep.engines.engine import NOT_ROUTED
from megatron_ncclep.engines.low_latency_types import Tokens
from megatron_ncclep.errors import InputError
from megatron_ncclep.integration.releases import SGLANG
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.serving.modes import MOST_TOKENS, Mode, Modes
from megatron_ncclep.sglang import BACKEND

# Limits the CUDA graphs to what low-latency mode takes.
GRAPH_OPTION = (
    f"--cuda-graph-max-bs-decode {MOST_TOKENS[-1]}, and --cuda-graph-backend-prefill disabled"
)


class NcclEpDispatcher(BaseDispatcher):
    """Tokens to their experts' ranks and back, in one of two modes (megatron_ncclep.serving).

    Experts get rows in SGLang's standard format, as without an all-to-all backend.
    """

    def __init__(self, config: Any) -> None:
        """Collective.

        Args:
            config: SGLang's MoeRunnerConfig of the layer.

        Raises:
            InputError: the layer needs something that is not supported; on all ranks.
            EngineUnavailableError: for example, the GPUs are not in one NVLink domain.
        """
        super().__init__()
        runner = config.runner_backend
        if runner is None or not runner.is_triton():
            raise InputError(
                f"--moe-a2a-backend {BACKEND} with the MoE runner "
                f"{'of this quantisation' if runner is None else runner.value}: set "
                "--moe-runner-backend triton, or choose another --moe-a2a-backend"
            )
        config.inplace = False  # the rows are a buffer of ours
        group = EpGroup.of(get_parallel().moe_ep_group.device_group)
        self._num_local = config.num_local_experts
        self._first = group.rank * self._num_local
        self._modes = Modes(
            group, SGLANG, config.num_experts, config.num_local_experts,
            hidden=config.hidden_size, top_k=config.top_k, dtype=config.params_dtype,
        )  # fmt: skip
        self._mode: Mode | None = None  # between dispatch and combine
        self._num_rows = 0

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        """Send this rank's tokens and get those of its experts.  Collective.

        Args:
            hidden_states: [num_tokens, hidden].
            topk_output: SGLang's StandardTopKOutput: experts of all ranks; -1: not routed.

        Returns:
            SGLang's StandardDispatchOutput: rows [num_rows, hidden] and, for each, this rank's
            experts and their weights [num_rows, k]; -1: an expert of another rank.

        Raises:
            InputError: SGLang's ranks have not agreed on their numbers of tokens.
            PeerError: a rank did not come.
        """
        num_tokens = get_dp_global_num_tokens()
        if not num_tokens or len(num_tokens) != get_parallel().moe_ep_size:
            raise InputError(
                f"--moe-a2a-backend {BACKEND} was called without the ranks' numbers of tokens "
                f"({num_tokens}): unset SGLANG_SCHEDULER_SKIP_ALL_GATHER, or choose another "
                "--moe-a2a-backend"
            )
        self._mode = self._modes.of(max(num_tokens), GRAPH_OPTION)
        tokens = Tokens(
            hidden_states, topk_output.topk_ids.int(), topk_output.topk_weights.float(), None
        )
        inputs = self._mode.dispatch(tokens)()
        rows, weights, local = inputs.rows, inputs.topk_weights, inputs.topk_ids - self._first
        local = torch.where((local >= 0) & (local < self._num_local), local, NOT_ROUTED)
        self._num_rows = len(rows)
        if not self._num_rows:  # SGLang's kernels are not made for none
            rows, weights = rows.new_zeros(1, rows.shape[1]), weights.new_zeros(1, weights.shape[1])
            local = torch.full_like(weights, NOT_ROUTED, dtype=torch.int32)
        output = StandardTopKOutput(weights, local, topk_output.router_logits)
        return StandardDispatchOutput(rows, None, output)

    def combine(self, combine_input: Any) -> torch.Tensor:
        """Send back the experts' output, and add up each token's.  Collective.

        Args:
            combine_input: SGLang's StandardCombineInput: [num_rows, hidden], each row multiplied by
                its weights and added up over this rank's experts.

        Returns:
            [num_tokens, hidden].
        """
        mode, self._mode = self._mode, None
        assert mode is not None, "SGLang calls dispatch first"
        return mode.combine(combine_input.hidden_states[: self._num_rows])()
