"""Stands in for the extension where a test is about what Python asks of it.

Methods, their arguments and attributes are those of `_C.pyi`: nothing else can be called.
"""

from __future__ import annotations

import functools
import inspect
import runpy
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import ThreadGroup, on_threads

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.native import group as native_group
from megatron_ncclep.engines.native import low_latency as native_low_latency
from megatron_ncclep.engines.native.engine import NativeEngine
from megatron_ncclep.libraries import extension

STREAM = 7
NUM_EXPERTS, TOP_K, HIDDEN = 4, 2, 8
STUB = Path(__file__).parents[2] / "megatron_ncclep" / "_C.pyi"


@functools.cache
def stub() -> dict[str, Any]:
    """What `_C.pyi` declares, by name: classes, functions, and None for other attributes."""
    found = runpy.run_path(str(STUB), run_name="stub")
    own = {
        name: thing for name, thing in found.items() if getattr(thing, "__module__", "") == "stub"
    }
    return own | dict.fromkeys(found["__annotations__"])


def members(bound_as: str) -> dict[str, Any]:
    """Those of a class, or of the module: ""."""
    found = vars(stub()[bound_as]) if bound_as else stub()
    return {name: thing for name, thing in found.items() if not name.startswith("_")}


def attributes(bound_as: str) -> list[str]:
    """The members that are not called."""
    return [name for name, member in members(bound_as).items() if not callable(member)]


@functools.cache
def arguments_of(bound_as: str, method: str) -> Any:
    """A named tuple for the arguments of a method."""
    parameters = inspect.signature(members(bound_as)[method]).parameters
    defaults = [p.default for p in parameters.values() if p.default is not p.empty]
    return namedtuple(method, [name for name in parameters if name != "self"], defaults=defaults)


FakeFailure: Any = namedtuple(
    "FakeFailure", attributes("GroupFailure"), defaults=("late", "dispatch", 1, 9, 2.0, 0, 0)
)
FakePlanSizes: Any = namedtuple(
    "FakePlanSizes", attributes("PlanSizes"), defaults=(5, 2, 3, -1, True)
)


class Fake:
    """A class of the extension, or the module; its attributes are 0 until a test sets them.

    Attributes:
        calls: name and arguments of each call, in order; arguments have their names.
        answers: method -> what it returns, an exception that it raises, or a function of its
            arguments; a method without an answer returns None.
    """

    # Methods that change nothing; their calls are not recorded.
    QUERIES = ("begin", "routes_size", "sums_size", "bad_ranks", "bad_low_latency", "failure")

    def __init__(self, bound_as: str, **answers: Any) -> None:
        self._bound_as, self._members = bound_as, members(bound_as)
        vars(self).update(dict.fromkeys(attributes(bound_as), 0))
        self.calls: list[tuple[str, Any]] = []
        self.answers = answers
        assert answers.keys() <= self._members.keys()

    @property
    def names(self) -> list[str]:
        """Of the calls, in order."""
        return [name for name, _ in self.calls]

    def named(self, name: str) -> list[Any]:
        """The arguments of each call of `name`."""
        return [arguments for called, arguments in self.calls if called == name]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in vars(self).get("_members", ()):
            raise AttributeError(name)
        return functools.partial(self._call, name)

    def _call(self, method: str, /, *values: Any, **named: Any) -> Any:
        arguments = arguments_of(self._bound_as, method)(*values, **named)
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
            "native_device_problem": "",
            # Not the extension's number, so that a test notices code that does not ask for it.
            "native_min_sms": lambda num_ranks: 5 + num_ranks // 32,
        }
        super().__init__("", **{**own, **answers})
        self.nccl = Fake("Nccl")
        self.MAX_RANKS, self.MAX_DOMAINS = 33, 16
        self.MAX_LOCAL_RANKS, self.NARROW_LOCAL_RANKS = 40, 32
        self.MAX_EXPERTS, self.MAX_LOCAL_EXPERTS = 512, 256


def gpus_with(num_sms: int) -> Callable[..., Any]:
    """What stands in for `torch.cuda.get_device_properties`."""
    return lambda device: SimpleNamespace(multi_processor_count=num_sms)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the native engine find a `FakeExtension` and the stream `STREAM`, and need no GPU."""
    module = FakeExtension()
    low_latency = native_low_latency.NativeLowLatency
    for where, name, value in (
        (extension, "load", lambda: module),
        (extension, "current_stream", lambda: STREAM),
        (
            native_group,
            "communicator_of",
            lambda group, _: SimpleNamespace(lsa_size=group.size, num_domains=1),
        ),
        (native_low_latency, "communicator_of", lambda *_: None),
        (low_latency, "_view", lambda _, address, dtype, *shape: torch.zeros(shape).to(dtype)),
        (NativeEngine, "_describe", lambda *_: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "synchronize", lambda device: None),
        (torch.cuda, "get_device_properties", gpus_with(132)),
    ):
        monkeypatch.setattr(where, name, value)


def on_ranks(
    function: Callable[[NativeEngine, FakeGroup, int], Any], num_ranks: int = 2, **options: Any
) -> None:
    """Call `function` with the engine, the stand-in and the number of each rank, on the CPU."""

    def run(group: ThreadGroup) -> None:
        group.device = torch.device("cpu")
        engine = NativeEngine(group, NUM_EXPERTS, EpConfig(engine="native", **options))
        function(engine, fake_of(engine), group.rank)

    for result in on_threads(num_ranks, run):
        if result is not None:
            raise result


def fake_of(engine: NativeEngine) -> FakeGroup:
    """The stand-in that an engine calls."""
    native: Any = engine._shared.native
    return native


def assignments(num_tokens: int) -> torch.Tensor:
    """A routing of so many tokens, the same for all experts."""
    return torch.arange(NUM_EXPERTS).repeat(num_tokens)[: num_tokens * TOP_K].view(-1, TOP_K)
