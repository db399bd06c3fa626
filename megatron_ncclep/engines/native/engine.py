"""This project's own engine: kernels on NCCL's windows, within and between NVLink domains.

The kernels are in `csrc/native/`.  This module allocates results and queues the kernels; what
precedes each call on the host is in `megatron_ncclep/engines/native/host_protocol.py`.
"""

from __future__ import annotations

import dataclasses
import logging

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.base import EngineBase
from megatron_ncclep.engines.engine import (
    COMMON_OPTIONS,
    NODE_SUMS_ROUNDED,
    SOURCE_PART_UNROUNDED,
    EngineCaps,
    RoutePlan,
)
from megatron_ncclep.engines.low_latency_types import LowLatencySizes
from megatron_ncclep.engines.native.availability import default_num_sms
from megatron_ncclep.engines.native.buffers import RowsCall, row_bytes_of, try_allocate
from megatron_ncclep.engines.native.group import NativeGroup, Refusing
from megatron_ncclep.engines.native.host_protocol import HostProtocol
from megatron_ncclep.engines.native.low_latency import NativeLowLatency
from megatron_ncclep.engines.native.plan import NativePlan
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks.group import EpGroup

CAPS = EngineCaps(
    name="native",
    reduction=SOURCE_PART_UNROUNDED,
    payload_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    row_bytes_multiple=16,
    options=COMMON_OPTIONS | {"num_sms"},
    moves_bytes=True,
    max_tokens=extension.limit("MAX_TOKENS"),
    max_top_k=extension.limit("MAX_TOP_K"),
    max_local_experts=extension.limit("MAX_LOCAL_EXPERTS"),
    captures_static=True,
    low_latency_tokens=extension.limit("LOW_LATENCY_TOKENS") or 0,
)
# Of ranks in several NVLink domains.
CAPS_OVER_DOMAINS = dataclasses.replace(CAPS, reduction=NODE_SUMS_ROUNDED)


class NativeEngine(EngineBase[NativePlan]):
    """See `Engine`.

    In static mode no call waits for the device or for another host, so that all of them can be
    captured in a CUDA graph.  A graph must not run concurrently with other work of the group on
    another stream.  During and after a capture a batch that is larger than all earlier ones, or has
    longer rows, is refused: windows are replaced when they grow, and the graph would use the old
    ones.

    A multi-rank group is unusable after an error in a call on which the hosts do not agree: all its
    later calls raise the same error on all ranks.

    Autograd does not record these calls, even if arguments require gradients: results are new
    tensors, which kernels write.
    """

    caps = CAPS  # of an engine within one NVLink domain
    plan_type = NativePlan

    def __init__(self, group: EpGroup, num_experts: int, config: EpConfig) -> None:
        """Collective; makes the group's communicator, if need be."""
        ranks_per_gpu = group.ranks_per_gpu(group.deadline_s(config))
        self.num_sms = config.num_sms or default_num_sms(group, ranks_per_gpu)
        if ranks_per_gpu > 1:
            text = f"up to {ranks_per_gpu} ranks share a GPU: a test, whose timings mean nothing"
            group.announce(text, logging.WARNING)
        self._name = f"native {num_experts}"
        shared = group.resources.share(
            self._name, lambda: NativeGroup(group, num_experts, group.deadline_s(config))
        )
        self._described: set[tuple[int, int]] = set()
        self.nodes = shared.domains
        if self.nodes.count > 1:
            self.caps = CAPS_OVER_DOMAINS
            domains, ranks = self.nodes.count, self.nodes.ranks_on_each
            group.announce(
                f"{domains} NVLink domains of {ranks} ranks: kernels use the network (GIN)"
            )
        if self.nodes.ranks_on_each > extension.load().NARROW_LOCAL_RANKS:
            self.caps = dataclasses.replace(self.caps, low_latency_tokens=0)
        super().__init__(group, num_experts, config)
        self._shared, self._native = shared, shared.native
        self._protocol = HostProtocol(self, shared)

    def plan(self, topk_idx: torch.Tensor, zero_unused: bool = True) -> NativePlan:
        """See `Engine.plan`.

        The device checks the values of `topk_idx`.  In static mode the host waits neither for the
        device nor for other ranks' hosts, unless windows have to grow or the ranks have recently
        brought different numbers of tokens: an index that is not an expert, or is named twice,
        counts as not routed, and a later `plan` or `megatron_ncclep.check()` raises InputError on
        all ranks.
        """
        number, capacity, buffers = self._protocol.begin_plan(topk_idx)
        stream = self.streams.keep(topk_idx)
        # Everything is queued before the host knows how much arrives; it is rarely more than
        # expected.
        report = self._overflow_report
        with Refusing(self._shared, "plan"):
            handle = self._native.plan(
                topk_idx=topk_idx.contiguous(),
                most_tokens=capacity.most_tokens,
                number=number,
                alignment=self.config.block_alignment,
                max_recv_rows=capacity.limit or 0,
                counts=buffers.counts,
                token_routes=buffers.token_routes,
                routes=buffers.routes,
                max_pairs=capacity.max_pairs,
                max_assignments=capacity.max_assignments,
                kept=buffers.kept,
                lacked=None if report is None else report.for_kernel(),
                num_sms=self.num_sms,
                stream=stream,
                leaves_unused=not zero_unused,
            )
        # The plan object is made while the device works; in exact mode the sizes follow.
        num_tokens, top_k = topk_idx.shape
        rows_on_host = None
        if capacity.limit is None:
            rows_on_host = torch.empty(self.num_local_experts, dtype=torch.int64, device="cpu")
        plan = NativePlan(
            plan_id=number,
            num_tokens=num_tokens,
            top_k=top_k,
            made_by=self,
            num_rows=capacity.limit or 0,
            counts=buffers.counts,
            token_routes=buffers.token_routes,
            routes=buffers.routes,
            most_tokens=capacity.most_tokens,
            handle=handle,
            stream=stream,
            shared=self._shared,
            rows_on_host=rows_on_host,
        )
        if rows_on_host is not None:
            self._wait_for_sizes(plan, rows_on_host, topk_idx)
        return plan

    def _wait_for_sizes(
        self, plan: NativePlan, rows_on_host: torch.Tensor, topk_idx: torch.Tensor
    ) -> None:
        """Complete an exact plan; receive its routes again where they had no room."""
        native = self._native
        sizes = native.wait_for_sizes(
            plan=plan.handle, rows_of_expert=rows_on_host, stream=plan.stream
        )
        if sizes is None:
            self._shared.raise_failure()
        assert sizes is not None  # otherwise the device has reported a failure, which was raised
        if sizes.first_bad_rank >= 0:
            self._protocol.raise_bad_routing(topk_idx)
        plan.num_rows = sizes.num_rows
        if not sizes.has_room:
            needed = (sizes.num_pairs, sizes.num_assignments)
            size = native.routes_size(*needed, plan.most_tokens)
            memory = try_allocate("a plan's routes", plan.routes.new_empty, size)
            if isinstance(memory, str):  # the other ranks have moved on
                self._shared.refuse("plan", memory)
            plan.routes = memory
            with Refusing(self._shared, "plan"):
                native.plan_receive(
                    plan=plan.handle,
                    routes=plan.routes,
                    max_pairs=sizes.num_pairs,
                    max_assignments=sizes.num_assignments,
                    num_sms=self.num_sms,
                    stream=plan.stream,
                )
        self._protocol.record_load(plan, sizes.num_assignments)

    def dispatch(
        self, plan: RoutePlan, x: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.dispatch`."""
        call = self._protocol.begin_rows("dispatch", plan, x, w, RowsCall.of_dispatch)
        self._describe(call)
        with Refusing(self._shared, "dispatch"):
            self._native.dispatch(**call.arguments(self.num_sms))
        return call.rows, call.row_w

    def combine(
        self, plan: RoutePlan, y: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.combine`."""

        def allocate(plan: NativePlan, y: torch.Tensor, w: torch.Tensor | None) -> RowsCall:
            num_sums = self._native.sums_size(plan.handle, self.num_sms, row_bytes_of(y))
            return RowsCall.of_combine(plan, y, w, num_sums)

        call = self._protocol.begin_rows("combine", plan, y, w, allocate)
        self._describe(call)
        with Refusing(self._shared, "combine"):
            self._native.combine(**call.arguments(self.num_sms))
        return call.tokens, call.topk_w

    def make_low_latency(self, sizes: LowLatencySizes, number: int) -> NativeLowLatency:
        """See `create_low_latency`."""
        self.require_open()
        return NativeLowLatency(self._shared, self.streams, self.config, sizes)

    def _release(self) -> None:
        """Release the windows, which the group's last engine frees."""
        self.group.resources.release(self._name, self.timeout_s)

    def _describe(self, call: RowsCall) -> None:
        """Log at level DEBUG how dispatch and combine share their CTAs, once per kind of row.

        See `csrc/native/rows/cta_roles.h`.
        """
        kind = row_bytes, top_k = row_bytes_of(call.rows), call.plan.top_k
        if self.group.rank != 0 or kind in self._described:
            return
        self._described.add(kind)
        native, num_sms, num_ranks = extension.load(), self.num_sms, self.group.size
        staging, pulling = native.split_dispatch(num_sms)
        adding, sending, summing = native.split_combine(num_sms, num_ranks, top_k, row_bytes)
        self.group.announce(
            f"native: rows of {row_bytes} bytes, top-{top_k}, {num_ranks} ranks, {num_sms} SMs: "
            f"CTAs of dispatch: {staging} staging, {pulling} pulling; of combine: {adding} adding, "
            f"{sending} sending, {summing} summing",
            logging.DEBUG,
        )
