"""The places of vLLM that are changed in memory: it has no registry of all-to-all backends.

https://github.com/vllm-project/vllm/pull/50556 proposes one; with it, most of this file can go.
Every other backend takes vLLM's own path.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, get_args

from megatron_ncclep.errors import InputError, IntegrationError, PeerError
from megatron_ncclep.integration.import_hook import after_import
from megatron_ncclep.logs import get_logger
from megatron_ncclep.vllm import BACKEND

FIELD = "all2all_backend"
OLDEST, NEWEST = "0.24", "0.33"  # of the releases that the tests run with
_CONFIG_MODULE = "vllm.config.parallel"
_ARGUMENTS_MODULE = "vllm.engine.arg_utils"
_COMMUNICATOR_MODULE = "vllm.distributed.device_communicators.base_device_communicator"
_PAIRS_MODULE = "vllm.model_executor.layers.fused_moe.all2all_utils"
_WORKER_MODULE = "vllm.v1.worker.gpu_worker"
_MARK = "_changed_by_megatron_ncclep"


def install() -> None:
    """Change the places now, or when vLLM imports them.  Idempotent, not collective."""
    for name in HOOKS:
        after_import(name, change_or_warn)


def change_or_warn(module: ModuleType) -> None:
    """Change one of the modules.

    A place that is not as expected causes only a warning here, because this vLLM may have been
    started with another backend; `require_all` raises it.
    """
    try:
        HOOKS[module.__name__](module)
    except IntegrationError as error:
        warnings.warn(str(error), stacklevel=2)


def require_all() -> None:
    """Raise what `change_or_warn` warned of.

    Raises:
        IntegrationError: a place is not as expected; names it.
    """
    for name, change in HOOKS.items():
        if name in sys.modules:
            change(sys.modules[name])


def change_config(module: ModuleType) -> None:
    """Let vLLM's option take the name, in code and on the command line."""
    config = getattr(module, "ParallelConfig", None)
    field = getattr(config, "__dataclass_fields__", {}).get(FIELD)
    names = get_args(getattr(field, "type", None))
    if config is None or field is None or "allgather_reducescatter" not in names:
        raise _unknown(f"{module.__name__}.ParallelConfig.{FIELD}", "a Literal of names")
    splits = getattr(config, "use_sequence_parallel_moe", None)
    if not isinstance(splits, property):
        raise _unknown(f"{config.__name__}.use_sequence_parallel_moe", "a property")
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


def change_communicator(module: ModuleType) -> None:
    """Give vLLM's expert-parallel group a manager of this backend, which vLLM asks for."""
    base = module.DeviceCommunicatorBase
    original = _unchanged(base, "__init__", ["cpu_group", "unique_name"])
    if original is None:
        return

    class NcclEpAll2AllManager(module.All2AllManagerBase):  # type: ignore[name-defined]
        """Holds nothing: the pairs reach the ranks through an EpGroup."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_all2all and self.all2all_backend == BACKEND:
            self.all2all_manager = NcclEpAll2AllManager(self.cpu_group)
            self.use_all2all = False  # a subclass would look for a manager in vLLM's own list
            get_logger().info("vLLM uses the all-to-all backend %r", BACKEND)

    base.__init__ = _changed(init)


def change_pairs(module: ModuleType) -> None:
    """Let vLLM's layers get our pair, wherever this function has been imported to."""
    name = "maybe_make_prepare_finalize"
    original = _unchanged(module, name, ["moe", "routing_tables", "use_monolithic"])
    if original is None:
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
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

    replacement = _changed(make)
    for importer in list(sys.modules.values()):
        if vars(importer).get(name) is original:
            setattr(importer, name, replacement)


def change_worker(module: ModuleType) -> None:
    """Raise failures of the device before vLLM hands out tokens, in CUDA graphs too."""
    worker = module.Worker
    for name in ("execute_model", "sample_tokens", "execute_dummy_batch"):
        if (original := _unchanged(worker, name, [])) is not None:
            setattr(worker, name, _checked(original))
    original = _unchanged(worker, "compile_or_warm_up_model", [])
    if original is not None:
        worker.compile_or_warm_up_model = _ending_first_step(original)


def _checked(original: Callable[..., Any]) -> Any:
    """A worker's method that raises failures of the device, and names a rank that has died.

    Tokens that are copied to the host later are checked then.  No check waits.
    """

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_ours(self):
            return original(self, *args, **kwargs)
        result = _raising(lambda: original(self, *args, **kwargs))
        if (get_output := getattr(result, "get_output", None)) is not None:
            result.get_output = lambda: _raising(get_output)
        return result

    return _changed(checked)


def _raising(call: Callable[[], Any]) -> Any:
    """The result of `call`; raises failures that a device has reported by then.

    Raises:
        PeerError: a rank has died, or did not come.
    """
    from megatron_ncclep.ranks.group import lost_ranks, raise_failures

    raise_failures()
    try:
        result = call()
    except RuntimeError as error:
        if isinstance(error, PeerError) or not (lost := lost_ranks()):
            raise
        raise PeerError(f"{lost}; look at the other ranks' output. {error}") from error
    raise_failures()
    return result


def _ending_first_step(original: Callable[..., Any]) -> Any:
    """A worker's warm-up, after which ranks wait for each other as `timeout_s` says."""

    @functools.wraps(original)
    def warm_up(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if _is_ours(self):
            import megatron_ncclep

            megatron_ncclep.check()
        return result

    return _changed(warm_up)


def _is_ours(worker: Any) -> bool:
    return bool(getattr(worker.vllm_config.parallel_config, FIELD) == BACKEND)


def _unchanged(owner: Any, name: str, parameters: list[str]) -> Any:
    """The function to wrap, or None if it is wrapped already; checks its parameters."""
    function = getattr(owner, name, None)
    where = f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")
    if not callable(function):
        raise _unknown(where, "a function")
    if getattr(function, _MARK, False):
        return None
    missing = [p for p in parameters if p not in inspect.signature(function).parameters]
    if missing:
        raise _unknown(where, f"a function with the parameter {missing[0]!r}")
    return function


def _changed(function: Any) -> Any:
    setattr(function, _MARK, True)
    return function


def _unknown(place: str, expected: str) -> IntegrationError:
    return IntegrationError(
        f"--all2all-backend {BACKEND} is not available: {place} is not {expected}: this vLLM is "
        f"not one that megatron_ncclep knows ({OLDEST} to {NEWEST})"
    )


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    _CONFIG_MODULE: change_config,
    _COMMUNICATOR_MODULE: change_communicator,
    _PAIRS_MODULE: change_pairs,
    _WORKER_MODULE: change_worker,
}
