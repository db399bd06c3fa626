"""How the windows of the native engine grow, and how ranks verify that they reach each other's.

A rank computes the addresses of its peers' windows from a struct that NCCL keeps in device memory
and no header documents.  So whenever windows are made, the device first writes and reads words
across all ranks: wrong addresses cause an error, never wrong results.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ncclep.errors import InputError, LibraryError
from megatron_ncclep.libraries import extension
from megatron_ncclep.libraries.search import find_nccl
from megatron_ncclep.logs import get_logger
from megatron_ncclep.ranks.group import EpGroup

NAMES = ("control", "rows")  # of the windows that `_C.NativeGroup.windows` returns
ENDS = ("start", "end")
WORD_BYTES = 8
MIB = 2**20
# Windows are made for a multiple of this many tokens, or of a larger step where there are many.
MIN_TOKENS = 128


def reserve(
    group: EpGroup, native: Any, num_tokens: int, top_k: int, row_bytes: int, timeout_s: float
) -> None:
    """Make sure that windows are large enough, with the arguments of `grow`.

    Collective when they grow.

    Raises:
        InputError: on every rank, when they must grow and a CUDA graph uses them.
        LibraryError, PeerError: as `grow`.
    """
    if native.fits(num_tokens, top_k, row_bytes):
        return
    is_captured = native.was_captured or torch.cuda.is_current_stream_capturing()
    _require_no_graph(group, is_captured, timeout_s)
    torch.cuda.synchronize(group.device)
    grow(group, native, tokens_of_windows(num_tokens), top_k, row_bytes, timeout_s)


def tokens_of_windows(num_tokens: int) -> int:
    """The number of tokens to make windows for when a batch has `num_tokens`.

    At most an eighth more, or `MIN_TOKENS` more, so that slightly growing batches do not replace
    the windows each time.  Example: 5000 tokens get windows for 5120.
    """
    step = max(MIN_TOKENS, (1 << num_tokens.bit_length()) // 16)
    return max(1, -(-num_tokens // step)) * step


def grow(
    group: EpGroup, native: Any, num_tokens: int, top_k: int, row_bytes: int, timeout_s: float
) -> None:
    """Make windows of this capacity, empty and verified; log the sizes on rank 0.

    Collective, with the same arguments.  No work may be in flight on this rank's device.

    Args:
        group: the ranks.
        native: the group's `_C.NativeGroup`.
        num_tokens: of the rank with the most.
        top_k: assignments of a token.
        row_bytes: bytes of a row.
        timeout_s: seconds to wait for the other ranks, after each step.

    Raises:
        LibraryError: on every rank, when one has no memory, when NCCL makes no window, or when a
            rank does not reach another's memory.  No windows are left then.
        PeerError: a rank did not come in time.
    """
    held = native.num_bytes
    needed = {"tokens": num_tokens, "top-k": top_k, "row bytes": row_bytes}
    had = (native.max_tokens, native.max_top_k, native.row_bytes)
    cause = ", ".join(
        f"{name} {then} -> {now}"
        for (name, now), then in zip(needed.items(), had, strict=True)
        if now > then
    )

    def on_all_ranks(what: str, step: Callable[[], str | None], remedy: str) -> None:
        _on_all_ranks(group, native, what, step, f"({cause})", remedy, timeout_s)

    smaller = "if GPU memory ran out: use smaller micro-batches"
    on_all_ranks(
        "leaving its windows", lambda: None, _other()
    )  # no rank uses the old ones any longer
    on_all_ranks(
        "allocating its windows", lambda: native.allocate(num_tokens, top_k, row_bytes), smaller
    )
    open_checked(group, native, NAMES, cause, timeout_s)
    if group.rank == 0:
        # The first plan precedes the first row, so its windows are made without knowing row
        # lengths.
        level = logging.INFO if native.num_bytes >= MIB else logging.DEBUG
        get_logger().log(
            level,
            "native: windows grew from %.1f to %.1f MiB on each of %d ranks (%s)",
            held / MIB,
            native.num_bytes / MIB,
            group.size,
            cause,
        )


def open_checked(
    group: EpGroup, native: Any, names: tuple[str, ...], cause: str, timeout_s: float
) -> None:
    """Open windows that were allocated on all ranks, check and clear them.  Collective.

    Args:
        group: the ranks.
        native: the owner of the windows: a `_C.NativeGroup` or a `_C.NativeLowLatency`.
        names: of its windows.
        cause: why they are made, for errors.
        timeout_s: seconds to wait for the other ranks, after each step.

    Raises:
        LibraryError, PeerError: as `grow`.
    """

    def on_all_ranks(what: str, step: Callable[[], str | None]) -> None:
        _on_all_ranks(group, native, what, step, f"({cause})", _other(), timeout_s)

    on_all_ranks("opening its windows", native.open)
    on_all_ranks("writing to its windows", lambda: _write_own(group, native, names))
    on_all_ranks("checking its windows", lambda: _verify_peers_and_write(group, native, names))
    on_all_ranks("checking its windows", lambda: _verify_own(group, native, names))
    on_all_ranks("clearing its windows", native.clear)


def _other() -> str:
    return f"use the engine nccl_ep or reference, and report this with NCCL {find_nccl()}"


def _on_all_ranks(
    group: EpGroup,
    native: Any,
    what: str,
    step: Callable[[], str | None],
    cause: str,
    remedy: str,
    timeout_s: float,
) -> None:
    """Take a step, and raise on all ranks unless it succeeded on all of them."""
    try:
        problem = step()
    except Exception as error:  # of any kind: the other ranks have to know
        problem = str(error) if isinstance(error, LibraryError) else repr(error)
    if problems := group.gather_problems(problem, what, timeout_s):
        native.drop()
        raise LibraryError(f"engine 'native', {what} {cause}: {problems}; {remedy}")


def _require_no_graph(group: EpGroup, is_captured: bool, timeout_s: float) -> None:
    """Refuse to grow windows that a CUDA graph uses.  Collective.

    Args:
        group: the ranks.
        is_captured: whether this rank has captured calls of the group, or is capturing.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        InputError: on every rank, when any has.
        PeerError: a rank did not come in time.
    """
    problem = "a CUDA graph holds calls of this group" if is_captured else None
    if problems := group.gather_problems(problem, "letting its windows grow", timeout_s):
        raise InputError(
            "engine 'native': this batch has more tokens, a larger top-k or longer rows than all "
            f"before, and its windows cannot grow: {problems}; run a step with the largest batch "
            "before the first capture, or close the group's engines and create them again"
        )


# --- the check -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Probe:
    """A word that one rank writes for another, at one end of a window.

    Attributes:
        window, end: names of the place.
        peer: the other rank, or this one: kernels use its own address too.
        address: as this rank addresses it.
        value: different for each writer, reader, place and generation of windows.
    """

    window: str
    end: str
    peer: int
    address: int
    value: int


def _write_own(group: EpGroup, native: Any, names: tuple[str, ...]) -> None:
    """Write the words in this rank's own windows that the others read."""
    _store(_probes(group, native, names, remote=False, writes=True))


def _verify_peers_and_write(group: EpGroup, native: Any, names: tuple[str, ...]) -> str | None:
    """Read the words that the others wrote for this rank in their windows, and write words there.

    Returns:
        what is wrong with the first unexpected word, if there is one.
    """
    left = _probes(group, native, names, remote=True, writes=False)
    problem = _difference(left, "reads {seen} from the {end} of the {window} window of {peer}")
    _store(_probes(group, native, names, remote=True, writes=True))
    return problem


def _verify_own(group: EpGroup, native: Any, names: tuple[str, ...]) -> str | None:
    """Read what the others wrote to this rank's windows; say what is wrong, if anything."""
    brought = _probes(group, native, names, remote=False, writes=False)
    return _difference(
        brought, "finds {seen} where {peer} wrote to the {end} of its {window} window"
    )


def _probes(
    group: EpGroup, native: Any, names: tuple[str, ...], *, remote: bool, writes: bool
) -> list[_Probe]:
    """The words that this rank reads or writes, in its own windows or in its peers' (`remote`).

    Each end of a window has 2 R words: the window's own rank writes the first R, one for each
    reader; each writer r writes one of the last R.  The very last is the window's last 8 bytes.
    """
    me, size = group.rank, group.size
    is_left = remote != writes
    words = []
    for name, window in zip(names, native.windows, strict=True):
        for end in ENDS:
            start = 0 if end == "start" else window.num_bytes - 2 * size * WORD_BYTES
            for peer in range(size):
                writer, reader = (me, peer) if writes else (peer, me)
                place = reader if is_left else size + writer
                base = window.peers[peer] if remote else window.address
                subject = f"{name} {end} {is_left}".encode()
                numbers = struct.pack("<3q", native.generation, writer, reader)
                value = hashlib.blake2b(subject + numbers, digest_size=WORD_BYTES).digest()
                address = base + start + place * WORD_BYTES
                words.append(_Probe(name, end, peer, address, int.from_bytes(value, "little")))
    return words


def _store(words: list[_Probe]) -> None:
    extension.load().store_words([word.address for word in words], [word.value for word in words])


def _difference(words: list[_Probe], text: str) -> str | None:
    """Read `words`; describe the first with an unexpected value by `text`."""
    found = extension.load().load_words([word.address for word in words])
    wrong = [(w, seen) for w, seen in zip(words, found, strict=True) if seen != w.value]
    if not wrong:
        return None
    word, seen = wrong[0]
    what = text.format(
        seen=f"{seen:#018x}", end=word.end, window=word.window, peer=f"rank {word.peer}"
    )
    return (
        f"it {what}, at {word.address:#x}, and not {word.value:#018x} "
        f"({len(wrong)} of {len(words)} words are wrong)"
    )
