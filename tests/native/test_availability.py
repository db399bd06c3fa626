"""What keeps the native engine from running: each reason, and that all ranks get the same.

Ranks are threads, and their GPUs are `Gpu`s; nothing here needs a GPU or the extension.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_machine import NUM_RANKS, Gpu, Machine, choice, choices, reasons
from rank_pool import RankContext
from timeouts import patient

from megatron_ncclep import engines
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import create_engine
from megatron_ncclep.engines.hierarchical.message_packing import VECTOR
from megatron_ncclep.engines.native import availability as native_availability
from megatron_ncclep.engines.native.engine import CAPS
from megatron_ncclep.engines.nccl_ep import availability as nccl_ep_availability
from megatron_ncclep.errors import (
    EngineUnavailableError,
    InputError,
    LibraryError,
    PeerError,
)
from megatron_ncclep.libraries import extension, search
from megatron_ncclep.libraries.search import Library


@pytest.fixture
def native_or_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    only = {name: engines.ENGINES[name] for name in ("native", "reference")}
    monkeypatch.setattr(engines, "ENGINES", only)


def test_nothing_is_in_the_way(machine: Machine) -> None:
    assert choice(NUM_RANKS, 512) == ("native", "native can run")
    assert sorted(machine.made) == list(range(NUM_RANKS))


def test_ranks_share_a_gpu_where_nccl_allows_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, native_or_reference: None
) -> None:
    machine.gpus = [machine.gpus[0]] * NUM_RANKS
    assert "for tests, NCCL 2.30.0 or newer lets ranks share a GPU with NCCL_MULTI" in reasons()
    name, reason = choice(NUM_RANKS)
    assert name == "reference"
    assert reason.startswith("not native: ranks 0 and 1 share one GPU (NVIDIA H200, UUID uuid-0)")
    assert reason.endswith("\nreference can run")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert "share one GPU" in reasons()  # NCCL 2.28.9
    library = Library(Path("libnccl.so.2"), (2, 30, 7), "")
    monkeypatch.setattr(search, "find_nccl", lambda: library)
    assert choice(NUM_RANKS, engine="native") == ("native", "requested by name")
    assert "num_sms 34: at most 33 for each of 3 ranks on NVIDIA H200" in reasons(num_sms=34)


@pytest.mark.parametrize(
    ("sms_of_gpu", "num_ranks", "ranks_per_gpu", "num_sms"),
    [
        (132, 8, 1, 32),
        (132, 8, 4, 25),
        (148, 8, 8, 14),
        (78, 8, 2, 23),
        (132, 2, 1, 48),
        (132, 1, 1, 48),
        (78, 2, 1, 46),
        (132, 2, 2, 32),
        (132, 3, 1, 32),
    ],
)
def test_kernels_fit_on_their_gpu(
    machine: Machine, sms_of_gpu: int, num_ranks: int, ranks_per_gpu: int, num_sms: int
) -> None:
    machine.gpus[0] = replace(machine.gpus[0], multi_processor_count=sms_of_gpu)
    group = SimpleNamespace(device=torch.device("cuda", 0), size=num_ranks)
    assert native_availability.default_num_sms(group, ranks_per_gpu) == num_sms


# --- what one rank finds -------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is in the way, and what all ranks say.

    Attributes:
        says: part of the text.
        gpu: what differs on the GPU of rank 1.
        machine: attributes of the `Machine`.
        lacks: module, function and what it returns instead.
        ranks, experts, options: of the group and the config.
    """

    says: str
    gpu: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    lacks: tuple[Any, str, Any] | None = None
    ranks: int = NUM_RANKS
    experts: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


NO_REACH = "the GPU of rank {} cannot access the memory of rank {}'s"
MANY = [Gpu(f"12345678-1234-1234-1234-{r:012d}", "NVIDIA " + "H" * 60) for r in range(64)]
IN_THE_WAY = {
    # What one rank finds.
    "older": Case(
        "rank 1: NVIDIA A100 is older than Hopper (sm_90)",
        gpu={"capability": (8, 0), "name": "NVIDIA A100"},
    ),
    # `auto` chose the engine, and the first dispatch failed on every rank.
    "shared memory": Case(
        "rank 1: NVIDIA RTX PRO 6000 (compute capability 12.0): the kernel of dispatch needs 17",
        gpu={
            "capability": (12, 0),
            "name": "NVIDIA RTX PRO 6000",
            "lacks": "the kernel of dispatch needs 172032 bytes",
        },
        lacks=(extension, "architectures", ["compute_90"]),
    ),
    "few SMs": Case(
        "rank 1: num_sms 32: at most 0 on NVIDIA H200 with 16 SMs",
        gpu={"multi_processor_count": 16},
    ),
    "no NCCL": Case(
        "it needs NCCL 2.28.9 or newer, found none: pip install 'nvidia-nccl-cu",
        lacks=(search, "find_nccl", None),
    ),
    # Limits.
    "experts": Case("it takes at most 512 experts in total: there are 513", experts=513),
    "experts of a rank": Case(
        "it takes at most 256 experts on a rank: 2 ranks have 514", ranks=2, experts=514
    ),
    "too few SMs": Case(
        "num_sms 4: its kernels need at least 5 for 3 ranks", options={"num_sms": 4}
    ),
    "too many SMs": Case(
        "num_sms 101: at most 100 on NVIDIA H200 with 132 SMs: 32 are left to NCCL's kernels, "
        "otherwise two groups can deadlock",
        options={"num_sms": 101},
    ),
    "too many ranks": Case("it takes at most 33 ranks, the group has 34", ranks=34),
    # What the ranks find together.
    "two models": Case(
        "the ranks have different GPUs, rank 0 NVIDIA H200 (sm_90) and rank 1 NVIDIA H100 (sm_90)",
        gpu={"name": "NVIDIA H100"},
    ),
    "no access": Case(NO_REACH.format(0, 2), machine={"no_access": {(0, 2)}}),
    # No GPU reaches another, on a host with a long name: the message is long enough.
    "many GPUs": Case(
        "cannot access",
        machine={"gpus": MANY, "no_access": {(a, b) for a in range(64) for b in range(64)}},
        ranks=32,
    ),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_what_is_in_the_way_all_ranks_say(
    name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, native_or_reference: None
) -> None:
    """What one rank alone finds, too, and that before NCCL is asked."""
    case = IN_THE_WAY[name]
    machine.gpus = [Gpu(f"uuid-{r}") for r in range(case.ranks)]
    vars(machine).update(case.machine)
    machine.gpus[1] = replace(machine.gpus[1], **case.gpu)
    if case.lacks is not None:
        module, function, value = case.lacks
        monkeypatch.setattr(module, function, lambda: value)
    assert case.says in reasons(case.ranks, case.experts, **case.options)
    if not case.options:
        assert choice(case.ranks, case.experts)[0] == "reference"
    assert machine.made == []


@pytest.mark.parametrize("engine", ["native", "nccl_ep", "auto"])
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InputError("NCCLEP_NCCL_LIBRARY=/gone: there is no such file"), "NCCLEP_NCCL_LIBRARY="),
        (RuntimeError("CUDA error: out of memory"), "RuntimeError: CUDA error: out of memory"),
    ],
)
def test_a_rank_that_cannot_even_look(
    engine: str, error: Exception, text: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong path in one rank's environment was an error there and 60 s of waiting elsewhere."""

    def look(group: Any, *_: Any) -> str | None:
        if group.rank == 1:
            raise error
        return None

    for module in (native_availability, nccl_ep_availability):
        monkeypatch.setattr(module, "_own_problem", look)
    errors = choices(NUM_RANKS, EpConfig(engine=engine))
    kind = InputError if isinstance(error, InputError) else LibraryError
    assert [type(e) for e in errors] == [kind] * NUM_RANKS, errors
    assert len({str(e) for e in errors}) == 1
    assert f"rank 1: {text}" in str(errors[0])
    assert errors[1].__cause__ is (None if isinstance(error, InputError) else error)
    assert machine.made == []


@pytest.mark.parametrize(
    ("num_ranks", "options"), [(32, {"num_sms": 6}), (2, {"num_sms": 5}), (2, {"num_sms": 100})]
)
def test_just_within_the_limits(machine: Machine, num_ranks: int, options: dict[str, Any]) -> None:
    machine.gpus = [Gpu(f"uuid-{r}") for r in range(num_ranks)]
    machine.lsa_size = num_ranks
    found = choice(num_ranks, 512, engine="native", **options)
    assert found == ("native", "requested by name")
    machine.lsa_size = 33
    text = "33 ranks are in one NVLink domain: it takes at most 32"
    assert text in reasons(num_ranks, 512, **options)
    machine.gpus = [replace(gpu, capability=(10, 0)) for gpu in machine.gpus]
    assert text not in reasons(num_ranks, 512, **options)
    machine.lsa_size = 41
    text = "41 ranks are in one NVLink domain: it takes at most 40"
    assert text in reasons(num_ranks, 512, **options)
    if num_ranks > 2:
        machine.lsa_size = 1
        text = "the ranks are in 32 NVLink domains: it takes at most 16"
        assert text in reasons(num_ranks, 512, **options)


@pytest.mark.skipif(
    extension.unavailable_reason() is not None,
    reason=f"nothing to call: {extension.unavailable_reason()}",
)
def test_the_limits_are_the_kernels_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python let through beyond them would write beyond what is there."""
    native = extension.load()
    assert (CAPS.max_tokens, CAPS.max_top_k) == (native.MAX_TOKENS, native.MAX_TOP_K)
    assert CAPS.max_local_experts == native.MAX_LOCAL_EXPERTS
    assert CAPS.low_latency_tokens == native.LOW_LATENCY_TOKENS
    # Ranks on CPUs make the same messages, and have no extension to ask.
    assert native.MESSAGE_VECTOR == VECTOR
    # The default number of SMs works wherever the engine does.
    gpu = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    for size in (1, native.MAX_LOCAL_RANKS, native.MAX_RANKS):
        group: Any = SimpleNamespace(device=torch.device("cuda", 0), size=size)
        assert native.native_min_sms(size) <= native_availability.default_num_sms(group, 1)


def test_without_the_extension_its_engines_have_no_limits() -> None:
    """The kernels' limits are read from it when engines are imported, which needs no extension."""
    script = """
import sys
sys.modules["megatron_ncclep._C"] = None  # what an import of nothing leaves
from megatron_ncclep.engines import ENGINES
caps = ENGINES["native"].caps
print(caps.max_tokens, caps.max_top_k, caps.max_local_experts, caps.low_latency_tokens)
"""
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=patient(60))
    assert ran.stdout.split() == [b"None", b"None", b"None", b"0"]


@pytest.mark.cpu_only  # with GPUs there is nothing in the way
@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2)])
def test_without_gpus(ctx: RankContext, n: int) -> None:
    """In processes, over gloo."""
    words = "it needs GPUs and a process group with the nccl backend"
    with pytest.raises(EngineUnavailableError, match=words):
        create_engine(ctx.group, 4 * n, EpConfig(engine="native"))


# --- what the ranks find together ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "lsa_size", "text"),
    [("aaa", 2, "on 1 host(s)"), ("aab", 2, "on 2"), ("abc", NUM_RANKS, None)],
)
def test_nvlink_domains_and_hosts(
    machine: Machine,
    hosts: str,
    lsa_size: int,
    text: str | None,
    monkeypatch: pytest.MonkeyPatch,
    native_or_reference: None,
) -> None:
    """What matters is what NCCL finds; a domain may have many hosts."""
    own_place = native_availability._own_place
    monkeypatch.setattr(
        native_availability,
        "_own_place",
        lambda gpu: replace(own_place(gpu), host=hosts[gpu.index]),
    )
    machine.lsa_size = lsa_size
    _, reason = choice(NUM_RANKS)
    if text is None:
        assert reason == "native can run"
        return
    assert reason.startswith("not native: only 2 of 3 ranks, on ")
    assert text in reason
    remedy = "all have NVLink and CUDA peer" if hosts == "aaa" else "use the engine 'hierarchical'"
    assert re.search(f"between domains no network; or .*{remedy}", reasons())
    # With a network for kernels between them, several domains are as good as one.
    machine.network_problem = ""
    assert choice(NUM_RANKS) == ("native", "native can run")
    assert sorted(machine.closed) == ["Rails"] * NUM_RANKS + ["Window"] * NUM_RANKS
    # One that brings nothing is none.
    machine.probe = PeerError("put number 1 of rank 0 has not come")
    assert "(GIN) failed: putting a word to each rail peer: put number 1 of rank 0 has" in reasons()
    assert choice(NUM_RANKS)[0] == "reference"


def test_an_nccl_that_makes_no_communicator(machine: Machine) -> None:
    machine.lsa_size = LibraryError("ncclCommInitRank failed: why")
    assert reasons() == "NCCL made no communicator: ncclCommInitRank failed: why"
