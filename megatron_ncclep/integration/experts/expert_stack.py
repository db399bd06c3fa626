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

import math
from collections.abc import Sequence

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
    addresses = list(map(torch.Tensor.data_ptr, tensors))
    size = first.element_size()
    step = addresses[1] - addresses[0] if len(tensors) > 1 else first.numel() * size
    if (
        step < first.numel() * size
        or any((addresses[0] % ADDRESS_BYTES, step % ADDRESS_BYTES))
        # Every pass asks, so this is no loop of Python's.
        or addresses != list(range(addresses[0], addresses[-1] + 1, step))
        or not all(map(torch.Tensor.is_contiguous, tensors))
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


def lay_out(parameters: Sequence[torch.nn.Parameter], room: int = 0) -> None:
    """Move the parameters' data into one storage, in the order given; values stay the same.

    Args:
        parameters: one [out_features, in_features] for each expert.
        room: so many rows are left free behind each, for `with_room`.
    """
    # Autograd would refuse what an evaluation in inference mode has moved.
    with torch.inference_mode(parameters[0].is_inference()):
        first = parameters[0].detach()
        rows, columns = first.shape
        stack = first.new_empty(len(parameters), rows + room, columns)
        for parameter, data in zip(parameters, stack[:, :rows], strict=True):
            parameter.data = data.copy_(parameter.detach())


def with_room(parameters: Sequence[Tensor], room: int) -> Tensor | None:
    """Return the parameters and the rows behind each, [number, out_features + room, in_features].

    None unless `lay_out` has left just this room and nothing has moved them since.  Writing into
    the room changes no parameter, and autograd does not take it for a change.
    """
    first, view = parameters[0].data, view_of(parameters)
    shape = (len(parameters), first.shape[0] + room, first.shape[1])
    if view is None or view.stride(0) != shape[1] * shape[2]:
        return None
    # A storage of another size has other tensors between these.
    size = math.prod(shape) * first.element_size()
    if first.storage_offset() or first.untyped_storage().nbytes() != size:
        return None
    return first.as_strided(shape, (shape[1] * shape[2], shape[2], 1))
