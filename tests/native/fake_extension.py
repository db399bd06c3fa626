"""Stands in for the extension where a test is about what Python asks of it.

Methods, their arguments and attributes are those of `_C.pyi`: nothing else can be called.
"""

from __future__ import annotations

import ast
import functools
from collections import namedtuple
from collections.abc import Callable
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
STUB = Path(__file__).parents[2] / "megatron_ncclep" / "_C.pyi"


@functools.cache
def interface() -> dict[str, dict[str, list[str] | None]]:
    """What `_C.pyi` declares: class, or "" for the module -> name -> names of the arguments.

    "*" stands before arguments that need their names.  An attribute has None instead; the module
    has classes that can be made, with the arguments that make one.
    """
    found: dict[str, dict[str, list[str] | None]] = {"": {}}

    def add(owner: str, statement: ast.stmt) -> None:
        if isinstance(statement, ast.AnnAssign):
            found[owner][ast.unparse(statement.target)] = None
        elif isinstance(statement, ast.ClassDef):
            found[statement.name] = {}
            for member in statement.body:
                add(statement.name, member)
        elif isinstance(statement, ast.FunctionDef):
            given = statement.args
            names = [a.arg for a in given.args if a.arg != "self"]
            names += ["*"] * bool(given.kwonlyargs) + [a.arg for a in given.kwonlyargs]
            if statement.name == "__init__":
                found[""][owner] = names
            else:
                found[owner][statement.name] = None if statement.decorator_list else names

    for statement in ast.parse(STUB.read_text()).body:
        add("", statement)
    return found


def fake_of(bound_as: str, **values: Any) -> Any:
    """A named tuple with the attributes of a class, which `values` has all."""
    assert values.keys() == interface()[bound_as].keys()
    return namedtuple(f"Fake{bound_as}", values, defaults=values.values())  # type: ignore[misc]


FakeFailure = fake_of(
    "GroupFailure", reason="late", phase="dispatch", peer=1, operation=9, deadline_s=2.0,
    own_call=0, peer_call=0,
)  # fmt: skip
FakePlanSizes = fake_of(
    "PlanSizes", num_rows=5, num_pairs=2, num_assignments=3, first_bad_rank=-1, has_room=True
)


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
        self.methods = {
            name: [argument for argument in names if argument != "*"]
            for name, names in members.items()
            if names is not None
        }
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
            "release_windows": self._release,
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
        self.num_token_routes = 4
        self.bad: dict[str, list[int]] = {"bad_ranks": [], "bad_low_latency": []}
        self._held = (0, 0, 0)

    def _begin(self, timeout_s: float, *requested: int) -> bool | None:
        if self.is_over and self.failed is not None:
            return None
        self.timeout_s = timeout_s
        return all(number <= held for number, held in zip(requested, self._held, strict=True))

    def _reserve(self, *arguments: Any) -> str | None:
        requested, held = arguments[:3], self._held
        self._held = (self.max_tokens, _, row_bytes) = tuple(map(max, held, requested))
        self.num_bytes = self.max_tokens * row_bytes
        return None if self._held == held else f"{held} -> {self._held}"

    def _release(self) -> None:
        self._held, self.max_tokens, self.num_bytes, self.was_captured = (0, 0, 0), 0, 0, 0

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
        self.MAX_RANKS, self.MAX_DOMAINS = 33, 16
        self.MAX_LOCAL_RANKS, self.NARROW_LOCAL_RANKS = 40, 32
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
        (
            native_group,
            "communicator_of",
            lambda group, _: SimpleNamespace(lsa_size=group.size, num_domains=1),
        ),
        (native_low_latency, "communicator_of", lambda *_: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "synchronize", lambda device: None),
        (
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(multi_processor_count=132),
        ),
    ):
        monkeypatch.setattr(where, name, value)
