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
from contract_cases import contract_cases, for_engine
from imports import import_dynamo
from left_out import leave_out, print_left_out, tell_the_printer, told_by
from megatron_versions import INSTALLED, put_first
from on_ranks import pytest_pyfunc_call  # noqa: F401  (a hook of pytest)
from packaging.version import Version
from patience import PatientPool
from processes import LOCAL_RANKS
from small_job import Trainer

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES
from megatron_ncclep.libraries import search
from megatron_ncclep.ranks import place
from megatron_ncclep.ranks.group import EpGroup
from megatron_ncclep.ranks.pool import RankPool

TESTS = Path(__file__).parent
GPU_TESTS = TESTS / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        default="gloo",
        choices=("gloo", "nccl"),
        help="of the contract tests: gloo on the CPU, or nccl on GPUs, which ranks share where "
        "there are fewer; with it tests/gpu is collected too",
    )
    parser.addoption(
        "--hosts",
        type=int,
        default=1,
        metavar="N",
        help="with --backend nccl: as how many hosts the largest --ranks appear (default: 1)",
    )
    parser.addoption(
        "--engine",
        action="append",
        metavar="NAME",
        help="engine whose contract is checked; may be repeated (default: reference)",
    )
    parser.addoption(
        "--ranks",
        action="append",
        type=int,
        metavar="N",
        help="ranks of the contract cases; may be repeated (default: 1 2 3 4).  Other tests use as "
        "many as they need, at most the largest N",
    )
    parser.addoption(
        "--megatron",
        default=INSTALLED,
        metavar="RELEASE",
        help="Megatron-Core of VENV/megatron/RELEASE, as scripts/fetch_megatron.sh unpacks it "
        "(default: the installed one); with another one, only the tests with the marker "
        "each_release run, and all on GPUs",
    )
    parser.addoption(
        "--iterations",
        type=int,
        default=60,
        metavar="N",
        help="batches of the random test (default: 60)",
    )
    parser.addoption(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the random test (default: 0); a failure says which to run again",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_ranks(n): left out when the largest --ranks is less")
    config.addinivalue_line(
        "markers",
        "needs_caps(test=...): left out for an engine whose EngineCaps fail the test",
    )
    config.addinivalue_line("markers", "cpu_only: left out on GPUs; a comment says why")
    config.addinivalue_line(
        "markers", "own_gpus(reason): left out when ranks share GPUs, and listed"
    )
    config.addinivalue_line(
        "markers",
        "supports(option, ..., compared=...): the options that the test shows to work and what it "
        "compares, for docs/support.md (scripts/support.py)",
    )
    config.addinivalue_line(
        "markers",
        "refuses(option, ..., words=...): the options that are refused, and why; as `supports`",
    )
    config.addinivalue_line(
        "markers",
        "any_python(reason): left out before Python 3.12, whose run shows as much, and listed",
    )
    config.addinivalue_line(
        "markers",
        "each_release: runs with every supported release of Megatron-Core (--megatron), not only "
        "with the installed one",
    )
    config.addinivalue_line(
        "markers", "limit_s(seconds): time that ranks have for a test, instead of 240 seconds"
    )
    config.addinivalue_line(
        "markers", "since(release): left out with older releases of Megatron-Core"
    )
    put_first(config.getoption("--megatron"))
    if config.getoption("--iterations") < 1:
        raise pytest.UsageError("--iterations: must be at least 1")
    if lists_only(config):
        return
    over, hosts = config.getoption("--backend"), config.getoption("--hosts")
    check_options(chosen_engines(config), chosen_ranks(config), over, hosts)
    if over == "nccl":
        # TransformerEngine multiplies fp32 as TF32, in which a difference of one rounding of fp32
        # becomes one of 2^-11: two trainings then part after some steps.
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
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

    An engine that cannot run on this machine's GPUs is not refused: its tests fail, and say why.

    Raises:
        pytest.UsageError: says which option to change.
    """
    for name in engine_names:
        if name not in ENGINES:
            raise pytest.UsageError(f"--engine {name}: the engines are {', '.join(ENGINES)}")
        reason = reason_without_gpus(name) if backend == "gloo" else None
        if reason:
            raise pytest.UsageError(
                f"--engine {name}: cannot run over gloo on the CPU: {reason}; on a machine with "
                "GPUs add --backend nccl"
            )
    if ranks[0] < 1:
        raise pytest.UsageError(f"--ranks {ranks[0]}: must be at least 1")
    if hosts < 1 or ranks[-1] % hosts or (hosts > 1 and backend != "nccl"):
        raise pytest.UsageError(
            f"--hosts {hosts}: must divide the largest --ranks, {ranks[-1]}, and with more "
            "than one --backend must be nccl"
        )
    if backend == "nccl" and shares_gpus(ranks[-1]):
        os.environ[place.ENABLE] = "1"
        if torch.cuda.device_count() == 0 or not place.may_share_gpu():
            raise pytest.UsageError(
                f"--backend nccl: {ranks[-1]} ranks on {torch.cuda.device_count()} GPU(s) with "
                f"NCCL {search.find_nccl()}: {place.HOW_TO_SHARE}"
            )


def shares_gpus(num_ranks: int) -> bool:
    """Whether there are fewer GPUs than ranks."""
    return num_ranks > torch.cuda.device_count()


def reason_without_gpus(name: str) -> str | None:
    """What the engine says of a gloo group; asked in a group of this process alone."""
    if name == "reference":  # made for it
        return None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None  # just made
        return ENGINES[name].unavailable_reason(
            EpGroup.of(dist.group.WORLD), EpConfig(engine=name), None
        )
    finally:
        dist.destroy_process_group()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/gpu out without GPUs: not skipped, so that no report counts them."""
    on_gpu = config.getoption("--backend") != "gloo"
    is_inside = GPU_TESTS in (collection_path, *collection_path.parents)
    return True if is_inside and not on_gpu else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    most, backend = chosen_ranks(config)[-1], config.getoption("--backend")
    release = Version(config.getoption("--megatron"))
    # Those wait for Slurm, minutes without work: the other process has all the others meanwhile.
    items.sort(key=lambda item: "cluster" not in item.path.parts)
    reasons: dict[pytest.Function, str] = {}
    for item in items:
        too_few = any(mark.args[0] > most for mark in item.iter_markers("needs_ranks"))
        lacks_caps = any(
            not mark.kwargs["test"](ENGINES[item.callspec.params["engine_name"]].caps)
            for mark in item.iter_markers("needs_caps")
        )
        on_cpu_only = item.get_closest_marker("cpu_only") is not None
        own_gpus = item.get_closest_marker("own_gpus")
        any_python = item.get_closest_marker("any_python")
        for_each_release = item.get_closest_marker("each_release") is not None
        too_old = any(release < Version(mark.args[0]) for mark in item.iter_markers("since"))
        # On GPUs all tests are about Megatron as it is there.
        other_release = release != Version(INSTALLED) and not for_each_release and backend == "gloo"
        not_on_gpus = backend != "gloo" and on_cpu_only
        if lists_only(config):
            continue
        if any((too_few, lacks_caps, not_on_gpus, too_old, other_release)):
            reasons[item] = ""
        elif backend == "nccl" and own_gpus is not None and shares_gpus(most):
            reasons[item] = own_gpus.args[0]
        elif any_python is not None and sys.version_info < (3, 12):
            reasons[item] = f"{any_python.args[0]}; with Python 3.12 it is run"
    leave_out(config, items, reasons)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Start the pools of a failed test anew: a group that gave up on a rank does so for good."""
    report = yield
    if report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, RankPool):
                value.close()
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    tell_the_printer(session.config)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    told_by(node.config, node)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    print_left_out(terminalreporter, config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a room to one worker: they share a pool of ranks, and what fixtures have
    compiled.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.partition("::")[0])
            return path.parts[1] if len(path.parts) > 2 else path.parts[0]

    return Scheduling(config, log)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test every chosen engine and, if it asks for them, every contract case of each."""
    names, numbers = chosen_engines(metafunc.config), chosen_ranks(metafunc.config)
    if "contract_case" in metafunc.fixturenames:
        metafunc.parametrize(
            ("engine_name", "contract_case"),
            [
                pytest.param(
                    name, for_engine(case, ENGINES[name].caps), id=f"{name}-{n}ranks-{case}"
                )
                for name in names
                for n in numbers
                for case in contract_cases(n)
            ],
        )
    elif "engine_name" in metafunc.fixturenames:
        metafunc.parametrize("engine_name", names)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--backend")


@pytest.fixture(scope="session")
def iterations(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--iterations")


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--seed")


@pytest.fixture(scope="session")
def rank_counts(request: pytest.FixtureRequest) -> list[int]:
    return chosen_ranks(request.config)


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    """What runs `ncclep train` on a CPU."""
    trainer = Trainer()
    yield trainer
    trainer.close()


@pytest.fixture(scope="session")
def hosts(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--hosts")


@pytest.fixture(scope="session")
def pool(backend: str, rank_counts: list[int], hosts: int) -> Iterator[RankPool]:
    """As many ranks as the largest --ranks; a test that needs fewer uses the first ones."""
    size = rank_counts[-1]
    prepare = import_dynamo if backend == "gloo" else None
    pool = PatientPool(size, backend, prepare=prepare, hosts=hosts)
    yield pool
    pool.close()
