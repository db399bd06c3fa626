"""The bindings of FP8 products without a GPU: what they refuse, and what the package passes them.

Where all checks pass, the driver refuses to launch: this machine's lack of a GPU is the last word.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import needs_extension
from torch import Tensor

from megatron_ncclep.errors import LibraryError
from megatron_ncclep.integration.experts.fp8_products import BLOCK, Fp8Products, Fp8Rows
from megatron_ncclep.libraries import extension

pytestmark = [
    needs_extension,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels would read memory of the host"),
]

SIZES, HIDDEN, FFN = (3, 0, 129), 512, 256
NUM_ROWS, STREAM = sum(SIZES) + 5, 0
ROW_BYTES = HIDDEN + 16  # of a packed row: four scales
NO_GPU = "launching|cudaGetDevice failed"
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.uint8


def reaches_launch(call: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(LibraryError, match=NO_GPU):
        call(*arguments, **named)


@pytest.fixture
def ends() -> Tensor:
    return torch.tensor([0, *SIZES]).cumsum(0).int()


def places(columns: int, num_rows: int = NUM_ROWS, experts: int = len(SIZES)) -> Fp8Rows:
    blocks = num_rows // BLOCK + experts
    return Fp8Rows(
        torch.zeros(num_rows, columns, dtype=FP8),
        torch.zeros(columns // BLOCK, -(-num_rows // 4) * 4),
        torch.zeros(blocks, columns, BLOCK, dtype=FP8),
        torch.zeros(blocks, columns),
    )


def test_what_the_package_passes(ends: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of `Fp8Products` gets past all checks, with and without each result."""
    monkeypatch.setattr(extension, "current_stream", lambda: STREAM)
    products = Fp8Products()
    gate_up, rows = torch.zeros(NUM_ROWS, 2 * FFN, dtype=BF16), places(HIDDEN)
    activated, probs = torch.zeros(NUM_ROWS, FFN, dtype=BF16), torch.zeros(NUM_ROWS)
    packed = torch.zeros(NUM_ROWS, ROW_BYTES, dtype=FP8)
    weights = list(torch.zeros(len(SIZES), 2 * FFN, HIDDEN, dtype=BF16))
    for by_rows, transposed in ((True, True), (True, False), (False, True)):
        state = (ends, by_rows, transposed)
        reaches_launch(products.quantize_rows, torch.zeros(NUM_ROWS, HIDDEN, dtype=BF16), *state)
        reaches_launch(products.unpack, packed, HIDDEN, *state)
        reaches_launch(products.swiglu, gate_up, probs, *state)
        reaches_launch(products.swiglu_gradients, gate_up, probs, activated, *state)
    # Rows that begin anywhere, and weights with gaps between.
    odd = torch.zeros(NUM_ROWS * HIDDEN + 1, dtype=BF16)[1:].view(NUM_ROWS, HIDDEN)
    reaches_launch(products.quantize_rows, odd, ends)
    reaches_launch(products.pack, odd)
    reaches_launch(products.quantize_weights, weights)
    reaches_launch(products.quantize_weights, [weight.clone() for weight in weights])
    of_fc1 = torch.zeros(len(SIZES), 2 * FFN, HIDDEN, dtype=FP8)
    scales = torch.zeros(len(SIZES), 2 * FFN // BLOCK, HIDDEN // BLOCK)
    reaches_launch(products.multiply, rows, of_fc1, scales, ends)
    reaches_launch(products.multiply, rows._replace(rows=packed), of_fc1, scales, ends)
    grad = places(2 * FFN)
    for out in (
        None,
        torch.zeros(len(SIZES), 2 * FFN, HIDDEN),
        list(torch.zeros(len(SIZES), 2 * FFN, HIDDEN)),
        torch.zeros(len(SIZES), 2 * FFN, HIDDEN, dtype=BF16),
    ):
        reaches_launch(products.weight_gradients, grad, rows, ends, BF16, out, True)
    # Without rows nothing is launched, but weight gradients may have to become zeros.
    none = places(HIDDEN, 0)
    assert products.quantize_rows(torch.zeros(0, HIDDEN, dtype=BF16), ends * 0).rows is not None
    assert products.pack(torch.zeros(0, HIDDEN, dtype=BF16)).shape == (0, ROW_BYTES)
    assert products.unpack(packed[:0], HIDDEN, ends * 0).rows is not None
    assert products.multiply(none, of_fc1, scales, ends * 0).shape == (0, 2 * FFN)
    reaches_launch(products.weight_gradients, places(2 * FFN, 0), none, ends * 0, BF16)


def refused(call: str, good: dict[str, Any], wrong: dict[str, list[Any]]) -> None:
    """`good` arguments reach the launch; with each of the `wrong` ones, a check speaks."""
    function = getattr(extension.load(), call)
    reaches_launch(function, **good)
    for name, values in wrong.items():
        for value in values:
            with pytest.raises((LibraryError, TypeError)) as caught:
                function(**{**good, name: value})
            text = str(caught.value)
            assert "must be" in text or "needs" in text or "multiple of" in text, (name, text)


def of_rows(columns: int) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Where rows in FP8 go, and wrong places."""
    rows, scales, transposed, scales_transposed = places(columns)
    good = {"rows": rows, "scales": scales, "transposed": transposed,
            "scales_transposed": scales_transposed}  # fmt: skip
    assert scales is not None
    blocks = len(scales_transposed)
    wrong = {
        "rows": [None, rows[:-1], rows.int(), rows.flatten()],
        "scales": [None, scales.double(), scales[:-1], scales[:, :-4].contiguous(),
                   torch.zeros(columns // BLOCK, NUM_ROWS + 1 | 1)],
        "transposed": [None, transposed[:-1], transposed[:, :-BLOCK].contiguous(),
                       transposed.flatten(1)],
        "scales_transposed": [None, scales_transposed[:-1], torch.zeros(blocks, columns + 128)],
    }  # fmt: skip
    return good, wrong


OFFSETS = [torch.zeros(1, dtype=torch.int32), torch.zeros(4), torch.zeros(2, 2, dtype=torch.int32)]


def test_quantisation_refuses(ends: Tensor) -> None:
    state = {"powers_of_two": True, "stream": STREAM, "offsets": ends}
    place, wrong = of_rows(HIDDEN)
    values = torch.zeros(NUM_ROWS, HIDDEN, dtype=BF16)
    odd = torch.zeros(values.numel() + 1, dtype=BF16)[1:].view_as(values)
    refused(
        "fp8_quantize_rows",
        {"values": values, **place, **state},
        {"values": [values.float(), values[:-1], values.flatten(), odd], "offsets": OFFSETS}
        | wrong,
    )  # fmt: skip
    packed = torch.zeros(NUM_ROWS, ROW_BYTES, dtype=FP8)
    lengths = [packed[:, :size].contiguous() for size in (HIDDEN, 16, 0)]
    odd_bytes = torch.zeros(packed.numel() + 8, dtype=FP8)[8:].view_as(packed)
    wrong_packed = [packed.int(), packed.flatten(), odd_bytes, *lengths]
    refused(
        "fp8_pack_rows",
        {"values": values, "packed": packed, "powers_of_two": True, "stream": STREAM},
        {"values": [values.float(), values[:-1], values.flatten(), odd],
         "packed": [packed[:-1], *wrong_packed]},
    )  # fmt: skip
    del place["rows"], wrong["rows"]
    refused(
        "fp8_unpack_rows",
        {"packed": packed, **place, **state},
        {"packed": wrong_packed, "offsets": OFFSETS, **wrong, "scales": wrong["scales"][1:]},
    )
    nowhere = dict.fromkeys(place)
    with pytest.raises(LibraryError, match="FP8 rows need a place"):
        extension.load().fp8_unpack_rows(packed=packed, **nowhere, **state)
    place, wrong = of_rows(FFN)
    gate_up, probs = torch.zeros(NUM_ROWS, 2 * FFN, dtype=BF16), torch.zeros(NUM_ROWS)
    inputs = {"gate_up": gate_up, "probs": probs}
    of_inputs = {"gate_up": [gate_up.float(), gate_up[:-1], gate_up.flatten()],
                 "probs": [probs[:-1], probs.double(), probs[:, None]],
                 "offsets": OFFSETS}  # fmt: skip
    refused("fp8_swiglu", {**inputs, **place, **state}, {**of_inputs, **wrong})
    place, wrong = of_rows(2 * FFN)
    grads, sums = torch.zeros(NUM_ROWS, FFN, dtype=BF16), torch.zeros(FFN // BLOCK, NUM_ROWS)
    refused(
        "fp8_swiglu_gradients",
        {**inputs, "grads": grads, "prob_grads": sums, **place, **state},
        {**of_inputs, "grads": [grads.float(), grads[:-1]],
         "prob_grads": [sums[:-1], sums[:, :-1].contiguous(), sums.double()], **wrong},
    )  # fmt: skip


def test_weights_refused() -> None:
    values = torch.zeros(2, FFN, HIDDEN, dtype=BF16)
    codes, scales = torch.zeros(values.shape, dtype=FP8), torch.zeros(2, FFN // 128, HIDDEN // 128)
    refused(
        "fp8_quantize_weights",
        {"values": values, "weights": codes, "scales": scales, "transposed": codes.mT.contiguous(),
         "scales_transposed": scales.mT.contiguous(), "powers_of_two": True, "stream": STREAM},
        {"values": [values.float(), values[0], values[:, :64].contiguous(), values[:1]],
         "weights": [codes[:1], codes.int()], "scales": [scales[:1], scales.double()],
         "transposed": [codes], "scales_transposed": [scales]},
    )  # fmt: skip


def test_products_refuse(ends: Tensor) -> None:
    rows, scales, transposed, of_blocks = places(HIDDEN)
    number = len(SIZES)
    weights = torch.zeros(number, FFN, HIDDEN, dtype=FP8)
    of_weights = torch.zeros(number, FFN // BLOCK, HIDDEN // BLOCK)
    out = torch.zeros(NUM_ROWS, FFN, dtype=BF16)
    refused(
        "fp8_multiply_rows",
        {"rows": rows, "scales": scales, "weights": weights, "weight_scales": of_weights,
         "offsets": ends, "out": out, "stream": STREAM},
        {"rows": [rows[:-1], rows[:, :384].contiguous()], "scales": [scales[:-1]],
         "weights": [weights[:-1], weights[:, :128].contiguous(), weights[..., :128].contiguous()],
         "weight_scales": [of_weights[:-1], of_weights.double()],
         "offsets": [*OFFSETS, ends[:-1]], "out": [out.float(), out[:-1]]},
    )  # fmt: skip
    _, _, b, of_b = places(FFN)
    sums = torch.zeros(number, HIDDEN, FFN)
    _, _, longer, of_longer = places(FFN, NUM_ROWS + BLOCK)
    refused(
        "fp8_multiply_for_weights",
        {"a": transposed, "a_scales": of_blocks, "b": b, "b_scales": of_b, "offsets": ends,
         "out": sums, "adds": True, "stream": STREAM},
        {"a": [transposed[:-1], transposed.int()], "a_scales": [of_blocks[:1], of_longer],
         "b": [longer], "b_scales": [of_longer, of_b.double()], "offsets": [*OFFSETS, ends[:-1]],
         "out": [sums[:-1], sums.bfloat16(), sums[:, :384].contiguous(),
                 sums[..., :128].contiguous()]},
    )  # fmt: skip
