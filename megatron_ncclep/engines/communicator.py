"""The NCCL communicator of an expert-parallel group: our own, so that torch's stays untouched."""

from __future__ import annotations

import threading
from typing import Any

import torch

from megatron_ncclep.engines import extension
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.engines.libraries import find_nccl
from megatron_ncclep.errors import EngineUnavailableError, PeerError

UNIQUE_ID_BYTES = 128


def communicator_of(group: EpGroup, timeout_s: float) -> Any:
    """Return the `_C.Communicator` over `group`, made at the first call.  Collective.

    All engines and layers of the group share it, until `EpGroup.close`: making one takes a second.

    Raises:
        EngineUnavailableError: no libnccl.so.2 is to be found.
        LibraryError: NCCL could not make it.
        PeerError: the other ranks did not come within `timeout_s` seconds.
    """
    return group.share("communicator", lambda: _create(group, timeout_s))


def _create(group: EpGroup, timeout_s: float) -> Any:
    native = extension.load()
    library = find_nccl()
    if library is None:
        raise EngineUnavailableError(
            "no libnccl.so.2 found: install nvidia-nccl-cu13 (or -cu12, whichever torch is for)"
        )
    nccl = native.Nccl(str(library.path))
    unique_id = nccl.unique_id() if group.rank == 0 else bytes(UNIQUE_ID_BYTES)
    theirs = group.exchange(unique_id, "open, exchanging NCCL's unique id", timeout_s)
    unique_id = theirs[:UNIQUE_ID_BYTES]

    # NCCL waits for all ranks without a deadline, so a thread does the waiting.
    made: list[Any] = []

    def make() -> None:
        torch.cuda.set_device(group.device)  # a thread has a current device of its own
        try:
            made.append(native.Communicator(nccl, unique_id, group.size, group.rank))
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=make, name="ncclep-communicator", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not made:
        raise PeerError(
            f"rank {group.rank} of {group.size}: no NCCL communicator over the expert-parallel "
            f"group within {timeout_s:g} s: look at the other ranks' output, or at NCCL's own with "
            "NCCL_DEBUG=INFO"
        )
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]
