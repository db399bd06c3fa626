"""Variants of a dispatcher by name, and what cannot be: words after it, in this order.

DISPATCHER      as through hooks: alltoall_fused, ncclep:native, ...
grouped         this package's experts in place of Megatron-Core's (ncclep only)
static          a fixed number of received rows (ncclep only), which graphs need and imply
GRAPHS          full_iteration   forward and backward as one CUDA graph (ncclep with grouped)
                partial_graphs   Megatron-Core's graphs of attention, router and preprocessing,
                                 of whole training steps only
optimizer_graph the optimizer's step as one CUDA graph of Megatron-Core's, of training steps only
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ncclep.benchmark.dispatchers import OUR_DISPATCHER, dispatcher_choice
from megatron_ncclep.benchmark.megatron_setup import DispatcherChoice
from megatron_ncclep.errors import InputError

GROUPED, STATIC = "grouped", "static"
FULL_ITERATION, PARTIAL_GRAPHS = "full_iteration", "partial_graphs"
OPTIMIZER_GRAPH = "optimizer_graph"
NO_GRAPHS_ON_CPU = "a CPU has no CUDA graphs: leave {} out"


@dataclass(frozen=True)
class Variant:
    """A dispatcher, and how it is used.

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
        """The fields of EpConfig that the words ask for.

        Args:
            max_recv_rows: of a static one.
        """
        options: dict[str, Any] = {}
        if self.grouped:
            options["experts"] = "grouped"
        if self.static:
            options["max_recv_rows"] = max_recv_rows
        return options


def dropped_problem(num_dropped: int, max_recv_rows: Any) -> str | None:
    """Say that rows were dropped, if any were: then something else is computed."""
    if not num_dropped:
        return None
    return (
        f"{num_dropped} rows did not fit into {max_recv_rows} received rows and were dropped: give "
        "a larger --max-recv-rows"
    )


@dataclass(frozen=True)
class Grammar:
    """The names of one kind of subjects.

    Attributes:
        prefix: that they begin with.
        dispatchers: names that may follow.
        graphs: words for CUDA graphs of forward and backward that this kind has.
        steps: there is an optimizer.
    """

    prefix: str
    dispatchers: tuple[str, ...]
    graphs: tuple[str, ...]
    steps: bool = False

    @property
    def form(self) -> str:
        """What to write."""
        last = f"[:{OPTIMIZER_GRAPH}]" if self.steps else ""
        return f"{self.prefix}DISPATCHER[:grouped][:static][:{' or :'.join(self.graphs)}]{last}"

    @property
    def plain_names(self) -> list[str]:
        """The names of all subjects without variants."""
        return [self.prefix + name for name in self.dispatchers]

    def parse(self, name: str) -> Variant:
        """Read the name of a subject.

        Raises:
            InputError: unknown words, or variants that do not go together.
        """
        plain = self.plain_names
        base = next((b for b in plain if name == b or name.startswith(f"{b}:")), None)
        if base is None or "@" in name:
            raise InputError(
                f"unknown subject {name!r}: write {self.form}, such as {self.prefix}alltoall or "
                f"{self.prefix}ncclep:native:grouped:full_iteration; without variants there are "
                f"{', '.join(plain)}"
            )
        words = name[len(base) :].split(":")[1:]
        known = (GROUPED, STATIC, *self.graphs, *(OPTIMIZER_GRAPH,) * self.steps)
        ordered = [word for word in known if word in words]
        graphs = [word for word in words if word in self.graphs]
        if words != ordered or len(graphs) > 1:
            raise InputError(f"subject {name!r}: write {self.form}, in this order")
        dispatcher = base.removeprefix(self.prefix)
        variant = Variant(
            name,
            dispatcher_choice(dispatcher),
            grouped=GROUPED in words,
            static=STATIC in words or (bool(graphs) and dispatcher.startswith(OUR_DISPATCHER)),
            graphs=graphs[0] if graphs else None,
            optimizer_graph=OPTIMIZER_GRAPH in words,
            captures_optimizer=OPTIMIZER_GRAPH in words,
        )
        if problem := self._contradiction(variant, words):
            raise InputError(f"subject {name!r}: {problem}")
        return variant

    def _contradiction(self, variant: Variant, words: Sequence[str]) -> str | None:
        """Say which variants do not go together, if any."""
        for word in (GROUPED, STATIC):
            if word in words and not variant.ours:
                return (
                    f"{word} is of this package's dispatcher: write "
                    f"{self.prefix}ncclep:ENGINE:{word}"
                )
        if variant.graphs == FULL_ITERATION and not variant.ours:
            other = PARTIAL_GRAPHS if PARTIAL_GRAPHS in self.graphs else "no graphs"
            return (
                "this dispatcher's host waits for the numbers of rows, which one graph of an "
                f"iteration cannot have: write {other}"
            )
        if variant.graphs == FULL_ITERATION and not variant.grouped:
            return (
                "Megatron-Core's experts take the numbers of rows on the host, which one graph of "
                f"an iteration cannot have: write {GROUPED}:{FULL_ITERATION}"
            )
        if variant.graphs and STATIC in words:
            return f"{variant.graphs} implies {STATIC}: leave it out"
        return None
