"""Failures of the device, raised where a server would hand out tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_ncclep.errors import PeerError
from megatron_ncclep.integration.patching import raise_failure
from megatron_ncclep.integration.releases import Program
from megatron_ncclep.ranks.group import lost_ranks, raise_failures


def raising(call: Callable[[], Any], program: Program) -> Any:
    """The result of `call`; raises failures that a device has reported by then.

    Raises:
        PeerError: a rank has died, or did not come.
        IntegrationError: the server has imported a module that is not as expected.
    """
    raise_failure(program)
    raise_failures()
    try:
        result = call()
    except RuntimeError as error:
        if isinstance(error, PeerError) or not (lost := lost_ranks()):
            raise
        raise PeerError(f"{lost}; look at the other ranks' output. {error}") from error
    raise_failures()
    return result
