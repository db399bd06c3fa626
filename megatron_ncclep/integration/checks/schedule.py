"""Which inputs Megatron's overlapping schedule (1F1B) may free with our dispatcher.

With overlap_moe_expert_parallel_comm a layer runs in parts, and the storage of a part's input is
freed right after its forward pass where backward does not need it.  Megatron decides that by the
dispatcher type: `alltoall` and similar ones send copies, and pass copies to the experts.  Our
dispatcher reads the layer's own tokens, which the router and shared experts need for their
gradients, and the experts keep the rows that it delivers for their weights' gradients.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

from megatron_ncclep.errors import IntegrationError
from megatron_ncclep.integration.options.field import NAME
from megatron_ncclep.integration.patching import replaces
from megatron_ncclep.integration.releases import MEGATRON

# The parts whose input is needed in backward.
KEPT = ("moe_dispatch", "mlp")
# Modules in which Megatron decides, from 0.19 on and before.
PLACES = ("megatron.core.models.common.utils", "megatron.core.models.gpt.fine_grained_callables")
_FUNCTION = "should_free_input"


def keep_inputs() -> None:
    """Make the schedule keep the inputs that layers with our dispatcher need.  Idempotent.

    Raises:
        IntegrationError: this Megatron-Core decides somewhere else.
    """
    for name in PLACES:
        module = importlib.import_module(name) if find_spec(name) is not None else None
        if module is not None and hasattr(module, _FUNCTION):
            _change_freeing(module)
            return
    raise IntegrationError(
        f"neither {' nor '.join(PLACES)} has {_FUNCTION}(), which says what the schedule of "
        f"overlap_moe_expert_parallel_comm frees: {MEGATRON.not_known}"
    )


@replaces(_FUNCTION, ["name", "is_moe", "config"])
def _change_freeing(original: Any) -> Any:
    def should_free_input(name: str, is_moe: bool, config: Any, *args: Any, **kwargs: Any) -> bool:
        if config.moe_token_dispatcher_type == NAME and name in KEPT:
            return False
        return bool(original(name, is_moe, config, *args, **kwargs))

    return should_free_input
