"""Staging memory of NVIDIA's NCCL EP: made when rows come, grown with them, freed when unused.

The library fixes the number of tokens of a rank and the length of a row when it makes a group, and
plans are bound to the group that they were made for (`Route`).  So when a larger batch or a longer
row arrives, all ranks together make another group, and the previous one is freed once no plan of
any rank is bound to it.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_ncclep import envs
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.engine import RoutePlan
from megatron_ncclep.engines.overflow import rows_limit
from megatron_ncclep.errors import EngineUnavailableError
from megatron_ncclep.libraries import extension, search
from megatron_ncclep.libraries import nccl_ep as nccl_ep_library
from megatron_ncclep.ranks.communicator import communicator_of
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource

if TYPE_CHECKING:
    from megatron_ncclep import _C

# The most tokens of a rank that libnccl_ep supports.
MAX_TOKENS = 8192
# Staging is made for a power of two of tokens, at least this many, so that slightly varying batches
# neither grow it nor recompile kernels.
MIN_STAGED_TOKENS = 128


class Route:
    """The library's side of a plan: a handle in the staging memory that it was made for."""

    def __init__(self) -> None:
        self.handle: Any = None
        self.memory: torch.Tensor | None = None
        self.staged: Any = None


@dataclass(eq=False)
class NcclEpPlan(RoutePlan):
    """Routes as NVIDIA's library keeps them.

    Attributes:
        topk_idx: int64 [num_tokens, top_k], without the assignments that static mode dropped.
        order: int64 [num_tokens, top_k], the caller's top-k slot of each assignment of `topk_idx`;
            None: the same slot.
        host_counts: int64 [num_local_experts] on the CPU: `tokens_per_expert`.
        num_used: rows up to the end of the last block; `num_rows` in exact mode.
        num_staged_tokens: the most tokens that any rank has.
        route: the library's handle for `topk_idx`.
    """

    topk_idx: torch.Tensor
    order: torch.Tensor | None
    host_counts: torch.Tensor
    num_used: int
    num_staged_tokens: int
    route: Route

    def tokens_per_expert_on_host(self) -> torch.Tensor:
        """Return `tokens_per_expert` as a CPU tensor; does not wait."""
        return self.host_counts


def open_library() -> tuple[_C.NcclEp, dict[str, str]]:
    """Open the libnccl_ep of `find_nccl_ep`, and tell it where its sources are.  Not collective.

    Returns:
        the library, and the environment variables to set when it makes a group.

    Raises:
        EngineUnavailableError: there is none.
    """
    library = nccl_ep_library.find_nccl_ep()
    if library is None:
        raise EngineUnavailableError(nccl_ep_library.NO_LIBRARY)
    for name, folder in nccl_ep_library.jit_folders(library).items():
        if envs.get(name) is None:
            os.environ[name] = str(folder)  # the library reads it when it compiles
    native = extension.load().NcclEp(str(library.path))
    return native, nccl_ep_library.group_modes(library)


class Staging(Resource):
    """NVIDIA's group: staging memory that the layers of a group with the same experts share.

    Attributes:
        adds_by_assignment: combine adds the ranks' parts in the order of a token's assignments.
    """

    def __init__(self, group: EpGroup, num_experts: int, config: EpConfig) -> None:
        self._group, self._num_experts, self._config = group, num_experts, config
        timeout_s = group.deadline_s(config)
        self._communicator = communicator_of(group, timeout_s)
        self._library, self._modes = group.hosts.on_all_ranks(
            "opening libnccl_ep", open_library, timeout_s
        )
        self.adds_by_assignment: bool = envs.get(nccl_ep_library.PULL_PUSH)
        self._staged: Any = None
        self._limits = (0, 0, 0)  # tokens, bytes of a row, assignments of a token
        self._num_rows = 0  # static mode: of every dispatched tensor
        self._routes: weakref.WeakSet[Route] = weakref.WeakSet()
        # Staging memory that was outgrown, and the routes that were bound to it.
        self._retired: list[tuple[Any, weakref.WeakSet[Route]]] = []

    @staticmethod
    def name(num_experts: int, config: EpConfig) -> str:
        """The name under which engines of a group share staging memory: those with equal staging.

        What a `max_recv_rows` that is a text means also depends on other options.
        """
        rows, of = config.max_recv_rows, ""
        if isinstance(rows, str):
            of = f" of {config.max_tokens_per_rank} tokens aligned to {config.block_alignment}"
        return f"nccl_ep {num_experts} {rows}{of} {config.num_sms}"

    def rows_of(self, plan: NcclEpPlan) -> int:
        """Rows of the tensor that the library fills for a plan that is bound to this memory.

        In static mode as many as the memory was made for: at least a rank's tokens and, with a
        limit that depends on the batch, at least the limit of the largest batch.
        """
        return plan.num_rows if self._config.max_recv_rows is None else self._num_rows

    def bind(self, plan: NcclEpPlan, row_bytes: int, alignment: int) -> Any:
        """Return the handle of `plan` for rows of `row_bytes`.  Collective when it makes one."""
        route = plan.route
        needed = (plan.num_staged_tokens, row_bytes, plan.top_k)
        is_larger = any(n > limit for n, limit in zip(needed, self._limits, strict=True))
        if self._staged is None or is_larger:
            self._grow(needed)
        if route.handle is None or route.staged is not self._staged:
            device, num_local = self._group.device, self._num_experts // self._group.size
            num_bytes = self._staged.handle_bytes(alignment, plan.top_k)
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            handle = extension.load().NcclEpHandle(self._staged, alignment, plan.top_k, memory)
            counters = torch.empty(num_local + 1, dtype=torch.int64, device=device)
            handle.update(plan.topk_idx, counters[1:], counters[:1], extension.current_stream())
            # Only now: if a step above fails, the route is unchanged.
            route.handle, route.memory, route.staged = handle, memory, self._staged
            self._routes.add(route)
        return route.handle

    def release_memory(self) -> None:
        """Free the staging memory, which the next rows make again.  Collective."""
        self.close()
        self._routes = weakref.WeakSet()

    def close(self) -> None:
        """Free the staging memory.  Collective."""
        torch.cuda.synchronize(self._group.device)
        for staged in [*(old for old, _ in self._retired), self._staged]:
            if staged is not None:
                staged.close()
        self._staged, self._retired = None, []

    def free_unused(self) -> None:
        """Free outgrown staging memory that no plan of any rank is bound to.  Collective.

        Every call of `plan` calls this; if nothing was outgrown, the ranks exchange nothing.
        """
        if not self._retired:
            return
        # A route that has moved rows since then is bound to the newer memory.
        bound = [sum(r.staged is staged for r in routes) for staged, routes in self._retired]
        what = "freeing outgrown staging memory of nccl_ep"
        timeout_s = self._group.deadline_s(self._config)
        in_use = self._group.hosts.gather(bound, what, timeout_s).sum(dim=0).tolist()
        if not all(in_use):
            torch.cuda.synchronize(self._group.device)
        for (staged, _), number in zip(self._retired, in_use, strict=True):
            if number == 0:
                staged.close()
        self._retired = [old for old, number in zip(self._retired, in_use, strict=True) if number]

    def _grow(self, needed: tuple[int, int, int]) -> None:
        """Make staging memory that holds `needed` too.  Collective, with the same `needed`.

        The old memory is freed once no plan of any rank is bound to it.

        Raises:
            LibraryError: on every rank, when one cannot make it.  There is none then.
        """
        tokens, row_bytes, top_k = (
            max(n, had) for n, had in zip(needed, self._limits, strict=True)
        )
        tokens = min(max(MIN_STAGED_TOKENS, 1 << (tokens - 1).bit_length()), MAX_TOKENS)
        if self._staged is not None:
            self._retired.append((self._staged, self._routes))
            self._staged, self._limits, self._routes = None, (0, 0, 0), weakref.WeakSet()
            self.free_unused()
        num_ranks = self._group.size
        limit = rows_limit(self._config, num_ranks, tokens, top_k, self._num_experts // num_ranks)
        num_rows = 0 if limit is None else max(limit, tokens)

        def make() -> Any:
            with nccl_ep_library.environment(self._modes):
                return extension.load().NcclEpGroup(
                    self._library,
                    self._communicator,
                    num_experts=self._num_experts,
                    max_tokens=tokens,
                    max_recv_rows=num_rows,
                    row_bytes=row_bytes,
                    top_k=top_k,
                    num_sms=self._config.num_sms or 0,
                    # The group keeps it permanently.  Hosts agree before its kernels wait for each
                    # other, so a late first step does not count against it.
                    timeout_s=self._config.timeout_s,
                )

        what = f"nccl_ep: making staging memory for {tokens} tokens of {row_bytes} bytes"
        timeout_s = self._group.deadline_s(self._config)
        self._staged = self._group.hosts.on_all_ranks(what, make, timeout_s)
        self._limits, self._num_rows = (tokens, row_bytes, top_k), num_rows
        self._group.announce(
            f"nccl_ep: staging memory for {tokens} tokens of {row_bytes} bytes on each rank; "
            f"NVIDIA's kernels for them are compiled at first use ({search.find_nvcc()}, a few "
            "seconds for each step, then cached in "
            f"{envs.get('NCCL_EP_JIT_CACHE_DIR') or 'the user cache folder'})"
        )
