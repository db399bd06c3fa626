"""The places of SGLang that are changed in memory, as its plugins do: it has no other registry.

SGLang's own HookRegistry would import every one of these modules into each of SGLang's processes,
with any backend, and only log a place that it does not find.

SGLang's models and configuration treat this backend as they treat `flashinfer`: each rank brings
its own tokens, the ranks agree on their numbers, and the combine returns complete sums.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron_ncclep.errors import InputError
from megatron_ncclep.integration.patching import Changes, raise_failure, replaces
from megatron_ncclep.integration.releases import SGLANG
from megatron_ncclep.sglang import BACKEND

FIELD = "moe_a2a_backend"
# Where a model adds up, and multiplies by a routed scaling factor, is each model's own business.
TESTED_MODELS = ("Qwen3MoeForCausalLM",)


@replaces("ServerArgs.add_cli_args", ["parser"], SGLANG)
def change_command_line(original: Any) -> Any:
    """Let the option take the name."""

    def add_cli_args(parser: Any) -> None:
        original(parser)
        (action,) = (action for action in parser._actions if action.dest == FIELD)
        action.choices = [*action.choices, BACKEND]

    return add_cli_args


@replaces("ServerArgs.check_server_args", [], SGLANG)
def change_checks(original: Any) -> Any:
    """Refuse options that do not go together, after SGLang has resolved and checked them."""

    def check_server_args(self: Any) -> None:
        original(self)
        from sglang.srt.arg_groups import overrides
        from sglang.srt.arg_groups.model_override_base import resolved_view

        args = resolved_view(self)
        if BACKEND in (args.moe_a2a_backend, args.speculative_moe_a2a_backend):
            require_all()
            check_options(args, overrides.model_config_of(self).hf_config.architectures)

    return check_server_args


def check_options(args: Any, architectures: list[str]) -> None:
    """Refuse what this backend does not support.

    Args:
        args: SGLang's server arguments, resolved.
        architectures: the model's.

    Raises:
        InputError: names the options.
    """
    if not set(architectures) <= set(TESTED_MODELS):
        raise InputError(
            f"--moe-a2a-backend {BACKEND} with {', '.join(architectures)}: tested with "
            f"{', '.join(TESTED_MODELS)} only; choose another --moe-a2a-backend"
        )
    num_ranks = args.tp_size
    if not num_ranks == args.ep_size == args.attn_dp_size > 1:
        raise InputError(
            f"--moe-a2a-backend {BACKEND} with --tp-size {num_ranks} --ep-size {args.ep_size} "
            f"--attn-dp-size {args.attn_dp_size}: set all three to the number of ranks, more than 1"
        )
    for what, asked in (
        ("speculative decoding", args.speculative_algorithm),
        ("redundant experts", args.enable_eplb or args.ep_num_redundant_experts),
        ("elastic expert parallelism", args.elastic_ep_backend),
        ("two-batch overlap", args.enable_two_batch_overlap),
        ("single-batch overlap", args.enable_single_batch_overlap),
        ("prefill-decode multiplexing", args.enable_pdmux),
        ("pipeline parallelism", args.pp_size > 1),
        ("LoRA", args.enable_lora or args.lora_paths),
    ):
        if asked:
            raise InputError(f"--moe-a2a-backend {BACKEND} has no {what}: leave it out")


@replaces("MoeA2ABackend._missing_", ["value"], SGLANG)
def change_names(original: Any) -> Any:
    """Let the enumeration have one more member, which appears when it is asked for."""
    enumeration = original.__self__
    member = object.__new__(enumeration)
    member._name_, member._value_ = BACKEND.upper(), BACKEND
    return lambda value: member if value == BACKEND else original(value)


@replaces("MoeA2ABackend.is_flashinfer", [], SGLANG)
def change_treatment(original: Any) -> Any:
    """Have models treat it as `flashinfer`: see above."""
    return lambda self: is_ours(self) or original(self)


@replaces("create_moe_dispatcher", ["moe_runner_config"], SGLANG)
def change_dispatchers(original: Any) -> Any:
    """Let SGLang's layers get our dispatcher."""

    def create(moe_runner_config: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.layers.moe.utils import get_moe_a2a_backend

        if not is_ours(get_moe_a2a_backend()):
            return original(moe_runner_config, *args, **kwargs)
        require_all()
        from megatron_ncclep.sglang.dispatcher import NcclEpDispatcher

        return NcclEpDispatcher(moe_runner_config)

    return create


def change_experts(module: ModuleType) -> None:
    """Let the Triton experts run in one call, as they do without an all-to-all backend."""
    from sglang.srt.layers.moe.moe_runner.base import FusedOpPool

    if FusedOpPool.get_fused_func(BACKEND, "triton") is None:
        FusedOpPool.register_fused_func(BACKEND, "triton", module.fused_experts_none_to_triton)


def _checked(original: Any, wait: Callable[..., None] | None = None) -> Any:
    """A scheduler's method that raises failures of the device, and names a rank that has died.

    `wait` is called first, with the same arguments.
    """

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        from sglang.srt.layers.moe.utils import get_moe_a2a_backend

        if not is_ours(get_moe_a2a_backend()):
            return original(self, *args, **kwargs)
        from megatron_ncclep.serving.failures import raising

        if wait is not None:
            raising(lambda: wait(self, *args, **kwargs), SGLANG)
        return raising(lambda: original(self, *args, **kwargs), SGLANG)

    return checked


@replaces("Scheduler.process_batch_result", ["batch", "result"], SGLANG)
def change_results(original: Any) -> Any:
    """Check a batch before its tokens are handed out, in CUDA graphs too."""
    return _checked(original, _wait_for)


def _wait_for(scheduler: Any, batch: Any, result: Any) -> None:
    """Wait until a batch has reached the host, as SGLang does next.

    The first batch, of SGLang's own request after its start, ends the first step: from then on
    ranks wait for each other as `timeout_s` says.
    """
    import megatron_ncclep

    done = getattr(result, "copy_done", None)
    if done is not None:
        done.synchronize()
    if done is None or not getattr(scheduler, "_ncclep_has_started", False):
        megatron_ncclep.check()
        scheduler._ncclep_has_started = True


def is_ours(backend: Any) -> bool:
    """Whether a member of SGLang's enumeration is this backend."""
    return bool(backend.value == BACKEND)


def require_all() -> None:
    """Called where this backend is used.

    Raises:
        IntegrationError: a place of an imported module is not as expected; names it.
    """
    raise_failure(SGLANG)
    HOOKS.require()


HOOKS = Changes(
    SGLANG,
    {
        "sglang.srt.server_args": (change_command_line, change_checks),
        "sglang.srt.layers.moe.utils": (change_names, change_treatment),
        "sglang.srt.layers.moe.fused_moe_triton.layer": (change_dispatchers,),
        "sglang.srt.layers.moe.moe_runner.triton": (change_experts,),
        "sglang.srt.managers.scheduler": (
            replaces("Scheduler.get_next_batch_to_run", [], SGLANG)(_checked),
            replaces("Scheduler.run_batch", [], SGLANG)(_checked),
            change_results,
        ),
    },
)
