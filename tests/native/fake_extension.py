"""Stands in for the extension where a test is about what Python asks of it.

Methods, their arguments and attributes are those of `csrc/bindings`: nothing else can be called.
"""

from __future__ import annotations

import functools
import re
from collections import namedtuple
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ncclep.engines import base
from megatron_ncclep.engines.native import group as native_group
from megatron_ncclep.engines.native import low_latency as native_low_latency
from megatron_ncclep.libraries import extension

STREAM = 7


@functools.cache
def interface() -> dict[str, dict[str, list[str] | None]]:
    """What `csrc/bindings` binds: class, or "" for the module -> name -> names of the arguments.

    An attribute has None instead; a class has the arguments that make one.
    """
    folder = Path(__file__).parents[2] / "csrc" / "bindings"
    text = "".join(path.read_text() for path in sorted(folder.glob("*.cpp")))
    found: dict[str, dict[str, list[str] | None]] = {"": {}}
    made = ""
    for before, piece in pairwise(re.split(r"(?=py::class_<|\.def|\.attr\()", text)):
        name, arguments = re.search(r'"(\w+)"', piece), re.findall(r'"(\w+)"_a', piece)
        is_module = before.endswith("module")
        if name and piece.startswith("py::class_"):
            made = name[1]
            found[made] = {}
        elif piece.startswith(".def(py::init"):
            found[""][made] = arguments
        elif name and (is_module or not piece.startswith(".attr")):
            owner = found["" if is_module else made]
            owner[name[1]] = arguments if piece.startswith(".def(") else None
    return found


FakeFailure = namedtuple(
    "FakeFailure", interface()["GroupFailure"], defaults=("late", "dispatch", 1, 9, 2.0, 0, 0)
)
FakePlanSizes = namedtuple("FakePlanSizes", interface()["PlanSizes"], defaults=(5, 2, 3, -1, True))


class Fake:
    """A class of the extension, or the module; its attributes are 0 until a test sets them.

    Attributes:
        methods: name -> names of the arguments.
        calls: name and arguments of each call, in order; arguments have their names.
        answers: method -> what it returns, an exception that it raises, or a function of its
            arguments; a method without an answer returns None.
    """

    # Methods that change nothing; their calls are not recorded.
    QUERIES = ("begin", "routes_size", "sums_size", "bad_ranks", "bad_low_latency", "failure")

    def __init__(self, bound_as: str, **answers: Any) -> None:
        members = interface()[bound_as]
        self.methods = {name: names for name, names in members.items() if names is not None}
        vars(self).update(dict.fromkeys(members.keys() - self.methods.keys(), 0))
        self.calls: list[tuple[str, Any]] = []
        self.answers = answers
        if unknown := answers.keys() - self.methods.keys():
            raise ValueError(f"answers of {unknown}, which are no methods of '{bound_as}'")

    @property
    def names(self) -> list[str]:
        """Of the calls, in order."""
        return [name for name, _ in self.calls]

    def named(self, name: str) -> list[Any]:
        """The arguments of each call of `name`."""
        return [arguments for called, arguments in self.calls if called == name]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in vars(self).get("methods", ()):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, method: str, /, *values: Any, **named: Any) -> Any:
        arguments = namedtuple(method, self.methods[method])(*values, **named)  # type: ignore[misc]
        if method not in self.QUERIES:
            self.calls.append((method, arguments))
        answer = self.answers.get(method)
        if isinstance(answer, Exception):
            raise answer
        return answer(*arguments) if callable(answer) else answer


class FakeGroup(Fake):
    """A `_C.GroupHandle` that remembers for how much it has windows.

    Attributes:
        timeout_s: the deadline that the last call has set.
        sizes: what plans find, a `FakePlanSizes`; a plan says itself whether it has room for it.
        is_over: whether kernels have ended.  Only then does the device say what they found:
        failed: a `FakeFailure`, or None.
        bad: whose routing was bad, until it is told to forget.
    """

    def __init__(self, **answers: Any) -> None:
        own = {
            "begin": self._begin,
            "reserve": self._reserve,
            "routes_size": lambda max_pairs, max_assignments, _: max_pairs + max_assignments,
            "sums_size": 0,
            "plan": lambda *_: self.calls[-1][1],
            "wait_for_sizes": lambda plan, *_: self.sizes._replace(
                has_room=self.sizes.num_pairs <= plan.max_pairs
                and self.sizes.num_assignments <= plan.max_assignments
            ),
            "failure": lambda: self.failed if self.is_over else None,
            "bad_ranks": lambda forget: self._bad("bad_ranks", forget),
            "bad_low_latency": lambda forget: self._bad("bad_low_latency", forget),
        }
        super().__init__("GroupHandle", **{**own, **answers})
        self.is_over, self.failed, self.sizes = True, None, FakePlanSizes()
        self.bad: dict[str, list[int]] = {"bad_ranks": [], "bad_low_latency": []}
        self._held = (0, 0, 0)

    def _begin(self, timeout_s: float, *wanted: int) -> bool | None:
        if self.is_over and self.failed is not None:
            return None
        self.timeout_s = timeout_s
        return all(number <= held for number, held in zip(wanted, self._held, strict=True))

    def _reserve(self, *arguments: Any) -> str | None:
        wanted, held = arguments[:3], self._held
        self._held = (self.max_tokens, _, row_bytes) = tuple(map(max, held, wanted))
        self.num_bytes = self.max_tokens * row_bytes
        return None if self._held == held else f"{held} -> {self._held}"

    def _bad(self, method: str, forget: bool) -> list[int]:
        ranks = self.bad[method] if self.is_over else []
        self.bad[method] = [] if forget else self.bad[method]
        return ranks


class FakeExtension(Fake):
    """The extension; `nccl` is the `_C.Nccl` that it opens."""

    def __init__(self, **answers: Any) -> None:
        own = {
            "Nccl": lambda path: self.nccl,
            "GroupHandle": lambda *_: FakeGroup(),
            "LowLatencyHandle": lambda *_: Fake("LowLatencyHandle"),
            # Not the extension's number, so that a test notices code that does not ask for it.
            "native_device_problem": lambda: "",
            "native_min_sms": lambda num_ranks: 5 + num_ranks // 32,
        }
        super().__init__("", **{**own, **answers})
        self.nccl = Fake("Nccl")
        self.MAX_RANKS, self.MAX_LOCAL_RANKS, self.MAX_DOMAINS = 33, 32, 16
        self.MAX_EXPERTS, self.MAX_LOCAL_EXPERTS = 512, 256


class FakeKeeper:
    """A `StreamKeeper` that writes down what it is to keep.

    Attributes:
        current: handle of the current stream.
        kept: tensors, for whatever stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.current = STREAM
        self.kept: list[torch.Tensor | None] = []

    def keep(self, *tensors: torch.Tensor | None) -> int:
        self.kept += tensors
        return self.current

    def lacks(self, *tensors: torch.Tensor) -> bool:
        return not all(any(kept is tensor for kept in self.kept) for tensor in tensors)


def play(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the native engine find a `FakeExtension` and the stream `STREAM`, and need no GPU."""
    module = FakeExtension()
    for where, name, value in (
        (extension, "load", lambda: module),
        (extension, "StreamKeeper", FakeKeeper),
        (base, "StreamKeeper", FakeKeeper),
        (extension, "current_stream", lambda: STREAM),
        (native_group, "communicator_of", lambda group, _: SimpleNamespace(lsa_size=group.size)),
        (native_low_latency, "communicator_of", lambda *_: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "synchronize", lambda device: None),
    ):
        monkeypatch.setattr(where, name, value)
