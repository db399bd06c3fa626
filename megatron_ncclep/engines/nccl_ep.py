"""The engine on NVIDIA's NCCL EP: HT-mode kernels of libnccl_ep.so, through its C interface.

The library fixes when it makes a group how many tokens a rank may have and how long a row may be.
Neither is known when an engine is made, so its staging memory is made at the first dispatch, and
anew, on all ranks together, when a larger batch or a longer row comes (`_Staging`).

How many rows each rank receives is worked out here, from the counts of picks that the ranks
exchange, so that a plan can exist before the length of its rows is known.
"""

from __future__ import annotations

import logging
import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ncclep import envs
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import extension, libraries
from megatron_ncclep.engines.agreement import agree_on_routes, agree_on_rows
from megatron_ncclep.engines.communicator import communicator_of
from megatron_ncclep.engines.engine import EVERY_PART_ROUNDED, NOT_ROUTED, EngineCaps, RoutePlan
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.engines.overflow import drop_what_does_not_fit
from megatron_ncclep.errors import EngineUnavailableError, GroupClosedError

CAPS = EngineCaps(
    name="nccl_ep",
    reduction=EVERY_PART_ROUNDED,
    payload_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    row_bytes_multiple=16,
    options=frozenset({"alignment", "max_recv_rows", "num_sms", "timeout_s"}),
    max_tokens=8192,
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
# Staging is made for a power of two of tokens, at least this many, so that batches which vary a
# little neither grow it nor have kernels compiled anew.
MIN_STAGED_TOKENS = 128


def obstacle(group: EpGroup, config: EpConfig, num_experts: int | None) -> str | None:
    """Say why the engine cannot run for `group`; None if it can.  Collective.

    `CAPS` has what depends on `num_experts`.
    """
    nodes = group.ranks_per_node(config.timeout_s)
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


@dataclass(frozen=True)
class NcclEpPlan(RoutePlan):
    """Routes as NVIDIA's library keeps them.

    Attributes:
        topk_idx: int64 [num_tokens, top_k], without the picks that static mode dropped.
        host_counts: int64 [num_local_experts] on the CPU: `tokens_per_expert`.
        num_used: rows up to the end of the last block; `num_rows` unless in static mode.
        num_staged_tokens: the most tokens that any rank has.
        route: what the library made of `topk_idx`.
    """

    topk_idx: torch.Tensor
    host_counts: torch.Tensor
    num_used: int
    num_staged_tokens: int
    route: _Route

    def nbytes(self) -> int:
        """Bytes of device memory that the plan keeps alive."""
        return super().nbytes() - self.host_counts.nbytes + self.route.nbytes()

    def tokens_per_expert_on_host(self) -> torch.Tensor:
        """Return `tokens_per_expert` as a CPU tensor; waits for nothing."""
        return self.host_counts


class NcclEpEngine:
    """See `Engine`.  Ranks agree on the host before every call, beside the work on the device."""

    caps = CAPS

    def __init__(self, group: EpGroup, num_experts: int, config: EpConfig) -> None:
        """Collective; opens the library and makes the group's communicator, if need be."""
        self.group = group
        self.num_experts = num_experts
        self.num_local_experts = num_experts // group.size
        self.config = config
        self._staging_name = f"nccl_ep {num_experts} {config.max_recv_rows} {config.num_sms}"
        self._staging: _Staging = group.share(
            self._staging_name, lambda: _Staging(group, num_experts, config)
        )
        self._row_bytes = 0  # of the longest row so far
        self._closed = False

    @torch.no_grad()
    def plan(self, topk_idx: torch.Tensor) -> NcclEpPlan:
        """See `Engine.plan`."""
        self._require_open()
        agreement = agree_on_routes(self.group, topk_idx, self.num_experts, self.caps, self.config)
        topk_idx = topk_idx.to(torch.int64, copy=True).contiguous()  # the plan's own
        counts = self._exchange_counts(topk_idx)
        limit, alignment = self.config.max_recv_rows, self.config.alignment
        wanted = self._local(counts)
        if limit is not None:
            topk_idx = drop_what_does_not_fit(topk_idx, counts, self.group.rank, alignment, limit)
            counts = self._exchange_counts(topk_idx)
        routed = self._local(counts)
        padded = (routed + alignment - 1) // alignment * alignment
        num_used = int(padded.sum())
        on_device = torch.stack([routed, padded, wanted - routed]).to(self.group.device)
        plan = NcclEpPlan(
            plan_id=agreement.call,
            num_tokens=len(topk_idx),
            top_k=topk_idx.shape[1],
            num_experts=self.num_experts,
            num_rows=num_used if limit is None else limit,
            tokens_per_expert=on_device[1],
            routed_per_expert=on_device[0],
            num_dropped=on_device[2].sum(),
            topk_idx=topk_idx,
            host_counts=padded,
            num_used=num_used,
            num_staged_tokens=max(agreement.told),
            route=_Route(),
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


class _Route:
    """The library's side of a plan: a handle in the staging memory that it was made for."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.memory: torch.Tensor | None = None
        self.staged: Any = None

    def nbytes(self) -> int:
        return 0 if self.memory is None else self.memory.nbytes


class _Staging:
    """NVIDIA's group: staging memory that the layers of a group with the same experts share."""

    def __init__(self, group: EpGroup, num_experts: int, config: EpConfig) -> None:
        native = extension.load()
        library = libraries.find_nccl_ep()
        if library is None:
            raise EngineUnavailableError("libnccl_ep.so was not found: pip install nccl-extensions")
        for name, folder in libraries.jit_folders(library).items():
            if envs.get(name) is None:
                os.environ[name] = str(folder)  # the library reads it when it compiles
        self._group, self._num_experts, self._config = group, num_experts, config
        self._communicator = communicator_of(group, config.timeout_s)
        self._library = native.NcclEp(str(library.path))
        self._staged: Any = None
        self._retired: list[Any] = []
        self._limits = (0, 0, 0)  # tokens, bytes of a row, picks of a token
        self._routes: weakref.WeakSet[_Route] = weakref.WeakSet()

    def rows_of(self, plan: NcclEpPlan) -> int:
        """Rows of the tensor that the library fills: in static mode at least a rank's tokens."""
        if self._config.max_recv_rows is None:
            return plan.num_rows
        return max(plan.num_rows, self._limits[0])

    def bind(self, plan: NcclEpPlan, row_bytes: int, alignment: int) -> Any:
        """Return the handle of `plan` for rows of `row_bytes`.  Collective when it makes one."""
        route = plan.route
        needed = (plan.num_staged_tokens, row_bytes, plan.top_k)
        if any(n > limit for n, limit in zip(needed, self._limits, strict=True)):
            self._grow(needed)
        if route.handle is None or route.staged is not self._staged:
            native = extension.load()
            device = self._group.device
            route.staged = self._staged
            route.memory = torch.empty(
                self._staged.handle_bytes(alignment, plan.top_k), dtype=torch.uint8, device=device
            )
            route.handle = native.NcclEpHandle(self._staged, alignment, plan.top_k, route.memory)
            counters = torch.empty(
                self._num_experts // self._group.size + 1, dtype=torch.int64, device=device
            )
            route.handle.update(
                plan.topk_idx, counters[1:], counters[:1], extension.current_stream()
            )
            self._routes.add(route)
        return route.handle

    def close(self) -> None:
        """Free the staging memory.  Collective."""
        torch.cuda.synchronize(self._group.device)
        for staged in [*self._retired, self._staged]:
            if staged is not None:
                staged.close()
        self._staged, self._retired = None, []

    def _grow(self, needed: tuple[int, int, int]) -> None:
        """Make staging memory that holds `needed` too.  Collective, `needed` being the same.

        The old one is freed when no plan of any rank is bound to it.
        """
        tokens, row_bytes, top_k = (
            max(n, had) for n, had in zip(needed, self._limits, strict=True)
        )
        tokens = min(max(MIN_STAGED_TOKENS, 1 << (tokens - 1).bit_length()), CAPS.max_tokens or 0)
        if self._staged is not None:
            in_use = torch.tensor([len(self._routes)])
            what = "growing the staging memory of nccl_ep"
            if int(self._group.gather(in_use, what, self._config.timeout_s).sum()):
                self._retired.append(self._staged)
            else:
                torch.cuda.synchronize(self._group.device)
                self._staged.close()
        limit = self._config.max_recv_rows
        self._staged = extension.load().NcclEpGroup(
            self._library,
            self._communicator,
            num_experts=self._num_experts,
            max_tokens=tokens,
            max_recv_rows=0 if limit is None else max(limit, tokens),
            row_bytes=row_bytes,
            top_k=top_k,
            num_sms=self._config.num_sms or 0,
            timeout_s=self._config.timeout_s,
        )
        self._limits = (tokens, row_bytes, top_k)
        self._routes = weakref.WeakSet()
        if self._group.rank == 0:
            text = (
                f"nccl_ep: staging memory for {tokens} tokens of {row_bytes} bytes on each rank; "
                f"NVIDIA's kernels for them are compiled at first use "
                f"({libraries.find_nvcc()}, some seconds for each step, then cached in "
                f"{envs.get('NCCL_EP_JIT_CACHE_DIR') or 'the user cache folder'})"
            )
            self._group.log_once(logging.INFO, text, text)
