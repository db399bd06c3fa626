"""Shared by all layers of a group while text is generated: low-latency mode, and an engine.

A decode batch is a few tokens on each rank and uses low-latency mode.  A prompt may be thousands of
tokens: a batch that is too large on any rank goes through the engine, in exact mode, on all ranks.
If it were cut into pieces for low-latency mode, every expert would read its weights once per piece.

Outside CUDA graphs the ranks' hosts exchange their numbers of tokens in every layer, so all make
the same choice.  Inside a graph there is no choice: its batch must fit low-latency mode.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.engine import NOT_ROUTED
from megatron_ncclep.engines.low_latency import LowLatency, create_low_latency
from megatron_ncclep.engines.low_latency_types import LowLatencySizes
from megatron_ncclep.errors import EngineUnavailableError, EpError, InputError, UnsupportedError
from megatron_ncclep.integration.options.field import resolve_options
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource
from megatron_ncclep.ranks.uncopied import Uncopied

# Options of EpConfig that apply while text is generated.
OPTIONS = (
    "check_calls",
    "engine",
    "first_timeout_s",
    "inference_tokens",
    "num_sms",
    "timeout_s",
)
# Tokens of a rank in low-latency mode, unless the option says otherwise.
DEFAULT_TOKENS = 128
# The dtype that Megatron-Core's inference experts take.
DTYPE = torch.bfloat16


class InferenceSession(Uncopied, Resource):
    """Low-latency mode and an engine in exact mode, for rows of one size.

    Attributes:
        group: the ranks.
        engine: for batches that are larger than `max_tokens` on any rank.
        max_tokens: the largest batch of a rank in low-latency mode.
        all_places: int32 [1] on the device: the number of rows that low-latency mode has room for,
            over all ranks; at the same address as long as the session is open.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        num_experts: int,
        hidden: int,
        top_k: int,
        options: EpConfig,
    ) -> None:
        """Collective; see `shared`."""
        self.group = EpGroup.of(process_group)
        used = {name: getattr(options, name) for name in OPTIONS if name != "inference_tokens"}
        self.engine = create_engine(process_group, num_experts, EpConfig(**used))
        caps, wanted = self.engine.caps, options.inference_tokens
        self.max_tokens = wanted or min(DEFAULT_TOKENS, caps.low_latency_tokens)
        self.all_places = torch.zeros(1, dtype=torch.int32, device=self.group.device)
        self._may_grow = wanted is None
        self._hidden, self._top_k = hidden, top_k
        self._low_latency: LowLatency | None = None
        error: EpError | None = None
        if not caps.low_latency_tokens:
            error = EngineUnavailableError(
                f"inference_moe_token_dispatcher_type='ncclep' needs low-latency mode, and engine "
                f"{caps.name!r} has none: where engine 'native' can run, ask for it "
                "(--ncclep-engine native); otherwise set inference_moe_token_dispatcher_type='nccl'"
            )
        elif problem := self._sizes(self.max_tokens).problem(caps):
            error = InputError(f"inference_moe_token_dispatcher_type='ncclep': {problem}")
        if error is not None:
            self.engine.close()
            raise error

    @classmethod
    def shared(cls, config: Any, process_group: dist.ProcessGroup) -> InferenceSession:
        """Return what all layers with this TransformerConfig share in a group.

        Collective the first time, which makes it.  It stays until the group is closed
        (`megatron_ncclep.close`), because CUDA graphs keep using its memory.

        Raises:
            InputError, EngineUnavailableError: see `create_engine`; the engine has no low-latency
                mode, or none for these sizes.
        """
        options = resolve_options(config)
        hidden = config.moe_latent_size or config.hidden_size
        sizes = config.num_moe_experts, hidden, config.moe_router_topk
        used = [f"{name}={getattr(options, name)}" for name in OPTIONS]
        name = f"inference {sizes} {' '.join(used)}"
        return EpGroup.of(process_group).resources.share(
            name, lambda: cls(process_group, *sizes, options)
        )

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured, in which hosts exchange nothing."""
        return self.group.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def prepare(self, num_tokens: int, most_tokens: int) -> None:
        """Prepare for CUDA graphs, and for batches after they are captured.  Collective.

        Args:
            num_tokens: the most tokens of this rank in a graph; 0: there will be no graphs.
            most_tokens: the most tokens of this rank in any batch: engines whose calls are in
                graphs can no longer enlarge their memory.

        Raises:
            InputError: on every rank, when that is more than the engine, the option or existing
                CUDA graphs allow.
        """
        if num_tokens > self.max_tokens:
            most = self.engine.caps.low_latency_tokens
            if not self._may_grow or self._low_latency is not None or num_tokens > most:
                raise InputError(self._too_many(num_tokens))
            self.max_tokens = num_tokens
        self._open()
        if num_tokens:  # run the engine with tokens that are not routed
            device = self.group.device
            topk = torch.full((most_tokens, self._top_k), NOT_ROUTED, device=device)
            x = torch.zeros(most_tokens, self._hidden, dtype=DTYPE, device=device)
            plan = self.engine.plan(topk)
            rows, _ = self.engine.dispatch(plan, x, torch.zeros(topk.shape, device=device))
            self.engine.combine(plan, rows)

    def low_latency_for(self, num_tokens: int, problem: str | None) -> LowLatency | None:
        """Choose what handles a batch: low-latency mode, or the engine (None).

        Collective, except while a CUDA graph is captured.

        Raises:
            InputError: there is a problem, on every rank; the batch is too large for a CUDA graph.
            UnsupportedError: a CUDA graph is captured before the first batch.
        """
        if self.is_capturing:
            if problem is not None:
                raise InputError(problem)
            if num_tokens > self.max_tokens:
                raise InputError(self._too_many(num_tokens))
            if self._low_latency is None:
                raise UnsupportedError(
                    "a CUDA graph is captured with inference_moe_token_dispatcher_type='ncclep' "
                    "before the first batch: run the model once before that, as Megatron-Core does"
                )
            return self._low_latency
        timeout_s = self.group.deadline_s(self.engine.config)
        agreement = self.group.hosts.agree("dispatch", {}, problem, timeout_s, payload=num_tokens)
        low_latency = self._open()
        return low_latency if max(agreement.gathered) <= self.max_tokens else None

    def close(self) -> None:
        """Release its resources.  Collective."""
        if self._low_latency is not None:
            self._low_latency.close()
        self.engine.close()

    def _open(self) -> LowLatency:
        if self._low_latency is None:
            sizes: Any = vars(self._sizes(self.max_tokens))
            self._low_latency = create_low_latency(self.engine, **sizes)
            self.all_places.fill_(self.group.size * self.max_tokens)
        return self._low_latency

    def _sizes(self, max_tokens: int) -> LowLatencySizes:
        return LowLatencySizes(max_tokens, self._hidden, self._top_k, DTYPE, DTYPE)

    def _too_many(self, num_tokens: int) -> str:
        caps = self.engine.caps
        remedy = (
            f"set the option inference_tokens (--ncclep-inference-tokens {num_tokens}), or let "
            if num_tokens <= caps.low_latency_tokens
            else f"engine {caps.name!r} takes at most {caps.low_latency_tokens}: let "
        )
        return (
            f"CUDA graphs of {num_tokens} tokens on a rank, but low-latency mode was set up for "
            f"{self.max_tokens}: {remedy}graphs be smaller (max_requests, cuda_graph_max_tokens), "
            "or use no graphs (inference_cuda_graph_scope='none')"
        )
