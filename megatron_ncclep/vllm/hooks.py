"""The places of vLLM that are changed in memory: it has no registry of all-to-all backends.

https://github.com/vllm-project/vllm/pull/50556 proposes one; with it, most of this file can go.
Every other backend takes vLLM's own path.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, get_args

from megatron_ncclep.errors import InputError
from megatron_ncclep.integration.patching import Changes, raise_failure, replaces, unknown
from megatron_ncclep.integration.releases import VLLM
from megatron_ncclep.logs import get_logger
from megatron_ncclep.vllm import BACKEND

FIELD = "all2all_backend"
_ARGUMENTS_MODULE = "vllm.engine.arg_utils"


def install() -> None:
    """Change the places now, or when vLLM imports them.  Idempotent, not collective.

    A place that is not as expected causes only a warning, because this vLLM may have been started
    with another backend; `require_all` raises it.
    """
    HOOKS.watch()


def require_all() -> None:
    """Called where this backend is used.

    Raises:
        IntegrationError: a place of an imported module is not as expected; names it.
    """
    raise_failure(VLLM)
    HOOKS.require()


def change_config(module: ModuleType) -> None:
    """Let vLLM's option take the name, in code and on the command line."""
    config = getattr(module, "ParallelConfig", None)
    field = getattr(config, "__dataclass_fields__", {}).get(FIELD)
    names = get_args(getattr(field, "type", None))
    if config is None or field is None or "allgather_reducescatter" not in names:
        raise unknown(f"{module.__name__}.ParallelConfig.{FIELD}", "a Literal of names", VLLM)
    splits = getattr(config, "use_sequence_parallel_moe", None)
    if not isinstance(splits, property):
        raise unknown(f"{config.__name__}.use_sequence_parallel_moe", "a property", VLLM)
    if BACKEND in names:
        return
    from pydantic.dataclasses import rebuild_dataclass

    field.type = config.__annotations__[FIELD] = Literal[(*names, BACKEND)]
    rebuild_dataclass(config, force=True)

    def use_sequence_parallel_moe(self: Any) -> bool:
        """With tensor parallelism, every rank brings its own part of the tokens."""
        if getattr(self, FIELD) != BACKEND:
            return bool(splits.fget(self))  # type: ignore[misc]
        ranks = min(self.tensor_parallel_size, self.data_parallel_size)
        return bool(self.enable_expert_parallel and ranks > 1)

    config.use_sequence_parallel_moe = property(use_sequence_parallel_moe)
    # The command line's choices may have been read from the class before.
    arguments = sys.modules.get(_ARGUMENTS_MODULE)
    if (cached := getattr(arguments, "_compute_kwargs", None)) is not None:
        cached.cache_clear()


@replaces("DeviceCommunicatorBase.__init__", ["cpu_group", "unique_name"], VLLM)
def change_communicator(original: Any) -> Any:
    """Give vLLM's expert-parallel group a manager of this backend, which vLLM asks for."""
    module: Any = sys.modules[original.__module__]

    class NcclEpAll2AllManager(module.All2AllManagerBase):
        """Holds nothing: the pairs reach the ranks through an EpGroup."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_all2all and self.all2all_backend == BACKEND:
            require_all()
            self.all2all_manager = NcclEpAll2AllManager(self.cpu_group)
            self.use_all2all = False  # a subclass would look for a manager in vLLM's own list
            get_logger().info("vLLM uses the all-to-all backend %r", BACKEND)

    return init


@replaces("maybe_make_prepare_finalize", ["moe", "routing_tables", "use_monolithic"], VLLM)
def change_pairs(original: Any) -> Any:
    """Let vLLM's layers get our pair."""
    signature = inspect.signature(original)

    def make(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        parallel = bound.arguments["moe"].moe_parallel_config
        if parallel.all2all_backend != BACKEND:
            return original(*args, **kwargs)
        require_all()
        if not parallel.use_all2all_kernels:
            raise InputError(
                f"--all2all-backend {BACKEND} with --data-parallel-size {parallel.dp_size} and "
                f"{'' if parallel.use_ep else 'without '}--enable-expert-parallel: vLLM uses no "
                "all-to-all backend there; it does with more than one data-parallel rank and "
                "expert parallelism"
            )
        from megatron_ncclep.vllm.pair import make_pair

        return make_pair(bound.arguments)

    return make


def _checked(original: Callable[..., Any]) -> Any:
    """A worker's method that raises failures of the device, and names a rank that has died.

    Tokens that are copied to the host later are checked then.  No check waits.
    """

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(self):
            return original(self, *args, **kwargs)
        from megatron_ncclep.serving.failures import raising  # imports torch

        result = raising(lambda: original(self, *args, **kwargs), VLLM)
        if (get_output := getattr(result, "get_output", None)) is not None:
            result.get_output = lambda: raising(get_output, VLLM)
        return result

    return checked


def _ending_first_step(original: Callable[..., Any]) -> Any:
    """A worker's warm-up, after which ranks wait for each other as `timeout_s` says."""

    def warm_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if _is_ours(self):
            import megatron_ncclep

            megatron_ncclep.check()
        return result

    return warm_up


def _is_ours(worker: Any) -> bool:
    return bool(getattr(worker.vllm_config.parallel_config, FIELD) == BACKEND)


HOOKS = Changes(
    VLLM,
    {
        "vllm.config.parallel": (change_config,),
        "vllm.distributed.device_communicators.base_device_communicator": (change_communicator,),
        "vllm.model_executor.layers.fused_moe.all2all_utils": (change_pairs,),
        # Failures of the device are raised before vLLM hands out tokens, in CUDA graphs too.
        "vllm.v1.worker.gpu_worker": (
            *(
                replaces(f"Worker.{name}", [], VLLM)(_checked)
                for name in ("execute_model", "sample_tokens", "execute_dummy_batch")
            ),
            replaces("Worker.compile_or_warm_up_model", [], VLLM)(_ending_first_step),
        ),
    },
)
