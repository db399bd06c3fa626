"""The process group's own all-to-all, with a deadline: how engines without kernels move rows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megatron_ncclep.errors import PeerError, RefusedError
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.torch_group import BUSY_WAIT_S, wait_until_let_go


class AllToAll:
    """An all-to-all that has been started: see `exchange`."""

    def __init__(
        self,
        group: EpGroup,
        sent: torch.Tensor,
        sent_splits: list[int],
        received_splits: list[int],
        what: str,
        timeout_s: float,
    ) -> None:
        """Start it.  Collective; does not wait.  The arguments are those of `exchange`."""
        self._group, self._what, self._timeout_s = group, what, timeout_s
        self._sent = sent.contiguous()  # must stay until it is over
        self._received = sent.new_empty(sum(received_splits), *sent.shape[1:])
        self._work: Any = None
        self._failure: RuntimeError | None = None
        process_group = group.torch.process_group
        try:
            self._work = dist.all_to_all_single(
                self._received,
                self._sent,
                received_splits,
                sent_splits,
                group=process_group,
                async_op=True,
            )
        except RuntimeError as error:  # a peer is gone; `finish` raises it
            self._failure = error

    def finish(self, on_host: bool = True) -> torch.Tensor:
        """Return the received entries, by source; raises the same errors as `TorchGroup.wait`.

        Args:
            on_host: wait for it, at most until the deadline.  Otherwise only the current stream
                waits, where the group has one.
        """

        def work(process_group: dist.ProcessGroup) -> Any:
            if self._failure is not None:
                raise self._failure
            return self._work

        if on_host or self._failure is not None or self._group.device.type != "cuda":
            self._group.torch.wait(work, self._what, self._timeout_s)
            if self._group.device.type != "cuda":
                self._work = None
                wait_until_let_go(self._received)
        else:
            self._work.wait()
        return self._received


class PendingTransfers:
    """Exchanges of a group that no host has waited for; `check` waits, with a deadline."""

    def __init__(self, group: EpGroup) -> None:
        self._group = group
        self._last: torch.cuda.Event | None = None
        self._was_captured = False
        self._what, self._timeout_s = "", 0.0

    def record(self, what: str, timeout_s: float) -> None:
        """Record an event; `check` fails if it has not completed by the deadline."""
        if self._group.device.type != "cuda":
            return
        self._what, self._timeout_s = what, timeout_s
        if torch.cuda.is_current_stream_capturing():
            self._was_captured = True
            return
        self._last = torch.cuda.Event()
        self._last.record()

    def check(self) -> None:
        """Wait until the last exchange is over, also in a CUDA graph that was replayed on the
        current stream.  While that stream is being captured waiting is impossible.

        Raises:
            PeerError: it was not over in time.
            RefusedError: it was not, because a rank that shares memory with this one refused a
                call.
        """
        if self._last is None and not self._was_captured:
            return
        if torch.cuda.is_current_stream_capturing():
            return
        waited_for = self._last
        if self._was_captured or waited_for is None:
            waited_for = torch.cuda.Event()
            waited_for.record()
        start = time.monotonic()
        while not waited_for.query():
            waited = time.monotonic() - start
            if waited > BUSY_WAIT_S:
                for rank in range(self._group.size):
                    if refusal := self._group.hosts.link.refusal(rank):
                        raise RefusedError(refusal)
                time.sleep(BUSY_WAIT_S)
            if waited > self._timeout_s:
                raise PeerError(
                    f"rank {self._group.rank} of {self._group.size}: {self._what} was not over "
                    f"within the deadline of {self._timeout_s:g} s: a rank died, is late, refused "
                    "a call, or made a different sequence of calls; look at the other ranks' output"
                )


def exchange(
    group: EpGroup,
    sent: torch.Tensor,
    sent_splits: list[int],
    received_splits: list[int],
    what: str,
    timeout_s: float,
) -> torch.Tensor:
    """Send `sent_splits[r]` entries of dimension 0 to rank r; return the received ones, by source.

    Sends bytes: exact for every dtype, even those that the backend does not support.  Collective;
    raises the same errors as `TorchGroup.wait`.

    Args:
        sent: [sum(sent_splits), ...].
        sent_splits: one number for each rank.
        received_splits: the number that each rank sends to this one.
    """
    # An extra dimension holds the bytes of each number.
    as_bytes = sent.contiguous().unsqueeze(-1).view(torch.uint8)
    started = AllToAll(group, as_bytes, sent_splits, received_splits, what, timeout_s)
    return started.finish().view(sent.dtype).squeeze(-1)


def exchange_lists(
    group: EpGroup,
    lists: Sequence[tuple[torch.Tensor, list[int], list[int]]],
    what: str,
    timeout_s: float,
) -> list[torch.Tensor]:
    """`exchange` several tensors with separate splits, in one message to each rank.

    Collective.  Each message has a fixed cost, which dominates for small tensors.

    Args:
        lists: each tensor with its `sent_splits` and `received_splits`, as for `exchange`.

    Returns:
        the received entries of each tensor, by source.
    """
    if len(lists) == 1:
        return [exchange(group, *lists[0], what, timeout_s)]
    sent, sent_lengths, received_lengths = [], [], []
    for tensor, sent_splits, received_splits in lists:
        entry_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
        sent_lengths.append([entry_bytes * number for number in sent_splits])
        received_lengths.append([entry_bytes * number for number in received_splits])
        sent.append(tensor.flatten().view(torch.uint8).split(sent_lengths[-1]))
    received = exchange(
        group,
        torch.cat(list(chain(*zip(*sent, strict=True)))),
        [sum(of_rank) for of_rank in zip(*sent_lengths, strict=True)],
        [sum(of_rank) for of_rank in zip(*received_lengths, strict=True)],
        what,
        timeout_s,
    )
    pieces = received.split(list(chain(*zip(*received_lengths, strict=True))))
    return [
        torch.cat(pieces[number :: len(lists)]).view(tensor.dtype).view(-1, *tensor.shape[1:])
        for number, (tensor, _, _) in enumerate(lists)
    ]
