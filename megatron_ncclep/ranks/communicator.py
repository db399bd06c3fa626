"""The NCCL communicator of an expert-parallel group: our own, separate from torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_ncclep.errors import EngineUnavailableError, EpError
from megatron_ncclep.libraries import extension
from megatron_ncclep.libraries.search import find_nccl
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.resources import Resource

if TYPE_CHECKING:
    from megatron_ncclep import _C

UNIQUE_ID_BYTES = 128


def communicator_of(group: EpGroup, timeout_s: float) -> Any:
    """Return the `_C.Communicator` over `group`, made on the first call.  Collective.

    All engines and layers of the group share it, until `EpGroup.close`: making one takes a second.

    Raises:
        EngineUnavailableError: libnccl.so.2 was not found.
        LibraryError: NCCL, or the extension, could not make it.
        PeerError: the other ranks did not come within `timeout_s` seconds.
        All but the last on every rank, whichever rank failed, and with its reason.
    """
    made = group.resources.share("communicator", lambda: _Communicator(_create(group, timeout_s)))
    return made.native


class _Communicator(Resource):
    def __init__(self, native: Any) -> None:
        self.native = native

    def close(self) -> None:
        self.native.close()

    def abort(self) -> None:
        self.native.abort()


def _create(group: EpGroup, timeout_s: float) -> Any:
    nccl, unique_id = group.hosts.on_all_ranks("opening NCCL", lambda: _open(group), timeout_s)
    theirs = group.hosts.exchange(unique_id, "open, exchanging NCCL's unique id", timeout_s)
    made: list[Any] = []
    try:
        # Another rank may use up its whole deadline here before it reports a failure.
        group.hosts.on_all_ranks(
            "making an NCCL communicator",
            lambda: made.append(_make(group, nccl, theirs[:UNIQUE_ID_BYTES], timeout_s)),
            2 * timeout_s,
        )
    except EpError:
        for communicator in made:  # not made on all ranks, so useless
            communicator.abort()
        raise
    return made[0]


def _open(group: EpGroup) -> tuple[_C.Nccl, bytes]:
    """Return the library, and on rank 0 NCCL's unique id, elsewhere zeros.  Not collective."""
    native = extension.load()
    library = find_nccl()
    if library is None:
        raise EngineUnavailableError(
            "no libnccl.so.2 found: install nvidia-nccl-cu13 (or -cu12, whichever torch is for)"
        )
    nccl = native.Nccl(str(library.path))
    return nccl, nccl.unique_id() if group.rank == 0 else bytes(UNIQUE_ID_BYTES)


def _make(group: EpGroup, nccl: _C.Nccl, unique_id: bytes, timeout_s: float) -> _C.Communicator:
    """Return the communicator.  Waits for the other ranks' NCCL until the deadline."""
    return extension.load().Communicator(
        nccl,
        unique_id=unique_id,
        num_ranks=group.size,
        rank=group.rank,
        device=-1 if group.device.index is None else group.device.index,
        timeout_s=timeout_s,
    )
