"""One tensor per expert, seen as one tensor of all experts, without a copy where memory allows.

Megatron keeps a parameter for each expert.  Its buffers (always for DDP's gradients, and with the
distributed optimizer for the weights too) hold the parameters in the reverse of the order in which
modules registered them, so experts follow each other in descending order at a constant distance.  A
view with that stride exists only from the last expert to the first, because torch has no negative
strides.  That is why grouped experts get their blocks from the dispatcher `ncclep` last expert
first: in this order the tensors have a view.

The end of a bucket can put a gap between two experts (`--ddp-bucket-size` with padding); then there
is no view, and weights are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megatron_ncclep.integration.experts.grouped_gemm import ADDRESS_BYTES


def view_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensors as one, [len(tensors), *shape], sharing their memory, or None.

    None if they do not follow each other at a constant distance in one storage, or not at addresses
    that grouped GEMMs accept.

    Args:
        tensors: of one shape and dtype.
    """
    first, last = tensors[0], tensors[-1]
    addresses = [tensor.data_ptr() for tensor in tensors]
    size = first.element_size()
    step = addresses[1] - addresses[0] if len(tensors) > 1 else first.numel() * size
    if (
        step < first.numel() * size
        or any((addresses[0] % ADDRESS_BYTES, step % ADDRESS_BYTES))
        or any(b - a != step for a, b in pairwise(addresses))
        or not all(tensor.is_contiguous() for tensor in tensors)
        or first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr()
    ):
        return None
    return first.detach().as_strided(
        (len(tensors), *first.shape), (step // size, *first.stride()), first.storage_offset()
    )


def stack_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors as one: a view if there is one, else a copy made by one kernel."""
    view = view_of(tensors)
    return torch.stack([tensor.detach() for tensor in tensors]) if view is None else view


def lay_out(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Move the parameters' data into one storage, in the order given; values stay the same."""
    # Autograd would refuse what an evaluation in inference mode has moved.
    with torch.inference_mode(parameters[0].is_inference()):
        stack = torch.stack([parameter.detach() for parameter in parameters])
        for parameter, data in zip(parameters, stack, strict=True):
            parameter.data = data
