"""What keeps an engine from running, told alike on all ranks, and which one `auto` takes.

Ranks are threads, and their GPUs are `Gpu`s; nothing here needs a GPU or the extension.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_extension import gpus_with
from fake_machine import NUM_RANKS, Gpu, Machine, nccl
from fakes import ThreadGroup, needs_extension
from rank_pool import RankContext
from timeouts import patient

from megatron_ncclep import engines
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES, create_engine
from megatron_ncclep.engines.hierarchical.message_packing import VECTOR
from megatron_ncclep.engines.native import availability as native_availability
from megatron_ncclep.engines.native.engine import CAPS
from megatron_ncclep.engines.nccl_ep import availability as nccl_ep_availability
from megatron_ncclep.errors import EngineUnavailableError, InputError, LibraryError, PeerError
from megatron_ncclep.libraries import extension
from megatron_ncclep.libraries.nccl_ep import PULL_PUSH, NcclEpLibrary
from megatron_ncclep.ranks import nodes

EXTENSIONS = NcclEpLibrary(Path("/opt/libnccl_ep.so"), (0, 2, 0), "", "nccl-extensions", 2)
TRANSFORMER_ENGINE = replace(EXTENSIONS, package="transformer-engine", interface=3)


def of_nccl_ep(library: NcclEpLibrary, **differs: Any) -> dict[str, Any]:
    """With a libnccl_ep and the NCCL that it needs."""
    newer = library.package == "transformer-engine"
    used = nccl(2, 32, 3) if newer else nccl(2, 30, 7)
    return {"engine": "nccl_ep", "library": library, "nccl": used, **differs}


# --- one reason ----------------------------------------------------------------------------------


MANY = [Gpu(f"12345678-1234-1234-1234-{r:012d}", "NVIDIA " + "H" * 60) for r in range(64)]
BLACKWELL = [Gpu(f"uuid-{r}", capability=(10, 0)) for r in range(NUM_RANKS)]
# A pattern of what all ranks say, and what differs: on the GPU of rank 1, of the machine, in the
# numbers of ranks and experts, and in the config.
IN_THE_WAY: dict[str, dict[str, Any]] = {
    # What one rank finds.
    "rank 1: NVIDIA A100 is older than Hopper": {"capability": (8, 0), "name": "NVIDIA A100"},
    # `auto` chose the engine, and the first dispatch failed on every rank.
    r"rank 1: RTX PRO 6000 \(compute capability 12.0\): the kernel of dispatch needs 17": {
        "capability": (12, 0), "name": "RTX PRO 6000", "architectures": ["compute_90"],
        "lacks": "the kernel of dispatch needs 172032 bytes",
    },
    "rank 1: num_sms 32: at most 0 on .* H200 with 16 SMs": {"multi_processor_count": 16},
    "NCCL 2.28.9 or newer, found none: pip install 'nvidia-nccl-cu": {"nccl": None},
    # Limits.
    "it takes at most 512 experts in total: there are 513": {"experts": 513},
    "it takes at most 256 experts on a rank: 2 ranks have 514": {"ranks": 2, "experts": 514},
    "num_sms 4: its kernels need at least 5 for 3 ranks": {"num_sms": 4},
    "num_sms 101: at most 100 on NVIDIA H200 with 132 SMs: 32 are left to NCCL's kernels, "
    "otherwise two groups can deadlock": {"num_sms": 101},
    "it takes at most 33 ranks, the group has 34": {"ranks": 34},
    # What the ranks find together.
    r"the ranks have different GPUs, rank 0 NVIDIA H200 \(sm_90\) and rank 1 NVIDIA H100 ": {
        "name": "NVIDIA H100"
    },
    "the GPU of rank 0 cannot access the memory of rank 2's": {"no_access": {(0, 2)}},
    # No GPU reaches another, on a host with a long name: the message is long enough.
    "cannot access": {
        "gpus": MANY, "no_access": {(a, b) for a in range(64) for b in range(64)}, "ranks": 32
    },
    # What NCCL finds.
    "33 ranks are in one NVLink domain: it takes at most 32": {"lsa_size": 33},
    "41 .* in one NVLink domain: it takes at most 40": {"gpus": BLACKWELL, "lsa_size": 41},
    "the ranks are in 32 NVLink domains: it takes at most 16": {"lsa_size": 1, "ranks": 32},
    "^NCCL made no communicator: ncclCommInitRank failed: why$": {
        "lsa_size": LibraryError("ncclCommInitRank failed: why")
    },
    # What NVIDIA's library lacks.
    "pip install nccl-extensions, .* or transformer-engine": {"engine": "nccl_ep"},
    "libnccl_ep.so is version 0.3.0: .* the interface of 0.2 only": of_nccl_ep(
        replace(EXTENSIONS, version=(0, 3, 0))
    ),
    "of nccl-extensions requires NCCL 2.30.7 exactly, and this process has NCCL 2.28.9: "
    ".*nvidia-nccl-cu[0-9]+==2.30.7": of_nccl_ep(EXTENSIONS, nccl=nccl(2, 28, 9)),
    "there is no nvcc": of_nccl_ep(EXTENSIONS, has_nvcc=False),
    "NCCLEP_NCCL_LIBRARY=/mine.so, but libnccl_ep gets .* /opt/libnccl.so.2": of_nccl_ep(
        EXTENSIONS,
        nccl=nccl(2, 30, 7, path="/mine.so"), loaded=nccl(2, 30, 7, path="/opt/libnccl.so.2"),
    ),
    "at most 34 are safe": of_nccl_ep(EXTENSIONS, num_sms=35),
    "at most 16 are safe": of_nccl_ep(EXTENSIONS, nodes=[1, 2], num_sms=17),
    "at most 132 are safe": of_nccl_ep(TRANSFORMER_ENGINE, num_sms=133),
}  # fmt: skip


def choose(machine: Machine, differs: dict[str, Any], **options: Any) -> tuple[str, str]:
    """What all ranks choose on a machine that differs so, and why."""
    options |= differs
    ranks, experts = options.pop("ranks", NUM_RANKS), options.pop("experts", None)
    machine.gpus = [Gpu(f"uuid-{r}") for r in range(ranks)]
    for name in vars(machine).keys() & options.keys():
        setattr(machine, name, options.pop(name))
    of_gpu = {name: options.pop(name) for name in vars(MANY[0]).keys() & options.keys()}
    machine.gpus[1] = replace(machine.gpus[1], **of_gpu)
    return machine.choose(ranks, experts, **options)


@pytest.mark.parametrize("says", IN_THE_WAY)
def test_what_is_in_the_way_all_ranks_say(says: str, machine: Machine) -> None:
    """What one rank alone finds, too, and that before NCCL is asked."""
    differs = IN_THE_WAY[says]
    name, text = choose(machine, differs, engine="native")
    assert name == ""
    assert re.search(says, text), text
    if not {"engine", "num_sms"} & differs.keys():
        assert choose(machine, differs)[0] == "reference"
    assert bool(machine.made) == ("lsa_size" in differs)


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
    errors = machine.choices(NUM_RANKS, EpConfig(engine=engine))
    kind = InputError if isinstance(error, InputError) else LibraryError
    assert [type(e) for e in errors] == [kind] * NUM_RANKS, errors
    assert len({str(e) for e in errors}) == 1
    assert f"rank 1: {text}" in str(errors[0])
    assert errors[1].__cause__ is (None if isinstance(error, InputError) else error)
    assert machine.made == []


# --- what can run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "differs",
    [
        {"experts": 512},
        {"experts": 512, "ranks": 32, "lsa_size": 32, "num_sms": 6},
        {"experts": 512, "ranks": 2, "lsa_size": 2, "num_sms": 5},
        {"experts": 512, "ranks": 2, "lsa_size": 2, "num_sms": 100},
        of_nccl_ep(EXTENSIONS, num_sms=34),
        of_nccl_ep(TRANSFORMER_ENGINE, experts=9),
        # It does not say its version before it is opened.
        of_nccl_ep(NcclEpLibrary(Path("/opt/libnccl_ep.so"), None, "")),
    ],
    ids=lambda differs: " ".join(map(str, differs)),
)
def test_what_can_run_just_within_the_limits(machine: Machine, differs: dict[str, Any]) -> None:
    engine = differs.get("engine", "native")
    assert choose(machine, differs, engine="native") == (engine, "requested by name")
    assert sorted(machine.made) == list(range(len(machine.gpus)))
    if engine == "native":
        assert choose(machine, differs) == ("native", "native can run")


def test_pull_push(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PULL_PUSH, "1")
    machine.library, machine.nccl = EXTENSIONS, nccl(2, 30, 7)
    _, text = machine.choose(engine="nccl_ep")
    assert "which libnccl_ep of nccl-extensions would ignore" in text
    machine.library, machine.nccl, machine.nodes = TRANSFORMER_ENGINE, nccl(2, 32, 3), [1, 2]
    assert "needs all ranks in one node" in machine.choose(engine="nccl_ep")[1]
    machine.nodes = [NUM_RANKS]
    assert machine.choose(engine="nccl_ep")[0] == "nccl_ep"


def test_ranks_with_libraries_that_differ(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fits the NCCL of its own machine, and their kernels would wait for each other."""
    machine.library, machine.nccl = EXTENSIONS, nccl(2, 30, 7)
    interfaces = iter([2, 3])  # of one rank after the other
    monkeypatch.setattr(
        nccl_ep_availability, "_identity", lambda: [0, 2, 0, 2, 30, 7, i := next(interfaces), i - 2]
    )
    differ = (
        "rank {} has libnccl_ep 0.2.0 of interface 2, NCCL 2.30.7",
        f"rank {{}} has libnccl_ep 0.2.0 of interface 3, NCCL 2.30.7 and {PULL_PUSH}",
    )
    assert machine.choose(2, engine="nccl_ep")[1] in [
        f"it must be the same on all ranks: {a.format(0)}, {b.format(1)}"
        for a, b in (differ, differ[::-1])
    ]


def test_ranks_share_a_gpu_where_nccl_allows_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.gpus = [machine.gpus[0]] * NUM_RANKS
    allows = "for tests, NCCL 2.30.0 or newer lets ranks share a GPU with NCCL_MULTI"
    assert allows in machine.choose(engine="native")[1]
    name, reason = machine.choose()
    assert name == "reference"
    assert reason.startswith("not native: ranks 0 and 1 share one GPU (NVIDIA H200, UUID uuid-0)")
    assert reason.endswith("\nreference can run")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert "share one GPU" in machine.choose(engine="native")[1]  # NCCL 2.28.9
    machine.nccl = nccl(2, 30, 7)
    assert machine.choose(engine="native") == ("native", "requested by name")
    most = "num_sms 34: at most 33 for each of 3 ranks on NVIDIA H200"
    assert most in machine.choose(engine="native", num_sms=34)[1]


@pytest.mark.parametrize(
    ("hosts", "lsa_size", "text"),
    [("aaa", 2, "on 1 host(s)"), ("aab", 2, "on 2"), ("abc", NUM_RANKS, None)],
)
def test_nvlink_domains_and_hosts(
    machine: Machine, hosts: str, lsa_size: int, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What matters is what NCCL finds; a domain may have many hosts."""
    own_place = native_availability._own_place
    monkeypatch.setattr(
        native_availability,
        "_own_place",
        lambda gpu: replace(own_place(gpu), host=hosts[gpu.index]),
    )
    machine.lsa_size = lsa_size
    _, reason = machine.choose()
    if text is None:
        assert reason == "native can run"
        return
    assert reason.startswith("not native: only 2 of 3 ranks, on ")
    assert text in reason
    remedy = "all have NVLink and CUDA peer" if hosts == "aaa" else "use the engine 'hierarchical'"
    assert re.search(
        f"between domains no network; or .*{remedy}", machine.choose(engine="native")[1]
    )
    # With a network for kernels between them, several domains are as good as one.
    machine.network_problem = ""
    assert machine.choose() == ("native", "native can run")
    assert sorted(machine.closed) == ["Rails"] * NUM_RANKS + ["Window"] * NUM_RANKS
    # One that brings nothing is none.
    machine.probe = PeerError("put number 1 of rank 0 has not come")
    failed = "(GIN) failed: putting a word to each rail peer: put number 1 of rank 0 has"
    assert failed in machine.choose(engine="native")[1]
    assert machine.choose()[0] == "reference"


NOT_NATIVE = "not native: only {} of 4 ranks, on 1 host(s), are in one NVLink"


@pytest.mark.parametrize(
    ("lsa_size", "no_access", "name", "says"),
    [
        (4, set(), "native", ["native can run"]),
        (2, set(), "hierarchical", [NOT_NATIVE.format(2), "\nhierarchical can run"]),
        (
            # One node's kernels cannot run: the ranks of the other one hear it, too.
            *(2, {(2, 3)}, "reference"),
            ["\nnot hierarchical: inside a node, not native: rank 2: the GPU of rank 0 cannot"],
        ),
        (1, set(), "reference", ["\nnot hierarchical: all ranks are on one node\n"]),
    ],
    ids=["one domain", "two nodes", "a node without peer access", "no NVLink"],
)
def test_auto_takes_what_can_run_on_all_nodes(
    machine: Machine, lsa_size: int, no_access: set[tuple[int, int]], name: str, says: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """NCCL offers kernels no network between the nodes; nobody has libnccl_ep."""
    local = [[b""] * 2, threading.Barrier(2)], [[b""] * 2, threading.Barrier(2)]

    class GridOfThreads:
        """The grid, with groups of threads for the machines."""

        def __init__(self, group: Any, shape: nodes.Nodes, timeout_s: float) -> None:
            self.nodes = shape
            meeting: Any = local[shape.node_of(group.rank)]
            self.local = ThreadGroup(shape.local_index(group.rank), *meeting)
            self.local.device = group.device

    monkeypatch.setattr(nodes, "Grid", GridOfThreads)
    monkeypatch.setattr(nodes, "communicator_of", machine.communicator_of)
    monkeypatch.setattr(engines, "ENGINES", ENGINES)
    monkeypatch.delenv("NCCLEP_LOCAL_RANKS", raising=False)
    machine.gpus = [Gpu(f"uuid-{r}") for r in range(4)]
    machine.lsa_size, machine.no_access = lsa_size, no_access
    chosen, reason = machine.choose(4, 8)
    assert chosen == name
    assert all(text in reason for text in says), reason
    assert reason.endswith(f"{name} can run")


# --- the kernels' own limits ---------------------------------------------------------------------


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
    group: Any = SimpleNamespace(device=torch.device("cuda", 0), size=num_ranks)
    assert native_availability.default_num_sms(group, ranks_per_gpu) == num_sms


@needs_extension
def test_the_limits_are_the_kernels_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python let through beyond them would write beyond what is there."""
    native = extension.load()
    assert (CAPS.max_tokens, CAPS.max_top_k) == (native.MAX_TOKENS, native.MAX_TOP_K)
    assert CAPS.max_local_experts == native.MAX_LOCAL_EXPERTS
    assert CAPS.low_latency_tokens == native.LOW_LATENCY_TOKENS
    # Ranks on CPUs make the same messages, and have no extension to ask.
    assert native.MESSAGE_VECTOR == VECTOR
    # The default number of SMs works wherever the engine does.
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus_with(132))
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
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=patient(300))
    assert ran.stdout.split() == [b"None", b"None", b"None", b"0"]


@pytest.mark.cpu_only  # with GPUs there is nothing in the way
@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.ranks(n)) for n in (1, 2)])
def test_without_gpus(ctx: RankContext, n: int) -> None:
    """In processes, over gloo."""
    words = "it needs GPUs and a process group with the nccl backend"
    with pytest.raises(EngineUnavailableError, match=words):
        create_engine(ctx.group, 4 * n, EpConfig(engine="native"))
