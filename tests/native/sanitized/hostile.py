"""Call everything that `csrc/bindings` binds with one wrong argument at a time; run by a test.

    python hostile.py EXTENSION FAKE_LIBRARY

The extension is one over the stand-ins of this folder, so that a GPU is not needed, kernels say
which of their assumptions does not hold, and AddressSanitizer sees what they touch.  Every call
either raises what a caller can handle or is as good as a right one; when one crashes, the last line
of the output says which.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from math import inf, nan
from types import ModuleType
from typing import Any

from objects import BYTES, Address, Numbers, Objects, Program, plain

from megatron_ncclep.errors import EpError

# What a caller can handle; AttributeError: of an object that looks like half a tensor.
REFUSALS = (EpError, TypeError, ValueError, OverflowError, AttributeError)
# Arguments that may be negative or not finite.
SAYS_NOTHING = (
    *("not_routed", "too_many_experts", "forget", "skips_exchange"),
    *("sends", "completes", "low_latency", "device", "number"),
)
TAKES_ADDRESSES = ("C.copy_rows", "C.copy_memory")
WRONG = (
    *(-1, 0, 1, 3, 129, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**64 - 1, 2**64, -(2**63)),
    *(nan, inf, -1.0, 1e300, "", "x", "/x\0y", None, b"", b"x" * 128, [], [-1], {}, object()),
)


def wrong_tensors(true: Numbers) -> Iterator[Any]:
    """Tensors that differ from the right one in one respect."""
    yield from (Numbers(dtype, *true.shape) for dtype in BYTES if dtype != true.name)
    for i, size in enumerate(true.shape):
        for n in {0, 1, size + 1, size - 1, 3 * size, 1 << 20} - {size}:
            yield Numbers(true.name, *true.shape[:i], n, *true.shape[i + 1 :])
    yield Numbers(true.name)
    yield Numbers(true.name, 1, *true.shape)
    yield Numbers(true.name, *true.shape, shift=2)
    for name, answer in (("data_ptr", 0), ("data_ptr", 2**64), ("is_contiguous", False)):
        liar = Numbers(true.name, *true.shape)
        setattr(liar, name, lambda answer=answer: answer)
        yield liar
    for lie in ({"shape": (2**62, 2**62, 0)}, {"shape": (-4, -2)}, {"dtype": "torch.complex64"}):
        liar = Numbers(true.name, *true.shape)
        vars(liar).update(lie)
        yield liar


def wrong_values(right: Any, uninitialised: list[Any]) -> Iterator[Any]:
    """What to try in place of `right`."""
    if isinstance(right, Address):  # one that leads nowhere is for the device to find
        yield from (0, -1, 2**64, None, "x", 1.5, [1])
        if right.alignment > 1:
            yield right.value + right.alignment // 2
    elif isinstance(right, list):
        yield from ([], [0], [right[0].value] * 40, right[0].value, None, "xy")
    else:
        yield from (*WRONG, *uninitialised)
        if isinstance(right, Numbers):
            yield from wrong_tensors(right)


class Hostile:
    """Calls of a program, and what came of them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.uninitialised = [
            cls.__new__(cls) for cls in vars(program.module).values() if isinstance(cls, type)
        ]
        self.complaints: list[str] = []

    def is_refused(self, call: Callable[..., Any], /, **arguments: Any) -> bool:
        self.program.nccl.fake_reset(0)
        try:
            call(**arguments)
        except Exception as error:
            # The text is pybind11's, of an object whose class has no __init__.
            if not isinstance(error, REFUSALS) and "non-held to held instance" not in str(error):
                self.complaints.append(f"{arguments} raised {type(error).__name__}: {error}")
            return True
        return False

    def make(self, name: str) -> tuple[Objects, Callable[..., Any], dict[str, Any]]:
        """Objects of its own for the call, and its right arguments."""
        o = Objects(self.program)
        Objects.BEFORE.get(name, lambda o: None)(o)
        return o, o.bound(name), o.arguments()[name]

    def try_all(self, name: str) -> None:
        """Call with right arguments, and with all of them right but one."""
        o, call, right = self.make(name)
        call(**plain(right))
        o, call, right = self.make(name)
        o.close()
        if name not in TAKES_ADDRESSES:  # nothing is at a closed window's
            is_refused = self.is_refused(call, **plain(right))
            if not is_refused and "stream" in right and not name.startswith("C."):
                self.complaints.append(f"{name} queues work of an object that is closed")
        for argument, value in right.items():
            print(f"{name}, {argument}", flush=True)
            o, call, right = self.make(name)
            for wrong in wrong_values(value, self.uninitialised):
                if self.is_refused(call, **{**plain(right), argument: wrong}):
                    continue
                is_number = isinstance(wrong, int | float) and argument not in SAYS_NOTHING
                is_shape = name == "group.begin" and argument != "timeout_s"  # it fits or not
                if is_number and not 0 <= wrong < inf and not is_shape:
                    self.complaints.append(f"{name} takes {wrong} for {argument}")
                o, call, right = self.make(name)  # the call may have changed something
            if self.is_refused(call, **plain(right)):
                self.complaints.append(f"{name} does not work any more after wrong {argument}")


def bound_names(module: ModuleType) -> set[str]:
    """All that can be called in the extension: functions, constructors, methods."""
    names = set()
    for name, value in vars(module).items():
        if isinstance(value, type):
            names |= {f"{name}.{n}" for n, v in vars(value).items() if callable(v) and n[0] != "_"}
        if callable(value) and name not in ("PlanSizes", "GroupFailure", "PlanHandle"):
            names.add(f"C.{name}")
    return names


def main(extension: str, library: str) -> None:
    """Try everything; exit status 1 and the complaints when there are any."""
    program = Program(extension, library)
    hostile, objects = Hostile(program), Objects(program)
    tried: set[str] = set()
    for name in objects.arguments():
        hostile.try_all(name)
        owner, _, member = name.partition(".")
        tried.add(name if owner == "C" else f"{type(getattr(objects, owner)).__name__}.{member}")
    if missing := sorted(bound_names(program.module) - tried):
        hostile.complaints.append(f"nothing tries {', '.join(missing)}")
    sys.exit("\n".join(hostile.complaints[:20]) or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
