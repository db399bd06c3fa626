"""Keep other packages' remarks out of what `ncclep train` shows."""

from __future__ import annotations

import logging
import warnings

from megatron_ncclep import envs


def hide_remarks() -> None:
    """Hide what Megatron-Core and torch remark about packages that this job does without.

    Several dozen lines (no TransformerEngine, no Apex, GPTModel will be replaced some day, ...)
    would bury the progress.  `NCCLEP_LOG=debug` shows them; errors are always shown.
    """
    if envs.get("NCCLEP_LOG") == "DEBUG":
        return
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
