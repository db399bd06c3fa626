"""Keep other packages' remarks out of what `ncclep train` shows."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_ncclep import envs


@contextmanager
def remarks_hidden() -> Iterator[None]:
    """Hide, inside the `with`, what Megatron-Core and torch remark about packages that are missing.

    Several dozen lines (no TransformerEngine, no Apex, GPTModel will be replaced some day, ...)
    would bury the progress.  `NCCLEP_LOG=debug` shows them; errors are always shown.
    """
    if envs.get("NCCLEP_LOG") == "DEBUG":
        yield
        return
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.setLevel(level)
