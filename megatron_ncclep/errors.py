"""Every exception this package raises for a user's sake; each message carries values and remedy."""

from __future__ import annotations

import re

# What Megatron's build_module makes of the text of an error, once for each module that it builds.
_BUILT = re.compile(r"(.*?)(?: \(while building (.*)\))? when instantiating (\w+)", re.DOTALL)


class EpError(Exception):
    """Base of all errors of this package.

    Megatron's build_module raises an error anew, as type(error)(f"{error} when instantiating X").
    That is put in brackets, and the same error is not printed a second time, as the cause of it.
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
    """A rank has refused a call in which no rank waited for it; its group goes no further.

    The rank raises it at once, the others at their next call; see docs/contract.md.
    """


class UnsupportedError(EpError, ValueError):
    """A Megatron option or a configuration that this dispatcher does not support."""


class EngineUnavailableError(EpError, RuntimeError):
    """An engine was asked for by name and cannot run here."""


class GroupClosedError(EpError, RuntimeError):
    """The engine or its group was closed, or its process group was destroyed."""


class PeerError(EpError, RuntimeError):
    """A rank died, did not arrive before the deadline, or is in another call than this one."""


class RowsDroppedError(EpError, RuntimeError):
    """Rows did not fit in static mode and `on_overflow` is "raise"; on every rank of the group."""


class LibraryError(EpError, RuntimeError):
    """A call of NCCL, of CUDA or of an engine's library failed; names the call and the reason."""


class IntegrationError(EpError, RuntimeError):
    """A place of Megatron-Core that the integration hooks into is not what it expects."""
