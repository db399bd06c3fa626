"""What the ranks of one measurement share: groups, progress, deadlines, and outcomes.

Every wait has a deadline.  An engine's own is `timeout_s`; ranks that compare outcomes wait twice
as long, so that the engine's message comes first; a step that takes three times as long, in a
kernel that never ends say, ends the process with the stack of every thread.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.benchmark.subjects import Setting, UnavailableError
from megatron_ncclep.benchmark.timing import Timer
from megatron_ncclep.errors import PeerError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.pool import RankContext

# From the best to the worst; the ranks agree on the worst.
OUTCOMES = ("ok", "unavailable", "wrong", "failed")


class Ranks:
    """One rank's side of a measurement.  Made and closed by all ranks together.

    Args:
        context: the ranks; all of the process's world.
        timeout_s: seconds that a rank waits for the others.
        what: is measured, in words: the name of a shape.
        shows: whether rank 0 says what is done next, on stderr: stdout holds the table only.

    Attributes:
        rank, num_ranks, on_gpu: of this process.
        setting: where subjects run.
        group: of the ranks that are measured.
        timer: over the same ranks.
    """

    def __init__(
        self,
        context: RankContext,
        timeout_s: float,
        what: str,
        shows: bool = False,
    ) -> None:
        self._timeout_s, self._what, self._shows = timeout_s, what, shows and context.rank == 0
        self.rank, self.num_ranks = context.rank, context.num_ranks
        self.on_gpu = context.device == "cuda"
        backend = "nccl" if self.on_gpu else "gloo"
        # Beside what is measured: ranks compare outcomes even when the device is stuck.
        self._made: list[dist.ProcessGroup] = []
        self._control = self._new_group("gloo", 2)
        self.setting = Setting(
            rank=context.rank,
            num_ranks=context.num_ranks,
            device=context.device,
            timeout_s=timeout_s,
            new_group=lambda: self._new_group(backend),
        )
        self.group = self.setting.new_group()
        self.timer = Timer(self.group, context.device)

    def agree(self, status: str, reason: str | None) -> tuple[str, str | None]:
        """Give every rank the worst outcome of any of them and all reasons for it.  Collective."""
        self.deadline()  # what came before may have taken an engine's whole deadline
        try:
            every = self.gather((OUTCOMES.index(status), reason))
        except RuntimeError as error:
            raise PeerError(
                f"rank {self.rank}: no answer from the other ranks within "
                f"{2 * self._timeout_s:g} s; here: {reason or status}. {error}"
            ) from error
        worst = max(outcome for outcome, _ in every)
        reasons = dict.fromkeys(text for outcome, text in every if outcome == worst and text)
        return OUTCOMES[worst], "; ".join(reasons) or None

    def attempt(self, call: Callable[[], str | None]) -> tuple[str, str | None]:
        """Run `call` and give every rank the worst outcome of any, and why.  Collective.

        Args:
            call: returns what is wrong with a result on this rank, if anything is.
        """
        try:
            reason = call()
            status = "wrong" if reason else "ok"
        except UnavailableError as error:
            status, reason = "unavailable", str(error)
        except Exception as error:
            status, reason = "failed", f"{type(error).__name__}: {error}"
        return self.agree(status, reason)

    def gather(self, mine: Any) -> list[Any]:
        """Give every rank what each of them has, in the order of ranks.  Collective."""
        every: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(every, mine, group=self._control)
        return every

    def largest(self, mine: dict[str, int] | None) -> dict[str, int] | None:
        """The largest value of any rank, key by key.  Collective."""
        every = self.gather(mine)
        return None if mine is None else {key: max(m[key] for m in every) for key in mine}

    def step(self, what: str) -> None:
        """Say what is done next, and how long it may take at most."""
        if self._shows:
            print(f"{self._what}: {what}", file=sys.stderr, flush=True)
        self.deadline()

    def deadline(self) -> None:
        """Start the time anew after which the process is ended."""
        faulthandler.dump_traceback_later(3 * self._timeout_s, exit=True)

    def own_stream(self) -> AbstractContextManager[Any]:
        """A stream that CUDA graphs can be captured on, which the default one is not."""
        return torch.cuda.stream(torch.cuda.Stream()) if self.on_gpu else nullcontext()

    def wait_for_device(self) -> None:
        """Wait until the device has done what was queued."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def close(self) -> None:
        """Release the groups and what ends a rank that hangs.  Collective."""
        self.stop()
        for group in reversed(self._made):
            EpGroup.of(group).close()
            dist.destroy_process_group(group)

    def stop(self) -> None:
        """End the deadline."""
        faulthandler.cancel_dump_traceback_later()

    def _new_group(self, backend: str, patience: float = 1) -> dist.ProcessGroup:
        """All ranks as a process group of its own: one subject's failure is not another's."""
        timeout = timedelta(seconds=patience * self._timeout_s)
        group = dist.new_group(backend=backend, timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)  # every rank is a member
        self._made.append(group)
        return group


class DeviceMemory:
    """Device memory that a subject takes, from here on."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()
            self._outside = self._outside_torch()

    def growth(self, shared_bytes: int = 0) -> dict[str, int] | None:
        """Bytes at the peak of torch's allocator, and bytes held outside of it; None on a CPU.

        Args:
            shared_bytes: of torch's that were there before and that the subject needs.
        """
        if not self._on_gpu:
            return None
        return {
            "torch_bytes": torch.cuda.max_memory_allocated() - self._allocated + shared_bytes,
            "other_bytes": self._outside_torch() - self._outside,
        }

    @staticmethod
    def _outside_torch() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()
