"""torch, the driver and the GPUs, and which GPUs read each other's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ncclep.doctor.machine import driver_release
from megatron_ncclep.doctor.report import Finding, ranges
from megatron_ncclep.libraries import extension
from megatron_ncclep.libraries.tested import untested_torch

GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each


@dataclass(frozen=True)
class Driver:
    """What the driver says of the machine, regardless of CUDA_VISIBLE_DEVICES.

    Attributes:
        release: of its kernel module; None: not known, as under WSL.
        cuda: the newest CUDA that it supports, (major, minor); None: its library does not answer.
        num_gpus: GPUs of this machine that its kernel module lists.
    """

    release: str | None
    cuda: tuple[int, int] | None
    num_gpus: int


def find_driver() -> Driver | None:
    """The driver of this machine; None if it has none."""
    release, cuda = driver_release(), extension.driver_version()
    if release is None and cuda is None:
        return None
    return Driver(release, cuda, len(list(GPUS.glob("*"))))


def torch_and_gpus() -> Iterator[Finding]:
    """Torch's version, the driver's, and a line for each GPU that torch sees."""
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    versions = [f"{torch.__version__}, {cuda}", untested_torch()]
    yield Finding("torch", "; ".join(filter(None, versions)))
    driver = find_driver()
    if driver is None:
        yield Finding("driver", "none")
    else:
        serves = ".".join(map(str, driver.cuda)) if driver.cuda else "an unknown version"
        seen = f"; {driver.num_gpus} GPUs in this machine" if driver.num_gpus else ""
        release = driver.release or "release unknown"
        yield Finding("driver", f"{release}, supports CUDA up to {serves}{seen}")
    if not torch.cuda.is_available():
        yield Finding(
            "GPUs",
            "none visible: the reference engine trains on the CPU (--cpu)",
            why_not_visible(driver, torch.version.cuda) if driver else None,
        )
        return
    num_gpus = torch.cuda.device_count()
    yield Finding("GPUs", str(num_gpus))
    for index in range(num_gpus):
        device = torch.cuda.get_device_properties(index)
        yield Finding(
            f"GPU {index}",
            f"{device.name}, sm_{device.major}{device.minor}, {device.multi_processor_count} SMs, "
            f"{device.total_memory / 2**30:.0f} GiB; {peers(index, num_gpus)}",
        )


def why_not_visible(driver: Driver, torch_cuda: str | None) -> str | None:
    """Say why torch sees none of the GPUs that the driver sees, and what helps; None without GPUs.

    Args:
        driver: the driver's information.
        torch_cuda: the CUDA version that torch is built for; None for the CPU.
    """
    if not driver.num_gpus:
        return None
    seen = f"the driver sees {driver.num_gpus}, torch sees none: "
    if torch_cuda is None:
        return f"{seen}install a torch that is built for CUDA"
    if driver.cuda is None:
        return (
            f"{seen}the driver's libcuda.so.1 is not there or fails: its kernel module and its "
            "libraries have to be of the same version: install it again, or restart the machine"
        )
    if driver.cuda[0] < int(torch_cuda.partition(".")[0]):
        return (
            f"{seen}torch is built for CUDA {torch_cuda} and the driver supports CUDA up to "
            f"{'.'.join(map(str, driver.cuda))}: update the driver, or install a torch that is "
            f"built for CUDA {driver.cuda[0]}"
        )
    return (
        f"{seen}unset CUDA_VISIBLE_DEVICES if it hides them, and look at the warning of "
        '`python -c "import torch; torch.cuda.init()"`'
    )


def peers(index: int, num_gpus: int) -> str:
    """Say which of the other GPUs a GPU reads directly."""
    others = {
        other: torch.cuda.can_device_access_peer(index, other)
        for other in range(num_gpus)
        if other != index
    }
    texts = []
    for word, direct in (("reads", True), ("cannot read", False)):
        if numbers := [other for other, is_direct in others.items() if is_direct == direct]:
            texts.append(f"{word} GPU {ranges(numbers)}")
    return ", ".join(texts) or "the only one"
