"""torch, the driver and the GPUs: which there are, and which of them reach each other how."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_ncclep.doctor.report import Finding, ranges

# Seconds that nvidia-smi may take; with many GPUs and no persistence daemon it needs several.
DEADLINE_S = 60.0

RESTART_DRIVER = (
    "the driver's kernel module and its libraries have to be of the same version and loaded: "
    "install the driver again, or restart the machine"
)


@dataclass(frozen=True)
class SmiGpu:
    """One GPU as nvidia-smi counts them, which CUDA_VISIBLE_DEVICES does not change."""

    index: int
    uuid: str
    driver_version: str


@dataclass(frozen=True)
class Smi:
    """What nvidia-smi knows.

    Attributes:
        gpus: all GPUs of the machine.
        cuda_version: the newest CUDA that the driver serves, (major, minor); None if not known.
        links: (from, to) -> the kind of connection, such as NV18, PIX or SYS.
    """

    gpus: tuple[SmiGpu, ...]
    cuda_version: tuple[int, int] | None
    links: Mapping[tuple[int, int], str]


class SmiError(Exception):
    """nvidia-smi failed or did not answer; the message says so and what may help."""


def torch_and_gpus() -> Iterator[Finding]:
    """Torch's version, the driver's, and a line for each GPU that torch sees."""
    import torch

    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    yield Finding("torch", f"{torch.__version__}, {cuda}")
    smi = None
    if shutil.which("nvidia-smi") is None:
        yield Finding("driver", "not known: there is no nvidia-smi")
    else:
        try:
            smi = ask_nvidia_smi()
        except SmiError as error:
            yield Finding("driver", "does not answer", str(error))
        else:
            yield _driver(smi)
    if not torch.cuda.is_available():
        yield Finding(
            "GPUs",
            "none visible: the reference engine trains on the CPU (--cpu)",
            why_not_visible(smi, torch.version.cuda) if smi else None,
        )
        return
    num_gpus = torch.cuda.device_count()
    yield Finding("GPUs", str(num_gpus))
    smi_index = {gpu.uuid: gpu.index for gpu in smi.gpus} if smi else {}
    properties = [torch.cuda.get_device_properties(index) for index in range(num_gpus)]
    places = [smi_index.get(_uuid(device.uuid), -1) for device in properties]
    for index, device in enumerate(properties):
        others = {
            other: (
                smi.links.get((places[index], places[other])) if smi else None,
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


def _driver(smi: Smi) -> Finding:
    if not smi.gpus:
        return Finding("driver", "nvidia-smi finds no GPU")
    version = smi.gpus[0].driver_version
    serves = f", serves CUDA up to {_dotted(smi.cuda_version)}" if smi.cuda_version else ""
    return Finding("driver", f"{version}{serves}; {len(smi.gpus)} GPUs in this machine")


def why_not_visible(smi: Smi, torch_cuda: str | None) -> str | None:
    """Say why torch sees none of the GPUs that the driver sees, and what helps; None without GPUs.

    Args:
        smi: what the driver sees.
        torch_cuda: the CUDA version that torch is built for; None for the CPU.
    """
    if not smi.gpus:
        return None
    seen = f"nvidia-smi sees {len(smi.gpus)}, torch sees none: "
    if torch_cuda is None:
        return f"{seen}install a torch that is built for CUDA"
    if smi.cuda_version and smi.cuda_version[0] < int(torch_cuda.partition(".")[0]):
        return (
            f"{seen}torch is built for CUDA {torch_cuda} and the driver serves CUDA up to "
            f"{_dotted(smi.cuda_version)}: update the driver, or install a torch that is built for "
            f"CUDA {smi.cuda_version[0]}"
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


# --- nvidia-smi ----------------------------------------------------------------------------------


def ask_nvidia_smi() -> Smi:
    """Run nvidia-smi, which must be on PATH.

    Raises:
        SmiError: it failed or took longer than the deadline.
    """
    gpus = parse_gpus(_run("--query-gpu=index,uuid,driver_version", "--format=csv,noheader"))
    if not gpus:
        return Smi((), None, {})
    # Only the table that it prints without arguments has the CUDA version, whatever its age.
    return Smi(gpus, parse_cuda_version(_run()), parse_topology(_run("topo", "-m")))


def parse_gpus(text: str) -> tuple[SmiGpu, ...]:
    """Read `--query-gpu=index,uuid,driver_version --format=csv,noheader`."""
    rows = [line.split(", ") for line in text.splitlines()]
    return tuple(
        SmiGpu(int(row[0]), _uuid(row[1]), row[2])
        for row in rows
        if len(row) == 3 and row[0].isdigit()
    )


def parse_cuda_version(text: str) -> tuple[int, int] | None:
    """Find `CUDA Version: 13.0` in the table of `nvidia-smi`."""
    found = re.search(r"CUDA\D* Version\s*:\s*(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Read the cells between GPUs of the matrix of `nvidia-smi topo -m`: (row, column) -> kind.

    Beside the GPUs the matrix has network cards and affinities, below it stands a legend.
    """
    lines = [
        [cell.strip() for cell in re.sub(r"\x1b\[\d*m", "", line).split("\t")]
        for line in text.splitlines()
    ]
    header = next((line for line in lines if "GPU0" in line[1:]), [])
    links = {}
    for line in lines:
        row = re.fullmatch(r"GPU(\d+)", line[0])
        if row is None:
            continue
        for name, cell in zip(header, line, strict=False):
            column = re.fullmatch(r"GPU(\d+)", name)
            if column is not None and cell not in ("", "X"):
                links[int(row[1]), int(column[1])] = cell
    return links


def _run(*arguments: str) -> str:
    command = " ".join(("nvidia-smi", *arguments))
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=DEADLINE_S
        )
    except subprocess.TimeoutExpired as error:
        raise SmiError(
            f"`{command}` did not answer within {DEADLINE_S:g} s: {RESTART_DRIVER}"
        ) from error
    if done.returncode != 0 and "No devices were found" not in done.stdout:
        said = " ".join((done.stdout + done.stderr).split())
        raise SmiError(
            f"`{command}` failed with exit status {done.returncode} ({said}): {RESTART_DRIVER}"
        )
    return done.stdout


def _uuid(uuid: object) -> str:
    """A GPU's UUID as text; nvidia-smi writes a prefix, torch writes none."""
    return str(uuid).strip().removeprefix("GPU-").lower()


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
