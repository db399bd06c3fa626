"""The engine on NVIDIA's NCCL EP: HT-mode kernels of libnccl_ep.so, through its C interface.

The library fixes when it makes a group how many tokens a rank may have and how long a row may be.
Neither is known when an engine is made, so its staging memory is made at the first dispatch, and
anew, on all ranks together, when a larger batch or a longer row comes (`nccl_ep_staging.py`).

How many rows each rank receives is worked out here, from the counts of picks that the ranks
exchange, so that a plan can exist before the length of its rows is known.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import extension, libraries
from megatron_ncclep.engines.agreement import agree_on_routes, agree_on_rows, on_all_ranks
from megatron_ncclep.engines.communicator import communicator_of
from megatron_ncclep.engines.engine import EVERY_PART_ROUNDED, NOT_ROUTED, EngineCaps, RoutePlan
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.engines.nccl_ep_staging import MAX_TOKENS, NcclEpPlan, Route, Staging
from megatron_ncclep.engines.overflow import drop_what_does_not_fit, rows_needed
from megatron_ncclep.engines.overflow_report import Shortage
from megatron_ncclep.engines.rows_limit import can_drop, rows_limit
from megatron_ncclep.errors import EngineUnavailableError, GroupClosedError, LibraryError

CAPS = EngineCaps(
    name="nccl_ep",
    reduction=EVERY_PART_ROUNDED,
    payload_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    row_bytes_multiple=16,
    options=frozenset(
        {"alignment", "check_calls", "max_recv_rows", "num_sms", "on_overflow", "timeout_s"}
    ),
    max_tokens=MAX_TOKENS,
    max_top_k=32,
    max_local_experts=256,
    min_ranks=2,
    max_plan_bytes=64 * 2**20,
    compiles_at_run_time=True,
)
# Of libnccl_ep, as csrc/nccl_ep/api.h declares it; its constructor checks it once more.
INTERFACE = (0, 2)
MAX_RANKS_PER_NODE = 8
MAX_NODES = 8
# Its barriers' indices overlap beyond 34 SMs; beyond 16 it works over NVLink only.
MAX_SMS = 34
MAX_SMS_BETWEEN_NODES = 16
MIN_COMPUTE_CAPABILITY = (9, 0)


def obstacle(group: EpGroup, config: EpConfig, num_experts: int | None) -> str | None:
    """Say why the engine cannot run for `group`; None if it can.  Collective.

    `CAPS` has what depends on `num_experts`.  What this rank alone finds, only this rank says.
    """
    nodes, timeout_s = group.ranks_per_node(config.timeout_s), config.timeout_s
    what = "open, looking for what keeps the engine 'nccl_ep' from running"
    problem = on_all_ranks(group, what, lambda: _own_obstacle(group, config, nodes), timeout_s)
    if group.gather_problems(problem, what, timeout_s):
        return problem
    try:
        communicator_of(group, timeout_s)
    except (EngineUnavailableError, LibraryError) as error:  # on all ranks
        return f"NCCL made no communicator: {error}"
    return None


def _own_obstacle(group: EpGroup, config: EpConfig, nodes: list[int]) -> str | None:
    """Say what is in the way on this rank; `nodes`: ranks of each machine.  Not collective."""
    if group.device.type != "cuda":
        return "it needs GPUs and a process group with the nccl backend"
    if problem := extension.obstacle():
        return problem
    if torch.cuda.get_device_capability(group.device) < MIN_COMPUTE_CAPABILITY:
        return f"{torch.cuda.get_device_name(group.device)} is older than Hopper (sm_90)"
    if len(nodes) > MAX_NODES or max(nodes) > MAX_RANKS_PER_NODE:
        return (
            f"the group has {len(nodes)} nodes with up to {max(nodes)} ranks: the library takes "
            f"{MAX_NODES} nodes of {MAX_RANKS_PER_NODE}"
        )
    most_sms = MAX_SMS if len(nodes) == 1 else MAX_SMS_BETWEEN_NODES
    if config.num_sms is not None and config.num_sms > most_sms:
        return f"num_sms {config.num_sms}: at most {most_sms} are safe on {len(nodes)} node(s)"
    return _library_obstacle()


def _library_obstacle() -> str | None:
    """Say what the library lacks in this process, if anything."""
    library = libraries.find_nccl_ep()
    if library is None:
        return "libnccl_ep.so was not found: pip install nccl-extensions"
    if library.version is not None and library.version[:2] != INTERFACE:
        return (
            f"{library.path} is version {libraries.version_text(library.version)}: this engine "
            f"knows the interface of {INTERFACE[0]}.{INTERFACE[1]} only"
        )
    nccl = libraries.loaded_nccl()
    needed = libraries.NCCL_OF_NCCL_EP.get(library.version) if library.version else None
    if nccl is not None and needed is not None and nccl.version != needed:
        have, want = (".".join(map(str, version or ("?",))) for version in (nccl.version, needed))
        return (
            f"{library.path.name} was built with NCCL {want} and takes no other, but this process "
            f"has NCCL {have}: pip install nvidia-nccl-cu13=={want}, or load that library first "
            "(LD_PRELOAD)"
        )
    if libraries.find_nvcc() is None:
        return (
            "it compiles its kernels at first use and there is no nvcc: set CUDA_HOME to a CUDA "
            "toolkit, or NCCL_EP_JIT_NVCC to its nvcc"
        )
    return None


class NcclEpEngine:
    """See `Engine`.  Ranks agree on the host before every call, beside the work on the device."""

    caps = CAPS

    def __init__(self, group: EpGroup, num_experts: int, config: EpConfig) -> None:
        """Collective; opens the library and makes the group's communicator, if need be."""
        self.group = group
        self.num_experts = num_experts
        self.num_local_experts = num_experts // group.size
        self.config = config
        self._staging_name = Staging.name(num_experts, config)
        self._staging: Staging = group.share(
            self._staging_name, lambda: Staging(group, num_experts, config)
        )
        self._shortage = Shortage.shared(group, config)
        self._row_bytes = 0  # of the longest row so far
        self._closed = False

    @torch.no_grad()
    def plan(self, topk_idx: torch.Tensor) -> NcclEpPlan:
        """See `Engine.plan`."""
        self._require_open()
        agreement = agree_on_routes(self.group, topk_idx, self.num_experts, self.caps, self.config)
        self._staging.free_unused()
        topk_idx = topk_idx.to(torch.int64, copy=True).contiguous()  # the plan's own
        counts = self._exchange_counts(topk_idx)
        alignment, num_local = self.config.alignment, self.num_local_experts
        num_tokens, top_k = topk_idx.shape
        limit = rows_limit(self.config, self.group.size, num_tokens, top_k, num_local)
        wanted = self._local(counts)
        if limit is not None and can_drop(self.config):
            if self._shortage is not None:
                self._shortage.note(rows_needed(counts, alignment), limit)
            topk_idx = drop_what_does_not_fit(topk_idx, counts, self.group.rank, alignment, limit)
            counts = self._exchange_counts(topk_idx)
        routed = self._local(counts)
        padded = (routed + alignment - 1) // alignment * alignment
        num_used = int(padded.sum())
        on_device = torch.stack([routed, padded, wanted - routed]).to(self.group.device)
        plan = NcclEpPlan(
            plan_id=agreement.call,
            num_tokens=num_tokens,
            top_k=top_k,
            num_experts=self.num_experts,
            num_rows=num_used if limit is None else limit,
            tokens_per_expert=on_device[1],
            routed_per_expert=on_device[0],
            num_dropped=on_device[2].sum(),
            topk_idx=topk_idx,
            host_counts=padded,
            num_used=num_used,
            num_staged_tokens=max(agreement.told),
            route=Route(),
        )
        if self._row_bytes:  # the layer has moved rows before: the library can plan now
            self._staging.bind(plan, self._row_bytes, alignment)
        return plan

    @torch.no_grad()
    def dispatch(
        self, plan: RoutePlan, x: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.dispatch`."""
        plan = self._agree("dispatch", plan, x, w)
        handle = self._bind(plan, x)
        num_rows = self._staging.rows_of(plan)
        rows = x.new_empty(num_rows, x.shape[1])
        row_w = None if w is None else w.new_empty(num_rows)
        handle.dispatch(
            x.contiguous(),
            None if w is None else w.contiguous(),
            rows,
            row_w,
            extension.current_stream(),
        )
        if plan.num_used < num_rows:
            rows[plan.num_used :].zero_()
            if row_w is not None:
                row_w[plan.num_used :].zero_()
        return rows[: plan.num_rows], None if row_w is None else row_w[: plan.num_rows]

    @torch.no_grad()
    def combine(
        self, plan: RoutePlan, y: torch.Tensor, w: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Engine.combine`."""
        plan = self._agree("combine", plan, y, w)
        handle = self._bind(plan, y)
        missing = self._staging.rows_of(plan) - plan.num_rows
        if missing:  # the library insists on its own number of rows
            y = torch.cat([y, y.new_zeros(missing, y.shape[1])])
            w = None if w is None else torch.cat([w, w.new_zeros(missing)])
        out = y.new_empty(plan.num_tokens, y.shape[1])
        home_w = None if w is None else w.new_empty(plan.num_tokens, plan.top_k)
        handle.combine(
            y.contiguous(),
            None if w is None else w.contiguous(),
            out,
            home_w,
            extension.current_stream(),
        )
        return out, home_w

    def close(self) -> None:
        """See `Engine.close`.  The last engine of the group frees the staging memory."""
        if self._closed:
            return
        self._closed = True
        self.group.release(self._staging_name, self.config.timeout_s)
        if self._shortage is not None:
            self.group.release(Shortage.name(self.config), self.config.timeout_s)

    def _agree(
        self, phase: str, plan: RoutePlan, rows: torch.Tensor, w: torch.Tensor | None
    ) -> NcclEpPlan:
        """Check the arguments of dispatch or combine on all ranks; return the plan, typed."""
        self._require_open()
        return agree_on_rows(
            phase,
            self.group,
            plan,
            NcclEpPlan,
            rows,
            w,
            self.num_experts,
            self.caps,
            self.config.timeout_s,
        )

    def _bind(self, plan: NcclEpPlan, rows: torch.Tensor) -> Any:
        """Return the library's handle of `plan`, for rows as long as those of `rows`."""
        row_bytes = rows.shape[1] * rows.element_size()
        self._row_bytes = max(self._row_bytes, row_bytes)
        return self._staging.bind(plan, row_bytes, self.config.alignment)

    def _exchange_counts(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Picks of every rank for every expert, int64 [num_ranks, num_experts] on the CPU."""
        expert = torch.where(topk_idx == NOT_ROUTED, self.num_experts, topk_idx).reshape(-1)
        mine = expert.new_zeros(self.num_experts + 1)
        mine = mine.scatter_add(0, expert, torch.ones_like(expert))[: self.num_experts]
        return self.group.gather(mine.cpu(), "plan, exchanging counts", self.config.timeout_s)

    def _local(self, counts: torch.Tensor) -> torch.Tensor:
        """Picks of all ranks for each expert of this rank."""
        first = self.group.rank * self.num_local_experts
        return counts[:, first : first + self.num_local_experts].sum(dim=0)

    def _require_open(self) -> None:
        if self._closed:
            raise GroupClosedError("the engine was closed: create a new one with create_engine()")
