"""Makes a plain `pip install` enough, by hooking the import of a few Megatron-Core modules.

torch calls `autoload` at the end of `import torch` (entry point group `torch.backends`).  It
imports nothing itself, and never breaks `import torch` or an import of Megatron.

To turn it off: NCCLEP_AUTOLOAD=0 for this package, TORCH_DEVICE_BACKEND_AUTOLOAD=0 for all of
torch's extensions.
"""

from __future__ import annotations

from megatron_ncclep import envs
from megatron_ncclep.integration.import_hook import before_import, warn
from megatron_ncclep.integration.releases import MEGATRON


def autoload() -> None:
    """Called by torch.  Any failure becomes a warning: torch must be importable without us."""
    try:
        if envs.get("NCCLEP_AUTOLOAD"):
            hook_imports()
    except Exception as error:
        warn(f"megatron_ncclep could not hook into imports: {error}")


def hook_imports() -> None:
    """Have Megatron's modules changed from the next import of one of them on.  Idempotent.

    A place that is not as the integration expects causes only a warning then, because the script
    may not use our dispatcher at all; `install()`, and a config that asks for it, raise it.
    """
    before_import("megatron", _watch, MEGATRON.feature)


def _watch() -> None:
    from megatron_ncclep.integration import hooks  # which takes long

    hooks.watch()
