"""NVTX ranges named after the steps, for Nsight Systems: "ncclep plan", "ncclep dispatch", ..."""

from __future__ import annotations

import torch


class step_range:  # noqa: N801 - used as a function
    """Mark the host's work inside as a range "ncclep `name`"; do nothing without a GPU.

    This is a class because a context manager made by contextlib takes the host three times as long.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        """Name a range.

        Args:
            name: of the step: "plan", "dispatch" or "combine", with " backward" appended in the
                backward pass.
            tensor: the step's input.
        """
        self._name = f"ncclep {name}" if tensor.is_cuda else None

    def __enter__(self) -> None:
        if self._name is not None:
            torch.cuda.nvtx.range_push(self._name)

    def __exit__(self, *error: object) -> None:
        if self._name is not None:
            torch.cuda.nvtx.range_pop()
