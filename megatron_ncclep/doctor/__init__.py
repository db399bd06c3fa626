"""Check whether and how the dispatcher can run here: versions, GPUs, Megatron, engines.

Also useful without a GPU or without Megatron-Core.  Exit status: 0 if nothing prevents training
with this machine's devices, 1 otherwise; each problem comes with its remedy.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator

from megatron_ncclep.doctor.choice import engines
from megatron_ncclep.doctor.gpus import torch_and_gpus
from megatron_ncclep.doctor.libraries import extension, nccl, nccl_ep
from megatron_ncclep.doctor.packages import megatron_core, package
from megatron_ncclep.doctor.report import Finding, render
from megatron_ncclep.errors import EpError, InputError

# In order of importance.
SECTIONS: dict[str, Callable[..., Iterator[Finding]]] = {
    "Package": package,
    "torch and GPUs": torch_and_gpus,
    "NCCL": nccl,
    "NVIDIA's NCCL EP": nccl_ep,
    "Extension": extension,
    "Megatron-Core": megatron_core,
    "Engines": engines,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--json` and `--ranks`."""
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="check engines for 1 to N ranks on this machine (default: one for each GPU); more "
        "ranks than GPUs share them, for tests",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a list of {section, subject, value, problem} instead of a table",
    )


def main(args: argparse.Namespace) -> int:
    """Print the findings and return the exit status.  Run it in one process per machine.

    Raises:
        InputError: a number of ranks that is none.
    """
    if args.ranks is not None and args.ranks < 1:
        raise InputError(f"--ranks {args.ranks}: must be at least 1")
    report = []
    num_problems = 0
    for title in SECTIONS:
        findings = examine(title, args.ranks)
        num_problems += sum(finding.problem is not None for finding in findings)
        if args.json:
            report += [{"section": title, **dataclasses.asdict(finding)} for finding in findings]
        else:
            # Section by section, which shows where a driver hangs.
            columns = shutil.get_terminal_size(fallback=(100, 24)).columns
            print(render(title, findings, columns), end="\n\n", flush=True)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print(f"{num_problems} problem{'' if num_problems == 1 else 's'}")
    return 1 if num_problems else 0


def examine(title: str, num_ranks: int | None = None) -> list[Finding]:
    """Return the findings of the section `title`; an error in it is one more problem.

    `num_ranks`: check engines for up to this many ranks; None: one for each GPU.
    """
    findings = []
    section = SECTIONS[title]
    try:
        for finding in section(num_ranks) if section is engines else section():
            findings.append(finding)
    except EpError as error:
        findings.append(Finding(f"{title}, the rest", "not examined", str(error)))
    return findings
