"""What low-latency mode of the native engine asks of the extension, with a stand-in for it."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_extension import STREAM, TOP_K, FakeGroup, gpus_with, on_ranks

from megatron_ncclep.engines.low_latency import LowLatency, create_low_latency
from megatron_ncclep.engines.native import availability as native_availability
from megatron_ncclep.engines.native.engine import NativeEngine
from megatron_ncclep.errors import InputError, LibraryError, RefusedError
from megatron_ncclep.ranks import group as ranks_group

MAX_TOKENS, HIDDEN = 128, 4096  # a row is 8 pieces: half a CTA's number of tokens

pytestmark = pytest.mark.usefixtures("stand_in")


def make(engine: NativeEngine) -> tuple[LowLatency, Any]:
    """An object, and the engine's part of it."""
    ll = create_low_latency(engine, max_tokens=MAX_TOKENS, hidden=HIDDEN, top_k=TOP_K)
    return ll, ll._calls


def batch(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16)
    topk_idx = torch.zeros(num_tokens, TOP_K, dtype=torch.int64)
    return x, topk_idx, torch.zeros(num_tokens, TOP_K)


@pytest.mark.parametrize(
    ("sms", "num_sms", "others", "num_tokens", "of_dispatch", "of_combine"),
    [
        # On a rank with one token of its own and 128 received rows a combine had 8 CTAs, and took
        # 34 us instead of 13: no test had ranks with such different batches.
        (132, None, 0, 1, 8, 32),  # 16 tokens' worth
        (132, None, 0, 40, 80, 80),
        # Combine took every SM of GPUs with up to 120.  While it waited for another rank, whose
        # NCCL kernel had started first, NCCL found none here: each waited for the other.
        (132, None, 0, 128, 100, 100),
        (78, None, 0, 128, 46, 46),
        (160, None, 0, 128, 120, 120),
        (132, 24, 0, 128, 24, 24),
        # Combines of two groups had 100 CTAs each: two GPUs that began with different ones were
        # stuck.  Objects of one group take turns.
        (132, None, 1, 128, 50, 50),
        (132, None, 2, 128, 50, 50),
    ],
)
def test_how_many_sms_a_call_takes(
    sms: int, num_sms: int | None, others: int, num_tokens: int, of_dispatch: int, of_combine: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As few as its rows need, and never those that NCCL and the objects of other groups need.

    `num_sms` is limited when the engine is made, by the same function.
    """
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus_with(sms))
    assert native_availability.most_sms(sms) == sms - native_availability.SMS_FOR_NCCL

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        groups = [engine.group, SimpleNamespace(num_low_latency=others)]
        monkeypatch.setattr(ranks_group, "_groups", groups)
        made = [make(engine) for _ in range(2)]
        ll, calls = made[0]
        ll.combine(ll.dispatch(*batch(num_tokens)).rows)
        found = [(name, arguments.num_ctas) for name, arguments in calls._native.calls]
        assert found == [("dispatch", of_dispatch), ("combine", of_combine)]
        for each, _ in made:
            each.close()
        assert engine.group.num_low_latency == 0

    on_ranks(use, 1, num_sms=num_sms)


def test_a_rank_without_memory_tells_the_others() -> None:
    """They would have waited for it in their kernels until the deadline."""

    class NoMemory(torch.Tensor):
        def new_empty(self, *_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 TiB")

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        ll, _ = make(engine)
        rows = ll.dispatch(*batch(1)).rows
        text = f"^low-latency combine: rank {rank}: no GPU memory for a low-latency"
        with pytest.raises(InputError, match=text):
            ll.combine(rows.as_subclass(NoMemory))
        assert native.named("refuse") == [("low-latency combine", STREAM)]

    on_ranks(use)


# Calls from the start on, and the calls that may come next.
TURNS = {
    (): {"dispatch", "send_dispatch"},
    ("send_dispatch",): {"complete_dispatch"},
    ("send_dispatch", "complete_dispatch"): {"combine", "send_combine"},
    ("dispatch",): {"combine", "send_combine"},
    ("dispatch", "send_combine"): {"complete_combine"},
    ("dispatch", "send_combine", "complete_combine"): {"dispatch", "send_dispatch"},
    ("dispatch", "combine"): {"dispatch", "send_dispatch"},
}


def test_calls_take_turns() -> None:
    """Only here does a host look whose turn it is, and the device does at first halves only."""
    y = torch.zeros(1, MAX_TOKENS, HIDDEN, dtype=torch.bfloat16)
    arguments = {
        "dispatch": batch(3), "send_dispatch": batch(3), "complete_dispatch": (),
        "combine": (y,), "send_combine": (y,), "complete_combine": (),
    }  # fmt: skip

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        for before, call in itertools.product(TURNS, arguments):
            ll, _ = make(engine)
            for step in before:
                getattr(ll, step)(*arguments[step])
            refused = pytest.raises(InputError, match="must come after")
            with nullcontext() if call in TURNS[before] else refused:
                getattr(ll, call)(*arguments[call])

    on_ranks(use, 1)


@pytest.mark.parametrize(
    ("step", "phase"),
    [("dispatch", "dispatch"), ("complete_dispatch", "dispatch"), ("combine", "combine")],
)
def test_a_launch_that_fails_is_refused(step: str, phase: str) -> None:
    """The other ranks' kernels waited for it until their deadline."""

    def use(engine: NativeEngine, native: FakeGroup, rank: int) -> None:
        ll, calls = make(engine)
        calls._native.answers[step] = LibraryError("launching it failed")

        def call() -> None:
            ll.send_dispatch(*batch(1))
            ll.combine(ll.complete_dispatch().rows)

        text = f"^low-latency {phase}: rank {rank}: launching it failed$"
        with pytest.raises(RefusedError, match=text):
            call()
        assert native.named("refuse") == [(f"low-latency {phase}", STREAM)]

    on_ranks(use)
