"""Torch's process group of some ranks: whether it is alive, and collectives with a deadline."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.errors import GroupClosedError, PeerError, UnsupportedError
from megatron_ncclep.libraries.tested import numbers
from megatron_ncclep.ranks.uncopied import Uncopied

# A wait for the device polls without pause for this long, and then with pauses of this length.
BUSY_WAIT_S = 1e-3
# Most bytes of an error's text; there is room for one from the first exchange on.
TEXT_BYTES = 1024
# Seconds for NCCL to abort a communicator.
ABORT_S = 5.0
# Seconds for gloo's threads to let go of a tensor: it takes them microseconds.
LET_GO_S = 1.0
_CPU = torch.device("cpu")
_CLOSED = (
    "the expert-parallel group was closed, by megatron_ncclep.close() or by Megatron's "
    "destroy_model_parallel(): create the engine (or build the model) again"
)
_DESTROYED = (
    "the expert-parallel process group was destroyed: create the engine (or the model) again after "
    "torch.distributed is initialised again"
)


class TorchGroup(Uncopied):
    """The ranks of one process group, as torch sees them.

    Attributes:
        device: the device of the tensors that the group's backend moves.
        whole: the whole group, if this is a part of it.
        is_closed: the group is not used any more, although torch may know it.
        lost: says which ranks have died or left, for errors; empty if that is not known.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        whole: TorchGroup | None = None,
        called: str = "the expert-parallel group",
    ) -> None:
        """Not collective; refers to torch's group weakly.

        Args:
            whole: the whole group, if this is a part of it that torch does not list; the part lives
                as long as the whole group.
            called: the group's name in errors of `wait`.
        """
        self._called = called
        self._process_group = weakref.ref(process_group)
        self.whole, self.is_closed = whole, False
        self.lost: Callable[[], str] = str
        if whole is None:
            require_alive(process_group)
        self.rank, self.size = process_group.rank(), process_group.size()
        if whole is None:
            on_gpu = "nccl" in dist.get_backend_config(process_group) and torch.cuda.is_available()
            self.device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else _CPU
        else:
            on_gpu, self.device = whole.device.type == "cuda", whole.device
        self._room: torch.Tensor | None = None  # of exchanges
        # Collectives must not wait for the model's queued work.
        self._stream = torch.cuda.Stream() if on_gpu else None

    @property
    def is_alive(self) -> bool:
        """Whether the group is open and torch still knows the process group."""
        if self.is_closed:
            return False
        if self.whole is not None:
            return self.whole.is_alive
        group = self._process_group()
        return group is not None and _is_alive(group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The torch group; raises GroupClosedError once it is destroyed, or this one closed."""
        self.require_open()
        group = self._process_group()
        if group is None or not self.is_alive:
            raise GroupClosedError(_DESTROYED)
        return group

    def is_of(self, process_group: dist.ProcessGroup) -> bool:
        """Whether this is the group of `process_group`."""
        return self._process_group() is process_group

    def require_open(self) -> None:
        """Raise GroupClosedError once the group is closed."""
        if self.is_closed:
            raise GroupClosedError(_CLOSED)

    def exchange_by_torch(self, mine: bytes, what: str, timeout_s: float) -> bytes:
        """See `Hosts.exchange`; by a collective.

        Raises:
            UnsupportedError: a CUDA graph is being captured, which would record the collective and
                not run it.
        """
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f"{what}: the ranks cannot agree while a CUDA graph is captured, because not all "
                "of them share memory: set max_recv_rows and run the same calls once before the "
                "capture, or put the ranks on one node and in one network namespace, with "
                "NCCLEP_HOST_EXCHANGE on"
            )
        with torch.cuda.stream(self._stream):  # no effect on a CPU
            room = self._room_for(len(mine)).view(self.size + 1, -1)
            sent, received = room[0], room[1:]
            sent.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))

            def start(group: dist.ProcessGroup) -> Any:
                if self._stream is None:  # gloo: half of the time of its all-gather
                    to_all = sent.expand(self.size, -1).contiguous()
                    return dist.all_to_all_single(received, to_all, group=group, async_op=True)
                # Unlike all_gather, it needs no memory of its own.
                flat = received.view(-1)
                return dist.all_gather_into_tensor(flat, sent, group=group, async_op=True)

            self.wait(start, what, timeout_s)
            wait_until_let_go(received)
            return bytes_of(received)

    @torch.inference_mode(False)  # a later exchange may be outside of it
    def _room_for(self, num_bytes: int) -> torch.Tensor:
        """Memory for such a message of each rank and one more, kept for the next exchange: a rank
        that has no memory left must still be able to say so.
        """
        size = (self.size + 1) * num_bytes
        if self._room is None or len(self._room) < size:
            at_least = (self.size + 1) * TEXT_BYTES
            self._room = torch.empty(max(size, at_least), dtype=torch.uint8, device=self.device)
        return self._room[:size]

    def wait(self, start: Callable[[dist.ProcessGroup], Any], what: str, timeout_s: float) -> None:
        """Start a collective on the torch group and wait for it, at most `timeout_s` seconds.

        Raises:
            GroupClosedError: the process group was destroyed.
            PeerError: the backend gave up or the deadline passed; names this rank and `what`.
        """
        group = self.process_group
        try:
            work = start(group)
            if self._stream is None:
                work.wait(timedelta(seconds=timeout_s))
            else:
                self._wait_for_device(work, timeout_s)
        except RuntimeError as error:  # what every backend raises for a dead peer or a timeout
            named = self
            if self.whole is not None:
                named, what = self.whole, f"{what} on this node"
                self._abort()
            # The backend's own text rarely names the rank, and may only describe a consequence.
            lost = self.lost() or "a rank died, is late, or made a different sequence of calls"
            raise PeerError(
                f"rank {named.rank} of {named.size}: no answer from the other ranks of "
                f"{self._called} in {what} (deadline {timeout_s:g} s): {lost}; look at the "
                f"other ranks' output. {error}"
            ) from error

    def _abort(self) -> None:
        """End the collectives of a group that torch does not list.  Not collective.

        At the end of the process torch aborts the groups that it lists, and NCCL frees their memory
        only when the device is idle: a kernel of this group that waits for a dead rank would keep
        the process from ending (pytorch issue 119797).  Waits at most ABORT_S: a process that ends
        meanwhile is ended by SIGABRT.
        """
        group = self._process_group()
        if group is None or self.device.type != "cuda":
            return

        def abort() -> None:
            backend: Any = group._get_backend(self.device)
            backend.abort()

        # NCCL tells its kernels at once, but then waits for those of other groups.
        thread = threading.Thread(target=abort, name="ncclep-abort", daemon=True)
        thread.start()
        thread.join(ABORT_S)

    def _wait_for_device(self, work: Any, timeout_s: float) -> None:
        """Wait until the collective `work` is done on the device.

        NCCL's own wait with a deadline sleeps a millisecond at a time, longer than a whole layer
        takes; so this polls an event.
        """
        work.wait()  # the current stream, not the host
        done = torch.cuda.Event()
        done.record()
        start = time.monotonic()
        while not done.query():
            waited = time.monotonic() - start
            if waited > timeout_s:
                raise RuntimeError("the collective did not finish")
            if waited > BUSY_WAIT_S:
                time.sleep(BUSY_WAIT_S)


def wait_until_let_go(received: Any) -> None:
    """Wait until gloo's threads no longer hold a tensor that a collective has filled.

    Up to torch 2.7 a thread that is the last to hold one needs Python's lock to free it, and waits
    for ever for a process that keeps the lock while it destroys the group and waits for the thread.
    """
    give_up = time.monotonic() + LET_GO_S
    has_bug = numbers(torch.__version__) < (2, 8)
    # One use is Python's; a thread lets go of what was sent first.
    while has_bug and received._use_count() > 1 and time.monotonic() < give_up:
        time.sleep(0)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """A copy of a tensor's bytes; torch itself needs numpy for that."""
    tensor = tensor.cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _is_alive(process_group: dist.ProcessGroup) -> bool:
    """Whether torch still knows the group.

    Every call of an engine asks this; it uses the fastest of torch's functions that fail for an
    unknown group.
    """
    try:
        dist.get_process_group_ranks(process_group)
    except KeyError:
        return False
    return True


def require_alive(process_group: dist.ProcessGroup) -> None:
    """Raise GroupClosedError when torch no longer knows the group."""
    if not _is_alive(process_group):
        raise GroupClosedError(_DESTROYED)
