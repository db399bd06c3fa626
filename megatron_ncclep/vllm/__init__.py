"""Expert parallelism for vLLM: `vllm serve ... --all2all-backend ncclep`.

    hooks   the places of vLLM that are changed in memory, so that the option takes the name
    pair    vLLM's prepare/finalize pair: what a MoE layer calls before and after its experts

vLLM calls `register`, an entry point of the group vllm.general_plugins, in each of its processes
before it reads options or makes a model.  docs/vllm.md describes the whole.
"""

from __future__ import annotations

from megatron_ncclep.integration.import_hook import the_finder
from megatron_ncclep.integration.releases import VLLM

BACKEND = "ncclep"  # the value of vLLM's --all2all-backend


def register() -> None:
    """Make `--all2all-backend ncclep` work in this process.  Idempotent, not collective.

    With other backends vLLM runs as before.  Needed in code only where VLLM_PLUGINS leaves this
    package out.  If this vLLM lacks a place that has to be changed, there is a warning that names
    it, and an IntegrationError when this backend is used.
    """

    def install() -> None:
        from megatron_ncclep.vllm import hooks

        hooks.install()

    the_finder().guard(install, VLLM.feature)
