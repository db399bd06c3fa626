"""Programs that tests compile, kept in build/native-tests until what they are made of changes."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPILE_S = 300.0  # at most, on a slow and busy machine


def cached(name: str, inputs: Iterable[object], make: Callable[[Path], None]) -> Path:
    """Return the folder that `make` filled from these inputs, now or in an earlier run.

    Files count by name and contents, other inputs by their text.  The folder replaces those of the
    same `name` from other inputs.
    """
    key = hashlib.sha256()
    for part in inputs:
        key.update(f"{part}\0".encode() + (part.read_bytes() if isinstance(part, Path) else b""))
    parent = ROOT / "build" / "native-tests"
    folder = parent / f"{name}-{key.hexdigest()[:20]}"
    if not folder.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=parent) as making:
            made = Path(making, name)
            made.mkdir()
            make(made)
            for old in parent.glob(f"{name}-*"):
                shutil.rmtree(old, ignore_errors=True)
            made.rename(folder)
    return folder


def version_of(compiler: str) -> str:
    """What the compiler says of itself, an input of all that it compiles."""
    return subprocess.check_output([compiler, "--version"], text=True)


def run_all(commands: Iterable[Sequence[str | Path]]) -> None:
    """Run compilers on all cores; the first that fails raises with what it said."""

    def run(command: Sequence[str | Path]) -> None:
        made = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_S, check=False
        )
        assert made.returncode == 0, made.stderr

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
