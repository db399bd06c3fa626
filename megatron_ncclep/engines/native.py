"""This project's own engine: kernels on NCCL's windows, for ranks in one NVLink domain.

The kernels and how they work: `csrc/native/`.  Here is what the host does: agree with the other
ranks, allocate what a plan keeps, and queue.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import checks, extension, native_windows
from megatron_ncclep.engines.agreement import agree_on_routes, agree_on_rows
from megatron_ncclep.engines.communicator import communicator_of
from megatron_ncclep.engines.engine import HOME_PART_UNROUNDED, EngineCaps, RoutePlan
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.engines.native_obstacle import DEFAULT_NUM_SMS, MAX_EXPERTS
from megatron_ncclep.errors import GroupClosedError, InputError, PeerError

CAPS = EngineCaps(
    name="native",
    reduction=HOME_PART_UNROUNDED,
    payload_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    row_bytes_multiple=16,
    options=frozenset({"alignment", "max_recv_rows", "num_sms", "timeout_s"}),
    max_tokens=65536,
    max_top_k=32,
    max_local_experts=MAX_EXPERTS,
    captures_static=True,
    device_deadline=True,
)
# Windows are made for a multiple of this many tokens, and of more where there are many.
MIN_TOKENS = 128
# A plan has room for this many times the picks that are expected to arrive.
ROOM = 1.25
CHUNK = 128  # tokens; kChunk in csrc/native/state.h
PHASES = ("none", "plan", "plan, receiving routes", "dispatch", "combine")  # Phase there


@dataclass(frozen=True)
class NativePlan(RoutePlan):
    """Routes as the kernels keep them.

    Attributes:
        counts: int64 [2 * num_local_experts + 1]: padded and real rows of the local experts, and
            the number of dropped picks.
        home: int32 [4, num_tokens]: what is known of each token at home.
        routes: int32: the pairs and picks that this rank receives, with room for more; in static
            mode for as many as can come.
        most_tokens: the most tokens that any rank has.
        handle: the `_C.NativePlan` over the three tensors.
        rows_on_host: `tokens_per_expert` on the CPU; None in static mode, where no host waits.
    """

    counts: torch.Tensor
    home: torch.Tensor
    routes: torch.Tensor
    most_tokens: int
    handle: Any
    rows_on_host: torch.Tensor | None

    def tokens_per_expert_on_host(self) -> torch.Tensor:
        """See `RoutePlan.tokens_per_expert_on_host`; in static mode it waits for the stream."""
        return self.tokens_per_expert.cpu() if self.rows_on_host is None else self.rows_on_host

    def nbytes(self) -> int:
        """Bytes of device memory that the plan keeps alive."""
        return self.counts.nbytes + self.home.nbytes + self.routes.nbytes


class NativeEngine:
    """See `Engine`.

    In static mode no call waits for the device, so that all of them can be captured in a CUDA
    graph.  A graph must not run beside other work of the group on another stream.  A batch that is
    larger than all before, or has longer rows, is refused during and after a capture: windows that
    grow are made anew, and the graph would go on with the old ones.

    Autograd records nothing of it, whatever its arguments need: results are new tensors, which
    kernels write.
    """

    caps = CAPS

    def __init__(self, group: EpGroup, num_experts: int, config: EpConfig) -> None:
        """Collective; makes the group's communicator, if need be."""
        self.group = group
        self.num_experts = num_experts
        self.num_local_experts = num_experts // group.size
        self.config = config
        self.num_sms = config.num_sms or DEFAULT_NUM_SMS
        self._name = f"native {num_experts}"
        self._native: Any = group.share(
            self._name,
            lambda: extension.load().NativeGroup(
                communicator_of(group, config.timeout_s), num_experts, config.timeout_s
            ),
        )
        self._row_bytes = 16  # of the longest row so far
        # Picks that the next plan may bring, as a multiple of what a rank without imbalance gets.
        self._crowding = ROOM
        self._described: set[tuple[int, int]] = set()
        self._closed = False

    def plan(self, topk_idx: torch.Tensor) -> NativePlan:
        """See `Engine.plan`.

        The device checks the values of `topk_idx`.  In static mode nobody waits for it: what is no
        expert, or named twice, counts as not routed, and a later call of `plan` raises InputError
        on all ranks.
        """
        self._begin()
        try:
            agreement = agree_on_routes(
                self.group, topk_idx, self.num_experts, self.caps, self.config, self._topk_problem
            )
        except InputError:
            self._forget_bad_routing()
            raise
        num_tokens, top_k = topk_idx.shape
        most_tokens = max(agreement.told)
        self._reserve(most_tokens, top_k, self._row_bytes)
        native, device, stream = self._native, topk_idx.device, extension.current_stream()
        num_sms, alignment, limit = self.num_sms, self.config.alignment, self.config.max_recv_rows
        num_local = self.num_local_experts

        counts = torch.empty(2 * num_local + 1, dtype=torch.int64, device=device)
        home = torch.empty(4, num_tokens, dtype=torch.int32, device=device)
        picks = topk_idx.contiguous()
        num_chunks = (most_tokens + CHUNK - 1) // CHUNK
        handle = extension.load().NativePlan(counts, home, num_chunks, top_k)

        def receive(max_pairs: int, max_picks: int) -> torch.Tensor:
            size = native.routes_size(max_pairs, max_picks, num_chunks)
            routes = torch.empty(size, dtype=torch.int32, device=device)
            native.plan_receive(handle, max_pairs, max_picks, routes, num_sms, stream)
            return routes

        # All is queued before the host knows how much arrives; it seldom is more than expected.
        most_pairs = self.group.size * most_tokens
        most_picks = most_pairs * min(top_k, num_local)
        if limit is None:
            max_picks = min(most_picks, int(self._crowding * most_tokens * top_k))
            max_pairs = min(most_pairs, max_picks)
            ticket = native.plan_count(handle, picks, alignment, False, num_sms, stream)
            routes = receive(max_pairs, max_picks)
        else:
            kept = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
            native.plan_drop(handle, picks, alignment, limit, kept, num_sms, stream)
            native.plan_count(handle, kept, alignment, True, num_sms, stream)
            max_picks = min(limit, most_picks)
            routes = receive(min(most_pairs, max_picks), max_picks)
        # The plan is made while the device works: afterwards the host only writes down the sizes.
        plan = NativePlan(
            plan_id=agreement.call,
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=self.num_experts,
            num_rows=0 if limit is None else limit,
            tokens_per_expert=counts[:num_local],
            routed_per_expert=counts[num_local:-1],
            num_dropped=counts[-1],
            counts=counts,
            home=home,
            routes=routes,
            most_tokens=most_tokens,
            handle=handle,
            rows_on_host=torch.empty(num_local, dtype=torch.int64) if limit is None else None,
        )
        if limit is None:
            sizes = native.wait_for_sizes(handle, ticket, plan.rows_on_host)
            if sizes is None:
                self._raise_failure()
            if sizes.bad_ranks:
                self._raise_bad_routing(topk_idx)
            object.__setattr__(plan, "num_rows", sizes.num_rows)
            if sizes.num_pairs > max_pairs or sizes.num_picks > max_picks:
                object.__setattr__(plan, "routes", receive(sizes.num_pairs, sizes.num_picks))
                self._crowding = ROOM * sizes.num_picks / (most_tokens * top_k)
        return plan

    def dispatch(
        self, plan: RoutePlan, x: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.dispatch`."""
        plan = self._agree("dispatch", plan, x, w)
        rows = x.new_empty(plan.num_rows, x.shape[1])
        row_w = None if w is None else w.new_empty(plan.num_rows)
        self._native.dispatch(
            plan.handle,
            _aligned(x),
            None if w is None else w.contiguous(),
            rows,
            row_w,
            self.num_sms,
            extension.current_stream(),
        )
        return rows, row_w

    def combine(
        self, plan: RoutePlan, y: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.combine`."""
        plan = self._agree("combine", plan, y, w)
        out = y.new_empty(plan.num_tokens, y.shape[1])
        home_w = None if w is None else w.new_empty(plan.num_tokens, plan.top_k)
        self._native.combine(
            plan.handle,
            _aligned(y),
            None if w is None else w.contiguous(),
            y.new_empty(self._native.sums_size(plan.handle, self.num_sms), y.shape[1]),
            out,
            home_w,
            self.num_sms,
            extension.current_stream(),
        )
        return out, home_w

    def close(self) -> None:
        """See `Engine.close`.  The last engine of the group frees the windows."""
        if self._closed:
            return
        self._closed = True
        self.group.release(self._name, self.config.timeout_s)

    def nbytes(self) -> int:
        """Bytes of symmetric memory that this rank holds; all engines of the group share it."""
        num_bytes: int = self._native.num_bytes
        return num_bytes

    def _begin(self) -> None:
        """What comes first in each call: raise what there is to raise, set the deadline."""
        if self._closed:
            raise GroupClosedError("the engine was closed: create a new one with create_engine()")
        self._raise_failure()
        self._native.timeout_s = self.config.timeout_s  # the group's other engines have theirs

    def _agree(
        self, phase: str, plan: RoutePlan, rows: torch.Tensor, w: torch.Tensor | None
    ) -> NativePlan:
        """Check the arguments of dispatch or combine on all ranks; return the plan, typed."""
        self._begin()
        agreed = agree_on_rows(
            phase,
            self.group,
            plan,
            NativePlan,
            rows,
            w,
            self.num_experts,
            self.caps,
            self.config.timeout_s,
        )
        row_bytes = rows.shape[1] * rows.element_size()
        self._row_bytes = max(self._row_bytes, row_bytes)
        self._reserve(agreed.most_tokens, agreed.top_k, row_bytes)
        self._describe(row_bytes, agreed.top_k)
        return agreed

    def _reserve(self, num_tokens: int, top_k: int, row_bytes: int) -> None:
        """Have windows for this much, the same on all ranks.  Collective when they grow."""
        native, timeout_s = self._native, self.config.timeout_s
        if native.fits(num_tokens, top_k, row_bytes):
            return
        is_captured = native.was_captured or torch.cuda.is_current_stream_capturing()
        native_windows.require_no_graph(self.group, is_captured, timeout_s)
        torch.cuda.synchronize(self.group.device)
        num_tokens = tokens_of_windows(num_tokens)
        native_windows.grow(self.group, native, num_tokens, top_k, row_bytes, timeout_s)

    def _describe(self, row_bytes: int, top_k: int) -> None:
        """Log at level DEBUG how the kernels are set up for such rows, once for each kind."""
        if self.group.rank != 0 or (row_bytes, top_k) in self._described:
            return
        self._described.add((row_bytes, top_k))
        text = configuration(self.num_sms, self.group.size, row_bytes, top_k)
        self.group.log_once(logging.DEBUG, text, text)

    def _raise_failure(self) -> None:
        """Raise PeerError when a wait on the device passed its deadline."""
        failure = self._native.failure()
        if failure is not None:
            raise PeerError(
                f"rank {self.group.rank} of {self.group.size}: rank {failure.peer} did not come in "
                f"{PHASES[failure.phase]}, operation {failure.epoch} of the group (deadline "
                f"{self.config.timeout_s:g} s): it died, is late or left the group's order of "
                "calls; look at the other ranks' output"
            )

    def _topk_problem(
        self, topk_idx: torch.Tensor, num_experts: int, device: torch.device, caps: EngineCaps
    ) -> str | None:
        """Say what is wrong with a routing, as far as one can without waiting for the device."""
        if bad_ranks := self._native.bad_ranks(forget=False):
            ranks = ", ".join(str(r) for r in range(self.group.size) if bad_ranks >> r & 1)
            return (
                f"in an earlier plan (static mode), topk_idx of rank {ranks} named what is not one "
                f"of the {num_experts} experts, or an expert twice for a token, or a routing map "
                "named more than top_k: those picks were not routed; without max_recv_rows the "
                "error comes in time and says which"
            )
        return checks.topk_shape_problem(topk_idx, device, caps)

    def _raise_bad_routing(self, topk_idx: torch.Tensor) -> None:
        """Raise the same InputError on all ranks, which know that a routing is bad.  Collective."""
        problem = checks.topk_value_problem(topk_idx, self.num_experts)
        raise InputError(
            f"plan: {self.group.gather_problems(problem, 'plan', self.config.timeout_s)}"
        )

    def _forget_bad_routing(self) -> None:
        """All ranks have raised: see to it that none does so again for the same plans."""
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.group.device)  # the news may still be on its way
            self._native.bad_ranks(forget=True)


def tokens_of_windows(num_tokens: int) -> int:
    """For how many tokens to make windows when a batch has `num_tokens`.

    At most an eighth more, or `MIN_TOKENS`: batches that grow a little must not make windows anew
    each time.  Example: 5000 tokens get windows for 5120.
    """
    step = max(MIN_TOKENS, (1 << num_tokens.bit_length()) // 16)
    return max(1, -(-num_tokens // step)) * step


def configuration(num_sms: int, num_ranks: int, row_bytes: int, top_k: int) -> str:
    """Say how dispatch and combine share their CTAs; see `csrc/native/split.h`."""
    native = extension.load()
    staging, pulling = native.split_dispatch(num_sms)
    adding, sending, summing = native.split_combine(num_sms, num_ranks, top_k)
    return (
        f"native: rows of {row_bytes} bytes, top-{top_k}, {num_ranks} ranks, {num_sms} SMs: "
        f"CTAs of dispatch: {staging} staging, {pulling} pulling; of combine: {adding} adding, "
        f"{sending} sending, {summing} summing"
    )


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """`rows` as the kernels read them: contiguous, in vectors of 16 bytes."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows
