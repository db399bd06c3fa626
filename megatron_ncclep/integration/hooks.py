"""Gives Megatron-Core the dispatcher type `ncclep`.

It patches places in Megatron, in memory only and without effect on other dispatcher types: `EARLY`
right after their import (import_hook.py), because a process needs them to ask for us, and `LATE`
when a config or a command line does that (`use`), wherever they have been imported to by then.
docs/architecture.md lists them.

In addition, the first layer with our dispatcher makes torch ask for failures before any optimizer
steps (checks/optimizer_step.py), puts an error that ends the script into torchrun's summary
(error_reporting.py), and, with overlap_moe_expert_parallel_comm, makes Megatron's schedule keep the
inputs that backward needs (checks/schedule.py).
"""

from __future__ import annotations

import gc
import inspect
import sys
import warnings
from types import ModuleType
from typing import Any

from megatron_ncclep import envs
from megatron_ncclep.config import A2SGD, VARIABLES, EpConfig
from megatron_ncclep.error_reporting import install_excepthook
from megatron_ncclep.errors import InputError, IntegrationError, UnsupportedError
from megatron_ncclep.integration.bridge import HOOKS as BRIDGE_HOOKS
from megatron_ncclep.integration.checks import (
    batch_invariance,
    cuda_graphs,
    fp8,
    optimizer_step,
    schedule,
    unsupported,
)
from megatron_ncclep.integration.experts import layer_experts
from megatron_ncclep.integration.gradient_averaging import change_ddp, refuse_in
from megatron_ncclep.integration.import_hook import imported
from megatron_ncclep.integration.inference import support as inference
from megatron_ncclep.integration.metrics_writers import change_report, change_track
from megatron_ncclep.integration.options import command_line
from megatron_ncclep.integration.options.field import (
    IN_PLACE_OF,
    NAME,
    TYPE_FIELD,
    as_alltoall,
    change_fields,
    names_variable,
    put_in_place,
    resolve_options,
)
from megatron_ncclep.integration.options.uses import notices
from megatron_ncclep.integration.patching import (
    Changes,
    replaces,
    unknown,
)
from megatron_ncclep.integration.releases import MEGATRON
from megatron_ncclep.integration.rerun.step import change_full_iteration, change_schedules
from megatron_ncclep.integration.teardown import change_destroy
from megatron_ncclep.ranks.group import EpGroup

_DISPATCHER_MODULE = "megatron_ncclep.integration.dispatcher"
# The hooks of a dispatcher, and the number of arguments that MoELayer passes to them.  After 0.19 a
# branch of Megatron passes a fourth one to dispatch_preprocess, and unpacks two results of
# combine_postprocess: it would split a tensor [2, ...] into its halves.
_DISPATCHER_HOOKS = {
    "dispatch_preprocess": 3,
    "token_dispatch": 2,
    "dispatch_postprocess": 2,
    "combine_preprocess": 1,
    "token_combine": 1,
    "combine_postprocess": 1,
}

_CONFIG_MODULE = "megatron.core.transformer.transformer_config"
_LAYER_MODULE = "megatron.core.transformer.moe.moe_layer"
_LOGGING_MODULE = "megatron.core.transformer.moe.moe_logging"  # from 0.18 on
_OPTIMIZER_GRAPH_MODULE = "megatron.core.optimizer.optimizer_cuda_graph"  # from 0.17 on


def install(**options: Any) -> None:
    """Make `moe_token_dispatcher_type="ncclep"` work in this process.  Idempotent, not collective.

    Call it before building a model.  Not needed for scripts on a machine where the package is
    installed with pip: `import torch` does the same there (see autoload.py).

    Args:
        options: fields of `EpConfig`; they become the defaults of every TransformerConfig.  A
            config's own `config.ncclep = EpConfig(...)` and the command line take precedence over
            them, and they over the environment.

    Raises:
        InputError: an option is unknown or outside its limits.
        IntegrationError: this Megatron-Core lacks a place that the integration patches, or a model
            was built before the options could take effect.
    """
    use()
    if options:
        resolved = EpConfig.resolve(**options)
        _require_no_model()
        from megatron.core.transformer.transformer_config import TransformerConfig

        use()  # what has been imported now
        TransformerConfig.ncclep = resolved
    if "megatron.core" in sys.modules:
        warn_if_untested()


def watch() -> None:
    """Have the places of `EARLY` changed now, or when they are imported.  Idempotent.

    A place that is not what the integration expects causes only a warning, because the process may
    not use our dispatcher at all; `use` raises it.
    """
    EARLY.watch()
    # Megatron's DDP refuses this variable with another dispatcher, which would ignore it.
    if VARIABLES["NCCLEP_GRADIENT_AVERAGING"].get() == A2SGD:
        use()


def use() -> None:
    """Have all places changed, because this process uses the package.  Idempotent.

    Raises:
        IntegrationError: a place of an imported module is not what the integration expects; those
            imported from now on only warn, and the next call raises it.
    """
    for changes in (EARLY, LATE):
        changes.require()
        changes.watch()


def change_module(module: ModuleType) -> None:
    """Patch a module of `EARLY` or `LATE`; does nothing to what is already patched.

    Raises:
        IntegrationError: a place is not what the integration expects; names it.
    """
    EARLY.change(module)
    LATE.change(module)


def warn_if_untested() -> None:
    """Warn when this Megatron-Core's version is outside the range that the tests run with."""
    import megatron.core

    version = megatron.core.__version__
    if not MEGATRON.is_tested(version):
        warnings.warn(
            f"megatron_ncclep is tested with Megatron-Core {MEGATRON.oldest} to {MEGATRON.newest}; "
            f"this is {version}",
            stacklevel=2,
        )


def check_dispatcher_hooks(layer_module: ModuleType) -> None:
    """Require Megatron's dispatchers to have the hooks that ours has.

    Raises:
        IntegrationError: one is missing, or takes other arguments; names it.
    """
    owner = layer_module.MoETokenDispatcher
    for name, number in _DISPATCHER_HOOKS.items():
        function = getattr(owner, name, None)
        if not callable(function) or len(inspect.signature(function).parameters) != 1 + number:
            where = f"{owner.__module__}.{owner.__name__}.{name}"
            raise unknown(where, f"a method of {number} argument{'s' if number > 1 else ''}")


@replaces("TransformerConfig.__post_init__", ["self"])
def _change_post_init(original: Any) -> Any:
    """Let the config validate `ncclep` as it validates `alltoall`; the value stays `ncclep`."""

    def post_init(self: Any) -> None:
        inference.check_inference_type(self)
        batch_invariance.check_generation(self)
        was_put_in_place = put_in_place(self)
        if getattr(self, TYPE_FIELD) != NAME:
            original(self)
            return
        with names_variable(was_put_in_place):
            unsupported.check_supported(self)
            cuda_graphs.check_graph_options(self)
        with as_alltoall(self):
            original(self)

    return post_init


@replaces("MoELayer.__init__", ["config", "pg_collection"])
def _change_layer(original: Any) -> Any:
    """Let MoELayer build our dispatcher; the class stays the same object."""
    module = sys.modules[original.__module__]
    if not hasattr(module, "get_default_pg_collection"):
        raise unknown(f"{module.__name__}.get_default_pg_collection", "a function")
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        with names_variable(put_in_place(bound.arguments["config"])):
            build(self, bound, *args, **kwargs)

    def build(self: Any, bound: inspect.BoundArguments, *args: Any, **kwargs: Any) -> None:
        config = bound.arguments["config"]
        if getattr(config, TYPE_FIELD) != NAME:
            _refuse_ignored_experts(config)
            original(self, *args, **kwargs)
            return
        warn_if_untested()
        use()
        check_dispatcher_hooks(module)
        groups = bound.arguments.get("pg_collection") or module.get_default_pg_collection()
        unsupported.check_supported(config)
        if config.num_moe_experts % groups.ep.size():
            raise InputError(
                f"{config.num_moe_experts} experts cannot be divided over "
                f"{groups.ep.size()} expert-parallel ranks"
            )
        options = inference.training_options(config, resolve_options(config))
        layer_experts.check_experts(config, options, groups.ep.size(), groups.expt_tp.size())
        batch_invariance.check_invariance(config, options)
        options = fp8.align_for_experts(config, options)
        optimizer_step.check_before_steps()
        install_excepthook()
        if config.overlap_moe_expert_parallel_comm:
            schedule.keep_inputs()
        with as_alltoall(config):
            original(self, *args, **kwargs)
        options, choice, grouped = layer_experts.select_experts(
            self, options, groups.expt_tp.size()
        )
        # Megatron's dispatcher holds nothing yet: it is replaced before its first use.
        from megatron_ncclep.integration.dispatcher import NcclEpTokenDispatcher

        overlapped = self.token_dispatcher.shared_experts
        self.token_dispatcher = NcclEpTokenDispatcher(
            self.num_local_experts,
            self.local_expert_indices,
            config=config,
            pg_collection=groups,
            options=options,
            **layer_experts.counts_wanted(self.experts),
            grouped=grouped,
        )
        if hasattr(self, "_training_token_dispatcher"):
            # From 0.18 on, with transformer_impl='inference_optimized': the dispatcher of every
            # pass that does not generate text.
            self._training_token_dispatcher = self.token_dispatcher
        if overlapped is not None:
            self.token_dispatcher.set_shared_experts(overlapped)
        told = [fp8.pads_rows(config, options), unsupported.unused_options(config)]
        if (replaced := envs.get(IN_PLACE_OF)) is not None:
            told += [
                f"{IN_PLACE_OF}={replaced}: configs with {TYPE_FIELD}={replaced!r} get {NAME!r}"
            ]
        if choice is not None:
            told += [f"experts: {choice.experts}, because {choice.reason}"]
        for text in filter(None, told):
            EpGroup.of(self.token_dispatcher.group).announce(text)
        batch_invariance.warn_of_experts(config, self.experts, self.token_dispatcher.group)
        _check_graphs(self, cuda_graphs.captured_by(config))

    return init


def _check_graphs(layer: Any, captured: cuda_graphs.Captured) -> None:
    """Refuse CUDA graphs that would capture work that needs the host; closes the layer's engine.

    Raises:
        UnsupportedError: names the option, its value, the reason and the remedy.
    """
    if captured == cuda_graphs.Captured.NOTHING:
        return
    dispatcher, experts, config = layer.token_dispatcher, layer.experts, layer.config
    engine = dispatcher.engine
    try:
        cuda_graphs.check_captured(
            config,
            captured,
            engine.caps,
            is_static=engine.config.max_recv_rows is not None,
            host_experts=None
            if layer_experts.need_no_host(experts, config)
            else type(experts).__name__,
            follows_load=dispatcher.engines.load is not None,
        )
    except UnsupportedError:
        dispatcher.engines.close()
        raise


@replaces("TransformerLayer.__init__", ["config", "submodules"])
def _change_transformer_layer(original: Any) -> Any:
    """Refuse unsupported graphs that Megatron captures itself and only the layer knows about."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        dispatcher = type(getattr(self.mlp, "token_dispatcher", None))
        if dispatcher.__module__ == _DISPATCHER_MODULE:
            with names_variable(put_in_place(self.config)):
                _check_graphs(self.mlp, cuda_graphs.captured_in(self))

    return init


def _refuse_ignored_experts(config: Any) -> None:
    """Refuse grouped experts in a config with a different dispatcher type."""
    given = vars(config).get(NAME)
    options = None if given is None else EpConfig.of(given)
    if options is not None and options.experts == "grouped":
        raise UnsupportedError(
            f"config.ncclep has experts={options.experts!r}, but the dispatcher is "
            f"{getattr(config, TYPE_FIELD)!r}, which would ignore it: leave it out, or set "
            f"{TYPE_FIELD}={NAME!r}"
        )


# Module -> its patches: what is needed to ask for us, and what is needed then.
EARLY = Changes(
    MEGATRON,
    {
        _CONFIG_MODULE: (change_fields, inference.change_inference_field, notices(use)),
        "megatron.training.arguments": (
            command_line.change_add_arguments,
            command_line.change_parse_args,
        ),
        "megatron.training.yaml_arguments": (command_line.change_core_config_from_args,),
        **BRIDGE_HOOKS,
    },
)
LATE = Changes(
    MEGATRON,
    {
        "megatron.core.parallel_state": (change_destroy,),
        _CONFIG_MODULE: (_change_post_init,),
        _LAYER_MODULE: (_change_layer, inference.change_inference_setup),
        "megatron.core.transformer.moe.experts": (fp8.change_padding,),
        "megatron.core.inference.contexts.dynamic_context": (inference.change_inference_context,),
        "megatron.core.transformer.transformer_layer": (_change_transformer_layer,),
        _OPTIMIZER_GRAPH_MODULE: (optimizer_step.change_optimizer_graph,),
        "megatron.core.pipeline_parallel.schedules": (change_schedules,),
        "megatron.core.full_cuda_graph": (change_full_iteration,),
        "megatron.core.distributed.distributed_data_parallel": (change_ddp,),
        "megatron.core.distributed.fsdp.mcore_fsdp_adapter": (
            refuse_in("FullyShardedDataParallel"),
        ),
        "megatron.core.distributed.torch_fully_sharded_data_parallel": (
            refuse_in("TorchFullyShardedDataParallel"),
        ),
        "megatron.core.transformer.moe.moe_utils": (change_track,),
        _LOGGING_MODULE: (change_report,),
    },
)
# All modules among these of Megatron-Core and Megatron-LM.
PLACES = tuple(name for name in {**LATE.table, **EARLY.table} if name not in BRIDGE_HOOKS)
# Those that an older Megatron-Core lacks, along with the features hooked there.
NOT_EVERYWHERE = (_OPTIMIZER_GRAPH_MODULE, _LOGGING_MODULE)


def _require_no_model() -> None:
    """Raise when an MoELayer has our dispatcher, whose options `install` is about to change."""
    if _dispatcher_of_a_layer() is None:
        return
    gc.collect()  # a model that nobody has any more may still lie in a cycle
    if (name := _dispatcher_of_a_layer()) is not None:
        raise IntegrationError(
            "megatron_ncclep.install() was called after a model was built: the model's MoE layers "
            f"already have their dispatcher ({name}). Call it before building the model"
        )


def _dispatcher_of_a_layer() -> str | None:
    """The class of our dispatcher in some MoELayer of this process, if there is one."""
    layer_module: Any = imported(_LAYER_MODULE)
    if layer_module is None:
        return None
    for layer in gc.get_objects():
        if type(layer) is layer_module.MoELayer:
            # None: a layer that was refused during construction, and is not collected yet.
            dispatcher = type(getattr(layer, "token_dispatcher", None))
            if dispatcher.__module__ == _DISPATCHER_MODULE:
                return dispatcher.__name__
    return None
