"""pytest's option --network: what kernels' puts between hosts go over."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


def add_network_option(add: Callable[..., Any]) -> None:
    """Add the option, with a parser's `addoption`."""
    add(
        "--network",
        choices=("loop", "loop-all"),
        help="with --hosts: the network of kernels' puts between hosts.  loop: a network of our "
        "own on this machine, which can be slow or broken (tests/network/link.h); loop-all: "
        "NCCL's own messages go over it, too",
    )


def use_network(network: str | None, hosts: int) -> None:
    """Build the test network, and set what makes NCCL use it in this process's pools of ranks."""
    if network is None:
        return
    if hosts < 2:
        raise pytest.UsageError("--network: add --hosts 2, or more: one host needs no network")
    sys.path += [str(TESTS / folder) for folder in ("network", "native")]
    from loop import build, variables_of_messages

    os.environ["NCCL_RMA_PLUGIN"] = str(plugin := build())
    if network == "loop-all":
        os.environ |= variables_of_messages(plugin)
