"""Options and fixtures of all tests: which engines are checked, over what, on how many ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract_cases import caps_of, contract_cases, for_engine
from deselect import (  # noqa: F401  (hooks of pytest)
    leave_out,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from fixtures import closed
from imports import import_dynamo
from megatron_versions import INSTALLED, put_first
from network.option import add_network_option, use_network
from on_ranks import pytest_pyfunc_call  # noqa: F401  (a hook of pytest)
from packaging.version import Version
from processes import LOCAL_RANKS
from ran import Recorder
from rank_pool import RankPool
from small_job import Trainer
from timeouts import PatientPool

from megatron_ncclep.engines import ENGINES
from megatron_ncclep.libraries import search
from megatron_ncclep.ranks import topology

GPU_TESTS = Path(__file__).parent / "gpu"
# What takes longest begins first: a process that got it last would be alone with it.  tests/cluster
# waits for Slurm, minutes without work.
LONGEST = ("cluster", "integration", "native", "test_doc_commands.py", "benchmark", "training")


MARKERS = """
needs_ranks(n): left out when the largest --ranks is less
needs_caps(test=...): left out for an engine whose EngineCaps fail the test
cpu_only: left out on GPUs; a comment says why
needs_network: left out without --network
needs_gib(gib): GPU memory of each rank; left out where ranks have less, and listed
supports(option, ..., compared=...): options that the test shows to work, and what it compares, \
for docs/support.md (scripts/support.py)
refuses(option, ..., words=...): options that are refused, and why, for docs/support.md
any_python(reason): left out before Python 3.12, whose run shows as much, and listed
each_release: runs with every supported release of Megatron-Core (--megatron)
alone: `ctx` is the only rank of its job
ranks(n): `ctx` is one of n ranks, instead of all that the pool has
limit_s(seconds): time that ranks have for a test, instead of 240 seconds
since(release): left out with older releases of Megatron-Core
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.addoption
    add(
        "--backend",
        default="gloo",
        choices=("gloo", "nccl"),
        help="gloo on the CPU, or nccl on GPUs, which ranks share if there are fewer; with nccl "
        "tests/gpu is collected too",
    )
    add(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="with --backend nccl: as how many hosts the largest --ranks appear (default: 1)",
    )
    add_network_option(add)
    add("--ran", type=Path, metavar="FOLDER", help="write there with which versions all passed")
    add(
        "--engine",
        action="append",
        metavar="NAME",
        help="engine whose contract is checked; may be repeated (default: reference)",
    )
    add(
        "--ranks",
        action="append",
        type=int,
        metavar="N",
        help="ranks of the contract cases; may be repeated (default: 1 2 3 4); other tests use as "
        "many as they need, at most the largest N",
    )
    add(
        "--megatron",
        default=INSTALLED,
        metavar="RELEASE",
        help="Megatron-Core of VENV/megatron/RELEASE, as scripts/fetch_megatron.sh unpacks it "
        "(default: the installed one); with another one, only tests with the marker each_release, "
        "and all on GPUs",
    )
    add("--iterations", type=int, default=60, metavar="N", help="random batches (default: 60)")
    add("--seed", type=int, default=0, metavar="N", help="of the random test (default: 0)")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS.strip().splitlines():
        config.addinivalue_line("markers", marker)
    put_first(config.getoption("--megatron"))
    if config.getoption("--iterations") < 1:
        raise pytest.UsageError("--iterations: must be at least 1")
    if lists_only(config):
        return
    if (folder := config.getoption("--ran")) is not None:
        config.pluginmanager.register(Recorder(folder, config.getoption("--megatron")))
    over, hosts = config.getoption("--backend"), config.getoption("--hosts")
    check_options(chosen_engines(config), chosen_ranks(config), over, hosts)
    if over == "nccl":
        # TransformerEngine multiplies fp32 as TF32, in which a difference of one rounding of fp32
        # becomes one of 2^-11: two trainings then part after some steps.
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    use_network(config.getoption("--network"), hosts)
    if hosts > 1:
        os.environ[LOCAL_RANKS] = str(chosen_ranks(config)[-1] // hosts)


def lists_only(config: pytest.Config) -> bool:
    """Whether scripts/support.py wants to know all tests, and nothing runs."""
    return getattr(config.option, "lists_only", False)


def chosen_engines(config: pytest.Config) -> list[str]:
    """The names of the engines that this run checks."""
    return config.getoption("--engine") or ["reference"]


def chosen_ranks(config: pytest.Config) -> list[int]:
    """The numbers of ranks of the contract cases, in ascending order."""
    return sorted(set(config.getoption("--ranks") or [1, 2, 3, 4]))


def check_options(engine_names: list[str], ranks: list[int], backend: str, hosts: int = 1) -> None:
    """Refuse what cannot run at all, before the first test; let ranks share GPUs if they must.

    An engine that cannot run on this machine is not refused: its tests fail, and say why.

    Raises:
        pytest.UsageError: says which option to change.
    """
    for name in engine_names:
        if name not in ENGINES:
            raise pytest.UsageError(f"--engine {name}: the engines are {', '.join(ENGINES)}")
    if ranks[0] < 1:
        raise pytest.UsageError(f"--ranks {ranks[0]}: must be at least 1")
    if hosts < 1 or ranks[-1] % hosts or (hosts > 1 and backend != "nccl"):
        raise pytest.UsageError(
            f"--hosts {hosts}: must divide the largest --ranks, {ranks[-1]}, and with more "
            "than one --backend must be nccl"
        )
    if backend == "nccl" and ranks[-1] > torch.cuda.device_count():
        os.environ[topology.ENABLE] = "1"
        if torch.cuda.device_count() == 0 or not topology.may_share_gpu():
            raise pytest.UsageError(
                f"--backend nccl: {ranks[-1]} ranks on {torch.cuda.device_count()} GPU(s) with "
                f"NCCL {search.find_nccl()}: {topology.HOW_TO_SHARE}"
            )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/gpu out without GPUs: not skipped, so that no report counts them."""
    on_gpu = config.getoption("--backend") != "gloo"
    is_inside = GPU_TESTS in (collection_path, *collection_path.parents)
    return True if is_inside and not on_gpu else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    if lists_only(config):
        return
    items.sort(key=lambda item: (*LONGEST, room := room_of(item.nodeid)).index(room))
    reasons = {item: reason_to_leave_out(config, item) for item in items}
    leave_out(config, items, {item: why for item, why in reasons.items() if why is not None})


def reason_to_leave_out(config: pytest.Config, item: pytest.Function) -> str | None:
    """Why the options rule a test out; "" where that goes without saying; None: it runs."""
    most, on_gpus = chosen_ranks(config)[-1], config.getoption("--backend") != "gloo"
    release, mark = Version(config.getoption("--megatron")), item.get_closest_marker
    if (
        any(needs.args[0] > most for needs in item.iter_markers("needs_ranks"))
        or any(
            not needs.kwargs["test"](caps_of(item.callspec.params["engine_name"]))
            for needs in item.iter_markers("needs_caps")
        )
        or any(release < Version(since.args[0]) for since in item.iter_markers("since"))
        or (on_gpus and mark("cpu_only") is not None)
        or (mark("needs_network") is not None and not config.getoption("--network"))
        # On GPUs all tests are about Megatron as it is there.
        or (release != Version(INSTALLED) and mark("each_release") is None and not on_gpus)
    ):
        return ""
    if on_gpus and (needs_gib := mark("needs_gib")) is not None:
        num_gpus = torch.cuda.device_count()
        total = num_gpus * torch.cuda.get_device_properties(0).total_memory
        if total < needs_gib.args[0] * 2**30 * max(most, num_gpus):
            return f"{needs_gib.args[0]} GiB are needed for each rank"
    if (any_python := mark("any_python")) is not None and sys.version_info < (3, 12):
        return f"{any_python.args[0]}; with Python 3.12 it is run"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Close the pools of a failed test: a group that gave up on a rank does so for good."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, RankPool):
                value.close()
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a room to one worker: they share a pool of ranks, and what fixtures have
    compiled.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return room_of(nodeid)

    config.option.loadscopereorder = False  # by numbers of tests
    return Scheduling(config, log)


def room_of(nodeid: str) -> str:
    """The folder of tests/ that a test is in, or its module."""
    return Path(nodeid.partition("::")[0]).parts[1]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test every chosen engine and, if it asks for them, every contract case of each."""
    names, numbers = chosen_engines(metafunc.config), chosen_ranks(metafunc.config)
    if "contract_case" in metafunc.fixturenames:
        metafunc.parametrize(
            ("engine_name", "contract_case"),
            [
                pytest.param(name, for_engine(case, caps_of(name)), id=f"{name}-{n}ranks-{case}")
                for name in names
                for n in numbers
                for case in contract_cases(n)
            ],
        )
    elif "engine_name" in metafunc.fixturenames:
        metafunc.parametrize("engine_name", names)


def value_of(option: str) -> Any:
    """A fixture of an option's value."""

    @pytest.fixture(scope="session")
    def value(request: pytest.FixtureRequest) -> Any:
        return request.config.getoption(option)

    return value


backend, hosts, iterations, seed = map(value_of, ("backend", "hosts", "iterations", "seed"))


@pytest.fixture(scope="session")
def rank_counts(request: pytest.FixtureRequest) -> list[int]:
    return chosen_ranks(request.config)


# What runs `ncclep train` on a CPU.
trainer = closed(Trainer)


@pytest.fixture(scope="session")
def pool(backend: str, rank_counts: list[int], hosts: int) -> Iterator[RankPool]:
    """As many ranks as the largest --ranks; a test that needs fewer uses the first ones."""
    size = rank_counts[-1]
    prepare = import_dynamo if backend == "gloo" else None
    pool = PatientPool(size, backend, prepare=prepare, hosts=hosts)
    yield pool
    pool.close()


@pytest.fixture
def ctx(pool: RankPool) -> RankPool:
    """The pool on whose ranks the test runs (tests/on_ranks.py); some folders have their own."""
    return pool


@pytest.fixture
def process_group() -> Iterator[dist.ProcessGroup]:
    """A group of one rank, this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None  # just made
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
