"""Keep other packages' remarks out of what `ncclep train` shows."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_ncclep import envs

CUDA_REMARKS = "torch.utils.cpp_extension"


@contextmanager
def remarks_hidden() -> Iterator[None]:
    """Hide, inside the `with`, what Megatron-Core and torch remark about packages that are missing.

    Several dozen lines (no TransformerEngine, no Apex, GPTModel will be replaced some day, ...)
    would bury the progress.  `NCCLEP_LOG=debug` shows them; errors are always shown.
    """
    if envs.get("NCCLEP_LOG") == "DEBUG":
        yield
        return
    # torch's loggers have levels of their own.  Megatron imports the module of this one, which says
    # that there is a CUDA toolkit and no GPU.
    loggers = [logging.getLogger(), logging.getLogger(CUDA_REMARKS)]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
