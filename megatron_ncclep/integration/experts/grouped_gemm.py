"""The three GEMMs of a linear layer over blocks of rows, each as one grouped GEMM.

Expert g has weights[g] and the rows from `offsets[g - 1]` (0 for the first) up to `offsets[g]`.
Example: offsets [2, 2, 5] over 8 rows: expert 0 has rows 0 and 1, expert 1 has none, expert 2 has
rows 2 to 4.  Rows 5 to 7 belong to no expert: they are not read, and their place in the result is
left uninitialized.

The offsets stay on the device.  `torch.nn.functional.grouped_mm` reads them there on GPUs of
compute capability 9.x and 10.x in bf16.  On any other GPU, and in any other dtype, torch would copy
them to the host and multiply expert by expert, which `unavailable_reason` refuses except on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Addresses and strides are multiples of 16 bytes: torch checks that on GPUs, because TMA needs it.
ADDRESS_BYTES = 16
# In torch's kernel each group is a thread of one CTA.
MAX_EXPERTS = 1023
_CAPABILITIES = (9, 10)
_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Say what keeps grouped GEMMs from running there without the host, if anything does."""
    if device.type == "cpu":
        return None
    if _torch_grouped_mm() is None:
        return f"torch {torch.__version__} has no grouped_mm: use torch 2.10 or newer"
    major, minor = torch.cuda.get_device_capability(device)
    if major not in _CAPABILITIES:
        return (
            f"torch's grouped_mm has kernels for compute capability 9.x and 10.x, and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )
    if dtype is not torch.bfloat16:
        return f"torch's grouped_mm has kernels for bf16, and the experts compute in {dtype}"
    return None


def multiply(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Return rows @ weights[g]^T for every expert g's rows.

    Args:
        rows: [num_rows, in_features].
        weights: [num_experts, out_features, in_features]; any stride between experts, and a
            transpose, which makes this the gradient of a layer's rows.
        offsets: int32 [num_experts], ascending, the last at most num_rows.

    Returns:
        [num_rows, out_features]; rows after the last offset are not written.
    """
    matrices = weights.transpose(1, 2)
    if not len(rows):
        return rows.new_empty(0, matrices.shape[2])
    if _has_kernel(rows):
        return _grouped_mm(rows, matrices, offsets)
    result = rows.new_empty(len(rows), matrices.shape[2])
    for expert, (begin, end) in enumerate(_blocks(offsets)):
        torch.mm(rows[begin:end], matrices[expert], out=result[begin:end])
    return result


def weight_gradients(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    out: Tensor | Sequence[Tensor] | None = None,
    adds: bool = False,
) -> Tensor | Sequence[Tensor]:
    """Compute grad[g]^T @ rows[g] for every expert, in the rows' dtype, and store or add it.

    Args:
        grad, rows, offsets: as above.
        out, adds: see `main_grad.WeightProduct`.
    """
    stack = _weight_gradients(grad, rows, offsets)
    if out is None:
        return stack
    # One kernel for all experts, where memory allows.
    pairs = [(out, stack)] if isinstance(out, Tensor) else zip(out, stack.unbind(), strict=True)
    for each, gradient in pairs:
        each.add_(gradient) if adds else each.copy_(gradient)
    return out


def _has_kernel(rows: Tensor) -> bool:
    """Whether torch's own operator accepts these rows; on a CPU it is new, and lacks fp64."""
    if rows.is_cuda:
        return True
    return hasattr(torch.nn.functional, "grouped_mm") and rows.dtype in _CPU_DTYPES


def _torch_grouped_mm() -> object | None:
    """torch's operator; before 2.10 it had an underscore."""
    return getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    operator = _torch_grouped_mm()
    assert callable(operator), "unavailable_reason() comes first"
    result: Tensor = operator(a, b, offs=offsets)
    return result


def _blocks(offsets: Tensor) -> list[tuple[int, int]]:
    """First row and end of every expert's block, on the host."""
    ends = offsets.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _weight_gradients(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Return grad[g]^T @ rows[g] for every expert: [num_experts, out_features, in_features].

    Sums are made in fp32 and rounded once.  An expert without rows gets zeros.
    """
    out_features, in_features = grad.shape[1], rows.shape[1]
    if not len(rows):  # torch's kernels treat this differently from version to version
        return rows.new_zeros(len(offsets), out_features, in_features)
    if not _has_kernel(rows):
        gradients = rows.new_zeros(len(offsets), out_features, in_features)
        for expert, (begin, end) in enumerate(_blocks(offsets)):
            torch.mm(grad[begin:end].t(), rows[begin:end], out=gradients[expert])
        return gradients
    gradients = _grouped_mm(grad.t(), rows, offsets)
    if rows.is_cuda and torch.cuda.get_device_capability(rows.device)[0] == 10:
        # For an expert without rows, Blackwell's kernel leaves the old contents of the memory
        # (pytorch/pytorch#172439).
        is_empty = torch.diff(offsets, prepend=offsets.new_zeros(1)) == 0
        gradients.masked_fill_(is_empty[:, None, None], 0)
    return gradients
