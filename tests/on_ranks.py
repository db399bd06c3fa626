"""Tests that run on ranks: a test that takes a `ctx` is called on each rank of a pool.

The fixture `ctx` chooses the pool, and each rank is passed its own `RankContext` in its place.  All
other arguments of such a test are sent to the ranks, so they must be values that can be pickled.
The test fails if it fails on any rank.
"""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

import pytest
import torch.distributed as dist
from rank_pool import RankContext, RankPool

# Whether this process is a rank.  The process that collects tests imports no Megatron-Core, which
# takes five seconds: a module of tests that all run on ranks imports it where this is true.
IS_RANK = "RANK" in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a test that takes a `ctx` on each rank; pytest calls all other tests."""
    parameters = inspect.signature(pyfuncitem.obj).parameters
    if "ctx" not in parameters:
        return None
    pool: RankPool = pyfuncitem.funcargs["ctx"]
    arguments = {name: pyfuncitem.funcargs[name] for name in parameters if name != "ctx"}
    names = (pyfuncitem.module.__name__, pyfuncitem.originalname)
    limit, number = map(pyfuncitem.get_closest_marker, ("limit_s", "ranks"))
    ranks, timeout = number and number.args[0], limit.args[0] if limit else 240
    pool.run(run_test, *names, arguments, ranks=ranks, timeout=timeout)
    return True


def gathered(ctx: RankContext, value: Any) -> list[Any]:
    """The values of all ranks, in their order.  Collective."""
    values: list[Any] = [None] * ctx.num_ranks
    dist.all_gather_object(values, value, group=ctx.group)
    return values


def run_test(ctx: RankContext, module: str, name: str, arguments: dict[str, Any]) -> None:
    """Call a test by its name, on a rank."""
    getattr(importlib.import_module(module), name)(ctx, **arguments)
