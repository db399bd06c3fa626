"""The data of a step that is run again comes back as it was, or is refused in the first step."""

from __future__ import annotations

import datetime
import threading
from collections import UserDict, deque, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from rank_pool import RankContext
from test_reruns import RERUN, ROUTER, WHOLE, Collapsing

from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.rerun.batches import Batches

pytestmark = pytest.mark.each_release


@dataclass
class Data:
    tokens: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    tokens: Any


class Named(dict[str, Any]):
    """With attributes of its own."""

    name = "nobody"


Pair = namedtuple("Pair", ["tokens", "rest"])


def kinds_of_batches(tokens: torch.Tensor) -> list[Any]:
    """Batches of many kinds that hold `tokens`."""
    named = Named(tokens=tokens)
    named.name = "somebody"
    return [
        named,
        Data(tokens),
        Frozen({"tokens": tokens}),
        Pair(tokens, None),
        SimpleNamespace(tokens=[tokens]),
        UserDict(tokens=tokens),
        ({"tokens": tokens, "when": datetime.date.max}, {1, 2}),
        [tokens],
        tokens,
    ]


def test_batches_come_back_as_they_were() -> None:
    """Dataclasses were not looked into: what a step put into them, or changed in place, was in the
    batch that came back.  Subclasses of dict came back as dicts, and broke forward steps.
    """
    given, expected = kinds_of_batches(torch.arange(3)), kinds_of_batches(torch.arange(3))
    batches = Batches(iter(given))
    for batch in batches.first():
        if isinstance(batch, Data | SimpleNamespace):
            batch.tokens = None
        elif hasattr(batch, "keys"):
            batch["tokens"] = None
    assert batches.problem([True], len(given)) is None
    found = list(batches.again())
    assert [type(each) for each in found] == [type(each) for each in expected]
    assert repr(found) == repr(expected)
    assert found[0].name == "somebody"
    # Those of the first run and of the rerun are two.
    found[1].tokens = None
    assert list(batches.again())[1].tokens is not None


@pytest.mark.parametrize("index", range(9))
def test_a_tensor_that_changes_is_noticed_in_any_batch(index: int) -> None:
    tokens = torch.arange(3)
    batches = Batches(iter([kinds_of_batches(tokens)[index]]))
    next(batches.first())
    tokens.add_(1)
    problem = batches.problem([True], 1)
    assert "a tensor of a micro-batch was changed in place" in str(problem)


def test_what_has_no_versions_is_kept_by_value() -> None:
    """Arrays and inference tensors.  Where a loader filled one buffer again and again, the step was
    run again with the last micro-batch in place of all.
    """
    buffer = numpy.zeros(3)
    with torch.inference_mode():
        tensor = torch.zeros(2)

    def refill() -> Iterator[Any]:
        for number in (1, 2):
            buffer[:] = number
            with torch.inference_mode():
                tensor.fill_(number)
            yield {"array": buffer, "of array": torch.from_numpy(buffer), "tensor": tensor}

    batches = Batches(refill())
    expected = [dict.fromkeys(("array", "of array", "tensor"), float(n)) for n in (1, 2)]
    for found in (batches.first(), batches.again()):
        assert [{k: float(v[0]) for k, v in batch.items()} for batch in found] == expected
    assert batches.problem([True], 2) is None
    assert "took 2 micro-batches from its data iterator in a step of 1, so" in str(
        batches.problem([True], 1)
    )


@pytest.mark.parametrize(
    "held",
    [deque(), threading.Lock(), iter([1]), numpy.array([torch.zeros(1)], dtype=object)],
    ids=lambda held: type(held).__name__,
)
def test_batches_of_unknown_kinds_are_refused(held: Any) -> None:
    """On arrival: not in the first step that is run again, perhaps hours later."""
    batches = Batches(iter([Data([held])]))
    assert next(batches.first()).tokens == [held]
    kind = f"{type(held).__module__}.{type(held).__qualname__}"
    problem = batches.problem([True], 1)
    assert f"a micro-batch holds an object of type {kind}, and whether" in str(problem)


class Careless(Collapsing):
    """A training whose rank 1 does not get its data as Megatron's loops do."""

    mistake = ""
    begun = False

    def _forward_step(self, batches: Iterator[dict[str, Any]], model: Any) -> tuple[Any, Any]:
        if self.rank == 1 and self.mistake == "reads elsewhere":
            batches = iter(self.batches(0, self.case.sequence))
        elif self.rank == 1 and self.mistake == "changes in place":
            batches = ({**b, "labels": b["labels"].add_(0)} for b in [next(batches)])
        elif self.rank == 1 and self.mistake == "begins with one from before" and not self.begun:
            self.begun, batches = True, iter(self.batches(0, self.case.sequence))
        return super()._forward_step(batches, model)

    def batches(self, seed: int, length: int) -> list[dict[str, Any]]:
        found: list[Any] = super().batches(seed, length)
        if self.rank == 1 and self.mistake == "has an unknown kind":
            found = [Named(batch, padding_mask=None) for batch in found]
            for batch in found:
                batch.lock = threading.Lock()
        return found


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        ("reads elsewhere", "the forward step does not use its data iterator"),
        ("changes in place", "a tensor of a micro-batch was changed in place after the data"),
        ("begins with one from before", "the forward step took 1 micro-batches .* of 2, so"),
        ("has an unknown kind", "a micro-batch holds an object of type _thread.lock, and"),
        ("adds up steps", "gradients of several calls of the schedule that add up"),
        ("has no DDP", "a model in GPTModel: only Megatron's DistributedDataParallel was tested"),
    ],
)
def test_what_cannot_be_rerun(ctx: RankContext, mistake: str, reason: str) -> None:
    """It ends the training on all ranks in the first step, in which all rows fit.

    A forward step that holds the next micro-batch was not noticed: a step that was run again had
    other data, and nobody was told.
    """
    options = {**ROUTER, "ncclep": replace(RERUN, max_recv_rows="3x")}
    training = Careless(ctx, "ncclep", replace(WHOLE, options=options))
    training.mistake = mistake
    if mistake == "has no DDP":
        training.wrapped = training.chunks
    elif mistake == "adds up steps":
        for _ in range(2):
            training.gradients(0)  # clears those before
        training.evaluate(0)
    elif ctx.rank != 1:
        reason = "another rank cannot"
    with pytest.raises(UnsupportedError, match=f"on_overflow='rerun'.* {reason}.*='worst'"):
        training._run(0, training.case.sequence, forward_only=False)
