"""The native code that engines use: NCCL, NVIDIA's libnccl_ep, this package's extension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_ncclep.doctor.report import Finding
from megatron_ncclep.engines import extension as native_extension
from megatron_ncclep.engines import libraries
from megatron_ncclep.engines.libraries import (
    NCCL_OF_NCCL_EP,
    OLDEST_NCCL,
    Library,
    Version,
    nccl_package,
    version_text,
)


def nccl() -> Iterator[Finding]:
    """NCCL: the one that this process has loaded, the others here, and which one engines use."""
    loaded = libraries.loaded_nccl()
    yield Finding(
        "NCCL loaded",
        f"{version_text(loaded.version)}, {loaded.path}"
        if loaded
        else "no libnccl.so.2: torch is built without NCCL, or has it built in",
    )
    known = {loaded.path.resolve()} if loaded else set()
    for subject, other in (
        ("NCCL installed", libraries.packaged_nccl()),
        ("NCCL of the system", libraries.system_nccl()),
    ):
        if other is not None and other.path.resolve() not in known:
            known.add(other.path.resolve())
            yield Finding(subject, str(other))
    used = libraries.find_nccl()
    value, remedy = nccl_for_native(used)
    yield Finding("NCCL for engines", value, remedy if torch.cuda.is_available() else None)


def nccl_for_native(used: Library | None) -> tuple[str, str | None]:
    """Say which NCCL engines use and, if it is too old for `native`, what helps.

    Args:
        used: the NCCL that engines would open; None if there is none.
    """
    oldest = version_text(OLDEST_NCCL)
    remedy = f"pip install '{nccl_package()}>={oldest}' in this environment"
    if used is None:
        return "none", f"no engine but the reference can run without it: {remedy}"
    which = f"{version_text(used.version)} ({used.found})"
    if used.version is None:
        return f"{which}, perhaps not a NCCL", f"it does not open: {remedy}"
    if used.version < OLDEST_NCCL:
        return f"{which}, too old for the engine native ({oldest} or newer)", remedy
    return f"{which}, new enough for the engine native ({oldest} or newer)", None


def nccl_ep() -> Iterator[Finding]:
    """NVIDIA's libnccl_ep, the NCCL that it demands, and what it compiles its kernels with."""
    library = libraries.find_nccl_ep()
    if library is None:
        cuda = torch.version.cuda
        yield Finding(
            "libnccl_ep",
            f"none for CUDA {cuda}; the package nccl-extensions brings it "
            "(pip install 'megatron-ncclep[nccl-ep]')"
            if cuda
            else "none: torch is built for the CPU",
        )
        return
    yield Finding("libnccl_ep", str(library))
    # It gets the libnccl.so.2 that is there first, whichever one engines open.
    used = libraries.loaded_nccl() or libraries.find_nccl()
    installed = [libraries.packaged_nccl(), libraries.system_nccl()]
    value, remedy = nccl_for_nccl_ep(
        library.version, used, [other for other in installed if other is not None]
    )
    on_gpu = torch.cuda.is_available()
    if remedy is not None and not on_gpu:  # nothing that it could be used with is here
        value = f"{value}; {remedy}"
    yield Finding("NCCL of libnccl_ep", value, remedy if on_gpu else None)
    compiler = libraries.find_nvcc()
    yield Finding(
        "compiler of libnccl_ep",
        str(compiler) if compiler else "no nvcc",
        "it compiles its kernels at first use: install the CUDA toolkit and set CUDA_HOME"
        if compiler is None and on_gpu
        else None,
    )
    folders = libraries.jit_folders(library)
    missing = [name for name in (libraries.SOURCES, libraries.NCCL_HEADERS) if name not in folders]
    yield Finding(
        "headers of libnccl_ep",
        ", ".join(f"{name}={folder}" for name, folder in folders.items()) or "nothing found",
        f"it compiles its kernels at first use: set {' and '.join(missing)} to the folder with "
        "its sources or NCCL's headers"
        if missing and on_gpu
        else None,
    )


def nccl_for_nccl_ep(
    version: Version | None, used: Library | None, installed: Sequence[Library]
) -> tuple[str, str | None]:
    """Say which NCCL a libnccl_ep demands and, if that is not the one in use, what helps.

    Args:
        version: of libnccl_ep.
        used: the NCCL that it would get.
        installed: others on this machine.
    """
    demanded = NCCL_OF_NCCL_EP.get(version) if version else None
    if demanded is None:
        known = ", ".join(map(version_text, NCCL_OF_NCCL_EP))
        return (
            f"which one libnccl_ep {version_text(version)} demands is not known",
            f"install one of which it is: {known} (pip install nccl-extensions==0.1.0)",
        )
    value = f"it demands exactly {version_text(demanded)}"
    if used is not None and used.version == demanded:
        return f"{value}, which is in use", None
    value += f", in use is {version_text(used.version) if used else 'none'}"
    fitting = next((other for other in installed if other.version == demanded), None)
    if fitting is not None:
        return value, f"start the process with LD_PRELOAD={fitting.path}"
    return value, (
        f"pip install {nccl_package()}=={version_text(demanded)} in this environment, or start the "
        f"process with LD_PRELOAD set to a libnccl.so.2 of that version, which is then loaded "
        "before torch loads its own"
    )


def extension() -> Iterator[Finding]:
    """This package's extension and the GPUs that it has code for."""
    obstacle = native_extension.obstacle()
    if obstacle is not None:
        yield Finding("extension", f"none: {obstacle}")
        return
    module = native_extension.load()
    names = native_extension.architectures()
    missing = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        if not native_extension.has_code_for(major, minor):
            missing.append(native_extension.architecture_of(major, minor))
    needed = " ".join(sorted({*missing, *(name.removeprefix("sm_") for name in names)}))
    yield Finding(
        "extension",
        f"built for {', '.join(names)} with CUDA {module.build_info()['cuda']}: {module.__file__}",
        f"it has no code for this machine's GPUs: install the package again with "
        f"NCCLEP_CUDA_ARCHITECTURES='{needed}' in the environment"
        if missing
        else None,
    )
