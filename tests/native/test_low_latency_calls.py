"""What low-latency mode of the native engine asks of the extension, with a stand-in for it."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_extension import STREAM, play
from fakes import ThreadGroup, on_threads

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines.low_latency import LowLatency
from megatron_ncclep.engines.low_latency_types import LowLatencySizes
from megatron_ncclep.engines.native import availability as native_availability
from megatron_ncclep.engines.native import low_latency as native_low_latency
from megatron_ncclep.engines.native.engine import CAPS
from megatron_ncclep.engines.native.group import NativeGroup
from megatron_ncclep.engines.native.low_latency import NativeLowLatency
from megatron_ncclep.errors import InputError, LibraryError, RefusedError
from megatron_ncclep.libraries import extension
from megatron_ncclep.ranks import group as ranks_group

MAX_TOKENS, HIDDEN, TOP_K = 128, 4096, 2  # a row is 8 pieces: half a CTA's number of tokens


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch)
    monkeypatch.setattr(native_low_latency, "_num_sms", lambda device: 132)
    monkeypatch.setattr(
        NativeLowLatency, "_view", lambda self, address, dtype, *shape: torch.zeros(shape).to(dtype)
    )


def make(group: ThreadGroup, **options: Any) -> tuple[LowLatency, NativeLowLatency]:
    group.device = torch.device("cpu")
    shared = NativeGroup(group, 4, 20.0)
    sizes = LowLatencySizes(MAX_TOKENS, HIDDEN, TOP_K, torch.bfloat16, torch.bfloat16)
    streams, config = extension.StreamKeeper(group.device), EpConfig(engine="native", **options)
    calls = NativeLowLatency(shared, streams, config, sizes)
    return LowLatency(group, CAPS, sizes, calls, calls.close), calls


def pair(ll: LowLatency, num_tokens: int) -> None:
    x = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16)
    assignments = torch.zeros(num_tokens, TOP_K, dtype=torch.int64)
    rows = ll.dispatch(x, assignments, torch.zeros(num_tokens, TOP_K))
    ll.combine(rows.rows)


def test_a_rank_with_few_tokens_adds_up_what_many_bring() -> None:
    """On a rank with one token of its own and 128 received rows a combine had 8 CTAs, and took 34
    us instead of 13: no test had ranks with such different batches.
    """

    def run(group: ThreadGroup) -> list[tuple[str, int]]:
        ll, calls = make(group)
        for num_tokens in (1, 40, 128):
            pair(ll, num_tokens)
        return [(name, arguments.num_ctas) for name, arguments in calls._native.calls]

    assert on_threads(1, run) == [
        [
            ("dispatch", 8),
            ("combine", 32),  # 16 tokens' worth
            ("dispatch", 80),
            ("combine", 80),
            ("dispatch", 100),
            ("combine", 100),
        ]
    ]


@pytest.mark.parametrize(
    ("sms", "num_sms", "most"), [(78, None, 46), (132, None, 100), (160, None, 120), (132, 24, 24)]
)
def test_sms_are_left_to_nccl(
    monkeypatch: pytest.MonkeyPatch, sms: int, num_sms: int | None, most: int
) -> None:
    """Combine took every SM of GPUs with up to 120.  While it waited for another rank, whose NCCL
    kernel had started first, NCCL found none here: each waited for the other.  `num_sms` is limited
    when the engine is made, by the same function.
    """
    monkeypatch.setattr(native_low_latency, "_num_sms", lambda device: sms)
    assert native_availability.most_sms(sms) == sms - native_availability.SMS_FOR_NCCL

    def run(group: ThreadGroup) -> list[tuple[str, int]]:
        ll, calls = make(group, num_sms=num_sms)
        pair(ll, MAX_TOKENS)
        return [(name, arguments.num_ctas) for name, arguments in calls._native.calls]

    assert on_threads(1, run) == [[("dispatch", most), ("combine", most)]]


def test_groups_share_the_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Combines of two groups had 100 CTAs each: two GPUs that began with different ones were stuck.

    Objects of one group take turns.
    """

    def run(group: ThreadGroup) -> list[int]:
        other, found = SimpleNamespace(num_low_latency=0), []
        monkeypatch.setattr(ranks_group, "_groups", [group, other])
        ll, calls = make(group)
        _, second = make(group)
        for other.num_low_latency in (0, 1, 2):
            pair(ll, MAX_TOKENS)
            found.append(calls._native.calls[-1][1].num_ctas)
        monkeypatch.setattr(group.resources, "release", lambda *_: None)
        for each in (calls, second):
            each.close()
        assert group.num_low_latency == 0
        return found

    assert on_threads(1, run) == [[100, 50, 50]]


def test_a_rank_without_memory_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would have waited for it in their kernels until the deadline."""

    def run(group: ThreadGroup) -> tuple[str, Any]:
        ll, _ = make(group)
        x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
        assignments = torch.zeros(1, TOP_K, dtype=torch.int64)
        rows = ll.dispatch(x, assignments, torch.zeros(1, TOP_K))
        with pytest.raises(InputError) as caught:
            ll.combine(rows.rows.as_subclass(NoMemory))
        return str(caught.value), ll._calls._shared.native.named("refuse")

    class NoMemory(torch.Tensor):
        def new_empty(self, *_: Any, **__: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 TiB")

    for rank, (text, told) in enumerate(on_threads(2, run)):
        assert text.startswith(f"low-latency combine: rank {rank}: no GPU memory for a low-latency")
        assert told == [("low-latency combine", STREAM)]


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
    x, weights = torch.zeros(3, HIDDEN, dtype=torch.bfloat16), torch.zeros(3, TOP_K)
    batch = (x, torch.zeros(3, TOP_K, dtype=torch.int64), weights)
    y = torch.zeros(1, MAX_TOKENS, HIDDEN, dtype=torch.bfloat16)
    arguments = {
        "dispatch": batch, "send_dispatch": batch, "complete_dispatch": (),
        "combine": (y,), "send_combine": (y,), "complete_combine": (),
    }  # fmt: skip

    def run(group: ThreadGroup) -> None:
        for before, call in itertools.product(TURNS, arguments):
            ll, _ = make(group)
            for step in before:
                getattr(ll, step)(*arguments[step])
            is_refused = call not in TURNS[before]
            with (
                pytest.raises(InputError, match="must come after") if is_refused else nullcontext()
            ):
                getattr(ll, call)(*arguments[call])

    assert on_threads(1, run) == [None]


@pytest.mark.parametrize(
    ("step", "phase"),
    [("dispatch", "dispatch"), ("complete_dispatch", "dispatch"), ("combine", "combine")],
)
def test_a_launch_that_fails_is_refused(step: str, phase: str) -> None:
    """The other ranks' kernels waited for it until their deadline."""

    def run(group: ThreadGroup) -> None:
        ll, calls = make(group)
        calls._native.answers[step] = LibraryError("launching it failed")
        x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
        text = f"^low-latency {phase}: rank {group.rank}: launching it failed$"

        def call() -> None:
            ll.send_dispatch(x, torch.zeros(1, TOP_K, dtype=torch.int64), torch.zeros(1, TOP_K))
            ll.combine(ll.complete_dispatch().rows)

        with pytest.raises(RefusedError, match=text):
            call()
        assert calls._shared.native.named("refuse") == [(f"low-latency {phase}", STREAM)]

    assert on_threads(2, run) == [None, None]
