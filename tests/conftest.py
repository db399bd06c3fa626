"""Options and fixtures of all tests: which engines are checked, over what, on how many ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES
from megatron_ncclep.engines.group import EpGroup
from megatron_ncclep.testing.cases import contract_cases, for_engine
from megatron_ncclep.testing.launcher import RankPool

GPU_TESTS = Path(__file__).parent / "gpu"
sys.path.append(str(Path(__file__).parent / "virtual"))
# Tests that virtual ranks cannot run -> why.
NOT_RUN = pytest.StashKey[dict[str, str]]()
VIRTUAL = "virtual"  # ranks that are threads and share one GPU: tests/virtual/virtual_ranks.py


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        default="gloo",
        choices=("gloo", "nccl", VIRTUAL),
        help="of the contract tests: gloo on the CPU, nccl with a GPU for each rank, or virtual, "
        "for the engine native: ranks that are threads and share one GPU.  The last two also "
        "collect tests/gpu",
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
        "markers", "needs_processes(reason): left out with --backend virtual, and listed"
    )
    config.addinivalue_line(
        "markers",
        "supports(option, ..., compared=...): the options that the test shows to work and what it "
        "compares, for docs/support.md (tests/support_table.py)",
    )
    config.addinivalue_line(
        "markers",
        "refuses(option, ..., words=...): the options that are refused, and why; as `supports`",
    )
    if config.getoption("--iterations") < 1:
        raise pytest.UsageError("--iterations: must be at least 1")
    if getattr(config.option, "lists_only", False):  # by tests/support_table.py, and nothing runs
        return
    check_options(chosen_engines(config), chosen_ranks(config), config.getoption("--backend"))


def chosen_engines(config: pytest.Config) -> list[str]:
    """The names of the engines that this run checks."""
    return config.getoption("--engine") or ["reference"]


def chosen_ranks(config: pytest.Config) -> list[int]:
    """The numbers of ranks of the contract cases, in ascending order."""
    return sorted(set(config.getoption("--ranks") or [1, 2, 3, 4]))


def check_options(engine_names: list[str], ranks: list[int], backend: str) -> None:
    """Refuse what cannot run at all, before the first test.

    An engine that cannot run on this machine's GPUs is not refused: its tests fail, and say why.

    Raises:
        pytest.UsageError: says which option to change.
    """
    for name in engine_names:
        if name not in ENGINES:
            raise pytest.UsageError(f"--engine {name}: the engines are {', '.join(ENGINES)}")
        obstacle = obstacle_without_gpus(name) if backend == "gloo" else None
        if obstacle:
            raise pytest.UsageError(
                f"--engine {name}: cannot run over gloo on the CPU: {obstacle}; on a machine with "
                "GPUs add --backend nccl"
            )
    if ranks[0] < 1:
        raise pytest.UsageError(f"--ranks {ranks[0]}: must be at least 1")
    if backend == VIRTUAL:
        check_virtual(engine_names, ranks)
    if backend == "nccl" and ranks[-1] > torch.cuda.device_count():
        fitting = " ".join(f"--ranks {n}" for n in ranks if n <= torch.cuda.device_count())
        raise pytest.UsageError(
            f"--backend nccl needs a GPU for each of {ranks[-1]} ranks, and there are "
            f"{torch.cuda.device_count()}: {f'use {fitting}' if fitting else 'use --backend gloo'}"
        )


def check_virtual(engine_names: list[str], ranks: list[int]) -> None:
    """Refuse what ranks that share one GPU cannot run; raises as `check_options`."""
    from virtual_ranks import MOST_RANKS  # here and below: nobody else needs torch's test code

    if engine_names != ["native"]:
        raise pytest.UsageError(
            f"--backend virtual runs the engine native, not {', '.join(engine_names)}: add "
            "--engine native"
        )
    if ranks[-1] > MOST_RANKS:
        raise pytest.UsageError(f"--ranks {ranks[-1]}: at most {MOST_RANKS} ranks share a GPU")
    if torch.cuda.device_count() == 0:
        raise pytest.UsageError("--backend virtual needs a GPU, and there is none: use gloo")


def obstacle_without_gpus(name: str) -> str | None:
    """What the engine says of a gloo group; asked in a group of this process alone."""
    if name == "reference":  # made for it
        return None
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None  # just made
        return ENGINES[name].obstacle(EpGroup.of(dist.group.WORLD), EpConfig(engine=name), None)
    finally:
        dist.destroy_process_group()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/gpu out without GPUs: not skipped, so that no report counts them."""
    on_gpu = config.getoption("--backend") != "gloo"
    is_inside = GPU_TESTS in (collection_path, *collection_path.parents)
    return True if is_inside and not on_gpu else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    most, backend = chosen_ranks(config)[-1], config.getoption("--backend")
    on_gpu = backend != "gloo"
    not_run: dict[str, str] = {}

    def is_left_out(item: pytest.Function) -> bool:
        too_few = any(mark.args[0] > most for mark in item.iter_markers("needs_ranks"))
        lacks_caps = any(
            not mark.kwargs["test"](ENGINES[item.callspec.params["engine_name"]].caps)
            for mark in item.iter_markers("needs_caps")
        )
        on_cpu_only = item.get_closest_marker("cpu_only") is not None
        if too_few or lacks_caps or (on_gpu and on_cpu_only):
            return True
        mark = item.get_closest_marker("needs_processes")
        if backend != VIRTUAL or mark is None:
            return False
        not_run[item.nodeid.partition("[")[0]] = mark.args[0]
        return True

    config.stash[NOT_RUN] = not_run
    left_out = [item for item in items if is_left_out(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """List what virtual ranks leave out, and why: scripts/gpu_check.sh reads these lines."""
    for test, reason in config.stash.get(NOT_RUN, {}).items():
        terminalreporter.write_line(f"LEFT OUT {test}: {reason}")


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
def pool(backend: str, rank_counts: list[int]) -> Iterator[RankPool]:
    """As many ranks as the largest --ranks; a test that needs fewer uses the first ones."""
    size = rank_counts[-1]
    if backend == VIRTUAL:
        from virtual_pool import VirtualPool

        pool: RankPool = VirtualPool(size)
    else:
        pool = RankPool(size, backend)
    yield pool
    pool.close()
