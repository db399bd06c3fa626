"""Shapes: problem sizes from configs/benchmark/, their routing and payload, and link traffic.

A payload's values are hashes of their places (contents.py), so any rank can compute another rank's
payload without receiving it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from megatron_ncclep.benchmark import contents
from megatron_ncclep.benchmark.cases import Case
from megatron_ncclep.benchmark.table_oracle import SlotTable, slot_table
from megatron_ncclep.cli import config_files
from megatron_ncclep.cli.config_files import Checked, at_least, one_of
from megatron_ncclep.config import ALIGNMENTS, MIN_TIMEOUT_S
from megatron_ncclep.errors import InputError

# Not fp64, which is for gradient checks, not for training.
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Fields of Shape that `model: NAME` fills in -> arguments in configs/model/NAME.yaml.
OF_A_MODEL = {
    "hidden": "hidden-size", "ffn_hidden_size": "moe-ffn-hidden-size", "experts": "num-experts",
    "top_k": "moe-router-topk",
}  # fmt: skip
# The role of a tensor: each has different values, so a result left from another pass is noticed.
X, GRAD_OUT, Y, GRAD_ROWS, WEIGHTS, GRAD_WEIGHTS = range(1, 7)


@dataclass(frozen=True)
class Shape(Checked):
    """One problem size, the same on every rank."""

    name: str  # readable, unique in its file
    tokens: int = at_least(1)  # T of each rank
    hidden: int = at_least(1)  # H
    experts: int = at_least(1)  # E of the whole group
    top_k: int = at_least(1)  # K
    dtype: str = one_of(DTYPES, "bfloat16")  # of the payload
    skew: float = at_least(0, default=0.0)  # 0: even over experts; 1: as few experts as possible
    alignment: int = one_of(ALIGNMENTS, 1)  # of an expert's block, in rows
    ffn_hidden_size: int | None = at_least(1, default=None)  # only layers and experts need it
    max_recv_rows: int | None = at_least(1, default=None)  # of engines: static mode

    def __str__(self) -> str:
        return f"shape {self.name}"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.experts:
            there = f"a token picks distinct experts, and there are {self.experts}"
            raise InputError(f"top_k {self.top_k}: {there}")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the payload."""
        return self.hidden * DTYPES[self.dtype].itemsize

    def check_ranks(self, num_ranks: int) -> None:
        """Raise an InputError if the experts cannot be divided over the ranks."""
        check_experts(self, self.experts, num_ranks)

    def case(self, num_ranks: int, device: str) -> Case:
        """The shape as a routing problem of `num_ranks` ranks."""
        return Case(
            name=self.name, tokens=(self.tokens,) * num_ranks, num_experts=self.experts,
            top_k=self.top_k, hidden=self.hidden, dtype=DTYPES[self.dtype],
            alignment=self.alignment, skew=self.skew, device=device,
            max_recv_rows=self.max_recv_rows,
        )  # fmt: skip


def check_experts(shape: Checked, num_experts: int, num_ranks: int) -> None:
    """Raise an InputError if the experts cannot be divided over the ranks."""
    if num_experts % num_ranks:
        wrong = f"{shape}: {num_experts} experts cannot be divided over {num_ranks} ranks"
        raise InputError(f"{wrong}: give --ranks a divisor of {num_experts}")


@dataclass(frozen=True)
class Measurement(Checked):
    """A file of configs/benchmark/: shapes, and default settings for measuring them."""

    shapes: tuple[Shape, ...] = ()  # of one MoE layer
    subjects: tuple[str, ...] = ()  # names; empty: all engines
    warmup: int | None = at_least(0, default=None)  # untimed rounds
    samples: int | None = at_least(1, default=None)  # timed rounds
    timeout_s: float = at_least(MIN_TIMEOUT_S, default=60.0)  # that a rank waits for the others

    # Key of the file -> what each item of its list becomes.
    ITEMS: ClassVar[dict[str, type]] = {"shapes": Shape}

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [item.name for key in self.ITEMS for item in getattr(self, key)]
        if not names or len(names) != len(set(names)):
            kinds = " or ".join(key.removesuffix("s") for key in self.ITEMS)
            raise InputError(f"give at least one {kinds}, each with a different name: {names}")


def load(name_or_path: str, kind: type[Measurement] = Measurement) -> Any:
    """Read a file of configs/benchmark/, by its name or its path, as a `kind`.

    A shape may have `model: NAME` instead of the numbers of `OF_A_MODEL`.

    Raises:
        InputError: no such file, an unknown or missing key, or a value of the wrong form.
    """
    content: dict[str, Any] = dict(config_files.load(config_files.BENCHMARK, name_or_path))
    try:
        for key, made in kind.ITEMS.items():
            items = _listed(content, key, dict, "mappings")
            content[key] = tuple(_make(made, key.removesuffix("s"), item) for item in items)
        content["subjects"] = tuple(_listed(content, "subjects", str, "names"))
        return _make(kind, None, content)
    except InputError as error:
        raise InputError(f"benchmark configuration {name_or_path}: {error}") from error


def _listed(content: dict[str, Any], key: str, kind: type, called: str) -> list[Any]:
    listed = content.get(key, [])
    if not isinstance(listed, list) or not all(isinstance(item, kind) for item in listed):
        raise InputError(f"{key} must be a list of {called}")
    return listed


def _make(kind: Any, called: str | None, mapping: dict[str, Any]) -> Any:
    """Make a dataclass of `mapping`; errors call it `called` and its name, if given."""
    fields = dataclasses.fields(kind)
    names = [f.name for f in fields]
    required = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    try:
        if kind is Shape and "model" in mapping:
            mapping = _with_model(mapping)
        wrong = [f"unknown key {name!r}" for name in mapping if name not in names]
        wrong += [f"no {name}" for name in required if name not in mapping]
        if wrong:
            raise InputError(f"{wrong[0]}: the keys are {', '.join(names)}")
        return kind(**mapping)
    except InputError as error:
        if called is None:
            raise
        raise InputError(f"{called} {mapping.get('name')}: {error}") from error


def _with_model(shape: dict[str, Any]) -> dict[str, Any]:
    """Fill in the values of a shape's `model: NAME`; the shape's own values take precedence."""
    model = config_files.load("model", str(shape["model"]))
    if lacking := [name for name in OF_A_MODEL.values() if name not in model]:
        raise InputError(f"its model has no {lacking[0]}")
    own = {key: value for key, value in shape.items() if key != "model"}
    return {field: model[name] for field, name in OF_A_MODEL.items()} | own


class Workload:
    """One shape's routing on this rank, shared by all subjects, which only read its tensors.

    `ffn_hidden_size` is the size of one expert; None: the shape does not give it.

    Attributes:
        tables: the routes to each rank.
        topk_idx, w: int64 and fp32 [T, K].
        x, grad_out: [T, H].
        y, grad_rows, grad_row_w: [N, H] and fp32 [N].
        shared: objects that subjects share, by name, each kept as long as one of them holds it.
    """

    def __init__(self, case: Case, rank: int, ffn_hidden_size: int | None = None) -> None:
        self.case, self.rank, self.ffn_hidden_size = case, rank, ffn_hidden_size
        self.tables = tables_of_case(case)
        self.topk_idx = case.topk_idx(rank)
        self.x, self.grad_out = self.rows(X, rank), self.rows(GRAD_OUT, rank)
        self.y, self.grad_rows = self.rows(Y, rank), self.rows(GRAD_ROWS, rank)
        self.w, self.grad_row_w = self.weights(WEIGHTS, rank), self.weights(GRAD_WEIGHTS, rank)
        self.shared: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def rows(self, what: int, rank: int, width: int | None = None) -> torch.Tensor:
        """[T or N, width] of `rank`: the first `width` columns, all of them by default."""
        tokens, table = self.case.tokens[rank], self.tables[rank]
        num_rows = tokens if what in (X, GRAD_OUT) else table.num_rows
        return payload(self.case, what, rank, num_rows, width)

    def weights(self, what: int, rank: int) -> torch.Tensor:
        """fp32 of `rank`: WEIGHTS [T, K] or GRAD_WEIGHTS [N]; above 0.5, at most 1."""
        of_tokens = (self.case.tokens[rank], self.case.top_k)
        shape = of_tokens if what == WEIGHTS else (self.tables[rank].num_rows,)
        return contents.weights_of(rank, shape, what, self.case.device).mul_(0.5).add_(0.5)

    def tokens_of(self, rank: int) -> slice:
        """The tokens of `rank` among those of the group, which are in the order of ranks."""
        first = sum(self.case.tokens[:rank])
        return slice(first, first + self.case.tokens[rank])

    def every(self, what: int) -> list[torch.Tensor]:
        """The tensor of each rank."""
        make = self.weights if what in (WEIGHTS, GRAD_WEIGHTS) else self.rows
        return [make(what, rank) for rank in range(self.case.num_ranks)]


def payload(
    case: Case, what: int, rank: int, num_rows: int, width: int | None = None
) -> torch.Tensor:
    """[num_rows, width] from 0.5 to 1.5: sums do not cancel, so relative tolerances make sense."""
    rows = contents.rows_of(rank, num_rows, width or case.hidden, case.dtype, what, case.device)
    return rows.mul_(0.5).add_(1)


def tables_of_case(case: Case, on_node: int | None = None) -> list[SlotTable]:
    """The routes of a case to each of its ranks; `on_node`: how many of them are on a node."""
    topk_idx = [case.topk_idx(rank) for rank in range(case.num_ranks)]
    rows = case.max_recv_rows
    assert rows is None or isinstance(rows, int)  # a shape has no words for them
    return tables_of(topk_idx, case.num_experts, case.alignment, on_node, rows)


def tables_of(
    topk_idx: list[torch.Tensor],
    num_experts: int,
    alignment: int = 1,
    on_node: int | None = None,
    max_recv_rows: int | None = None,
) -> list[SlotTable]:
    """The routes to each rank; arguments as of `slot_table`."""
    ranks = range(len(topk_idx))
    options = (topk_idx, num_experts, alignment, max_recv_rows, on_node)
    return [slot_table(rank, *options) for rank in ranks]


def wire_rows(tables: list[SlotTable], num_tokens: list[int], with_own: bool = False) -> int:
    """Rows that the busiest rank must send or receive, whichever is more.

    A token's row crosses once for each other rank that has any of its experts; `with_own`: and
    counts once more if its own rank has any.

    Example: two ranks with two experts each, top-2.  Rank 0's token 0 goes to experts 2 and 3: one
    row from rank 0 to rank 1.  Its token 1 goes to 0 and 1: none.  Rank 1's token 0 goes to 1 and
    2: one row from rank 1 to rank 0.  Every rank sends one row and receives one: the answer is 1.
    Rank 0's token 1 and rank 1's token 0 also use their own rank: with these rows it is 2.
    """
    crossing = _by_source(_assignments(tables) > 0, num_tokens)
    return _busiest(crossing if with_own else crossing.fill_diagonal_(0))


def network_rows(
    tables: list[SlotTable], num_tokens: list[int], ranks_on_each: int
) -> tuple[int, int]:
    """Rows that the busiest rank must send or receive over the network between nodes.

    Node m has ranks m * L to m * L + L - 1, where L is `ranks_on_each`.

    Returns:
        the rows with `hierarchical`, where a token's row crosses once for each other node that has
        any of its experts, to the rank with the same local index; and those with a flat all-to-all,
        where it crosses once for each of its assignments to another node.

    Example: two nodes of two ranks, an expert on each rank.  Rank 0's token goes to experts 2 and
    3: with `hierarchical` one row, to rank 2; flat two, to ranks 2 and 3.
    """
    R, L = len(tables), ranks_on_each
    rank = torch.arange(R)
    assignments = _assignments(tables)
    flat = _by_source(assignments, num_tokens)
    to_node = _by_source(assignments.view(-1, R // L, L).sum(2) > 0, num_tokens)
    once = torch.zeros_like(flat)
    for node in range(R // L):
        once[rank, node * L + rank % L] = to_node[:, node]
    inside = rank[:, None] // L == rank // L
    return _busiest(once.masked_fill(inside, 0)), _busiest(flat.masked_fill(inside, 0))


def _assignments(tables: list[SlotTable]) -> torch.Tensor:
    """int64 [tokens of the group, num_ranks]: how many experts a token has on each rank."""
    return torch.stack([(table.slot >= 0).sum(dim=1) for table in tables], dim=1)


def _by_source(rows: torch.Tensor, num_tokens: list[int]) -> torch.Tensor:
    """int64 [num_ranks, n], on the CPU: the rows of `rows` added up for each source rank."""
    return torch.stack([part.sum(dim=0) for part in rows.split(num_tokens)]).cpu()


def _busiest(crossing: torch.Tensor) -> int:
    """The most that a rank sends or receives; `crossing` [num_ranks, num_ranks]: from, to."""
    return int(torch.maximum(crossing.sum(dim=1), crossing.sum(dim=0)).max())
