"""NVTX ranges named as the steps, for Nsight Systems: "ncclep plan", "ncclep dispatch", ..."""

from __future__ import annotations

import torch


class step_range:  # noqa: N801 - used as a function
    """Show what the host does inside as a range "ncclep `name`"; nothing where no GPU takes part.

    A class, because what contextlib makes of a function takes the host three times as long.
    """

    __slots__ = ("_name",)

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        """Name a range.

        Args:
            name: of the step: "plan", "dispatch", "combine", or one with "backward" behind it.
            tensor: what the step takes.
        """
        self._name = f"ncclep {name}" if tensor.is_cuda else None

    def __enter__(self) -> None:
        if self._name is not None:
            torch.cuda.nvtx.range_push(self._name)

    def __exit__(self, *error: object) -> None:
        if self._name is not None:
            torch.cuda.nvtx.range_pop()
