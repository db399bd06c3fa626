"""The experts' GEMMs by quack-kernels: SwiGLU in their epilogues, gradients added in fp32.

A layer of experts with SwiGLU is six GEMMs here, with no other pass over its rows:

    fc1                 gate, up = rows @ fc1^T; stores both, and silu(gate) * up * probability
    fc2                 activated @ fc2^T
    fc2_backward        grad @ fc2; from it, gate and up: their gradients, the probabilities'
                        gradient, and the activated rows again, so that forward need not keep them
    weight_gradients    of fc2 and of fc1: main_grad[g] += grad[g]^T @ rows[g], summed and added in
                        fp32
    fc1_backward        gradient of gate and up @ fc1

Between fc1 and fc1_backward, gate and up are interleaved (gate 0, up 0, gate 1, ...), as a tile of
the GEMM needs them; the weights stay as Megatron lays them out, all gates, then all ups.

Adapters add a low-rank product to fc1 and to fc2: `narrow` multiplies by their first factor, `wide`
by the second, and the GEMM beside it adds that as it stores.  In fc2_backward they are more columns
of the gradient (`with_low_rank`), and the first factor more rows of the weights, because its
epilogue has no place for another operand.

Expert g has the rows from `ends[g]` up to `ends[g + 1]`, and `ends[0]` is 0.  The kernels read
`ends` on the device.  Rows after the last block are neither read nor written.

Tile shapes: for six shapes of configs/benchmark/layers.yaml, two H100s and 11 to 48 tiles for each
GEMM, these two were within 4 % of the best ones over all six GEMMs.  The cards ranked the other
tiles differently (benchmarks/results/2026-11-25-grouped-experts.txt).

This module imports quack-kernels and Triton; `fused_swiglu.unavailable_reason` says whether it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from quack.activation import swiglu
from quack.epilogue import gemm_epilogue, pack, unpack
from quack.epilogue.library import dgated_mod
from quack.epilogue.ops import ColVecLoad
from quack.gemm import gemm, run_gemm_plan
from quack.gemm_runtime.host import run_gemm_epi_plan
from torch import Tensor

from megatron_ncclep.integration.experts import low_rank_kernels


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the result that a CTA computes at a time.

    So many CTAs as `shared_by` share the rows' operand.
    """

    rows: int
    columns: int
    shared_by: int = 2

    def options(self, device: torch.device) -> dict[str, Any]:
        """Arguments of quack's calls: two consumers take turns.

        CTAs claim tiles from a counter, because experts have uneven numbers of rows.  The result
        of a tile does not depend on the CTA that computes it.
        """
        return {
            "tile_M": self.rows,
            "tile_N": self.columns,
            "cluster_M": 1,
            "cluster_N": self.shared_by,
            "pingpong": True,
            "is_dynamic_persistent": True,
            "tile_count_semaphore": torch.zeros(1, dtype=torch.int32, device=device),
        }


PLAIN = Tile(192, 128)
# Its epilogue holds gate, up and three results in registers.
WITH_BACKWARD = Tile(128, 128)
# The result is as narrow as an adapter's rank; these GEMMs wait for memory.
NARROW = Tile(128, 32, shared_by=1)


@gemm_epilogue(
    outputs=("activated",),
    ops={"probs": ColVecLoad("probs")},
    mode="acc_pair",
)
def swiglu_and_probs(acc, probs):  # type: ignore[no-untyped-def]
    """Epilogue: keep gate and up, and apply SwiGLU and the row's probability in fp32."""
    gate, up = unpack(acc)
    return {"D": pack(gate, up), "activated": swiglu(gate, up) * probs}


@gemm_epilogue(
    outputs=("activated",),
    ops={"probs": ColVecLoad("probs")},
    mode="acc_pair",
)
def sum_swiglu_and_probs(acc, c, probs):  # type: ignore[no-untyped-def]
    """The same, with an adapter's product to add to gate and up."""
    gate, up = unpack(acc + c)
    return {"D": pack(gate, up), "activated": swiglu(gate, up) * probs}


_swiglu_backward = dgated_mod("swiglu", has_scale=True, has_reduce=True)


class QuackProducts:
    """The GEMMs of one layer's experts.

    Compiled kernels are the same for any number of rows and experts.  quack's own lookup is by the
    tensors' sizes and remembers every size; the number of rows differs in every step, so the kernel
    found in the first call is kept here instead.
    """

    def __init__(self) -> None:
        self._plans: dict[Any, Any] = {}

    def __reduce__(self) -> tuple[type[QuackProducts], tuple[()]]:
        """A copy of a model, and a pickled one, look kernels up again."""
        return QuackProducts, ()

    def fc1(
        self,
        rows: Tensor,
        weights: Tensor,
        probs: Tensor,
        ends: Tensor,
        keep: bool,
        addend: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Multiply by fc1 and apply SwiGLU and the probabilities.

        Args:
            rows: [num_rows, hidden] in bf16.
            weights: [num_experts, 2 * ffn, hidden], gates before ups.
            probs: fp32 [num_rows].
            ends: int32 [num_experts + 1].
            keep: backward will follow.
            addend: interleaved as gate and up, and added to them.

        Returns:
            gate and up, interleaved, [num_rows, 2 * ffn], or None unless kept; and the activated
            rows [num_rows, ffn].
        """
        columns = weights.shape[1]
        gate_up = rows.new_empty(len(rows), columns) if keep else None
        activated = rows.new_empty(len(rows), columns // 2)
        values = {"activated": activated, "probs": probs}
        epilogue = swiglu_and_probs if addend is None else sum_swiglu_and_probs
        self._with_epilogue(epilogue, PLAIN, (rows, weights, gate_up, addend), values, ends)
        return gate_up, activated

    def fc2(
        self, activated: Tensor, weights: Tensor, ends: Tensor, addend: Tensor | None = None
    ) -> Tensor:
        """Multiply by fc2, [num_experts, hidden, ffn], and add `addend`: [num_rows, hidden]."""
        output = activated.new_empty(len(activated), weights.shape[1])
        key = ("fc2", addend is None)
        self._plain(key, (activated, weights, output, addend), {"cu_seqlens_m": ends})
        return output

    def fc2_backward(
        self, grad: Tensor, weights: Tensor, probs: Tensor, gate_up: Tensor, ends: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute backward through fc2, the probabilities and SwiGLU.

        Args:
            grad: of the output, [num_rows, hidden], and more columns if there are adapters.
            weights: fc2, [num_experts, hidden, ffn], and as many more rows.
            probs, gate_up, ends: of `fc1`.

        Returns:
            the gradient of gate and up, interleaved; the activated rows again; and the
            probabilities' gradient, fp32 [num_rows].
        """
        num_rows, ffn = len(grad), weights.shape[2]
        gate_up_grad = torch.empty_like(gate_up)
        activated = grad.new_empty(num_rows, ffn)
        # A sum over each tile's columns; adding these up in order gives the same bits every time.
        tiles = -(-ffn // WITH_BACKWARD.columns)
        sums = torch.empty(num_rows, tiles, dtype=torch.float32, device=grad.device)
        values = {"mAuxOut": activated, "mColVecBroadcast": probs, "mColVecReduce": sums}
        tensors = (grad, weights.mT, gate_up_grad, gate_up)
        self._with_epilogue(_swiglu_backward, WITH_BACKWARD, tensors, values, ends)
        return gate_up_grad, activated, sums.sum(dim=1)

    def fc1_backward(
        self, gate_up_grad: Tensor, weights: Tensor, ends: Tensor, addend: Tensor | None = None
    ) -> Tensor:
        """Multiply the gradient of gate and up by fc1's transpose, and add `addend`."""
        result = gate_up_grad.new_empty(len(gate_up_grad), weights.shape[2])
        tensors, key = (gate_up_grad, weights.mT, result, addend), ("fc1_backward", addend is None)
        self._plain(key, tensors, {"cu_seqlens_m": ends}, concat=("B",))
        return result

    def narrow(
        self,
        key: str,
        rows: Tensor,
        factor: Tensor,
        ends: Tensor,
        scale: float,
        interleaved: bool = False,
    ) -> Tensor:
        """Multiply by an adapter's factor, and by `scale`: [num_rows, rank].

        Args:
            key: names the product; those of one layer differ.
            rows: [num_rows, features].
            factor: [num_experts, rank, features], or a transpose of what has that shape.
            ends: int32 [num_experts + 1].
            scale: a factor in fp32.
            interleaved: the rows' columns are gate 0, up 0, gate 1, ...
        """
        low = rows.new_empty(len(rows), factor.shape[1])
        concat = ("B",) if interleaved else ()
        self._plain(key, (rows, factor, low, None), {"cu_seqlens_m": ends}, concat, NARROW, scale)
        return low

    def wide(
        self, key: str, low: Tensor, factor: Tensor, ends: Tensor, interleaved: bool = False
    ) -> Tensor:
        """Multiply `low` [num_rows, rank] by factor[g]^T, [features, rank]: [num_rows, features].

        If `interleaved`, the result's columns are gate 0, up 0, gate 1, ...
        """
        result = low.new_empty(len(low), factor.shape[1])
        concat = ("B",) if interleaved else ()
        self._plain(key, (low, factor, result, None), {"cu_seqlens_m": ends}, concat)
        return result

    with_low_rank = staticmethod(low_rank_kernels.with_low_rank)
    factor_gradients = staticmethod(low_rank_kernels.factor_gradients)

    def weight_gradients(
        self,
        grad: Tensor,
        rows: Tensor,
        ends: Tensor,
        interleaved: bool,
        out: Tensor | Sequence[Tensor] | None = None,
        adds: bool = False,
    ) -> Tensor | Sequence[Tensor]:
        """Compute grad[g]^T @ rows[g] for every expert, with sums in fp32.

        Args:
            grad: [num_rows, out_features].
            rows: [num_rows, in_features].
            ends: int32 [num_experts + 1].
            interleaved: the gradient's columns are gate 0, up 0, gate 1, ...; the result's rows
                are all gates, then all ups.
            out, adds: see `main_grad.WeightProduct`; an fp32 `out` is added to in fp32.
        """
        if out is None:
            out = rows.new_empty(len(ends) - 1, grad.shape[1], rows.shape[1])
        if isinstance(out, Tensor):
            parts = [(ends, out)]
        else:
            # Kernels need addresses that are multiples of 16 bytes, so each pair occupies four
            # numbers.
            pairs = torch.stack([ends[:-1], *[ends[1:]] * 3], dim=1)
            parts = [(pair[:2], each[None]) for pair, each in zip(pairs, out, strict=True)]
        for part_ends, part in parts:
            if not len(rows):
                if not adds:
                    part.zero_()
                continue
            # Loading the old values is faster than having the stores add to them.
            self._plain(
                ("weight_gradients", part.dtype, interleaved, adds),
                (grad.mT, rows.mT, part, part if adds else None),
                {"cu_seqlens_k": part_ends},
                concat=(("C", "out") if adds else ("out",)) if interleaved else (),
            )
        return out

    def _plain(
        self,
        key: Any,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
        ends: dict[str, Tensor],
        concat: tuple[str, ...] = (),
        tile: Tile = PLAIN,
        scale: float = 1.0,
    ) -> None:
        """Run a GEMM without an epilogue of ours; `key` identifies the compiled kernel."""
        a, b, out, c = tensors
        if 0 in a.shape:
            return
        options = tile.options(a.device)
        key = (key, scale == 1.0)  # which needs no multiplication
        plan = self._plans.get(key)
        if plan is None:
            options["alpha"] = scale
            self._plans[key] = gemm(a, b, out, c, concat_layout=concat, **ends, **options)
            return
        counter = options["tile_count_semaphore"]
        run_gemm_plan(plan, a, b, out, c, tile_count_semaphore=counter, alpha=scale, **ends)

    def _with_epilogue(
        self,
        epilogue: Any,
        tile: Tile,
        tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        values: dict[str, Tensor],
        ends: Tensor,
    ) -> None:
        a, b, out, c = tensors
        if 0 in a.shape:
            return
        options = tile.options(a.device)
        key = (epilogue, out is None, a.shape[1])
        plan = self._plans.get(key)
        if plan is None:
            concat = () if epilogue is _swiglu_backward else ("B",)
            self._plans[key] = epilogue.gemm(
                *tensors, epi_args=values, cu_seqlens_m=ends, concat_layout=concat, **options
            )
            return
        counter = options["tile_count_semaphore"]
        run_gemm_epi_plan(
            plan, a, b, out, c, values, cu_seqlens_m=ends, tile_count_semaphore=counter
        )
