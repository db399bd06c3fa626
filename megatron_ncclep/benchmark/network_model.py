"""A model of dispatch, or combine, over several nodes: what crosses the network, and how long.

Not a measurement.  It knows rates and counts bytes, and nothing of latency, of how a network is
laid out, or of what hosts and kernels add.  The router is balanced: all experts are equally likely.

Example: 2 nodes, top-2.  A token needs the other node unless both of its assignments are on its
own, which with many experts is so once in 4 times: 0.75 of the rows cross.  A flat all-to-all sends
a row for each assignment elsewhere: 1 a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from megatron_ncclep.benchmark.table import align, wrap
from megatron_ncclep.errors import InputError

NODES = (2, 4, 8, 16, 32, 64)
# 400 Gbit/s a GPU and an H200's NVLink, as rows of this size get out of them.
NIC_GB_S, NVLINK_GB_S = 46.0, 350.0


@dataclass(frozen=True)
class NetworkModel:
    """One pass over the rows of a rank.

    Attributes:
        num_tokens: T, of each rank.
        row_bytes: of one row.
        num_experts: E.
        top_k: K.
        ranks_on_each: L, ranks on a node.
        nic_gb_s: 1e9 bytes a second that a rank sends over the network, and receives at a time.
        nvlink_gb_s: the same inside a node.
        chunks: of columns, of which one crosses while the one before moves inside.
    """

    num_tokens: int = 4096
    row_bytes: int = 2 * 7168
    num_experts: int = 256
    top_k: int = 8
    ranks_on_each: int = 8
    nic_gb_s: float = NIC_GB_S
    nvlink_gb_s: float = NVLINK_GB_S
    chunks: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise InputError(f"{name} {value}: must be a positive number")
        if self.top_k > self.num_experts:
            raise InputError(f"top-{self.top_k} of {self.num_experts} experts: there are too few")

    def missed(self, parts: int) -> float:
        """How often a token needs none of the experts that one of `parts` equal parts has."""
        there, K = self.num_experts // parts, self.top_k
        return math.prod(
            max(0, self.num_experts - there - k) / (self.num_experts - k) for k in range(K)
        )

    def crossing_bytes(self, nodes: int) -> float:
        """Bytes that a rank sends over the network: a row for each other node in need of it."""
        rows = self.num_tokens * (nodes - 1) * (1 - self.missed(nodes))
        return rows * self.row_bytes

    def flat_bytes(self, nodes: int) -> float:
        """The same for a row for each assignment to another node, as `alltoall` sends them."""
        return self.num_tokens * self.top_k * (nodes - 1) / nodes * self.row_bytes

    def inside_bytes(self, nodes: int) -> float:
        """Bytes that a rank sends inside its node: rows of all nodes, from over its rail."""
        needed = nodes * (self.ranks_on_each - 1)
        rows = self.num_tokens * needed * (1 - self.missed(nodes * self.ranks_on_each))
        return rows * self.row_bytes

    def seconds(self, nodes: int) -> float:
        """Of one pass: the longer part, and of the shorter one what no other chunk hides."""
        crossing = self.crossing_bytes(nodes) / (1e9 * self.nic_gb_s)
        inside = self.inside_bytes(nodes) / (1e9 * self.nvlink_gb_s)
        return max(crossing, inside) + min(crossing, inside) / self.chunks


def table(model: NetworkModel) -> str:
    """What the model says of 2 to 64 nodes, as far as there are experts for them."""
    rows = [["nodes", "ranks", "network MB", "ms", "inside MB", "ms", "pass ms", "flat MB", "ms"]]
    for nodes in NODES:
        if model.num_experts % (nodes * model.ranks_on_each):
            continue
        crossing, inside = model.crossing_bytes(nodes), model.inside_bytes(nodes)
        flat = model.flat_bytes(nodes)
        rows.append([
            str(nodes),
            str(nodes * model.ranks_on_each),
            *_bytes_and_ms(crossing, model.nic_gb_s),
            *_bytes_and_ms(inside, model.nvlink_gb_s),
            f"{1e3 * model.seconds(nodes):.2f}",
            *_bytes_and_ms(flat, model.nic_gb_s),
        ])  # fmt: skip
    head = wrap(
        f"A model, not a measurement: one dispatch or combine of {model.num_tokens} tokens a rank, "
        f"rows of {model.row_bytes} bytes, top-{model.top_k} of {model.num_experts} experts alike, "
        f"{model.ranks_on_each} ranks on a node, {model.nic_gb_s:g} GB/s a rank to other "
        f"nodes and {model.nvlink_gb_s:g} inside, chunks: {model.chunks} (the engine: 1 to 4, "
        "by size). Bytes are what a rank sends; flat is an all-to-all with a row for each "
        "assignment, its part between nodes alone."
    )
    return "\n".join([*head, "", *align(rows)])


def parse(text: str) -> NetworkModel:
    """Read `NAME=VALUE,...`, such as `nic_gb_s=90,top_k=4`; what is left out has its default.

    Raises:
        InputError: an unknown name, or a value that cannot be.
    """
    kinds: dict[str, Any] = {f.name: type(f.default) for f in fields(NetworkModel)}
    given: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in kinds:
            raise InputError(f"--model-network {item}: the names are {', '.join(kinds)}")
        try:
            given[name] = kinds[name](value)
        except ValueError as error:
            raise InputError(f"--model-network {item}: {value!r} is no number") from error
    return NetworkModel(**given)


def _bytes_and_ms(num_bytes: float, gb_s: float) -> list[str]:
    return [f"{num_bytes / 1e6:.0f}", f"{num_bytes / (1e6 * gb_s):.2f}"]
