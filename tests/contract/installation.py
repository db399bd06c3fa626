"""Files as packages install them; libraries are texts here, or empty."""

from __future__ import annotations

from pathlib import Path


def touch(path: Path, content: bytes = b"") -> Path:
    """Write a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def package(site: Path, name: str) -> None:
    """Have a package `name` installed in the folder `site`."""
    touch(site / f"{name.replace('-', '_')}-1.0.dist-info" / "METADATA", f"Name: {name}\n".encode())


def install_nccl(site: Path, answers: dict[str, int], code: int = 23007) -> Path:
    """Install the package nvidia-nccl-cu13, headers included, whose library answers `code`."""
    path = touch(site / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
    parts = (code // 10000, code % 10000 // 100, code % 100)
    names = ("MAJOR", "MINOR", "PATCH")
    text = "".join(f"#define NCCL_{n} {p}\n" for n, p in zip(names, parts, strict=True))
    touch(site / "nvidia" / "nccl" / "include" / "nccl.h", text.encode())
    package(site, "nvidia-nccl-cu13")
    answers[str(path)] = code
    return path


def install_nccl_extensions(
    site: Path, content: bytes = b"\0NCCL EP version 0.2.0+cuda13.3\0"
) -> Path:
    """Install nccl-extensions 0.1.0 for CUDA 13, sources included."""
    _sources(site / "nccl" / "ep" / "include", 2)
    package(site, "nccl-extensions")
    return touch(site / "nccl" / "ep" / "lib" / "cu13" / "libnccl_ep.so", content)


def install_transformer_engine(site: Path, cuda: str = "13.4") -> Path:
    """Install what transformer-engine 2.20.2 brings of libnccl_ep, sources included."""
    folder = site / "transformer_engine" / "wheel_lib"
    touch(site / "transformer_engine" / "__init__.py")
    _sources(folder / "nccl_ep" / "include", 3)
    package(site, f"transformer-engine-cu{cuda.partition('.')[0]}")
    content = f"\0NCCL_EP_HT_EM_PULL_PUSH\0NCCL EP version 0.2.0+cuda{cuda}\0"
    return touch(folder / "libnccl_ep.so", content.encode())


def _sources(include: Path, interface: int) -> None:
    touch(include / "nccl_ep" / "common.hpp")
    touch(include / "nccl_ep.h", f"#define NCCL_EP_API_VERSION {interface}\n".encode())
