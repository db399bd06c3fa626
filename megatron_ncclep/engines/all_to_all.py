"""The process group's own all-to-all, with a deadline: how engines without kernels move rows."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_ncclep.engines.group import EpGroup


def exchange(
    group: EpGroup,
    sent: torch.Tensor,
    sent_splits: list[int],
    received_splits: list[int],
    what: str,
    timeout_s: float,
) -> torch.Tensor:
    """Send `sent_splits[r]` entries of dimension 0 to rank r; return what comes, by source.

    Collective; raises what `EpGroup.wait` does.

    Args:
        group: the ranks.
        sent: [sum(sent_splits), ...].
        sent_splits: one number for each rank.
        received_splits: what each rank sends to this one.
        what: names the call in errors.
        timeout_s: seconds to wait for the other ranks.
    """
    received = sent.new_empty(sum(received_splits), *sent.shape[1:])
    group.wait(
        lambda process_group: dist.all_to_all_single(
            received,
            sent.contiguous(),
            received_splits,
            sent_splits,
            group=process_group,
            async_op=True,
        ),
        what,
        timeout_s,
    )
    return received


def exchange_rows(
    group: EpGroup,
    sent: torch.Tensor,
    sent_splits: list[int],
    received_splits: list[int],
    what: str,
    timeout_s: float,
) -> torch.Tensor:
    """Like `exchange`, as bytes: exact for every dtype, whatever the backend can add up."""
    as_bytes = sent.contiguous().view(torch.uint8)
    received = exchange(group, as_bytes, sent_splits, received_splits, what, timeout_s)
    return received.view(sent.dtype)
