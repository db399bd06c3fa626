"""Frees the resources of a model's layers when Megatron drops its process groups.

`HOOKS` in hooks.py lists which module each function changes.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_ncclep.integration.patching import replaces, unknown

_GETTERS = ("get_expert_model_parallel_group", "get_expert_tensor_and_model_parallel_group")


@replaces("destroy_model_parallel", [])
def change_destroy(original: Any) -> Any:
    """`destroy_model_parallel`: first close the groups over which Megatron's layers dispatch.

    Megatron itself only drops its references to the process groups, in every release: torch keeps
    them.  Other groups are not closed: the user's own, or vLLM's in the same process, may live
    longer.
    """
    module = sys.modules[original.__module__]
    for name in _GETTERS:
        if not callable(getattr(module, name, None)):
            raise unknown(f"{module.__name__}.{name}", "a function")

    def destroy(*args: Any, **kwargs: Any) -> Any:
        groups = sys.modules.get("megatron_ncclep.ranks.group")
        if groups is not None:
            # After an error on this rank the others may never get here.
            alone = sys.exc_info()[0] is not None
            for name in _GETTERS:
                process_group = getattr(module, name)(check_initialized=False)
                if process_group is not None:
                    groups.close_groups(process_group, alone)
        return original(*args, **kwargs)

    return destroy
