"""LigerCute as a whole MoE layer: its one kernel for dispatch, experts and combine each way.

The router is that of the other layers, over whose top-k LigerCute runs with the same weights packed
as it needs them.  It returns gradients of weights in bf16; as in Megatron-Core's
DistributedDataParallel, a hook adds them to fp32 main_grads in the backward pass.

The check of results allows it no more than the other layers.  It rounds the assignments' weights
and their gradients to bf16, which they do not, but it adds a token's K rows in fp32 and rounds
their sum once, where the bound has a rounding for each row.  A gradient of weights may be further
off: the tiles of an expert's rows are added to it in bf16, in any order.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.layers import LayerSubject
from megatron_ncclep.benchmark import Setting, UnavailableError, excused
from megatron_ncclep.benchmark.shapes import Workload

PACKAGES = ("liger_kernel", "liger_cute_kernels")
# Its backward on Hopper has tiles of 128 columns of one size, and of 256 of the other.
TILES = (128, 256)
ROWS = 128  # of a tile; one at least is multiplied before the product is added to a gradient


@dataclass(frozen=True)
class Library:
    """What the subject uses of LigerCute."""

    moe_fused: Any  # the autograd operator
    native: Any  # the calls of its shared library
    nvshmem: Any  # the start of NVSHMEM


def imported() -> Library:
    """Import LigerCute; nothing is imported before.

    Raises:
        UnavailableError: it is not installed, or the import failed.
    """
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            missing = f"{package} is not installed"
            raise UnavailableError(f"{missing}: build LigerCute, see benchmarks/README.md")
    with excused(Exception):  # none of this is ours
        native = importlib.import_module("liger_cute_kernels.tvm_ffi")
        native.uniqueid_nbytes()  # loads it: the operator's import would not say what is missing
        return Library(
            importlib.import_module("liger_kernel.ops.cute.ops.moe").moe_fused,
            native, importlib.import_module("liger_cute_kernels.nvshmem"),
        )  # fmt: skip


def shape_problem(workload: Workload) -> str | None:
    """Say why LigerCute's kernels for Hopper cannot compute a layer of this shape, if they can't.

    Its forward alone would take some of these: the fault would come with the first backward.
    """
    case, ffn = workload.case, workload.ffn_hidden_size
    assert ffn is not None  # the layer could not be made without it
    if case.dtype != torch.bfloat16:
        return f"it computes in bf16 only, and the shape has {case.dtype}"
    if 0 in case.tokens:
        return "it needs tokens on every rank, and a rank of the shape has none"
    sizes = (case.hidden, ffn)
    if any(a % TILES[0] == b % TILES[1] == 0 for a, b in (sizes, sizes[::-1])):
        return None
    needed = f"a multiple of {TILES[0]} and one of {TILES[1]}"
    return f"its backward needs, as hidden size and expert size, {needed}, not {sizes}"


def initialize(library: Library, setting: Setting) -> None:
    """Start NVSHMEM over the ranks, once for the process.  Collective."""
    group = setting.new_group()
    try:
        library.nvshmem.resolve_team(group)  # no communication for all ranks
    except RuntimeError:  # NVSHMEM has not been started
        library.nvshmem.init_from_pg(group)


class LigerExperts(nn.Module):
    """A rank's experts as LigerCute has them: three weights of all experts, [E, out, in].

    `main_grads` of `fc1`, fp32 [E, 2F, H], and of `fc2`, [E, H, F], get what a backward returns.
    """

    def __init__(self, fc1: list[torch.Tensor], fc2: list[torch.Tensor]) -> None:
        super().__init__()
        gates, ups = zip(*(weight.detach().chunk(2) for weight in fc1), strict=True)
        self.gate, self.up, self.down = (
            nn.Parameter(torch.stack(weights))
            for weights in (gates, ups, [weight.detach() for weight in fc2])
        )
        shape = (len(fc1), 2 * self.gate.shape[1], self.gate.shape[2])
        self.main_grads = {
            "fc1": torch.zeros(shape, device=self.gate.device),
            "fc2": torch.zeros(self.down.shape, device=self.down.device),
        }
        halves = self.main_grads["fc1"].chunk(2, dim=1)
        targets = (*halves, self.main_grads["fc2"])
        for weight, target in zip(self.parameters(), targets, strict=True):
            weight.register_post_accumulate_grad_hook(_adding_to(target))


def _adding_to(target: torch.Tensor) -> Any:
    """A hook that adds a weight's gradient to `target` and drops it."""

    def add(weight: torch.Tensor) -> None:
        assert weight.grad is not None  # a hook runs after it was set
        target.add_(weight.grad)
        weight.grad = None

    return add


class LigerLayer(nn.Module):
    """Megatron-Core's router, and LigerCute's operator for all that follows."""

    def __init__(self, router: Any, experts: LigerExperts, moe_fused: Any, case: Any) -> None:
        super().__init__()
        self.router, self.experts, self._moe_fused = router, experts, moe_fused
        self._sizes = {"num_experts": case.num_experts, "top_k": case.top_k}

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Run the layer for `hidden`, [sequence, batch, H], as MoELayer does."""
        probs, _ = self.router(hidden)
        w, chosen = probs.topk(self._sizes["top_k"], dim=1)  # as Megatron-Core's flex dispatcher
        experts = self.experts
        out = self._moe_fused(
            hidden.flatten(0, 1), chosen.int(), w.to(hidden.dtype),
            experts.gate, experts.up, experts.down, **self._sizes,
        )  # fmt: skip
        return out.view_as(hidden), None


class LigerCuteSubject(LayerSubject):
    """See `Subject`."""

    _experts: LigerExperts

    def _make_layer(self, setting: Setting, max_recv_rows: Any) -> None:
        work, case = self._workload, self._workload.case
        if problem := shape_problem(work):
            raise UnavailableError(problem)
        self._library = library = imported()
        initialize(library, setting)
        # A shape that failed leaves buffers, which could not grow.
        library.native.pool_clear_all()
        library.native.moe_configure_symmetric(
            max_tokens=max(case.tokens), hidden_dim=case.hidden, max_num_experts=case.num_experts,
            max_top_k=case.top_k, num_pes=case.num_ranks, num_hosts=1,
            gpus_per_host=case.num_ranks,
        )  # fmt: skip
        self._parts = -(-int(work.tables[self._rank].routed.max()) // ROWS) + case.num_ranks
        whole = self._shared.module
        named = dict(whole.experts.named_parameters(prefix="experts"))
        self._weights = {kind: [n for n in named if kind in n] for kind in ("fc1", "fc2")}
        packed = ([named[name] for name in names] for names in self._weights.values())
        self._experts = LigerExperts(*packed)
        # Only the reference needs the originals.
        self.shared_bytes -= sum(
            weight.nbytes + weight.main_grad.nbytes for weight in named.values()
        )
        self._dispatcher = None
        self._layer = LigerLayer(whole.router, self._experts, library.moe_fused, case)

    def _zero_gradients(self) -> None:
        super()._zero_gradients()
        for main_grad in self._experts.main_grads.values():
            main_grad.zero_()

    def _gradients(self) -> dict[str, Any]:
        found = super()._gradients()
        for kind, names in self._weights.items():
            found |= dict(zip(names, self._experts.main_grads[kind], strict=True))
        return found

    def close(self) -> None:
        """See `Subject.close`.  Collective; NVSHMEM keeps running for the next shape."""
        super().close()
        del self._experts
        self._library.native.pool_clear_all()
