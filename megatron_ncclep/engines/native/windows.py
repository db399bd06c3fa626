"""The windows of the native engine: their sizes, and the log line about them.

`csrc/native/host/group.cpp` makes them, on all ranks or on none, and has the ranks verify that they
reach each other's (`csrc/native/host/window_check.h`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from megatron_ncclep.libraries import extension
from megatron_ncclep.logs import get_logger
from megatron_ncclep.ranks.group import EpGroup

if TYPE_CHECKING:
    from megatron_ncclep import _C

MIB = 2**20
# Windows are made for a multiple of this many tokens, or of a larger step for large batches.
MIN_TOKENS = 128


def reserve(
    group: EpGroup, native: _C.GroupHandle, num_tokens: int, top_k: int, row_bytes: int
) -> None:
    """Make sure that windows are large enough; log on rank 0 how they have grown.

    Collective when they grow, with the same arguments: the most tokens of a rank, assignments of a
    token, and bytes of a row; waits for the device then.  The deadline is
    that of the last `NativeGroup.begin`.

    Raises:
        InputError: on every rank, when they must grow and a CUDA graph uses them.
        LibraryError: on every rank, when one has no memory, when NCCL makes no window, or when a
            rank does not reach another's memory.  No windows are left then.
        PeerError: a rank did not come in time.
    """
    held = native.num_bytes
    growth = native.reserve(
        num_tokens=tokens_of_windows(num_tokens),
        top_k=top_k,
        row_bytes=row_bytes,
        stream=extension.current_stream(),
        all_gather=group.hosts.exchange,
    )
    if growth is None or group.rank != 0:
        return
    # The first plan precedes the first row, so its windows are made without knowing row lengths.
    get_logger().log(
        logging.INFO if native.num_bytes >= MIB else logging.DEBUG,
        "native: windows grew from %.1f to %.1f MiB on each of %d ranks (%s)",
        held / MIB,
        native.num_bytes / MIB,
        group.size,
        growth,
    )


def tokens_of_windows(num_tokens: int) -> int:
    """The number of tokens to make windows for when a batch has `num_tokens`.

    At most an eighth more, or `MIN_TOKENS` more, so that slightly growing batches do not replace
    the windows each time.  Example: 5000 tokens get windows for 5120.
    """
    step = max(MIN_TOKENS, (1 << num_tokens.bit_length()) // 16)
    return max(1, -(-num_tokens // step)) * step
