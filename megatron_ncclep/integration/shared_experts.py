"""Shared experts that overlap with the dispatcher: the halves of their pass, on their own stream.

Each half is queued after our kernels and may not start earlier, so our kernels get their SMs first,
and the shared experts' GEMMs all others.  All functions take Megatron's SharedExpertMLP, or None
for a layer without, and do nothing then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ncclep.errors import InputError


def prepare(shared: Any, hidden_states: torch.Tensor) -> None:
    """Begin a pass, before the plan: in exact mode the device is still busy meanwhile."""
    if shared is not None:
        # Its backward reads them on its stream, when no other reference may be left.
        hidden_states.record_stream(shared.stream)
        shared.pre_forward_comm(hidden_states)


def let_start(shared: Any) -> None:
    """Let their stream continue once everything queued so far has run."""
    if shared is not None:
        shared.stream.wait_stream(torch.cuda.current_stream())


def first_half(shared: Any, rows: torch.Tensor) -> None:
    """Queue what runs concurrently with dispatch, which returns `rows`."""
    if shared is not None:
        shared.linear_fc1_forward_and_act(rows)


def second_half(shared: Any, out: torch.Tensor) -> None:
    """Queue what runs concurrently with combine, which returns `out`."""
    if shared is not None:
        shared.linear_fc2_forward(out)
        shared.post_forward_comm()


@contextmanager
def finished_after_errors(shared: Any, *, has_dispatched: bool) -> Iterator[None]:
    """Finish their forward pass after an InputError, discarding the result.

    From Megatron-Core 0.18 on they assert that a pass has ended before the next one begins.
    """
    try:
        yield
    except InputError:
        if shared is not None:
            with torch.no_grad():
                if not has_dispatched:
                    shared.linear_fc1_forward_and_act()
                shared.linear_fc2_forward()
                shared.post_forward_comm()
                shared.get_output()
        raise
