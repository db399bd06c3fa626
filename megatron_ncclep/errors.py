"""Every exception that this package raises for users; each message has the values and a remedy."""

from __future__ import annotations

import re

# The suffix that Megatron's build_module appends to an error, once for each module that it builds.
_BUILT = re.compile(r"(.*?)(?: \(while building (.*)\))? when instantiating (\w+)", re.DOTALL)


class EpError(Exception):
    """Base of all errors of this package.

    Megatron's build_module re-raises an error as type(error)(f"{error} when instantiating X"). That
    suffix is put in brackets, and the same error is not printed a second time as the cause.
    """

    def __init__(self, text: str = "") -> None:
        if built := _BUILT.fullmatch(text):
            text, inner, outer = built.groups()
            text += f" (while building {f'{inner} in {outer}' if inner else outer})"
            self.__suppress_context__ = True
        super().__init__(text)


class InputError(EpError, ValueError):
    """An argument is wrong on some rank; every rank of the group raises it with the same text."""


class RefusedError(InputError):
    """A rank has refused a call in which no rank waited for it; its group is unusable.

    The rank raises it at once, the others at their next call; see docs/contract.md.
    """


class UnsupportedError(EpError, ValueError):
    """A Megatron option or a configuration that this dispatcher does not support."""


class EngineUnavailableError(EpError, RuntimeError):
    """An engine was asked for by name and cannot run here."""


class GroupClosedError(EpError, RuntimeError):
    """The engine or its group was closed, or its process group was destroyed."""


class PeerError(EpError, RuntimeError):
    """A rank died, did not arrive before the deadline, or is in a different call."""


class RowsDroppedError(EpError, RuntimeError):
    """Rows did not fit in static mode, and `on_overflow` forbids it; on every rank of the group."""


class LibraryError(EpError, RuntimeError):
    """A call to NCCL, CUDA or an engine's library failed; names the call and the reason."""


class IntegrationError(EpError, RuntimeError):
    """A place in Megatron-Core that the integration hooks into is not as expected."""
