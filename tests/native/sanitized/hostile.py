"""Call everything that `csrc/bindings` binds with what nobody should pass; run by a test.

    python hostile.py EXTENSION FAKE_LIBRARY LAST_CALL

The extension is one over the stand-ins of this folder, so that a GPU is not needed, kernels say
which of their assumptions does not hold, and AddressSanitizer sees what they touch.  Every call
either raises what a caller can handle or is as good as a right one; a crash ends the process, and
the file LAST_CALL says in which call.
"""

from __future__ import annotations

import mmap
import random
import sys
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

from hostile_values import Address, wrong_values
from objects import Objects, Program

from megatron_ncclep.errors import EpError

NOTE_BYTES = 4096
# What a caller can handle; AttributeError: of an object that looks like half a tensor.
REFUSALS = (EpError, TypeError, ValueError, OverflowError, AttributeError)
# Arguments that may be negative or not finite.
SAYS_NOTHING = (
    *("not_routed", "too_many_experts", "forget", "goes_on"),
    *("sends", "completes", "low_latency", "device", "number"),
)
TAKES_ADDRESSES = ("C.copy_rows", "C.copy_memory")


def plain(value: Any) -> Any:
    """An argument, or all of them, as they are passed."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value.value if isinstance(value, Address) else value


class Hostile:
    """Calls of a program, and what came of them."""

    def __init__(self, program: Program, last_call: Path) -> None:
        self.program = program
        last_call.write_bytes(bytes(NOTE_BYTES))
        with last_call.open("r+b") as file:
            self._note = mmap.mmap(file.fileno(), NOTE_BYTES)  # there even after a crash
        self.uninitialised = [
            cls.__new__(cls) for cls in vars(program.module).values() if isinstance(cls, type)
        ]
        self.num_calls = self.num_refused = 0
        self.complaints: list[str] = []

    def attempt(self, name: str, call: Callable[..., Any], arguments: dict[str, Any]) -> bool:
        """Whether the call was refused; what it must not raise is a complaint."""
        text = f"{name}({arguments})"
        note = text.encode("utf-8", "replace")[:NOTE_BYTES]
        self._note[:] = note.ljust(NOTE_BYTES, b"\0")
        self.program.nccl.fake_reset(0)
        self.num_calls += 1
        try:
            call(**arguments)
        except Exception as error:
            # The text is pybind11's, of an object whose class has no __init__.
            is_refusal = isinstance(error, REFUSALS) or "non-held to held instance" in str(error)
            self.num_refused += is_refusal
            if not is_refusal:
                self.complaints.append(f"{text} raised {type(error).__name__}: {error}")
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
        if self.attempt(name, call, plain(right)):
            self.complaints.append(f"{name} refuses the right arguments")
            call(**plain(right))
        o, call, right = self.make(name)
        o.close()
        if name not in TAKES_ADDRESSES:  # nothing is at a closed window's
            is_refused = self.attempt(f"closed {name}", call, plain(right))
            if not is_refused and "stream" in right and not name.startswith("C."):
                self.complaints.append(f"{name} queues work of an object that is closed")
        o, call, right = self.make(name)
        for argument, value in right.items():
            wrong_ones = wrong_values(value, self.uninitialised)
            for wrong in wrong_ones:
                if self.attempt(name, call, {**plain(right), argument: wrong}):
                    continue
                is_number = isinstance(wrong, int | float) and argument not in SAYS_NOTHING
                is_nonsense = is_number and not 0 <= wrong < inf
                is_shape = name == "group.begin" and argument != "timeout_s"  # it fits or not
                if is_nonsense and not is_shape:
                    self.complaints.append(f"{name} takes {wrong} for {argument}")
                o, call, right = self.make(name)  # the call may have changed something
            # What was refused has changed nothing.
            if self.attempt(name, call, plain(right)):
                self.complaints.append(f"{name} does not work any more after wrong {argument}")
            o, call, right = self.make(name)
        self.attempt(name, call, {})
        self.attempt(name, call, {**plain(right), "another": 1})

    def try_heads(self) -> None:
        """Whatever bytes a window's handle leads to: addresses, or an error."""
        draw, num_taken = random.Random(1), 0
        for _ in range(5000):
            rank, num_ranks = draw.randrange(-1, 4), draw.randrange(6)
            words = [draw.getrandbits(64) >> draw.randrange(64) for _ in range(4)]
            if draw.random() < 0.5:
                words[1] &= ~15
            if draw.random() < 0.75:
                words[2] = (rank << 32 | rank & 0xFFFFFFFF) % 2**64
            head = b"".join(word.to_bytes(8, "little") for word in words)
            if draw.random() < 0.1:
                head = head[: draw.randrange(32)]
            is_refused = self.attempt(
                "random C.window_peers", self.program.module.window_peers,
                {"head": head, "rank": rank, "num_ranks": num_ranks},
            )  # fmt: skip
            num_taken += not is_refused
            if not is_refused and not 0 <= rank < num_ranks:
                self.complaints.append(f"window_peers takes rank {rank} of {num_ranks}")
        if num_taken < 50:
            self.complaints.append(f"window_peers takes only {num_taken} of 5000 heads")


def bound_names(module: ModuleType) -> set[str]:
    """All that can be called in the extension: functions, constructors, methods."""
    names = set()
    for name, value in vars(module).items():
        if isinstance(value, type):
            names |= {f"{name}.{n}" for n, v in vars(value).items() if callable(v) and n[0] != "_"}
        if callable(value) and name not in ("PlanSizes", "GroupFailure", "PlanHandle"):
            names.add(f"C.{name}")
    return names


def main(extension: str, library: str, last_call: str) -> None:
    """Try everything; exit status 1 and the complaints when there are any."""
    program = Program(extension, library)
    hostile = Hostile(program, Path(last_call))
    objects = Objects(program)
    tried: set[str] = set()
    for name in objects.arguments():
        hostile.try_all(name)
        owner, _, member = name.partition(".")
        tried.add(name if owner == "C" else f"{type(getattr(objects, owner)).__name__}.{member}")
    hostile.try_heads()
    if missing := sorted(bound_names(program.module) - tried):
        hostile.complaints.append(f"nothing tries {', '.join(missing)}")
    print(f"{hostile.num_calls} calls, {hostile.num_refused} refused")
    for complaint in hostile.complaints[:20]:
        print(complaint, file=sys.stderr)
    sys.exit(1 if hostile.complaints else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
