"""Say what decides whether and how the dispatcher runs here: versions, GPUs, Megatron, engines.

Useful without a GPU and without Megatron-Core too.  Exit status: 0 when nothing stands in the way
of training with this machine's devices, 1 when something does; each problem comes with its remedy.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from megatron_ncclep import envs
from megatron_ncclep.errors import IntegrationError
from megatron_ncclep.version import __version__

INSTALL_MEGATRON = "install it: pip install 'megatron-ncclep[train]'"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was looked at.
        value: what was found.
        problem: what is wrong with it and the way out; None when nothing is.
    """

    subject: str
    value: str
    problem: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the findings and return the exit status."""
    findings = list(examine())
    problems = [finding for finding in findings if finding.problem]
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
        return 1 if problems else 0
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.subject:{width}}  {finding.value}")
        if finding.problem:
            print(f"{'':{width}}  PROBLEM: {finding.problem}")
    print(f"\n{len(problems)} problem{'' if len(problems) == 1 else 's'}")
    return 1 if problems else 0


def examine() -> Iterator[Finding]:
    """Look at everything, in the order in which it matters.  Not collective; one process."""
    yield Finding("megatron_ncclep", __version__)
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield from _torch()
    yield from _loading()
    yield from _megatron()
    yield from _engines()


def _torch() -> Iterator[Finding]:
    import torch

    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    yield Finding("torch", f"{torch.__version__}, {cuda}")
    count = torch.cuda.device_count()
    if not torch.cuda.is_available():
        yield Finding("GPUs", "none visible: the reference engine trains on the CPU (--cpu)")
        return
    yield Finding("NCCL", ".".join(str(part) for part in _nccl_version()))
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        yield Finding(
            f"GPU {index}",
            f"{device.name}, sm_{device.major}{device.minor}, {device.multi_processor_count} SMs, "
            f"{device.total_memory / 2**30:.0f} GiB; {_peers(index, count)}",
        )


def _nccl_version() -> Any:
    import torch

    return torch.cuda.nccl.version()


def _peers(index: int, count: int) -> str:
    """Which GPUs of this machine the GPU `index` can read directly."""
    import torch

    others = [other for other in range(count) if other != index]
    peers = [other for other in others if torch.cuda.can_device_access_peer(index, other)]
    if peers == others:
        return "reads all others directly" if others else "the only one"
    return f"reads {peers or 'no other'} directly"


def _loading() -> Iterator[Finding]:
    """How Megatron gets to know the dispatcher."""
    found = [e.value for e in entry_points(group="torch.backends") if e.name == "megatron_ncclep"]
    if not found:
        value = "no entry point: call megatron_ncclep.install(), or use `ncclep run`"
    elif not envs.get("NCCLEP_AUTOLOAD"):
        value = "off (NCCLEP_AUTOLOAD=0): call megatron_ncclep.install(), or use `ncclep run`"
    else:
        value = "on: unmodified scripts can say --moe-token-dispatcher-type ncclep"
    yield Finding("autoload", value)


def _megatron() -> Iterator[Finding]:
    """Megatron-Core's version and the places in it that the integration changes."""
    from megatron_ncclep import integration
    from megatron_ncclep.support import NEWEST, OLDEST, is_tested

    if importlib.util.find_spec("megatron") is None or not importlib.util.find_spec(
        "megatron.core"
    ):
        yield Finding("Megatron-Core", "not installed", INSTALL_MEGATRON)
        return
    core = importlib.import_module("megatron.core")
    version = core.__version__
    yield Finding(
        "Megatron-Core",
        f"{version} in {Path(str(core.__file__)).parents[1]}",
        None if is_tested(version) else f"tested are {OLDEST} to {NEWEST}: install one of these",
    )
    for name in integration.HOOKS:
        if name.startswith("megatron.training") and not importlib.util.find_spec(
            "megatron.training"
        ):
            yield Finding(name, "not in this wheel; scripts bring it from a Megatron-LM checkout")
            continue
        yield _hook_point(name)


def _hook_point(name: str) -> Finding:
    from megatron_ncclep import integration

    try:
        integration.change_module(importlib.import_module(name))
    except IntegrationError as error:
        return Finding(name, "changed", str(error))
    return Finding(name, "as expected")


def _engines() -> Iterator[Finding]:
    """What each engine says of a group of this process alone, and which one `auto` takes."""
    import torch
    import torch.distributed as dist

    from megatron_ncclep.config import EpConfig
    from megatron_ncclep.engines import ENGINES, choose_engine
    from megatron_ncclep.engines.group import EpGroup

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # Port 0: any that is free.
    dist.init_process_group(
        backend,
        init_method="tcp://127.0.0.1:0",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
    )
    try:
        assert dist.group.WORLD is not None  # just made
        group = EpGroup.of(dist.group.WORLD)
        for name, entry in ENGINES.items():
            yield Finding(f"engine {name}", entry.obstacle(group) or f"can run over {backend}")
        name, reason = choose_engine(group, EpConfig(engine="auto"))
        yield Finding("engine auto", f"takes {name} ({reason})")
    finally:
        dist.destroy_process_group()
