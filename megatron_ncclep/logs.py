"""The package's logger, and how its commands hide other packages' remarks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_ncclep import envs

CUDA_REMARKS = "torch.utils.cpp_extension"


def get_logger() -> logging.Logger:
    """Return the logger `megatron_ncclep`; its level is NCCLEP_LOG's unless one was set.

    Megatron-Core leaves the root logger alone or sets it to WARNING, which would hide the line
    that says which engine moves the tokens.  So the logger gets its own handler if neither it nor
    its parents have one.
    """
    logger = logging.getLogger("megatron_ncclep")
    logger.disabled = False  # which dictConfig sets for every logger that it does not name
    if logger.level == logging.NOTSET:
        logger.setLevel(envs.get("NCCLEP_LOG"))
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ncclep: %(message)s"))
        logger.addHandler(handler)
    return logger


@contextmanager
def remarks_hidden() -> Iterator[None]:
    """Hide, inside the `with`, the remarks of Megatron-Core and torch about missing packages.

    Several dozen lines (no TransformerEngine, no Apex, GPTModel will be replaced some day, ...)
    would bury the progress.  `NCCLEP_LOG=debug` shows them; errors are always shown.
    """
    if envs.get("NCCLEP_LOG") == "DEBUG":
        yield
        return
    # torch's loggers have their own levels.  Megatron imports the module of this one, which remarks
    # that there is a CUDA toolkit but no GPU.
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
