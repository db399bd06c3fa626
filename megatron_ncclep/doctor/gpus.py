"""torch, the driver and the GPUs, and how the GPUs reach each other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ncclep.doctor.report import Finding, ranges

try:
    import pynvml
except ImportError:  # installed without dependencies
    pynvml = None

# Deadline in seconds for the driver; with many GPUs and no persistence daemon it needs several.
DEADLINE_S = 60.0

RESTART_DRIVER = (
    "the driver's kernel module and its libraries have to be of the same version and loaded: "
    "install the driver again, or restart the machine"
)
# nvmlDeviceGetTopologyCommonAncestor -> as `nvidia-smi topo -m` writes it.
PCIE = {0: "PSB", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@dataclass(frozen=True)
class Driver:
    """The driver's information about the machine, regardless of CUDA_VISIBLE_DEVICES.

    Attributes:
        version: version of the driver.
        cuda_version: the newest CUDA that it supports, (major, minor).
        gpus: UUIDs of all GPUs.
        links: (from, to) -> the kind of connection, such as NV18, PIX or SYS.
    """

    version: str
    cuda_version: tuple[int, int]
    gpus: tuple[str, ...]
    links: Mapping[tuple[int, int], str]


class DriverError(Exception):
    """The driver failed or did not answer; the message says so and what may help."""


def torch_and_gpus() -> Iterator[Finding]:
    """Torch's version, the driver's, and a line for each GPU that torch sees."""
    import torch

    from megatron_ncclep.libraries.tested import untested_torch

    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    yield Finding(
        "torch", "; ".join(filter(None, [f"{torch.__version__}, {cuda}", untested_torch()]))
    )
    driver = None
    if pynvml is None:
        yield Finding("driver", "not known: nvidia-ml-py is not installed")
    else:
        try:
            driver = ask_driver()
        except DriverError as error:
            yield Finding("driver", "does not answer", str(error))
        else:
            yield _finding(driver)
    if not torch.cuda.is_available():
        yield Finding(
            "GPUs",
            "none visible: the reference engine trains on the CPU (--cpu)",
            why_not_visible(driver, torch.version.cuda) if driver else None,
        )
        return
    num_gpus = torch.cuda.device_count()
    yield Finding("GPUs", str(num_gpus))
    known = driver.gpus if driver else ()
    properties = [torch.cuda.get_device_properties(index) for index in range(num_gpus)]
    uuids = [_uuid(device.uuid) for device in properties]
    places = [known.index(uuid) if uuid in known else -1 for uuid in uuids]
    for index, device in enumerate(properties):
        others = {
            other: (
                driver.links.get((places[index], places[other])) if driver else None,
                torch.cuda.can_device_access_peer(index, other),
            )
            for other in range(num_gpus)
            if other != index
        }
        yield Finding(
            f"GPU {index}",
            f"{device.name}, sm_{device.major}{device.minor}, {device.multi_processor_count} SMs, "
            f"{device.total_memory / 2**30:.0f} GiB; {peers(others)}",
        )


def _finding(driver: Driver | None) -> Finding:
    if driver is None:
        return Finding("driver", "none")
    serves = f"{driver.version}, supports CUDA up to {_dotted(driver.cuda_version)}"
    return Finding("driver", f"{serves}; {len(driver.gpus)} GPUs in this machine")


def why_not_visible(driver: Driver, torch_cuda: str | None) -> str | None:
    """Say why torch sees none of the GPUs that the driver sees, and what helps; None without GPUs.

    Args:
        driver: the driver's information.
        torch_cuda: the CUDA version that torch is built for; None for the CPU.
    """
    if not driver.gpus:
        return None
    seen = f"the driver sees {len(driver.gpus)}, torch sees none: "
    if torch_cuda is None:
        return f"{seen}install a torch that is built for CUDA"
    if driver.cuda_version[0] < int(torch_cuda.partition(".")[0]):
        return (
            f"{seen}torch is built for CUDA {torch_cuda} and the driver supports CUDA up to "
            f"{_dotted(driver.cuda_version)}: update the driver, or install a torch that is built "
            f"for CUDA {driver.cuda_version[0]}"
        )
    return (
        f"{seen}unset CUDA_VISIBLE_DEVICES if it hides them, and look at the warning of "
        '`python -c "import torch; torch.cuda.init()"`'
    )


def peers(others: Mapping[int, tuple[str | None, bool]]) -> str:
    """Say how a GPU reaches the others.

    Args:
        others: GPU -> (kind of connection if known, whether this one can access its memory).
    """
    if not others:
        return "the only one"
    groups: dict[tuple[str | None, bool], list[int]] = {}
    for other, reach in others.items():
        groups.setdefault(reach, []).append(other)
    texts = []
    for (link, direct), numbers in groups.items():
        text = f"{'reads' if direct else 'cannot read'} GPU {ranges(numbers)}"
        texts.append(f"{text} ({link})" if link else text)
    return ", ".join(texts)


# --- the driver ----------------------------------------------------------------------------------


def ask_driver() -> Driver | None:
    """Ask through NVML; None: there is no driver.

    Raises:
        DriverError: it failed or took longer than the deadline.
    """
    # A daemon thread, because one that never returns does not keep the process from ending.
    answers: list[Driver | Exception | None] = []
    thread = threading.Thread(target=lambda: answers.append(_answer()), name="NVML", daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if not answers:
        raise DriverError(f"NVML did not answer within {DEADLINE_S:g} s: {RESTART_DRIVER}")
    if isinstance(answers[0], Exception):
        raise DriverError(f"NVML failed: {answers[0]}: {RESTART_DRIVER}") from answers[0]
    return answers[0]


def _answer() -> Driver | Exception | None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return None
    except pynvml.NVMLError as error:
        return error
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 13010 is 13.1
        gpus = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        return Driver(
            pynvml.nvmlSystemGetDriverVersion(),
            (cuda // 1000, cuda % 1000 // 10),
            tuple(_uuid(pynvml.nvmlDeviceGetUUID(gpu)) for gpu in gpus),
            {
                (a, b): _link(one, other)
                for a, one in enumerate(gpus)
                for b, other in enumerate(gpus)
                if a != b
            },
        )
    except pynvml.NVMLError as error:
        return error
    finally:
        pynvml.nvmlShutdown()


def _link(one: Any, other: Any) -> str:
    """How two GPUs are connected; for NVLink, direct or through switches, by how many links."""
    status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status == pynvml.NVML_P2P_STATUS_OK:
        there = pynvml.nvmlDeviceGetPciInfo(other).busId
        remotes = list(_remotes(one))
        # A switch is not a GPU: all links lead to it, and from it to every GPU.
        return f"NV{remotes.count(there) or len(remotes)}"
    level = pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other)
    return PCIE.get(level, f"level {level}")


def _remotes(gpu: Any) -> Iterator[Any]:
    """The PCI address at the other end of each active NVLink of a GPU."""
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            if pynvml.nvmlDeviceGetNvLinkState(gpu, link):
                yield pynvml.nvmlDeviceGetNvLinkRemotePciInfo(gpu, link).busId
        except pynvml.NVMLError:  # no such link
            return


def _uuid(uuid: object) -> str:
    """A GPU's UUID as text; NVML writes a prefix, torch does not."""
    return str(uuid).strip().removeprefix("GPU-").lower()


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
