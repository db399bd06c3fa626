"""The field `ncclep` of Megatron's TransformerConfig: the options of one config's dispatchers.

It is a field because `dataclasses.replace` and `asdict` copy only fields.  The class attribute of
that name holds the options of the process (`install`), and applies to every config that has none.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_ncclep.config import EpConfig

# The field, and the type of dispatcher that it has options for.
NAME = "ncclep"


@dataclasses.dataclass
class _Holder:
    """Where the field comes from: only dataclasses can make one."""

    # Does not change how configs compare and print.
    ncclep: EpConfig | None = dataclasses.field(
        default=None, kw_only=True, compare=False, repr=False
    )


def add_options_field(config_class: Any) -> None:
    """Add the field to `config_class` and to the classes derived from it so far.  Idempotent.

    Their constructors take it too, by name only.  Classes derived later get it from dataclasses.
    """
    if NAME in config_class.__dataclass_fields__:
        return
    field = _Holder.__dataclass_fields__[NAME]
    field.type = EpConfig | None  # it was a string
    config_class.ncclep = None
    config_class.__annotations__[NAME] = field.type
    for changed in [config_class, *derived(config_class)]:
        if "__dataclass_fields__" in vars(changed):
            changed.__dataclass_fields__[NAME] = field
        if "__init__" in vars(changed):
            changed.__init__ = _with_options(changed.__init__)


def derived(base: type) -> Iterator[type]:
    """All classes derived from `base` so far."""
    subclass: type
    for subclass in base.__subclasses__():
        yield subclass
        yield from derived(subclass)


def _with_options(original: Any) -> Any:
    """Wrap a constructor of configs so that it takes `ncclep`."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, ncclep: EpConfig | None = None, **kwargs: Any) -> None:
        # A copy of a config without options of its own brings those of the process along.
        if ncclep is not None and ncclep is not type(self).ncclep:
            self.ncclep = ncclep
        original(self, *args, **kwargs)

    signature = inspect.signature(original)
    option = inspect.Parameter(
        NAME, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=EpConfig | None
    )
    init.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), option]
    )
    return init


@contextmanager
def options_hidden(config_class: Any) -> Iterator[None]:
    """Hide the field from code that lists the fields of `config_class`."""
    field = config_class.__dataclass_fields__.pop(NAME, None)
    try:
        yield
    finally:
        if field is not None:
            config_class.__dataclass_fields__[NAME] = field


def resolve_options(config: Any) -> EpConfig | None:
    """Return a checked copy of the options that count for `config`; None: the environment's.

    The config's own become an EpConfig where they were a mapping.

    Raises:
        InputError: they are something else, or wrong.
    """
    if vars(config).get(NAME) is None:
        # Constructors that dataclasses made set None, which would hide the class's.
        vars(config).pop(NAME, None)
    elif not isinstance(config.ncclep, EpConfig):
        config.ncclep = EpConfig.of(config.ncclep)
    return None if config.ncclep is None else EpConfig.of(config.ncclep)
