"""VirtualPool: a RankPool whose ranks are threads of one process with one GPU."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from virtual_ranks import on_rank, serve

from megatron_ncclep.ranks.pool import RankError, RankPool

SOURCE = Path(__file__).with_name("virtual_nccl.cpp")
SIGNAL = signal.SIGUSR1
# For a process whose threads may hold the interpreter's lock to write where they are.
DUMP_S = 3.0
MOST_STACKS = 20_000  # characters


class VirtualPool(RankPool):
    """See `RankPool`; after an error on any rank the process is ended too.

    It may be in a state that no process of its own could be in: a fault of the GPU is all ranks'.
    """

    def __init__(self, size: int, device: str = "cuda") -> None:
        """Start nothing yet; `device` "cpu" is for tests of this class."""
        super().__init__(size, "virtual")
        self.device = device
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._is_running = False
        self._story = ""

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        timeout: float = 240,
    ) -> list[Any]:
        """See `RankPool.run`.  Interrupted (`timeout -s INT`), it says what the ranks were at."""
        self._is_running, self._story = True, ""
        try:
            return super().run(on_rank, function, *args, ranks=ranks, timeout=timeout)
        except RankError as error:
            self._is_running = False
            self.close()
            raise RankError(f"{error}{self._story}") from error
        except KeyboardInterrupt as error:
            self.close()
            raise KeyboardInterrupt(self._story) from error  # pytest prints it
        finally:
            self._is_running = False

    def close(self) -> None:
        """See `RankPool.close`; in the middle of a run, keep what the threads were doing."""
        stacks = self._stacks()
        if self._process is not None and stacks is not None:
            if self._is_running and self._process.is_alive():
                os.kill(self._process.pid, SIGNAL)
                wait_for_text(stacks)
            if said := stacks.read_text(errors="replace").strip():
                self._story = f"\n--- stderr and stacks ---\n{said[-MOST_STACKS:]}"
        super().close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _stacks(self) -> Path | None:
        return Path(self._folder.name) / "stderr" if self._folder is not None else None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ncclep-virtual-")
        library = None
        if self.device == "cuda":
            library = Path(self._folder.name) / "libvirtual_nccl.so"
            compile_stand_in(library)
        stacks = self._stacks()
        assert stacks is not None
        stacks.touch()
        self._start_process(serve, self.device, library, stacks, SIGNAL, sys.path)


def wait_for_text(file: Path) -> None:
    """Wait until a file no longer grows, or for a while."""
    deadline, size = time.monotonic() + DUMP_S, 0
    while time.monotonic() < deadline:
        time.sleep(0.3)
        before, size = size, file.stat().st_size
        if 0 < before == size:
            return


def cuda_headers() -> Path | None:
    """The folder of the toolkit with cuda.h, or None."""
    on_path = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    homes += [str(Path(on_path).resolve().parents[1])] if on_path else []
    homes += [str(home) for home in sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    found = (Path(home) / "include" for home in homes if home)
    return next((folder for folder in found if (folder / "cuda.h").is_file()), None)


def compile_stand_in(to: Path, source: Path = SOURCE) -> None:
    """Compile the stand-in for NCCL, or another source of this folder, as a shared library."""
    headers = cuda_headers()
    assert headers is not None, "virtual ranks need cuda.h: set CUDA_HOME to a CUDA toolkit"
    compiler = ["g++", "-std=c++17"] if source.suffix == ".cpp" else ["gcc"]
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-fvisibility=hidden"]
    if source.suffix == ".c":
        options.remove("-fvisibility=hidden")
    subprocess.run(
        [*compiler, *options, "-I", headers, source, "-o", to, "-ldl", "-pthread"],
        check=True,
        timeout=120,
    )
