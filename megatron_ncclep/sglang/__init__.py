"""Expert parallelism for SGLang: `sglang serve ... --moe-a2a-backend ncclep`.

    hooks       the places of SGLang that are changed in memory, so that the option takes the name
    dispatcher  SGLang's token dispatcher: what a MoE layer calls before and after its experts

SGLang calls `register`, an entry point of the group sglang.srt.plugins, in each of its processes
before it reads options or makes a model.  docs/vllm.md#sglang describes the whole.
"""

from __future__ import annotations

from megatron_ncclep.integration.import_hook import the_finder
from megatron_ncclep.integration.releases import SGLANG

BACKEND = "ncclep"  # the value of SGLang's --moe-a2a-backend


def register() -> None:
    """Make `--moe-a2a-backend ncclep` work in this process.  Idempotent, not collective.

    With other backends SGLang runs as before.  Needed in code only where SGLANG_PLUGINS leaves this
    package out.  If this SGLang lacks a place that has to be changed, there is a warning that names
    it, and an IntegrationError when this backend is used.
    """

    def install() -> None:
        from megatron_ncclep.sglang import hooks

        hooks.HOOKS.watch()

    the_finder().guard(install, SGLANG.feature)
