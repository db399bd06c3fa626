"""`inference_moe_token_dispatcher_type="ncclep"`: its patches of Megatron, and its refusals.

`HOOKS` in hooks.py lists which module each function changes.  Megatron-Core has this option from
0.18 on, with its own two dispatchers, `nccl` and `nvls`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.inference.session import DTYPE, InferenceSession
from megatron_ncclep.integration.options.field import NAME, accept_type, derived
from megatron_ncclep.integration.patching import is_changed, mark_patched, replaces, validated_as
from megatron_ncclep.ranks.group import EpGroup

FIELD = "inference_moe_token_dispatcher_type"
# Megatron builds the layer and its inference context as if this type had been requested: then all
# ranks run the same CUDA graph in a step, or none, and only decode steps are in graphs.
VALIDATED_AS = "nccl"
SINCE = "0.18"
IMPL = "inference_optimized"


def is_wanted(config: Any) -> bool:
    """Whether a TransformerConfig asks for our dispatcher while text is generated."""
    return getattr(config, FIELD, None) == NAME


# --- the option ----------------------------------------------------------------------------------


def change_inference_field(module: Any) -> None:
    """Let the config's field, from which command lines take their choices, accept the value."""
    config_class = module.TransformerConfig
    if FIELD in config_class.__dataclass_fields__:
        accept_type(module, FIELD)
        return
    for changed in [config_class, *derived(config_class)]:
        if "__init__" in vars(changed) and not is_changed(changed.__init__):
            changed.__init__ = _refusing(changed.__init__)


def _refusing(original: Any) -> Any:
    """A constructor for releases without the option, with a clearer error than Python's own."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get(FIELD) == NAME:
            raise UnsupportedError(_not_in_this_release())
        original(self, *args, **kwargs)

    return mark_patched(init)


def offer_inference_type(parser: argparse.ArgumentParser) -> None:
    """For releases without the option: recognise it on command lines, and refuse it."""
    if any(action.dest == FIELD for action in parser._actions):
        return

    def refuse(value: str) -> str:
        raise argparse.ArgumentTypeError(_not_in_this_release())

    option = f"--{FIELD.replace('_', '-')}"
    parser.add_argument(option, type=refuse, default=None, help=argparse.SUPPRESS)


def _not_in_this_release() -> str:
    import megatron.core

    return (
        f"{FIELD}={NAME!r}: Megatron-Core {megatron.core.__version__} has no dispatchers for "
        f"inference to choose from: use {SINCE} or later"
    )


def training_options(config: Any, options: EpConfig) -> EpConfig:
    """The options for the dispatcher of all other passes.

    Raises:
        UnsupportedError: inference_tokens is set, and nothing would use it.
    """
    if options.inference_tokens is not None and not is_wanted(config):
        raise UnsupportedError(
            f"inference_tokens={options.inference_tokens}, but {FIELD} is "
            f"{getattr(config, FIELD, None)!r}, which would ignore it: leave it out, or set "
            f"{FIELD}={NAME!r}"
        )
    return dataclasses.replace(options, inference_tokens=None)


def check_inference_type(config: Any) -> None:
    """Refuse the value where Megatron would ignore it, and with experts that were not tested.

    Raises:
        UnsupportedError: names the values and the remedy.
    """
    impl = getattr(config, "transformer_impl", None)
    if is_wanted(config) and (impl != IMPL or config.num_moe_experts is None):
        raise UnsupportedError(
            f"{FIELD}={NAME!r} with transformer_impl={impl!r} and "
            f"num_moe_experts={config.num_moe_experts}: Megatron-Core has dispatchers for "
            f"inference only with transformer_impl={IMPL!r}, in models with experts, and would "
            f"ignore it: leave it out, or set both"
        )
    # Before Megatron asks for its package.
    backend = getattr(config, "inference_grouped_gemm_backend", None)
    backend = getattr(backend, "value", backend)
    if is_wanted(config) and backend not in ("torch", "vllm"):
        raise UnsupportedError(
            f"{FIELD}={NAME!r} does not support inference_grouped_gemm_backend={backend!r}: how "
            "its kernels treat rows without an expert was not tested: set 'vllm' or 'torch'"
        )


# --- the layer -----------------------------------------------------------------------------------


def change_inference_setup(module: Any) -> None:
    """Give an MoELayer our dispatcher while text is generated."""
    if _has_field():
        _change_setup(module)


@replaces("MoELayer._setup_inference_mode", ["pg_collection"])
def _change_setup(original: Any) -> Any:
    def setup_inference_mode(self: Any, pg_collection: Any) -> None:
        config = self.config
        if not is_wanted(config):
            original(self, pg_collection)
            return
        _check_layer(config, pg_collection)
        with validated_as(config, FIELD, VALIDATED_AS):
            original(self, pg_collection)
        from megatron_ncclep.integration.inference.dispatcher import NcclEpInferenceDispatcher

        # Megatron's holds nothing yet: it is replaced before its first use.
        self._inference_token_dispatcher = NcclEpInferenceDispatcher(
            self.num_local_experts,
            self.local_expert_indices,
            config=config,
            pg_collection=pg_collection,
            session=InferenceSession.shared(config, pg_collection.ep),
        )

    return setup_inference_mode


def _check_layer(config: Any, pg_collection: Any) -> None:
    """Refuse options that the layer's experts or our dispatcher would handle wrongly.

    Raises:
        UnsupportedError: names the option, its value and the remedy.
    """
    slices = pg_collection.expt_tp.size()
    if config.params_dtype != DTYPE:
        raise UnsupportedError(
            f"{FIELD}={NAME!r} does not support params_dtype={config.params_dtype!r}: "
            f"Megatron-Core's inference experts take only {DTYPE}: set it (--bf16)"
        )
    if slices != 1:
        raise UnsupportedError(
            f"{FIELD}={NAME!r} does not support expert_tensor_parallel_size={slices!r}: "
            "Megatron-Core's inference experts are whole: set 1"
        )


# --- the inference context -----------------------------------------------------------------------


def change_inference_context(module: Any) -> None:
    """Prepare low-latency mode before Megatron captures CUDA graphs, and raise failures."""
    if _has_field():
        _change_context(module)
        _change_requests(module)


@replaces("DynamicInferenceContext.__init__", ["model_config", "inference_config"])
def _change_context(original: Any) -> Any:
    def init(self: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        if not is_wanted(model_config):
            original(self, model_config, *args, **kwargs)
            return
        with validated_as(model_config, FIELD, VALIDATED_AS):
            original(self, model_config, *args, **kwargs)
        from megatron.core import parallel_state

        # Without expert parallelism the context has no group, and layers have a single-rank group.
        group = self.expert_model_parallel_group or parallel_state.get_expert_model_parallel_group()
        session = InferenceSession.shared(model_config, group)
        # With sequence parallelism a rank has only a part of the tokens.
        parts = model_config.tensor_model_parallel_size if model_config.sequence_parallel else 1
        in_graphs = max(self.cuda_graph_token_counts or [0])
        session.prepare(-(-in_graphs // parts), -(-self.max_tokens // parts))
        self._ncclep_group = session.group

    return init


@replaces("DynamicInferenceContext.update_requests", [])
def _change_requests(original: Any) -> Any:
    def update_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The step's tokens are known by now.  A step in a CUDA graph cannot itself report that they
        # were computed from NaN because a rank did not come.
        group: EpGroup | None = getattr(self, "_ncclep_group", None)
        if group is not None:
            group.check()
        return original(self, *args, **kwargs)

    return update_requests


def _has_field() -> bool:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return FIELD in TransformerConfig.__dataclass_fields__
