"""The native code that engines use: NCCL, NVIDIA's libnccl_ep, this package's extension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_ncclep.doctor.report import Finding
from megatron_ncclep.engines.native.availability import MIN_COMPUTE_CAPABILITY
from megatron_ncclep.libraries import extension as native_extension
from megatron_ncclep.libraries import nccl_ep as nccl_ep_library
from megatron_ncclep.libraries import search
from megatron_ncclep.libraries.nccl_ep import BUILDS, NcclEpLibrary
from megatron_ncclep.libraries.search import OLDEST_NCCL, Library, nccl_package, version_text


def nccl() -> Iterator[Finding]:
    """NCCL: the one loaded in this process, others on this machine, and the one engines use."""
    loaded = search.loaded_nccl()
    yield Finding(
        "NCCL loaded",
        f"{version_text(loaded.version)}, {loaded.path}"
        if loaded
        else "no libnccl.so.2: torch is built without NCCL, or has it built in",
    )
    known = {loaded.path.resolve()} if loaded else set()
    for subject, other in (
        ("NCCL installed", search.packaged_nccl()),
        ("NCCL of the system", search.system_nccl()),
    ):
        if other is not None and other.path.resolve() not in known:
            known.add(other.path.resolve())
            yield Finding(subject, str(other))
    used = search.find_nccl()
    value, remedy = nccl_for_native(used)
    yield Finding("NCCL for engines", value, remedy if torch.cuda.is_available() else None)


def nccl_for_native(used: Library | None) -> tuple[str, str | None]:
    """Say which NCCL engines use and, if it is too old for `native`, what helps."""
    oldest = version_text(OLDEST_NCCL)
    remedy = f"pip install '{nccl_package()}>={oldest}' in this environment"
    if used is None:
        return "none", f"no engine but the reference can run without it: {remedy}"
    which = f"{version_text(used.version)} ({used.found})"
    if used.version is None:
        return f"{which}, perhaps not an NCCL", f"it does not open: {remedy}"
    if used.version < OLDEST_NCCL:
        return f"{which}, too old for the engine native ({oldest} or newer)", remedy
    return f"{which}, new enough for the engine native ({oldest} or newer)", None


def nccl_ep() -> Iterator[Finding]:
    """NVIDIA's libnccl_ep, the NCCL that it requires, and its kernels' compiler and headers."""
    library = nccl_ep_library.find_nccl_ep()
    if library is None:
        cuda = torch.version.cuda
        yield Finding(
            "libnccl_ep",
            f"none for CUDA {cuda}; the packages nccl-extensions (pip install "
            "'megatron-ncclep[nccl-ep]') and transformer-engine bring one each"
            if cuda
            else "none: torch is built for the CPU",
        )
        return
    yield Finding("libnccl_ep", _described(library))
    for other in nccl_ep_library.installed_nccl_eps():
        if other.path != library.path:
            yield Finding(
                f"libnccl_ep of {other.package}",
                f"{_described(other)}; {nccl_ep_library.CHOICE}={other.package} chooses it",
            )
    nccl = nccl_ep_library.nccl_in_use()
    installed = [search.packaged_nccl(), search.system_nccl()]
    value, remedy = nccl_for_nccl_ep(
        library, nccl, [other for other in installed if other is not None]
    )
    on_gpu = torch.cuda.is_available()
    if remedy is not None and not on_gpu:  # there is no GPU to use it with
        value = f"{value}; {remedy}"
    yield Finding("NCCL of libnccl_ep", value, remedy if on_gpu else None)
    compiler = search.find_nvcc()
    yield Finding(
        "compiler of libnccl_ep",
        str(compiler) if compiler else "no nvcc",
        "it compiles its kernels at first use: install the CUDA toolkit and set CUDA_HOME"
        if compiler is None and on_gpu
        else None,
    )
    folders = nccl_ep_library.jit_folders(library)
    problem = nccl_ep_library.jit_problem(library, folders, nccl)
    yield Finding(
        "headers of libnccl_ep",
        ", ".join(f"{name}={folder}" for name, folder in folders.items()) or "nothing found",
        problem if on_gpu else None,
    )
    if problem := nccl_ep_library.mode_problem(library):
        yield Finding("modes of libnccl_ep", "not as asked for", problem if on_gpu else None)


def _described(library: NcclEpLibrary) -> str:
    """A libnccl_ep and its known properties."""
    takes = f"; it requires {library.build.demand}" if library.build else ""
    interface = f"interface {library.interface}, " if library.interface else ""
    return f"{version_text(library.version)}, {interface}{library.path} ({library.found}){takes}"


def nccl_for_nccl_ep(
    library: NcclEpLibrary, used: Library | None, installed: Sequence[Library]
) -> tuple[str, str | None]:
    """Say which NCCL a libnccl_ep requires and, if that is not the one in use, what helps."""
    build = library.build
    if build is None:
        known = ", ".join(
            f"{version_text(b.version)} of interface {b.interface} (pip install {b.requirement})"
            for b in BUILDS
        )
        return (
            f"it is not known which one libnccl_ep {version_text(library.version)} requires",
            f"install a known one: {known}",
        )
    value = f"it requires {build.demand}"
    if build.takes(used):
        return f"{value}; {version_text(used.version) if used else ''} is in use", None
    value += f"; {version_text(used.version) if used else 'none'} is in use"
    return value, nccl_ep_library.nccl_remedy(build, used, installed)


def extension() -> Iterator[Finding]:
    """This package's extension and the GPUs that it has code for."""
    reason = native_extension.unavailable_reason()
    if reason is not None:
        yield Finding("extension", f"none: {reason}")
        return
    problems = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        capability = torch.cuda.get_device_capability(index)
        if capability >= MIN_COMPUTE_CAPABILITY:  # no build supports an older one
            problems.append(native_extension.gpu_problem(f"GPU {index}", *capability))
    built = native_extension.cuda_version()
    driver = native_extension.OLDEST_DRIVER.get(built[0])
    yield Finding(
        "extension",
        f"built for {', '.join(native_extension.architectures())} with CUDA {built[0]}.{built[1]}"
        f"{f', for drivers from {driver} on' if driver else ''}: "
        f"{native_extension.load().__file__}",
        # The GPUs of a machine are usually alike: one problem stands for all.
        next(filter(None, problems), None),
    )
