"""The subjects that `python -m benchmarks` measures, by their names.

    ENGINE                     an engine of this package through the engine interface
    nccl_ep_library[:PACKAGE]  NVIDIA's libnccl_ep called directly, without this package's checks:
                               the one that the engine nccl_ep uses, or the one of a package;
                               +pull_push and +fixed_order enable modes of transformer-engine's
    deepep[:no_overlap]        DeepEP V2, called directly; no_overlap: with all it takes for itself
    hybridep[:fused]           HybridEP with its permutation, called directly; fused: as one kernel
    alltoall, flex_deepep, ... Megatron-Core's own dispatchers through their six hooks
    ncclep:ENGINE              this package's dispatcher through the same hooks
    layer:DISPATCHER...        a whole MoELayer (router, dispatcher, experts)
    layer:liger_cute           LigerCute's kernel for dispatch, experts and combine, with a router
    experts:megatron,          the experts of such a layer alone: Megatron-Core's or this package's,
    experts:grouped            the latter also with :full_iteration; with _fp8 in blockwise FP8
    train:DISPATCHER...        whole training steps of a model

Layers, experts and trainings are measured on request only.  Layers and trainings take variants, in
the order of `LAYER` and `TRAIN`:

    grouped         this package's experts in place of Megatron-Core's (ncclep only)
    frozen          the experts' weights are frozen (layers)
    lora16, lora32  and have Megatron-Bridge's adapters of that rank (layers)
    static          a fixed number of received rows (ncclep only); full_iteration implies it
    fp8             in Megatron's recipe blockwise, e4m3 (training)
    router_fusion   Megatron-Core's `moe_router_fusion` (training)
    full_iteration  forward and backward as one CUDA graph (ncclep with grouped)
    partial_graphs  Megatron-Core's graphs of attention, router and preprocessing (training)
    optimizer_graph the optimizer's step as one CUDA graph of Megatron-Core's (training)

`@N` after an engine, a libnccl_ep, DeepEP or HybridEP limits its kernels to N SMs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.shapes import TrainingShape
from megatron_ncclep.benchmark import WITH_EXPERTS
from megatron_ncclep.benchmark.engines import split_name
from megatron_ncclep.engines import ENGINES
from megatron_ncclep.errors import EngineUnavailableError, InputError, UnsupportedError

# Kinds of subjects that have the passes `WHOLE`, and whose host time counts.
LAUNCHED = ("megatron", *WITH_EXPERTS)
# 1.5 times the rows of a balanced routing: an untrained router is far from balanced.
MAX_RECV_ROWS = "1.5x"

LIBRARY = "nccl_ep_library"
# Variants of the baseline -> the package that brings the library, and its modes.  A process has one
# NCCL, with which at most one of the packages' libraries can run.
LIBRARIES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    LIBRARY: (None, ()),
    f"{LIBRARY}:nccl-extensions": ("nccl-extensions", ()),
    **{
        "+".join([f"{LIBRARY}:transformer-engine", *modes]): ("transformer-engine", modes)
        for modes in ((), ("pull_push",), ("fixed_order",), ("pull_push", "fixed_order"))
    },
}
# Subjects of deepep.py -> their words.
FUSED, NO_OVERLAP = "fused", "no_overlap"
DEEPEP: dict[str, tuple[str, ...]] = {
    "deepep": (), "deepep:no_overlap": (NO_OVERLAP,),
    "hybridep": (), "hybridep:fused": (FUSED,),
}  # fmt: skip
GROUPED, STATIC, FP8 = "grouped", "static", "fp8"
BLOCKWISE = {"fp8": "e4m3", "fp8_recipe": "blockwise"}  # TransformerConfig's fields
FROZEN, LORA = "frozen", "lora"
FULL_ITERATION, PARTIAL_GRAPHS = "full_iteration", "partial_graphs"
ROUTER_FUSION = "router_fusion"
OPTIMIZER_GRAPH = "optimizer_graph"
INSTALL_MEGATRON = "Megatron-Core is not installed: pip install 'megatron-ncclep[train]'"
INSTALL_ENGINE = "TransformerEngine, which is not installed: pip install 'megatron-ncclep[te]'"


@dataclass(frozen=True)
class DispatcherChoice:
    """A dispatcher of Megatron-Core's MoE layer."""

    dispatcher: str  # value of `moe_token_dispatcher_type`
    options: dict[str, Any] = field(default_factory=dict)  # further TransformerConfig fields
    engine: str | None = None  # of this package's dispatcher; None for Megatron's own

    @property
    def excuses(self) -> tuple[type[Exception], ...]:
        """Errors that mean that it cannot be measured here: any error of Megatron-Core's own."""
        ours = (EngineUnavailableError, InputError, UnsupportedError)
        return (Exception,) if self.engine is None else ours


def _flex(backend: str, **options: Any) -> DispatcherChoice:
    """Megatron-Core's dispatcher over another library."""
    return DispatcherChoice("flex", {"moe_flex_dispatcher_backend": backend, **options})


# By name, in the order of the table.
DISPATCHERS = {
    **{f"ncclep:{engine}": DispatcherChoice("ncclep", {}, engine) for engine in ENGINES},
    "alltoall": DispatcherChoice("alltoall"),
    "alltoall_fused": DispatcherChoice("alltoall", {"moe_permute_fusion": True}),
    "allgather": DispatcherChoice("allgather"),
    "flex_deepep": _flex("deepep"),
    "flex_deepep_fused": _flex("deepep", moe_permute_fusion=True),
    "flex_hybridep": _flex("hybridep"),
    "flex_hybridep_fused": _flex("hybridep", moe_permute_fusion_into_hybridep=True),
}


@dataclass(frozen=True)
class Variant:
    """A layer, a training, or experts alone, and how they run."""

    name: str  # as on the command line
    dispatcher: DispatcherChoice  # of the MoE layers; meaningless for experts alone
    grouped: bool = False  # this package's experts, not Megatron-Core's
    fp8: bool = False  # in Megatron's recipe blockwise; not whole layers
    frozen: bool = False  # the experts' weights
    lora_rank: int = 0  # of adapters on frozen experts; 0: none
    static: bool = False  # received tensors have a fixed number of rows
    router_fusion: bool = False  # Megatron-Core's `moe_router_fusion`
    graphs: str | None = None  # FULL_ITERATION, PARTIAL_GRAPHS; None: no graphs of the passes
    optimizer_graph: bool = False  # the optimizer is one that can be captured,
    captures_optimizer: bool = False  # and is

    @property
    def captured(self) -> str | None:
        """The first word that asks for CUDA graphs, if any does."""
        return self.graphs or (OPTIMIZER_GRAPH if self.captures_optimizer else None)

    @property
    def ours(self) -> bool:
        """Whether the dispatcher is this package's."""
        return self.dispatcher.engine is not None

    def without_graphs(self) -> Variant:
        """The same, launched kernel by kernel."""
        name = f"{self.name} without graphs"
        return dataclasses.replace(self, name=name, graphs=None, captures_optimizer=False)

    def options(self, max_recv_rows: Any) -> dict[str, Any]:
        """The fields of EpConfig that the words ask for; `max_recv_rows`: of a static one."""
        options: dict[str, Any] = {"experts": "grouped" if self.grouped else "megatron"}
        return options | ({"max_recv_rows": max_recv_rows} if self.static else {})


# The experts that others are compared with, and all subjects of experts alone, by name.
MEGATRONS_EXPERTS = "experts:megatron"
EXPERTS = {
    name: Variant(name, DISPATCHERS["alltoall"], grouped=grouped, graphs=graphs)
    for name, grouped, graphs in (
        (MEGATRONS_EXPERTS, False, None),
        ("experts:grouped", True, None),
        (f"experts:grouped:{FULL_ITERATION}", True, FULL_ITERATION),
    )
} | {
    name: Variant(name, DISPATCHERS["alltoall"], grouped=grouped, fp8=True)
    for name, grouped in (("experts:megatron_fp8", False), ("experts:grouped_fp8", True))
}
# Names with a dispatcher; parts in brackets may be left out.
LAYER = "layer:DISPATCHER[:grouped][:frozen or :lora16 or :lora32][:static][:full_iteration]"
TRAIN = (
    "train:DISPATCHER[:grouped][:static][:fp8][:router_fusion]"
    "[:full_iteration or :partial_graphs][:optimizer_graph]"
)
# The whole layer of liger_cute.py, which has no dispatcher of its own.
LIGER_CUTE = "layer:liger_cute"
# The subject whose losses the others are compared with; those in FP8 with the same one in FP8.
CONTROL = "train:alltoall"


def is_train(name: str) -> bool:
    """Whether a subject trains."""
    return name.startswith("train:")


def variant_of(name: str) -> Variant | None:
    """Read the name of a layer, a training or experts; None for any other name.

    Raises:
        InputError: unknown words, or variants that do not go together.
    """
    if name == LIGER_CUTE:
        return Variant(name, DispatcherChoice("liger_cute"))
    form = next((form for form in (LAYER, TRAIN) if form[:6] == name[:6]), None)
    if form is None:
        return EXPERTS.get(name)
    pattern = form.replace("DISPATCHER", f"({'|'.join(DISPATCHERS)})")
    pattern = re.sub(r"\[(.*?)\]", lambda m: f"({m[1].replace(' or ', '|')})?", pattern)
    found, prefix = re.fullmatch(pattern, name), form[:6]
    if found is None:
        raise InputError(
            f"unknown subject {name!r}: write {form}, in this order, such as {prefix}alltoall or "
            f"{prefix}ncclep:native:grouped:full_iteration; the dispatchers are "
            f"{', '.join(DISPATCHERS)}"
        )
    dispatcher, words = DISPATCHERS[found[1]], [w[1:] for w in found.groups()[1:] if w]
    ours, graphed = dispatcher.engine is not None, OPTIMIZER_GRAPH in words
    graphs = next((word for word in words if word in (FULL_ITERATION, PARTIAL_GRAPHS)), None)
    own = [word for word in words if word in (GROUPED, STATIC)]
    if own and not ours:
        instead = f"{prefix}ncclep:ENGINE:{own[0]}"
        raise InputError(
            f"subject {name!r}: only this package's dispatcher can be {own[0]}: write {instead}"
        )
    if graphs == FULL_ITERATION and GROUPED not in words:
        instead = PARTIAL_GRAPHS if PARTIAL_GRAPHS in form else "no graphs"
        raise InputError(
            f"subject {name!r}: the host waits for the numbers of rows, which one graph of an "
            f"iteration cannot contain: write {f'{GROUPED}:{graphs}' if ours else instead}"
        )
    if graphs == FULL_ITERATION and STATIC in words:
        raise InputError(f"subject {name!r}: {graphs} implies {STATIC}: leave it out")
    ranks = [int(word.removeprefix(LORA)) for word in words if word.startswith(LORA)]
    return Variant(
        name, dispatcher, grouped=GROUPED in words, fp8=FP8 in words,
        frozen=FROZEN in words or bool(ranks), lora_rank=sum(ranks),
        static=STATIC in words or graphs == FULL_ITERATION, router_fusion=ROUTER_FUSION in words,
        graphs=graphs, optimizer_graph=graphed, captures_optimizer=graphed,
    )  # fmt: skip


def known_variant(name: str) -> Variant:
    """`variant_of` a name that is known to be one."""
    variant = variant_of(name)
    assert variant is not None, name
    return variant


def baseline(us: Mapping[str, float]) -> str | None:
    """The fastest of layers or trainings without anything of ours, of their times by name."""
    theirs = [name for name in us if (variant := variant_of(name)) and not variant.ours]
    return min(theirs, key=us.__getitem__, default=None)


def kind_of(name: str) -> str:
    """ "engine", "library", "deepep", "megatron" (a dispatcher), "layer", "experts" or "train"."""
    if variant_of(name) is not None:
        return name.partition(":")[0]
    base = name.partition("@")[0]
    if base in DEEPEP:
        return "deepep"
    return "engine" if base in ENGINES else "library" if base in LIBRARIES else "megatron"


def default_names() -> list[str]:
    """The subjects that are measured by default, in the order of the table."""
    return [*ENGINES, LIBRARY, *DEEPEP, *DISPATCHERS]


def check_name(name: str) -> None:
    """Raise an InputError: no such subject, or a number of SMs that it would ignore."""
    base, at, _ = name.partition("@")
    known = [*ENGINES, *LIBRARIES, *DEEPEP, *DISPATCHERS, *EXPERTS, LIGER_CUTE]
    if variant_of(base) is None and base not in known:
        there = f"there are {', '.join(known)}, {LAYER}, and {TRAIN}"
        raise InputError(f"unknown subject {name!r}: {there}")
    _, num_sms = split_name(name)
    takes_sms = base in ENGINES and "num_sms" in ENGINES[base].caps.options
    if at and not takes_sms and base not in LIBRARIES and base not in DEEPEP:
        ignored = f"{base} would ignore a number of SMs: leave @{num_sms} out"
        raise InputError(f"subject {name!r}: {ignored}")


def unavailable_reason(
    variant: Variant, device: str, training: TrainingShape | None = None
) -> str | None:
    """Say why `variant` cannot run on `device`, as far as one process can tell; None if it can."""
    if training is not None and importlib.util.find_spec("megatron") is None:
        return INSTALL_MEGATRON
    if variant.captured and device != "cuda":
        return f"a CPU has no CUDA graphs: leave {variant.captured} out"
    if variant.fp8 and device != "cuda":
        return "FP8 products need a GPU"
    if variant.router_fusion and device != "cuda":
        return f"TransformerEngine's fused router needs a GPU: leave {ROUTER_FUSION} out"
    if training is None or training.settings(1)["transformer-impl"] != "transformer_engine":
        return None
    if device != "cuda":
        needed = f"{training.name} is a model of TransformerEngine's modules, which need a GPU"
        return f"{needed}: use --config smoke, or a file with transformer-impl: local"
    missing = importlib.util.find_spec("transformer_engine") is None
    return f"{training.name} needs {INSTALL_ENGINE}" if missing else None


def dropped_problem(num_dropped: int, max_recv_rows: Any) -> str | None:
    """Say that rows were dropped, if any were: the subject then computes something else."""
    said = f"{num_dropped} rows did not fit into {max_recv_rows} received rows and were dropped"
    return f"{said}: give a larger --max-recv-rows" if num_dropped else None
