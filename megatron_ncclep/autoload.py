"""Makes a plain `pip install` enough, by hooking the import of a few Megatron-Core modules.

torch calls `autoload` at the end of `import torch` (entry point group `torch.backends`).  It has
those modules changed right after they are imported; it imports nothing itself, and never breaks
`import torch`.

To turn it off: NCCLEP_AUTOLOAD=0 for this package, TORCH_DEVICE_BACKEND_AUTOLOAD=0 for all of
torch's extensions.
"""

from __future__ import annotations

import warnings
from types import ModuleType

from megatron_ncclep import envs
from megatron_ncclep.integration.import_hook import after_import

# The modules that hooks.HOOKS and BRIDGE_HOOKS change, repeated here because importing
# `integration` would slow down every `import torch`.  A test compares the lists.
HOOKED_MODULES = (
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter",
    "megatron.core.distributed.torch_fully_sharded_data_parallel",
    "megatron.core.full_cuda_graph",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.transformer.transformer_config",
    "megatron.core.transformer.moe.experts",
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
    """Called by torch.  Any failure becomes a warning: torch must be importable without us."""
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

    A place that is not as the integration expects causes only a warning here, because the script
    may not use our dispatcher at all; `install()` raises it.
    """
    from megatron_ncclep.errors import IntegrationError
    from megatron_ncclep.integration import hooks

    try:
        hooks.change_module(module)
    except IntegrationError as error:
        warnings.warn(f"--moe-token-dispatcher-type ncclep is not available: {error}", stacklevel=2)
