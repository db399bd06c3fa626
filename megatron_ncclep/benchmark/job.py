"""One benchmark as plain data, the same on every rank: subjects by name, shapes, and how to time.

    ENGINE                     an engine of this package through the engine interface
    nccl_ep_library[:PACKAGE]  NVIDIA's libnccl_ep called directly, without this package's checks:
                               the one that the engine nccl_ep uses, or the one of a package;
                               +pull_push and +fixed_order enable modes of transformer-engine's
    deepep                     DeepEP V2, called directly
    hybridep[:fused]           HybridEP with its permutation, called directly; fused: as one kernel
    alltoall, flex_deepep, ... Megatron-Core's own dispatchers through their six hooks
    ncclep:ENGINE              this package's dispatcher through the same hooks
    layer:DISPATCHER...        a whole MoELayer (router, dispatcher, experts)
    experts:megatron,          the experts of such a layer alone: Megatron-Core's or this package's,
    experts:grouped            the latter also with :full_iteration
    train:DISPATCHER...        whole training steps of a model

Layers, experts and trainings are measured on request only.  Layers and trainings take variants, in
the order of `LAYER` and `TRAIN`:

    grouped         this package's experts in place of Megatron-Core's (ncclep only)
    static          a fixed number of received rows (ncclep only), which graphs need and imply
    full_iteration  forward and backward as one CUDA graph (ncclep with grouped)
    partial_graphs  Megatron-Core's graphs of attention, router and preprocessing (training)
    optimizer_graph the optimizer's step as one CUDA graph of Megatron-Core's (training)

`@N` after an engine, a libnccl_ep, DeepEP or HybridEP limits its kernels to N SMs.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import re
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from megatron_ncclep.benchmark import shapes
from megatron_ncclep.benchmark.shapes import Shape, TrainingShape
from megatron_ncclep.cli.config_files import Checked, at_least
from megatron_ncclep.config import EpConfig
from megatron_ncclep.engines import ENGINES
from megatron_ncclep.errors import EngineUnavailableError, InputError, UnsupportedError

HIGH_THROUGHPUT, LOW_LATENCY = "ht", "ll"  # modes: the steps of training, or low-latency mode
# Rounds, unless the file or the command line says so.
WARMUP = {"cuda": 5, "cpu": 1}
SAMPLES = {"cuda": 30, "cpu": 3}
LOW_LATENCY_CONFIGS = {False: "low_latency", True: "low_latency_smoke"}  # by --smoke
# 1.5 times the rows of a balanced routing: an untrained router is far from balanced.
MAX_RECV_ROWS = "1.5x"

# Megatron-Core's own `ncclep`, and what it cannot do without: room for twice the balanced rows.
FLEX_NCCLEP, CAPACITY_FACTOR = "flex_ncclep", 2.0
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
# Subjects of benchmark/deepep.py -> their words.
FUSED = "fused"
DEEPEP: dict[str, tuple[str, ...]] = {"deepep": (), "hybridep": (), "hybridep:fused": (FUSED,)}
GROUPED, STATIC = "grouped", "static"
FULL_ITERATION, PARTIAL_GRAPHS = "full_iteration", "partial_graphs"
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
    FLEX_NCCLEP: _flex("ncclep", moe_expert_rank_capacity_factor=CAPACITY_FACTOR),
}


@dataclass(frozen=True)
class Variant:
    """A layer, a training, or experts alone, and how they run."""

    name: str  # as on the command line
    dispatcher: DispatcherChoice  # of the MoE layers; meaningless for experts alone
    grouped: bool = False  # this package's experts, not Megatron-Core's
    static: bool = False  # received tensors have a fixed number of rows
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
}
# Names with a dispatcher; parts in brackets may be left out.
LAYER = "layer:DISPATCHER[:grouped][:static][:full_iteration]"
TRAIN = "train:DISPATCHER[:grouped][:static][:full_iteration or :partial_graphs][:optimizer_graph]"
# The subject whose losses the others are compared with.
CONTROL = "train:alltoall"


def is_train(name: str) -> bool:
    """Whether a subject trains."""
    return name.startswith("train:")


def variant_of(name: str) -> Variant | None:
    """Read the name of a layer, a training or experts; None for any other name.

    Raises:
        InputError: unknown words, or variants that do not go together.
    """
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
    if words and words[0] in (GROUPED, STATIC) and not ours:
        instead = f"{prefix}ncclep:ENGINE:{words[0]}"
        raise InputError(
            f"subject {name!r}: only this package's dispatcher can be {words[0]}: write {instead}"
        )
    if graphs == FULL_ITERATION and GROUPED not in words:
        instead = PARTIAL_GRAPHS if PARTIAL_GRAPHS in form else "no graphs"
        raise InputError(
            f"subject {name!r}: the host waits for the numbers of rows, which one graph of an "
            f"iteration cannot contain: write {f'{GROUPED}:{graphs}' if ours else instead}"
        )
    if graphs and STATIC in words:
        raise InputError(f"subject {name!r}: {graphs} implies {STATIC}: leave it out")
    return Variant(
        name, dispatcher, grouped=GROUPED in words,
        static=STATIC in words or (graphs is not None and ours),
        graphs=graphs, optimizer_graph=graphed, captures_optimizer=graphed,
    )  # fmt: skip


def known_variant(name: str) -> Variant:
    """`variant_of` a name that is known to be one."""
    variant = variant_of(name)
    assert variant is not None, name
    return variant


def kind_of(name: str) -> str:
    """ "engine", "library", "deepep", "megatron" (a dispatcher), "layer", "experts" or "train"."""
    if variant_of(name) is not None:
        return name.partition(":")[0]
    base, _ = split_name(name)
    if base in DEEPEP:
        return "deepep"
    return "engine" if base in ENGINES else "library" if base in LIBRARIES else "megatron"


def default_names() -> list[str]:
    """The subjects that are measured by default, in the order of the table."""
    # TransformerEngine's libnccl_ep may be the second one of the process.
    return [*ENGINES, LIBRARY, *DEEPEP, *(name for name in DISPATCHERS if name != FLEX_NCCLEP)]


def low_latency_engines(device: str) -> list[str]:
    """The engines with low-latency mode; on "cuda" those that a CUDA graph can capture."""
    caps = {name: entry.caps for name, entry in ENGINES.items() if entry.caps.low_latency_tokens}
    return [name for name, c in caps.items() if device != "cuda" or c.captures_static]


def split_name(name: str) -> tuple[str, int | None]:
    """Split `BASE@N` into BASE and N.

    Raises:
        InputError: unknown, or a number of SMs for a subject without that option.
    """
    base, at, sms = name.partition("@")
    known = [*ENGINES, *LIBRARIES, *DEEPEP, *DISPATCHERS, *EXPERTS]
    if variant_of(base) is None and base not in known:
        there = f"there are {', '.join(known)}, {LAYER}, and {TRAIN}"
        raise InputError(f"unknown subject {name!r}: {there}")
    if not at:
        return base, None
    if not re.fullmatch("[1-9][0-9]*", sms):
        raise InputError(f"subject {name!r}: write a number of SMs after the @, such as {base}@24")
    takes_sms = base in ENGINES and "num_sms" in ENGINES[base].caps.options
    if not takes_sms and base not in LIBRARIES and base not in DEEPEP:
        raise InputError(f"subject {name!r}: {base} would ignore a number of SMs: leave @{sms} out")
    return base, int(sms)


def unavailable_reason(
    variant: Variant, device: str, training: TrainingShape | None = None
) -> str | None:
    """Say why `variant` cannot run on `device`, as far as one process can tell; None if it can."""
    if training is not None and importlib.util.find_spec("megatron") is None:
        return INSTALL_MEGATRON
    if variant.captured and device != "cuda":
        return f"a CPU has no CUDA graphs: leave {variant.captured} out"
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


@dataclass(frozen=True)
class Job(Checked):
    """The whole task of `ncclep bench`: its file, overridden by the command line."""

    config: str  # name or path of the file with the shapes
    shapes: tuple[Shape, ...]  # of subjects that do not train; empty if there are none
    trainings: tuple[TrainingShape, ...]  # of those that do
    ranks: int
    device: str  # "cpu" or "cuda"
    subjects: tuple[str, ...]  # in the order in which they are shown
    required: tuple[str, ...]  # named on the command line: it is an error if one cannot run
    warmup: int = at_least(0)  # untimed rounds
    samples: int = at_least(1)  # timed rounds
    timeout_s: float = 60.0  # that a rank waits for the others
    out: str = ""  # folder for the results
    max_recv_rows: int | str | None = None  # of layers and trainings that are static
    mode: str = HIGH_THROUGHPUT  # or LOW_LATENCY

    @property
    def everything(self) -> list[Shape | TrainingShape]:
        """All shapes and trainings, in the order of measurement."""
        return [*self.shapes, *self.trainings]

    @property
    def measured(self) -> tuple[str, ...]:
        """The subjects that do not train."""
        return tuple(name for name in self.subjects if not is_train(name))

    @property
    def trained(self) -> tuple[str, ...]:
        """The subjects that train."""
        return tuple(filter(is_train, self.subjects))

    @property
    def needs_megatron(self) -> bool:
        """Whether some subjects are Megatron-Core's, or use its models."""
        return not {"engine", "library", "deepep"}.issuperset(map(kind_of, self.subjects))

    @classmethod
    def make(cls, args: argparse.Namespace, ranks: int, device: str) -> Job:
        """Override the file's values with those of the command line, and check the result.

        Raises:
            InputError: something is wrong or would be ignored.
        """
        subjects = tuple(args.subjects or ())
        if args.mode == LOW_LATENCY:
            file = shapes.load(config := args.config or LOW_LATENCY_CONFIGS[args.smoke])
            # The file's subjects are those of the other mode.
            libraries = [LIBRARY] if device == "cuda" else []
            names = subjects or (*low_latency_engines(device), *libraries)
            _check_low_latency(names, device, file.shapes)
        else:
            trains = bool(subjects) and all(map(is_train, subjects))
            usual = "smoke" if args.smoke else "training" if trains else "models"
            file = shapes.load(config := args.config or usual)
            names = subjects or file.subjects or tuple(default_names())
        for name in names:
            split_name(name)
        if len(set(names)) != len(names):
            raise InputError(f"a subject is named twice: {', '.join(names)}")
        rounds = {"warmup": WARMUP[device], "samples": SAMPLES[device]}
        for source, name in product((file, args), ("warmup", "samples")):
            if (value := getattr(source, name)) is not None:
                rounds[name] = value
        job = cls(
            config=config,
            shapes=file.shapes if not all(map(is_train, names)) else (),
            trainings=file.trainings if any(map(is_train, names)) else (),
            ranks=ranks, device=device, subjects=names, required=subjects, out=args.out,
            timeout_s=file.timeout_s, mode=args.mode,
            max_recv_rows=_max_recv_rows(args.max_recv_rows, names), **rounds,
        )  # fmt: skip
        job._check()
        return job

    def _check(self) -> None:
        """Refuse subjects for which the file has nothing, and ranks that do not fit the shapes."""
        if self.measured and not self.shapes:
            wrong = f"{self.measured[0]} does not train, and {self.config} has trainings only"
            raise InputError(f"{wrong}: give another --config")
        if self.trained and not self.trainings:
            wrong = f"{self.trained[0]} trains, and {self.config} has no trainings"
            raise InputError(f"{wrong}: give --config training")
        for shape in self.shapes:
            shape.check_ranks(self.ranks)
            others = [name for name in self.measured if kind_of(name) != "engine"]
            if shape.max_recv_rows is not None and (others or self.mode == LOW_LATENCY):
                what = f"--mode {LOW_LATENCY}" if self.mode == LOW_LATENCY else others[0]
                given = f"{self.config}: {shape}: max_recv_rows {shape.max_recv_rows}"
                raise InputError(f"{given}: {what} would ignore it: leave it out")
        for training in self.trainings:
            training.settings(self.ranks)
        for name in self.required:
            variant = variant_of(name)
            for model in self.trainings if is_train(name) else (None,):
                reason = variant and unavailable_reason(variant, self.device, model)
                if reason:
                    raise InputError(f"{name}: {reason}")


def _check_low_latency(names: tuple[str, ...], device: str, found: tuple[Shape, ...]) -> None:
    """Refuse subjects without low-latency mode, and settings that the mode would ignore."""
    libraries = [name for name, (_, modes) in LIBRARIES.items() if not modes]
    known = [*low_latency_engines(device), *libraries]
    for name in names:
        if name.partition("@")[0] not in known:
            those = "subjects that have it, on GPUs those that CUDA graphs can hold"
            raise InputError(
                f"subject {name!r}: --mode {LOW_LATENCY} measures {those}: {', '.join(known)}"
            )
    for shape in found:
        if shape.alignment != 1:
            why = "low-latency mode has no expert blocks to pad: leave it out"
            raise InputError(f"{shape}: alignment {shape.alignment}: {why}")


def _max_recv_rows(given: int | str | None, names: tuple[str, ...]) -> int | str | None:
    """The option that static subjects get; None if there are none."""
    if any(variant and variant.static for variant in map(variant_of, names)):
        return EpConfig(max_recv_rows=MAX_RECV_ROWS if given is None else given).max_recv_rows
    if given is not None:
        lacking = (
            "no subject has a fixed number of received rows, such as layer:ncclep:native:static"
        )
        raise InputError(f"--max-recv-rows {given}: {lacking}")
    return None
