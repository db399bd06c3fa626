"""Lets a plain `pip install` be enough: hooks the import of a few Megatron-Core modules.

torch calls `autoload` at the end of `import torch` (entry point group `torch.backends`).  It has
a few Megatron modules changed right after they are imported; it imports nothing itself, and it can
never break `import torch`.

Off switches: NCCLEP_AUTOLOAD=0 for this package, TORCH_DEVICE_BACKEND_AUTOLOAD=0 for all of torch's
extensions.
"""

from __future__ import annotations

import warnings
from types import ModuleType

from megatron_ncclep import envs
from megatron_ncclep.integration.import_hook import after_import

# The modules that hooks.HOOKS and BRIDGE_HOOKS change; named here too, because importing
# integration for them would cost every `import torch` its time.  A test compares the two.
HOOKED_MODULES = (
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
    "megatron.core.distributed.torch_fully_sharded_data_parallel",
    "megatron.core.parallel_state",
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.moe.moe_layer",
    "megatron.core.transformer.transformer_layer",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.transformer.moe.moe_logging",
    "megatron.core.inference.contexts.dynamic_context",
    "megatron.core.optimizer.optimizer_cuda_graph",
    "megatron.training.arguments",
    "megatron.training.yaml_arguments",
    "megatron.bridge.training.comm_overlap",
    "megatron.bridge.training.utils.moe_token_drop",
    "megatron.bridge.training.utils.omegaconf_utils",
)


def autoload() -> None:
    """What torch calls.  Any failure becomes a warning: torch must be importable without us."""
    try:
        if envs.get("NCCLEP_AUTOLOAD"):
            hook_imports()
    except Exception as error:
        warnings.warn(f"megatron_ncclep could not hook into imports: {error}", stacklevel=2)


def hook_imports() -> None:
    """Have the modules of `HOOKED_MODULES` changed when they are imported.  Idempotent."""
    for name in HOOKED_MODULES:
        after_import(name, change_or_warn)


def change_or_warn(module: ModuleType) -> None:
    """Change one of the modules.

    A place that is not what the integration expects is a warning here, because the script may not
    want our dispatcher at all; `install()` raises it.
    """
    from megatron_ncclep.errors import IntegrationError
    from megatron_ncclep.integration import hooks

    try:
        hooks.change_module(module)
    except IntegrationError as error:
        warnings.warn(f"--moe-token-dispatcher-type ncclep is not available: {error}", stacklevel=2)
