"""The extension without a GPU: what it asks of NCCL and NVIDIA's libnccl_ep, and what it refuses.

A library of our own stands in for both (`fake_nccl.c`); it is compiled here.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import Recorder, compile_fake

from megatron_ncclep.errors import LibraryError, PeerError

native = pytest.importorskip("megatron_ncclep._C", exc_type=ImportError)
UNIQUE_ID = bytes([7]) * 128


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A libnccl and libnccl_ep in one."""
    return compile_fake(tmp_path_factory.mktemp("fake") / "libfake.so")


@pytest.fixture
def recorder(fake: Path) -> Recorder:
    return Recorder(fake)


def connect(fake: Path, num_ranks: int = 2, rank: int = 1, timeout_s: float = 60.0) -> Any:
    return native.Communicator(native.Nccl(str(fake)), UNIQUE_ID, num_ranks, rank, -1, timeout_s)


def group_and_handle(fake: Path, communicator: Any) -> tuple[Any, Any]:
    """Of NVIDIA's library."""
    group = native.NcclEpGroup(
        native.NcclEp(str(fake)), communicator, num_experts=16, max_tokens=128, max_recv_rows=0,
        row_bytes=256, top_k=4, num_sms=24, timeout_s=1.5,
    )  # fmt: skip
    memory = torch.empty(group.handle_bytes(16, 4), dtype=torch.uint8)
    return group, native.NcclEpHandle(group, 16, 4, memory)


def combine(handle: Any) -> None:
    handle.combine(torch.zeros(1, 8), None, torch.zeros(1, 8), None, 0)


def test_what_is_made_and_the_order_of_closing(fake: Path, recorder: Recorder) -> None:
    nccl = native.Nccl(str(fake))
    assert (nccl.version, nccl.unique_id(), nccl.path) == (23007, UNIQUE_ID, str(fake))
    communicator = connect(fake)
    assert (communicator.num_ranks, communicator.rank) == (2, 1)
    assert (communicator.lsa_size, communicator.num_domains) == (2, 1)
    assert recorder.lines() == ["CommInitRank ranks=2 rank=1 id=7..7"]
    group, handle = group_and_handle(fake, communicator)
    recorder.fail_next(3)
    with pytest.raises(LibraryError, match=r"ncclEpCombine failed: internal error; the last word"):
        combine(handle)
    for made in (handle, group, group, communicator, communicator):
        made.close()
    assert recorder.lines() == ["HandleDestroy 1", "GroupDestroy 1", "CommDestroy 1"]
    with pytest.raises(LibraryError, match="the NCCL EP handle was closed"):
        combine(handle)
    with pytest.raises(LibraryError, match="the NCCL EP group was closed"):
        group.handle_bytes(1, 1)


def test_what_is_dropped_frees_itself_only_where_that_is_local(
    fake: Path, recorder: Recorder
) -> None:
    """A forgotten handle is freed; a group and a communicator are not: that would be collective."""
    communicator = connect(fake)
    group, handle = group_and_handle(fake, communicator)
    recorder.lines()
    del handle, group, communicator
    assert recorder.lines() == ["HandleDestroy 1"]


def test_a_communicator_is_made_in_time_or_not_at_all(fake: Path) -> None:
    """NCCL itself waits for the other ranks without a deadline."""
    library = ctypes.CDLL(str(fake))
    library.fake_wait_for_ranks(300)
    with pytest.raises(PeerError, match=r"no communicator over the 2 ranks .* within 0\.05 s"):
        connect(fake, timeout_s=0.05)
    library.fake_wait_for_ranks(0)
    with pytest.raises(LibraryError, match="a deadline of -1 s"):
        connect(fake, timeout_s=-1)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    newer = compile_fake(tmp_path / "libnewer.so", ep_version=300)
    for make, path, message in (
        (native.NcclEp, str(newer), r"libnewer\.so is version 0\.3\.0: .* 0\.2 only"),
        (native.Nccl, "libnothing.so.9", "cannot open libnothing.so.9"),
        (native.NcclEp, "libc.so.6", "libc.so.6 has no ncclEpGetVersion"),
        (native.Nccl, "libc.so.6", "libc.so.6 has no ncclGetVersion"),
    ):
        with pytest.raises(LibraryError, match=message):
            make(path)


def test_what_is_no_object_or_no_size_is_refused(fake: Path) -> None:
    """None for a communicator was a null pointer, and a size beyond 64 bits was -1."""
    never_made = native.Communicator.__new__(native.Communicator)
    for wrong in (None, object(), 7, never_made):
        kind = RuntimeError if wrong is never_made else TypeError
        with pytest.raises(kind):
            native.Window(wrong, 4096)
        with pytest.raises(kind):
            native.GroupHandle(wrong, 16, 1.0)
    communicator = connect(fake)
    for num_bytes in (2**64, -1, 1.5, None):
        with pytest.raises((TypeError, OverflowError)):
            native.Window(communicator, num_bytes)


def test_a_window_that_nccl_does_not_make(fake: Path, recorder: Recorder) -> None:
    """NCCL says success, and its memory is given back."""
    communicator = connect(fake)
    recorder.lines()
    with pytest.raises(LibraryError, match=r"NCCL made no window: .*peer-to-peer.*CUMEM"):
        native.Window(communicator, 5000)
    assert recorder.lines() == ["MemAlloc 8192", "WindowRegister 1 8192 flags=1", "MemFree 1"]
    recorder.fail_next(3)
    with pytest.raises(LibraryError, match=r"ncclMemAlloc of \d+ bytes failed: internal error"):
        native.Window(communicator, 5000)
    assert recorder.lines() == ["MemAlloc 8192"]
    # The fake's NVLink domain has two ranks.
    with pytest.raises(LibraryError, match="only 2 of 4 ranks are in one NVLink domain"):
        native.Window(connect(fake, 4, 0), 4096)


BASE = 0x7F00_0000_1000


def window_head(base: int = BASE, rank: int = 1, world_rank: int = 1, stride: int = 2) -> bytes:
    return struct.pack("<QQiiI4x", 0xDEAD, base, rank, world_rank, stride)


def test_addresses_of_peers() -> None:
    expected = [BASE, BASE + 2 * 2**32, BASE + 4 * 2**32]
    assert native.window_peers(window_head(), rank=1, num_ranks=3) == expected
    alone = window_head(rank=0, world_rank=0, stride=0)
    assert native.window_peers(alone, rank=0, num_ranks=1) == [BASE]
    for head, message in (
        (window_head(world_rank=2), "names rank 2, place 1 of its domain, for rank 1"),
        (window_head(rank=0), "names rank 1, place 0 of its domain, for rank 1"),
        (window_head(base=0), "has no address"),
        (window_head(stride=0), "all ranks at one address"),
        (window_head(base=BASE + 8), "starts at 0x7f0000001008, not a multiple of 16"),
        (window_head()[:16], "32 bytes, not 16"),
    ):
        with pytest.raises(LibraryError, match=message):
            native.window_peers(head, rank=1, num_ranks=3)


@pytest.mark.parametrize("num_ranks", range(1, 33))
def test_every_kind_of_work_has_ctas_and_every_rank_warps(num_ranks: int) -> None:
    """Rows of 14336 bytes used to fail at their first combine, with 32 SMs from 29 ranks on and
    with 3 SMs from 5 ranks on, though the engine had been made: some rank had no warp that sent to
    it.  No test had more than 4 ranks.
    """
    fewest = native.native_min_sms(num_ranks)
    for num_ctas in {fewest, 3 + fewest, 16, 24, 32, 100}:
        dispatch = native.split_dispatch(num_ctas)
        assert sum(dispatch) == num_ctas
        assert min(dispatch) >= 1
        for top_k, row_bytes in itertools.product((1, 8, 32), (16, 4096, 14336, 16384, 57344)):
            adding, sending, summing = native.split_combine(num_ctas, num_ranks, top_k, row_bytes)
            assert adding + sending + summing == num_ctas
            assert min(adding, summing) >= 1
            assert 15 * adding >= num_ranks - 1
            # 200 KB hold the rings of so many warps, of 4 stages of at most 16 KB each.
            piece = min(row_bytes, 16384) if row_bytes != 57344 else 57344 // 4
            assert sending == 0 or sending * min(14, 200 * 1024 // (4 * piece)) >= num_ranks - 1
            assert sending == 0 or num_ranks > 4
    with pytest.raises(LibraryError, match=rf"{fewest - 1} SMs .* at least {fewest}"):
        native.split_combine(fewest - 1, num_ranks, 8, 64)


def test_the_examples_of_the_split() -> None:
    """Those in csrc/native/rows/cta_roles.h; and rows are staged in more phases the more come."""
    assert native.split_dispatch(32) == (11, 21)
    assert native.split_combine(32, 2, 8, 14336) == (18, 0, 14)
    assert native.split_combine(32, 4, 8, 14336) == (13, 0, 19)
    assert native.split_combine(32, 8, 8, 14336) == (10, 9, 13)
    phases = [native.num_phases_of(tokens, 14336) for tokens in (0, 1, 128, 4096, 65536)]
    assert phases == [1, 1, 2, 6, 9]
