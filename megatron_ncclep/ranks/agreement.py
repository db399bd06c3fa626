"""Steps that each rank takes alone, and whose failure must reach all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from megatron_ncclep.errors import (
    EngineUnavailableError,
    EpError,
    InputError,
    LibraryError,
    PeerError,
)
from megatron_ncclep.ranks.group import EpGroup

# Errors of a step that are raised on all ranks with their own type; any other counts as the first.
# If ranks differ, the first of these is raised: a late rank may have waited for one that failed.
STEP_ERRORS: tuple[type[EpError], ...] = (
    LibraryError,
    InputError,
    EngineUnavailableError,
    PeerError,
)

_Result = TypeVar("_Result")


def on_all_ranks(
    group: EpGroup, what: str, step: Callable[[], _Result], timeout_s: float
) -> _Result:
    """Take a step that may fail on one rank alone; if it fails on any, raise on all.

    For local work between two exchanges, such as opening a library: if a rank just raised, the
    others would wait for it in the next exchange and never learn why it is missing.

    Args:
        group: the ranks.
        what: names the step in errors.
        step: not collective.
        timeout_s: seconds to wait for the other ranks.

    Returns:
        the result of `step` on this rank, if it succeeded on all ranks.

    Raises:
        one of STEP_ERRORS: on every rank, with the reasons of all that failed.
        PeerError: a rank did not come in time.
    """
    failure: Exception | None = None
    try:
        result = step()
    except Exception as error:  # of any kind: the other ranks have to know
        failure = error
    problem = None if failure is None else _reason(failure)
    if problems := group.hosts.gather_problems(problem, what, timeout_s):
        kinds = [k for k, kind in enumerate(STEP_ERRORS) if isinstance(failure, kind)]
        mine = -1 if failure is None else (kinds or [0])[0]
        all_kinds = group.hosts.gather(torch.tensor([mine]), what, timeout_s).flatten().tolist()
        raised = STEP_ERRORS[min(kind for kind in all_kinds if kind >= 0)]
        # An error of this package is complete, and as a cause would only be printed twice.
        cause = None if isinstance(failure, EpError) else failure
        raise raised(f"{what}: {problems}") from cause
    return result


def _reason(error: Exception) -> str:
    """The text of an exception; with its type, unless it is one of this package's."""
    text = str(error)
    return text if text and isinstance(error, EpError) else f"{type(error).__name__}: {text}"
