"""A folder of results is written by one run at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ncclep.errors import InputError
from megatron_ncclep.logs import get_logger

NAME = ".lock"
NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # by the folder's file system


@contextmanager
def held(folder: Path) -> Iterator[int]:
    """Make `folder`, and keep other runs out of it until the end of the `with`.

    The kernel ends the lock with the last process that has its file open, however that one ends.
    Where the file system knows no locks, a warning says so.

    Args:
        folder: the --out of a command.

    Yields:
        The lock's file, for children that hold it as long as they live.

    Raises:
        InputError: another run holds the lock, or the folder cannot be written.
    """
    lock = -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        _take(lock, folder)
    except OSError as error:
        raise InputError(
            f"--out {folder}: {error.strerror}: make room for it, or give another folder that can "
            "be written"
        ) from error
    else:
        yield lock
    finally:
        if lock >= 0:
            os.close(lock)


def _take(lock: int, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 1000).decode()
        raise InputError(
            f"--out {folder}: {holder or 'a process'}, or one that it started, is writing "
            "there: wait until it has ended, or give another --out"
        ) from None
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        get_logger().warning(
            "--out %s cannot be locked (%s): let no other run write there", folder, error.strerror
        )
    else:
        os.truncate(lock, 0)
        os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
