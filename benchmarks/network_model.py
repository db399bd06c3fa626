"""`python -m benchmarks --model-network`: traffic between nodes, and memory, computed.

What belongs to the kernels comes from the extension, which needs no GPU for it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ncclep.benchmark.table import as_text, grid
from megatron_ncclep.cli import config_files
from megatron_ncclep.engines.native.group import tokens_of_windows
from megatron_ncclep.engines.native.plan import HEADROOM
from megatron_ncclep.errors import EngineUnavailableError, InputError
from megatron_ncclep.libraries import extension
from megatron_ncclep.serving.modes import MOST_TOKENS

# Heads of the tables.
HEAD = "nodes", "ranks", "network MB", "ms", "inside MB", "ms", "pass ms", "flat MB", "ms"
PUTS_HEAD = (
    "nodes", "plan puts", "KB", "dispatch puts", "MB", "combine puts", "MB", "rounds",
)  # fmt: skip
MEMORY_HEAD = "nodes", "ranks", "rows GB", "control MB", "a plan MB", "low latency GB"


@dataclass(frozen=True)
class Puts:
    """What `native` puts to one rail peer in one operation (docs/network.md).

    Attributes:
        messages: with or without bytes.
        num_bytes: of all of them; a mean where it is computed for a mean routing.
    """

    messages: int
    num_bytes: float

    @classmethod
    def of_plan(
        cls,
        ranks_on_each: int,
        experts_on_rank: int,
        num_tokens: int,
        pairs: float,
        assignments: float,
    ) -> Puts:
        """Of a plan in exact mode.

        Args:
            ranks_on_each, experts_on_rank: L and E / R.
            num_tokens: of the rank with the most, and of this one in whole chunks.
            pairs, assignments: those of (token, rank) and of (token, expert) there.
        """
        counts = 8 * ranks_on_each * (experts_on_rank + 1)
        chunk = _kernels().CHUNK
        num_chunks = -(-num_tokens // chunk)
        chunks = 4 * (ranks_on_each + 1) * (num_chunks + 1) + 4 * num_chunks * chunk
        return cls(2 + 3 * ranks_on_each, counts + 8 * assignments + 8 * pairs + chunks)

    @classmethod
    def of_rows(
        cls,
        node_tokens: float,
        row_bytes: int,
        phases: int | None = None,
        weights: float = 0,
        rounds: int = 1,
        told: int = 1,
    ) -> Puts:
        """Of a dispatch or a combine.

        Args:
            node_tokens: rows: in dispatch this rank's for the peer, in combine the peer's.
            row_bytes: of a row.
            phases: messages with rows in a round; None: the most.
            weights: numbers that go with them: T * K, in combine in whole chunks, or 0.
            rounds: of so many phases each.
            told: the last rounds of which the peer is not told that their room is free: 1 in
                dispatch, 2 in combine.
        """
        phases = phases or _kernels().PHASES
        messages = 1 + rounds * phases * (2 if weights else 1) + max(0, rounds - told)
        return cls(messages, 8 + node_tokens * row_bytes + 4 * weights)


@dataclass(frozen=True)
class NetworkModel:
    """A model, not a measurement, of one dispatch or combine over several nodes.

    It counts bytes and divides them by rates, ignoring latency, network topology, hosts and
    kernels.  The router is balanced: all experts are equally likely.

    Example: 2 nodes, top-2.  A token needs the other node unless both of its assignments are on its
    own node, which with many experts is one case in four: 0.75 of the rows cross.  A flat
    all-to-all sends a row for each assignment to the other node: 1 per token.
    """

    num_tokens: int = 4096  # T, of each rank
    row_bytes: int = 2 * 7168
    num_experts: int = 256  # E
    top_k: int = 8  # K
    ranks_on_each: int = 8  # L, ranks on a node
    nic_gb_s: float = 46.0  # per rank over the network, each way: 400 Gbit/s with rows of this size
    nvlink_gb_s: float = 350.0  # the same inside a node: an H200's
    chunks: int = 1  # of columns: one crosses while the previous one moves inside a node

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise InputError(f"{name} {value}: must be a positive number")
        if self.top_k > self.num_experts:
            raise InputError(f"top-{self.top_k} of {self.num_experts} experts: there are too few")

    @classmethod
    def parse(cls, text: str) -> NetworkModel:
        """Read `NAME=VALUE,...`, such as `nic_gb_s=90,top_k=4`; the other values are the defaults.

        `model=NAME` takes those of a model of configs/model, or of a path that ends in .yaml.

        Raises:
            InputError: an unknown name, or a value that is not a number or makes no sense.
        """
        kinds: dict[str, Any] = {f.name: type(f.default) for f in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        sizes: dict[str, Any] = {}
        for item in filter(None, text.split(",")):
            name, _, value = item.partition("=")
            if name not in names():
                raise InputError(f"--model-network {item}: the names are {', '.join(names())}")
            if name in given or (name == "model" and sizes):
                raise InputError(f"--model-network {text}: {name} is given twice")
            if name == "model":
                sizes = _sizes_of_model(value)
                continue
            try:
                given[name] = kinds[name](value)
            except ValueError as error:
                raise InputError(f"--model-network {item}: {value!r} is not a number") from error
        return cls(**{**sizes, **given})

    def _needed(self, parts: int) -> float:
        """The probability that a token needs an expert of one of `parts` equal parts of them."""
        elsewhere = self.num_experts - self.num_experts // parts
        return 1 - math.prod(
            max(0, elsewhere - k) / (self.num_experts - k) for k in range(self.top_k)
        )

    def crossing_bytes(self, nodes: int) -> float:
        """Bytes that a rank sends over the network: one row for each other node that needs it."""
        return self.num_tokens * (nodes - 1) * self._needed(nodes) * self.row_bytes

    def flat_bytes(self, nodes: int) -> float:
        """The same for a row for each assignment to another node, as `alltoall` sends them."""
        return self.num_tokens * self.top_k * (nodes - 1) / nodes * self.row_bytes

    def inside_bytes(self, nodes: int) -> float:
        """Bytes that a rank sends inside its node: rows of all nodes, received over its rail."""
        rows = self.num_tokens * nodes * (self.ranks_on_each - 1)
        return rows * self._needed(nodes * self.ranks_on_each) * self.row_bytes

    def puts(self, nodes: int) -> list[Puts]:
        """What `native` puts to each rail peer in plan, dispatch and combine, with weights."""
        tokens, ranks = self.num_tokens, nodes * self.ranks_on_each
        crossing = tokens * self._needed(nodes)
        pairs = tokens * self.ranks_on_each * self._needed(ranks)
        sizes = (self.ranks_on_each, self.num_experts // ranks, tokens)
        rounds, chunk = self.rounds(nodes), _kernels().CHUNK
        chunks = -(-tokens // chunk)
        rows: dict[str, Any] = {
            "node_tokens": crossing,
            "row_bytes": self.row_bytes,
            "phases": min(_kernels().PHASES, -(-chunks // rounds) // 2 + 1),
            "rounds": rounds,
        }
        return [
            Puts.of_plan(*sizes, pairs, tokens * self.top_k / nodes),
            Puts.of_rows(**rows, weights=tokens * self.top_k),
            Puts.of_rows(**rows, weights=chunks * chunk * self.top_k, told=2),
        ]

    def memory(self, nodes: int) -> dict[str, int]:
        """Bytes of GPU memory of a rank with `native`, and the rounds of a dispatch or combine.

        `rows` and `control` are the windows; `plan` is what an exact plan of a balanced load keeps,
        until its backward pass; `low_latency` are the windows of vLLM's objects, for bf16.
        """
        native, ranks = _kernels(), nodes * self.ranks_on_each
        assignments = int(HEADROOM * self.num_tokens * self.top_k)
        group = {"num_ranks": ranks, "num_domains": nodes, "top_k": self.top_k}
        memory: dict[str, int] = native.native_memory(
            **group,
            num_experts=self.num_experts,
            num_tokens=tokens_of_windows(self.num_tokens),
            row_bytes=self.row_bytes,
            max_pairs=min(ranks * self.num_tokens, assignments),
            max_assignments=assignments,
        )
        # PlanBuffers: `counts` and `token_routes`.
        counts = 8 * (2 * self.num_experts // ranks + 1)
        token_routes = 4 * memory.pop("token_routes") * self.num_tokens
        memory["plan"] = memory.pop("routes") + counts + token_routes
        memory["low_latency"] = sum(
            native.low_latency_bytes(
                **group,
                max_tokens=most,
                hidden=self.row_bytes // 2,
                payload=str(torch.bfloat16),
                dtype=str(torch.bfloat16),
                num_scales=0,
            )
            for most in MOST_TOKENS
            if self.ranks_on_each <= native.NARROW_LOCAL_RANKS  # more have no low-latency mode
        )
        return memory

    def rounds(self, nodes: int) -> int:
        """The rounds of a dispatch or a combine with `native`, each for a part of the tokens."""
        return self.memory(nodes)["rounds"]

    def seconds(self, nodes: int) -> float:
        """Seconds of one pass: the longer part, plus the unhidden share of the shorter one."""
        crossing = self.crossing_bytes(nodes) / (1e9 * self.nic_gb_s)
        inside = self.inside_bytes(nodes) / (1e9 * self.nvlink_gb_s)
        return max(crossing, inside) + min(crossing, inside) / self.chunks


def names() -> list[str]:
    """The names that `NetworkModel.parse` takes."""
    return [*(field.name for field in dataclasses.fields(NetworkModel)), "model"]


def _kernels() -> Any:
    """The extension.

    Raises:
        EngineUnavailableError: there is none.
    """
    if problem := extension.unavailable_reason():
        raise EngineUnavailableError(f"--model-network asks the extension for sizes: {problem}")
    return extension.load()


def _sizes_of_model(name: str) -> dict[str, Any]:
    """Values of a model configuration; its rows are bf16."""
    of: Any = {"micro-batch-size": 1, **config_files.load("model", name)}
    try:
        return {
            "num_tokens": of["seq-length"] * of["micro-batch-size"],
            "row_bytes": 2 * of["hidden-size"],
            "num_experts": of["num-experts"],
            "top_k": of["moe-router-topk"],
        }
    except KeyError as error:
        raise InputError(f"--model-network model={name}: it has no {error}") from None


def render(model: NetworkModel) -> str:
    """The model's values for 1 to 64 nodes, as far as there are experts for them, as text.

    Raises:
        InputError: there are too few experts for the ranks of one node.
        EngineUnavailableError: the extension is missing.
    """
    rows, puts, held = [], [], []
    for nodes in (1, 2, 4, 8, 16, 32, 64):
        ranks = nodes * model.ranks_on_each
        if model.num_experts % ranks or ranks > _kernels().MAX_RANKS:
            continue
        memory = model.memory(nodes)
        parts = (("rows", 1e9), ("control", 1e6), ("plan", 1e6), ("low_latency", 1e9))
        numbers = [f"{memory[name] / unit:.2f}" for name, unit in parts]
        held.append([str(nodes), str(ranks), *numbers])
        if nodes == 1:
            continue
        crossing, inside, flat = (
            [f"{sent / 1e6:.0f}", f"{sent / (1e6 * gb_s):.2f}"]
            for sent, gb_s in (
                (model.crossing_bytes(nodes), model.nic_gb_s),
                (model.inside_bytes(nodes), model.nvlink_gb_s),
                (model.flat_bytes(nodes), model.nic_gb_s),
            )
        )
        ms = f"{1e3 * model.seconds(nodes):.2f}"
        rows.append([str(nodes), str(ranks), *crossing, *inside, ms, *flat])
        cells = [
            (str(put.messages), f"{put.num_bytes / unit:.1f}")
            for put, unit in zip(model.puts(nodes), (1e3, 1e6, 1e6), strict=True)
        ]
        rounds = str(memory["rounds"])
        puts.append([str(nodes), *(cell for pair in cells for cell in pair), rounds])
    if not held:
        raise InputError(
            f"--model-network: {model.num_experts} experts are not divisible by the "
            f"{model.ranks_on_each} ranks of a node: give ranks_on_each"
        )
    head = (
        f"A model, not a measurement: one dispatch or combine of {model.num_tokens} tokens per "
        f"rank, rows of {model.row_bytes} bytes, top-{model.top_k} of {model.num_experts} equally "
        f"likely experts, {model.ranks_on_each} ranks on a node, {model.nic_gb_s:g} GB/s per rank "
        f"to other nodes and {model.nvlink_gb_s:g} inside, chunks: {model.chunks} (the engine: 1 "
        "to 4, by size). Bytes are those that a rank sends; flat is an all-to-all with a row for "
        "each assignment, counting only the traffic between nodes."
    )
    network = (
        "Messages and bytes that a rank puts to each of its rail peers, one on every other node, "
        "with the engine 'native' over GIN: an exact plan, and dispatch and combine with weights, "
        f"in up to {_kernels().PHASES} phases a round, the most."
    )
    memory_head = (
        "GPU memory of a rank with the engine 'native': its windows for rows and for control; an "
        f"exact plan of a balanced load; vLLM's low-latency objects, for at most {MOST_TOKENS} "
        "tokens."
    )
    tables = [("", grid(HEAD, rows), "", network, "", grid(PUTS_HEAD, puts))] if rows else []
    return as_text(head, *sum(tables, ()), "", memory_head, "", grid(MEMORY_HEAD, held))
