"""`python -m benchmarks --model-network`: traffic between nodes, computed and not measured."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megatron_ncclep.benchmark.table import as_text, grid
from megatron_ncclep.errors import InputError

# `native` puts the rows of a dispatch or a combine in at most so many messages, its phases.
MOST_PHASES = 9
CHUNK = 128  # tokens that its kernels take together
# Heads of the tables.
HEAD = "nodes", "ranks", "network MB", "ms", "inside MB", "ms", "pass ms", "flat MB", "ms"
PUTS_HEAD = (
    "nodes", "plan puts", "KB", "dispatch puts", "MB", "combine puts", "MB", "rounds", "window GB",
)  # fmt: skip
# It takes more rounds until a rows window has at most so many bytes.
MOST_WINDOW_BYTES = 2 << 30


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
        num_chunks = -(-num_tokens // CHUNK)
        chunks = 4 * (ranks_on_each + 1) * (num_chunks + 1) + 4 * num_chunks * CHUNK
        return cls(2 + 3 * ranks_on_each, counts + 8 * assignments + 8 * pairs + chunks)

    @classmethod
    def of_rows(
        cls,
        node_tokens: float,
        row_bytes: int,
        phases: int = MOST_PHASES,
        weights: float = 0,
        rounds: int = 1,
        told: int = 1,
    ) -> Puts:
        """Of a dispatch or a combine.

        Args:
            node_tokens: rows: in dispatch this rank's for the peer, in combine the peer's.
            row_bytes: of a row.
            phases: messages with rows in a round.
            weights: numbers that go with them: T * K, in combine in whole chunks, or 0.
            rounds: of so many phases each.
            told: the last rounds of which the peer is not told that their room is free: 1 in
                dispatch, 2 in combine.
        """
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

        Raises:
            InputError: an unknown name, or a value that is not a number or makes no sense.
        """
        kinds: dict[str, Any] = {f.name: type(f.default) for f in dataclasses.fields(cls)}
        given: dict[str, Any] = {}
        for item in filter(None, text.split(",")):
            name, _, value = item.partition("=")
            if name not in kinds:
                raise InputError(f"--model-network {item}: the names are {', '.join(kinds)}")
            if name in given:
                raise InputError(f"--model-network {text}: {name} is given twice")
            try:
                given[name] = kinds[name](value)
            except ValueError as error:
                raise InputError(f"--model-network {item}: {value!r} is not a number") from error
        return cls(**given)

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
        rounds = self.rounds(nodes)
        rows: dict[str, Any] = {
            "node_tokens": crossing,
            "row_bytes": self.row_bytes,
            "phases": min(MOST_PHASES, self._round_chunks(rounds) // 2 + 1),
            "rounds": rounds,
        }
        return [
            Puts.of_plan(*sizes, pairs, tokens * self.top_k / nodes),
            Puts.of_rows(**rows, weights=tokens * self.top_k),
            Puts.of_rows(**rows, weights=self._most_chunks * CHUNK * self.top_k, told=2),
        ]

    def window_bytes(self, nodes: int, rounds: int) -> int:
        """Bytes of a rank's rows window with `native` (`csrc/native/rail_layout.h`).

        For each token of a round: two halves for dispatch, each with this rank's rows and, for each
        other node, those on their way there and those from there; the sums of all ranks; and, for
        one round or two, those on their way to other nodes and those of all nodes.
        """
        of_nodes = (2 if rounds > 1 else 1) * (2 * nodes - 1)
        rows = 2 * (2 * nodes - 1) + nodes * self.ranks_on_each + of_nodes
        return rows * self._round_chunks(rounds) * CHUNK * self.row_bytes

    def rounds(self, nodes: int) -> int:
        """The rounds of a dispatch or a combine with `native`, each for a part of the tokens."""
        rounds = 1
        while rounds < self._most_chunks and self.window_bytes(nodes, rounds) > MOST_WINDOW_BYTES:
            rounds += 1
        return rounds

    @property
    def _most_chunks(self) -> int:
        return -(-self.num_tokens // CHUNK)

    def _round_chunks(self, rounds: int) -> int:
        return -(-self._most_chunks // rounds)

    def seconds(self, nodes: int) -> float:
        """Seconds of one pass: the longer part, plus the unhidden share of the shorter one."""
        crossing = self.crossing_bytes(nodes) / (1e9 * self.nic_gb_s)
        inside = self.inside_bytes(nodes) / (1e9 * self.nvlink_gb_s)
        return max(crossing, inside) + min(crossing, inside) / self.chunks


def names() -> list[str]:
    """The names of the model's values."""
    return [field.name for field in dataclasses.fields(NetworkModel)]


def render(model: NetworkModel) -> str:
    """The model's values for 2 to 64 nodes, as far as there are experts for them, as text."""
    rows, puts = [], []
    for nodes in (2, 4, 8, 16, 32, 64):
        if model.num_experts % (nodes * model.ranks_on_each):
            continue
        crossing, inside, flat = (
            [f"{sent / 1e6:.0f}", f"{sent / (1e6 * gb_s):.2f}"]
            for sent, gb_s in (
                (model.crossing_bytes(nodes), model.nic_gb_s),
                (model.inside_bytes(nodes), model.nvlink_gb_s),
                (model.flat_bytes(nodes), model.nic_gb_s),
            )
        )
        ranks, ms = str(nodes * model.ranks_on_each), f"{1e3 * model.seconds(nodes):.2f}"
        rows.append([str(nodes), ranks, *crossing, *inside, ms, *flat])
        cells = [
            (str(put.messages), f"{put.num_bytes / unit:.1f}")
            for put, unit in zip(model.puts(nodes), (1e3, 1e6, 1e6), strict=True)
        ]
        rounds = model.rounds(nodes)
        window = f"{model.window_bytes(nodes, rounds) / 1e9:.2f}"
        puts.append([str(nodes), *(cell for pair in cells for cell in pair), str(rounds), window])
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
        f"in up to {MOST_PHASES} phases a round, the most; and its window for rows."
    )
    return as_text(head, "", grid(HEAD, rows), "", network, "", grid(PUTS_HEAD, puts))
