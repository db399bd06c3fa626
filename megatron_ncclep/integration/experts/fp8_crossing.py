"""How rows that cross between ranks in FP8 reach the experts' products.

Dispatch quantises each token's row once, at its source rank, and sends packed rows
(ops/packed_rows.py), half the bytes of bf16.  The experts' products take them where they arrive.
The backward pass of combine does the same with gradients.

Bytes have no gradient, and Megatron passes on one tensor.  So autograd and Megatron get a stand-in
for the rows: it has their shape and dtype, takes no memory, and every number in it is NaN, so that
whoever reads it computes nothing that looks right.  The bytes are handed over beside it.

Whether rows cross in FP8 follows from the config and the recipe, which all ranks share.  What this
rank alone knows decides only in which form they are delivered: where others than the grouped
experts will read them, as numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.experts.fp8_products import Fp8Products


class Fp8Crossing:
    """Hands over the packed rows of one pass through a layer; each is taken once and dropped.

    Dispatch delivers rows, which the experts' forward takes; combine delivers gradients, which
    their backward takes.  An object for each pass: any number of micro-batches, copies of a layer
    and backward passes of one graph may be under way.
    """

    def __init__(self, products: Fp8Products, hidden: int, stands_in: bool) -> None:
        """Begin a pass.

        Args:
            products: packs rows.
            hidden: numbers of a row, a multiple of 128.
            stands_in: the experts take packed rows; otherwise they get numbers.
        """
        self._products, self._hidden, self.stands_in = products, hidden, stands_in
        self._packed: Tensor | None = None
        self._address = 0  # of the last stand-in

    def pack(self, rows: Tensor) -> Tensor:
        """Quantise rows, bf16 [num_tokens, hidden]: see `Fp8Products.pack`."""
        return self._products.pack(rows)

    def deliver(self, packed: Tensor) -> Tensor:
        """Keep packed rows until they are taken, or unpack them.

        Args:
            packed: uint8 [num_rows, row_bytes], as dispatch delivers them.

        Returns:
            what stands in for them, bf16 [num_rows, hidden], all of it one NaN; or their numbers.
        """
        if not self.stands_in:
            return self._products.numbers(packed, self._hidden)
        self._packed = packed
        shape = (len(packed), self._hidden)
        # No view of one number: Megatron copies views.
        stand_in = torch.empty_strided(shape, (0, 0), dtype=torch.bfloat16, device=packed.device)
        stand_in[:1, :1].fill_(torch.nan)
        self._address = stand_in.data_ptr()
        return stand_in

    def take(self, rows: Tensor) -> Tensor | None:
        """Take the packed rows that `rows` stand in for; None if `rows` are real numbers.

        Raises:
            UnsupportedError: something between changed or replaced the stand-in, or took its rows.
        """
        packed, self._packed = self._packed, None
        is_stand_in = rows.stride() == (0, 0) and rows.data_ptr() == self._address
        if is_stand_in is (packed is not None):
            return packed
        found = "others arrived" if packed is not None else "their bytes are gone"
        raise UnsupportedError(
            f"experts='grouped' (--ncclep-experts grouped) did not get what crossed in "
            f"FP8: {found}. Leave nothing between dispatch, experts and combine, such as a hook of "
            "a tensor, another use of it, or a checkpoint of the experts alone, or set "
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 on all ranks, with which rows cross in bf16"
        )

    def waiting(self) -> list[Tensor]:
        """The bytes that were delivered and not yet taken."""
        return [] if self._packed is None else [self._packed]

    def expect_gradient_of(self, output: Tensor) -> None:
        """Find out who gets the gradient of `output`, which combine is about to add up.

        Only the experts that took the rows can take packed ones.  Others get numbers: where the
        graph was cut, as by overlap_moe_expert_parallel_comm, or has an operation between, and in
        torch's anomaly detection, for which the stand-in's NaN would be an error.
        """
        is_own = getattr(output.grad_fn, "crossing", None) is self
        self.stands_in = is_own and not torch.is_anomaly_enabled()
