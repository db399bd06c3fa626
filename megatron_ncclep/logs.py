"""The package's logger, with a handler only where nobody has set one."""

from __future__ import annotations

import logging

from megatron_ncclep import envs


def get_logger() -> logging.Logger:
    """Return the logger `megatron_ncclep`; its level is NCCLEP_LOG's unless somebody set one.

    Megatron-Core leaves the root logger alone or sets it to WARNING, which would hide the one line
    that says which engine moves the tokens; so the logger gets a handler of its own when neither it
    nor the root logger has one.
    """
    logger = logging.getLogger("megatron_ncclep")
    if logger.level == logging.NOTSET:
        logger.setLevel(envs.get("NCCLEP_LOG"))
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ncclep: %(message)s"))
        logger.addHandler(handler)
    return logger
