"""What the native engines of one group share: windows, and word of what failed on the device.

Kernels wait for other ranks.  When such a wait passes its deadline no call is there that could
raise: the kernel makes its outputs NaN, later kernels of the group do nothing else, and the host
raises at the next occasion: the engine's next call, or `NativeGroup.check`.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_ncclep.engines import extension
from megatron_ncclep.engines.agreement import on_all_ranks
from megatron_ncclep.engines.communicator import communicator_of
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.errors import PeerError

# Phase in csrc/native/state.h.
PHASES = ("none", "plan", "plan, receiving routes", "dispatch", "combine")


class NativeGroup:
    """The extension's group for one number of experts, shared by the layers that have as many.

    Attributes:
        group: the ranks.
        native: the `_C.NativeGroup`.
    """

    def __init__(self, group: EpGroup, num_experts: int, timeout_s: float) -> None:
        """Collective; makes the group's communicator, if need be.

        Raises:
            LibraryError: on every rank, when one has no memory for it.
        """
        self.group = group
        communicator = communicator_of(group, timeout_s)
        self.native: Any = on_all_ranks(
            group,
            "making the native engine",
            lambda: extension.load().NativeGroup(communicator, num_experts, timeout_s),
            timeout_s,
        )

    def raise_failure(self) -> None:
        """Raise what is known to have failed on the device.  Waits for nothing; not collective.

        Raises:
            PeerError: a wait for another rank passed its deadline; names rank, phase and operation.
        """
        failure = self.native.failure()
        if failure is not None:
            raise PeerError(
                f"rank {self.group.rank} of {self.group.size}: rank {failure.peer} did not come in "
                f"{PHASES[failure.phase]}, operation {failure.epoch} of the group (deadline "
                f"{failure.deadline_s:g} s): it died, is late or left the group's order of calls; "
                "look at the other ranks' output. What this group has returned since is NaN"
            )

    def check(self) -> None:
        """Wait for what is queued in this group; raise as `raise_failure`.  Not collective.

        A CUDA graph that holds calls of the group is waited for if it was replayed on the current
        stream.  While that stream is being captured nothing can be waited for.
        """
        if not torch.cuda.is_current_stream_capturing():
            self.native.wait_until_idle()
            if self.native.was_captured:
                torch.cuda.current_stream(self.group.device).synchronize()
        self.raise_failure()

    def close(self) -> None:
        """Free the windows.  Collective."""
        self.native.close()
