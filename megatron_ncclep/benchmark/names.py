"""Everything that can be measured, by name.

    ENGINE                 an engine of this package through the engine interface
    nccl_ep_library        NVIDIA's libnccl_ep called directly, without this package's checks: the
                           one that the engine nccl_ep takes
    nccl_ep_library:PACKAGE    the one that a package brought; +pull_push and +fixed_order switch
                           modes of transformer-engine's on, which are off otherwise
    alltoall, allgather,   Megatron-Core's own dispatchers through their six hooks
    flex_deepep, ...
    ncclep:ENGINE          this package's dispatcher through the same hooks
    layer:DISPATCHER...    a whole MoELayer (router, dispatcher, experts) with any of those through
                           hooks, such as layer:alltoall and layer:ncclep:native
    experts:megatron,      the experts of such a layer alone: Megatron-Core's or this package's, the
    experts:grouped        latter with :full_iteration too
    train:DISPATCHER...    whole training steps of a model

The last three kinds are measured only when they are asked for.  Layers and trainings take words for
variants, in this order:

    grouped         this package's experts in place of Megatron-Core's (ncclep only)
    static          a fixed number of received rows (ncclep only), which graphs need and imply
    full_iteration  forward and backward as one CUDA graph (ncclep with grouped)
    partial_graphs  Megatron-Core's graphs of attention, router and preprocessing (training)
    optimizer_graph the optimizer's step as one CUDA graph of Megatron-Core's (training)

`@N` after an engine or a libnccl_ep lets its kernels have N SMs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from dataclasses import dataclass, field
from typing import Any

from megatron_ncclep.benchmark.shapes import TrainingShape
from megatron_ncclep.engines import ENGINES
from megatron_ncclep.errors import EngineUnavailableError, InputError, UnsupportedError

LIBRARY = "nccl_ep_library"
# The yardstick's variants -> the package that brings the library, and modes of it.  A process has
# one NCCL, and with it at most one of the packages' libraries can run.
LIBRARIES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    LIBRARY: (None, ()),
    f"{LIBRARY}:nccl-extensions": ("nccl-extensions", ()),
    **{
        "+".join([f"{LIBRARY}:transformer-engine", *modes]): ("transformer-engine", modes)
        for modes in ((), ("pull_push",), ("fixed_order",), ("pull_push", "fixed_order"))
    },
}
GROUPED, STATIC = "grouped", "static"
FULL_ITERATION, PARTIAL_GRAPHS = "full_iteration", "partial_graphs"
OPTIMIZER_GRAPH = "optimizer_graph"
# What needs Megatron-Core or TransformerEngine says how to get it.
INSTALL_MEGATRON = "Megatron-Core is not installed: pip install 'megatron-ncclep[train]'"
INSTALL_ENGINE = "TransformerEngine, which is not installed: pip install 'megatron-ncclep[te]'"


@dataclass(frozen=True)
class DispatcherChoice:
    """A dispatcher of Megatron-Core's MoE layer.

    Attributes:
        dispatcher: value of `moe_token_dispatcher_type`.
        options: further TransformerConfig fields.
        engine: of this package's dispatcher; None for Megatron's own.
    """

    dispatcher: str
    options: dict[str, Any] = field(default_factory=dict)
    engine: str | None = None

    @property
    def excuses(self) -> tuple[type[Exception], ...]:
        """Errors that mean that it cannot be measured here.

        What Megatron-Core or a package of its raises is such a reason.  Our own dispatcher has no
        such excuse, but for an engine that cannot run.
        """
        if self.engine is None:
            return (Exception,)
        return (EngineUnavailableError, InputError, UnsupportedError)


# By name, in the order of the table.
DISPATCHERS = {
    **{f"ncclep:{engine}": DispatcherChoice("ncclep", {}, engine) for engine in ENGINES},
    "alltoall": DispatcherChoice("alltoall"),
    "alltoall_fused": DispatcherChoice("alltoall", {"moe_permute_fusion": True}),
    "allgather": DispatcherChoice("allgather"),
    **{
        f"flex_{backend}": DispatcherChoice("flex", {"moe_flex_dispatcher_backend": backend})
        for backend in ("deepep", "hybridep")
    },
}


@dataclass(frozen=True)
class Variant:
    """A dispatcher of a layer or of a training, and how it is used.

    Attributes:
        name: as on the command line.
        dispatcher: of the MoE layers.
        grouped: this package's experts, not Megatron-Core's.
        static: received tensors have a fixed number of rows.
        graphs: `FULL_ITERATION` or `PARTIAL_GRAPHS`; None: no CUDA graphs of forward and backward.
        optimizer_graph: the optimizer is one that can be captured,
        captures_optimizer: and is.
    """

    name: str
    dispatcher: DispatcherChoice
    grouped: bool = False
    static: bool = False
    graphs: str | None = None
    optimizer_graph: bool = False
    captures_optimizer: bool = False

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
        return dataclasses.replace(
            self, name=f"{self.name} without graphs", graphs=None, captures_optimizer=False
        )

    def options(self, max_recv_rows: Any) -> dict[str, Any]:
        """The fields of EpConfig that the words ask for; `max_recv_rows`: of a static one."""
        options: dict[str, Any] = {"experts": "grouped" if self.grouped else "megatron"}
        return options | ({"max_recv_rows": max_recv_rows} if self.static else {})


@dataclass(frozen=True)
class Grammar:
    """The names of one kind of subjects.

    Attributes:
        form: what to write; what stands in brackets may be left out.
    """

    form: str

    @property
    def prefix(self) -> str:
        """What the names begin with."""
        return self.form.partition("DISPATCHER")[0]

    def has(self, name: str) -> bool:
        """Whether a name is of this kind."""
        return name.startswith(self.prefix)

    def parse(self, name: str) -> Variant:
        """Read the name of a subject.

        Raises:
            InputError: unknown words, or variants that do not go together.
        """
        pattern = self.form.replace("DISPATCHER", f"({'|'.join(DISPATCHERS)})")
        pattern = re.sub(r"\[(.*?)\]", lambda m: f"({m[1].replace(' or ', '|')})?", pattern)
        found = re.fullmatch(pattern, name)
        if found is None:
            raise InputError(
                f"unknown subject {name!r}: write {self.form}, in this order, such as "
                f"{self.prefix}alltoall or {self.prefix}ncclep:native:grouped:full_iteration; the "
                f"dispatchers are {', '.join(DISPATCHERS)}"
            )
        dispatcher, words = DISPATCHERS[found[1]], [w[1:] for w in found.groups()[1:] if w]
        ours, graphed = dispatcher.engine is not None, OPTIMIZER_GRAPH in words
        graphs = next((word for word in words if word in (FULL_ITERATION, PARTIAL_GRAPHS)), None)
        problem = None
        if words and words[0] in (GROUPED, STATIC) and not ours:
            problem = (
                f"{words[0]} is of this package's dispatcher: write "
                f"{self.prefix}ncclep:ENGINE:{words[0]}"
            )
        elif graphs == FULL_ITERATION and GROUPED not in words:
            other = PARTIAL_GRAPHS if PARTIAL_GRAPHS in self.form else "no graphs"
            problem = (
                "the host waits for the numbers of rows, which one graph of an iteration cannot "
                f"have: write {f'{GROUPED}:{graphs}' if ours else other}"
            )
        elif graphs and STATIC in words:
            problem = f"{graphs} implies {STATIC}: leave it out"
        if problem is not None:
            raise InputError(f"subject {name!r}: {problem}")
        return Variant(
            name,
            dispatcher,
            grouped=GROUPED in words,
            static=STATIC in words or (graphs is not None and ours),
            graphs=graphs,
            optimizer_graph=graphed,
            captures_optimizer=graphed,
        )


@dataclass(frozen=True)
class ExpertsVariant:
    """Experts alone.

    Attributes:
        grouped: this package's, not Megatron-Core's.
        graphs: `FULL_ITERATION`; None: no CUDA graph.
    """

    grouped: bool
    graphs: str | None = None
    static = False

    @property
    def captured(self) -> str | None:
        """As of a `Variant`."""
        return self.graphs


# What other experts are compared with.
MEGATRONS_EXPERTS = "experts:megatron"
# By name: all that there are.
EXPERTS = {
    MEGATRONS_EXPERTS: ExpertsVariant(grouped=False),
    "experts:grouped": ExpertsVariant(grouped=True),
    f"experts:grouped:{FULL_ITERATION}": ExpertsVariant(grouped=True, graphs=FULL_ITERATION),
}
LAYERS = Grammar("layer:DISPATCHER[:grouped][:static][:full_iteration]")
TRAININGS = Grammar(
    "train:DISPATCHER[:grouped][:static][:full_iteration or :partial_graphs][:optimizer_graph]"
)
# Whose losses the others are compared with.
CONTROL = "train:alltoall"


def is_train(name: str) -> bool:
    """Whether a subject's name is that of one that trains."""
    return TRAININGS.has(name)


def variant_of(name: str) -> Variant | ExpertsVariant | None:
    """Read the name of a layer, a training or experts; None: it is none of them.

    Raises:
        InputError: unknown words, or variants that do not go together.
    """
    if name in EXPERTS:
        return EXPERTS[name]
    return next((kind.parse(name) for kind in (LAYERS, TRAININGS) if kind.has(name)), None)


def kind_of(name: str) -> str:
    """ "engine", "library", "megatron" (a dispatcher), "layer", "experts" or "train"."""
    if LAYERS.has(name) or TRAININGS.has(name) or name in EXPERTS:
        return name.partition(":")[0]
    base, _ = split_name(name)
    return "engine" if base in ENGINES else "library" if base in LIBRARIES else "megatron"


def default_names() -> list[str]:
    """The names of what is measured unless something is asked for, in the order of the table."""
    return [*ENGINES, LIBRARY, *DISPATCHERS]


def split_name(name: str) -> tuple[str, int | None]:
    """Split `BASE@N` into BASE and N, without making anything.

    Raises:
        InputError: unknown, or a number of SMs for something that has no such option.
    """
    base, at, sms = name.partition("@")
    known = [*ENGINES, *LIBRARIES, *DISPATCHERS, *EXPERTS]
    if variant_of(base) is None and base not in known:
        raise InputError(
            f"unknown subject {name!r}: there are {', '.join(known)}, {LAYERS.form}, and "
            f"{TRAININGS.form}"
        )
    if not at:
        return base, None
    if not re.fullmatch("[1-9][0-9]*", sms):
        raise InputError(f"subject {name!r}: write a number of SMs after the @, such as {base}@24")
    takes_sms = base in LIBRARIES or (base in ENGINES and "num_sms" in ENGINES[base].caps.options)
    if not takes_sms:
        raise InputError(f"subject {name!r}: {base} would ignore a number of SMs: leave @{sms} out")
    return base, int(sms)


def unavailable_reason(
    variant: Variant | ExpertsVariant, device: str, training: TrainingShape | None = None
) -> str | None:
    """Say why `variant` cannot run on `device`, as far as one process can tell; None if it can.

    Args:
        training: what it trains; None: it is a layer, or its experts.
    """
    if training is not None and importlib.util.find_spec("megatron") is None:
        return INSTALL_MEGATRON
    if variant.captured and device != "cuda":
        return f"a CPU has no CUDA graphs: leave {variant.captured} out"
    if training is None or training.settings(1)["transformer-impl"] != "transformer_engine":
        return None
    if device != "cuda":
        return (
            f"{training.name} is a model of TransformerEngine's modules, which need a GPU: use "
            "--config smoke, or a file with transformer-impl: local"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        return f"{training.name} needs {INSTALL_ENGINE}"
    return None


def dropped_problem(num_dropped: int, max_recv_rows: Any) -> str | None:
    """Say that rows were dropped, if any were: then something else is computed."""
    if not num_dropped:
        return None
    return (
        f"{num_dropped} rows did not fit into {max_recv_rows} received rows and were dropped: give "
        "a larger --max-recv-rows"
    )
