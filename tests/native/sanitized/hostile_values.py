"""Values that nobody should pass, made from those that one should."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, nan
from typing import Any

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype, LIBC.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
LIBC.free.argtypes = [ctypes.c_void_p]
LIBC.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

BYTES = {
    "bool": 1, "uint8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4,
    "float64": 8,
}  # fmt: skip
DTYPES = {name: f"torch.{name}" for name in (*BYTES, "complex64")}
MOST_BYTES = 1 << 24  # that a tensor's lies are backed by


class MischiefError(ValueError):
    """Raised by objects that we pass."""


class Numbers:
    """Looks like a tensor; its memory has its very size."""

    def __init__(self, dtype: str, *shape: int, shift: int = 0) -> None:
        self.name, self.dtype, self.shape = dtype, DTYPES[dtype], shape
        size = BYTES.get(dtype, 8)
        for n in shape:
            size *= max(0, n)
        self.address = 0
        if 0 < size <= MOST_BYTES:
            self.memory = LIBC.malloc(size + shift)
            LIBC.memset(self.memory, 0, size + shift)
            self.address = self.memory + shift

    def __del__(self) -> None:
        if self.address:
            LIBC.free(self.memory)

    def data_ptr(self) -> Any:
        return self.address

    def is_contiguous(self) -> Any:
        return True

    def __repr__(self) -> str:
        lies = {k: v for k, v in vars(self).items() if k not in ("memory", "address")}
        return f"{type(self).__name__}({lies})"


def liar(true: Numbers, **lies: Any) -> Numbers:
    """A tensor like `true`, of which some names say something else."""
    made = Numbers(true.name, *true.shape)
    vars(made).update(lies)
    return made


def mischief(*_: Any) -> Any:
    raise MischiefError("mischief")


def wrong_tensors(true: Numbers) -> Iterator[Any]:
    """Tensors that differ from the right one in one respect."""
    yield from (Numbers(dtype, *true.shape) for dtype in DTYPES if dtype != true.name)
    yield from (
        Numbers(true.name, *true.shape[:i], n, *true.shape[i + 1 :])
        for i in range(len(true.shape))
        for n in (0, 1, true.shape[i] + 1, true.shape[i] - 1, 3 * true.shape[i], 131, 1 << 20)
        if n != true.shape[i]
    )
    yield Numbers(true.name)
    yield Numbers(true.name, 1, *true.shape)
    yield Numbers(true.name, *reversed(true.shape), 1)
    yield Numbers(true.name, *true.shape, shift=2)
    yield Numbers(true.name, *true.shape, shift=8)
    for sizes in ((-1,), (-4, -2), (2**31, 2**31, 2**31), (2**62, 2**62, 0), (2**63,),
                  ("x",), (None,), (1.5,), [2, 2], None, 7, ((1,),)):  # fmt: skip
        yield liar(true, shape=sizes)
    for dtype in ("torch.int32\0", "int32", None, 3, object(), b"torch.int64"):
        yield liar(true, dtype=dtype)
    for address in (0, -1, None, 2**64, 2**70, "x", 1.5, [1]):
        yield liar(true, address=address, data_ptr=lambda address=address: address)
    for answer in (False, None, 0, 1, "yes", []):
        yield liar(true, is_contiguous=lambda answer=answer: answer)
    yield liar(true, data_ptr=mischief)
    yield liar(true, is_contiguous=mischief)
    yield liar(true, data_ptr=7)
    yield type("NoShape", (), {"data_ptr": lambda self: 0, "is_contiguous": lambda self: True})()
    yield Numbers  # the class


INTEGERS = (-1, 0, 1, 2, 3, 7, 129, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63,
            2**64 - 1, 2**64, -(2**31), -(2**31) - 1, -(2**63), 10**30)  # fmt: skip
FLOATS = (nan, inf, -inf, -1.0, 0.0, 1e300, 1e-320, 1e9 + 1, 1.5)
TEXTS = ("", "x", "/x\0y", "ü" * 300, "\ud800", "/a/b", "x" * 5000)
OTHERS = (None, True, b"", b"x" * 128, b"\0" * 200, [], [1], [-1], ["x"], {}, (1, 2), object(), len)


@dataclass(frozen=True)
class Address:
    """A right address; one that leads nowhere is for the device to find, and not tried."""

    value: int
    alignment: int

    def wrong(self) -> Iterator[Any]:
        yield from (0, -1, 2**64, 10**30, None, "x", 1.5, nan, b"x", [1], object())
        if self.alignment > 1:
            yield self.value + self.alignment // 2


def wrong_values(right: Any, uninitialised: list[Any]) -> Iterator[Any]:
    """What to try in place of `right`."""
    if isinstance(right, Address):
        yield from right.wrong()
        return
    if isinstance(right, list) and right and isinstance(right[0], Address):
        yield from ([wrong] for wrong in right[0].wrong())
        yield from ([], [right[0].value] * 40, right[0].value, None, "xy", {}, [[1]])
        return
    yield from (*INTEGERS, *FLOATS, *TEXTS, *OTHERS, *uninitialised)
    if isinstance(right, Numbers):
        yield from wrong_tensors(right)
