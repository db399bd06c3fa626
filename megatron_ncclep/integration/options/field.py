"""The field `ncclep` of Megatron's TransformerConfig: the options of one config's dispatchers.

It is a field because `dataclasses.replace` and `asdict` copy only fields.  The class attribute of
that name holds the process's options (`install`), which apply to every config without its own.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal, get_args

from megatron_ncclep import envs
from megatron_ncclep.config import EpConfig
from megatron_ncclep.errors import (
    EngineUnavailableError,
    InputError,
    IntegrationError,
    UnsupportedError,
)
from megatron_ncclep.integration.patching import unknown, validated_as

# The name of the field, and of the dispatcher type that it configures.
NAME = "ncclep"
TYPE_FIELD = "moe_token_dispatcher_type"
IN_PLACE_OF = "NCCLEP_IN_PLACE_OF"
_WAS_PUT = "_ncclep_was_put_in_place"  # on a config


def is_ours(kind: str | None) -> bool:
    """Whether a dispatcher type is ours, or the one in whose place NCCLEP_IN_PLACE_OF puts ours.

    Raises:
        InputError: the variable is neither `alltoall` nor `flex`.
    """
    return kind == NAME or (kind is not None and kind == envs.get(IN_PLACE_OF))


def put_in_place(config: Any) -> bool:
    """Give a config of a MoE model our type if NCCLEP_IN_PLACE_OF names its own.

    Returns:
        whether the config has our type because of that, since now or since an earlier call.
    """
    kind = getattr(config, TYPE_FIELD)
    if kind != NAME and config.num_moe_experts is not None and is_ours(kind):
        setattr(config, TYPE_FIELD, NAME)
        vars(config)[_WAS_PUT] = True
    return vars(config).get(_WAS_PUT, False) and getattr(config, TYPE_FIELD) == NAME


@contextmanager
def names_variable(was_put_in_place: bool) -> Iterator[None]:
    """Have errors name NCCLEP_IN_PLACE_OF, where that and no option asked for our type."""
    try:
        yield
    except (EngineUnavailableError, InputError, IntegrationError, UnsupportedError) as error:
        if not was_put_in_place:
            raise
        raise type(error)(
            f"{error}; or unset {IN_PLACE_OF}={envs.get(IN_PLACE_OF)}, which asks for {NAME!r} here"
        ) from error


# Lets Megatron validate a config, or build a layer, as if it had the type `alltoall`.
as_alltoall = functools.partial(validated_as, field=TYPE_FIELD, value="alltoall")


@dataclasses.dataclass
class _Holder:
    """The source of the field, because only a dataclass can create one."""

    # Excluded from comparison and repr of configs.
    ncclep: EpConfig | None = dataclasses.field(
        default=None, kw_only=True, compare=False, repr=False
    )


def accept_type(module: ModuleType, name: str) -> None:
    """Let a field of configs, from which command lines take their choices, accept our type."""
    config_class = getattr(module, "TransformerConfig", None)
    field = getattr(config_class, "__dataclass_fields__", {}).get(name)
    if config_class is None or field is None or not get_args(field.type):
        raise unknown(f"{module.__name__}.TransformerConfig.{name}", "a Literal of type names")
    if NAME not in get_args(field.type):
        field.type = Literal[(*get_args(field.type), NAME)]
        config_class.__annotations__[name] = field.type


def change_fields(module: Any) -> None:
    """Let TransformerConfig accept our type; add the field to it and to its existing subclasses.

    Their constructors take it too, by keyword only.  Later subclasses get it from dataclasses.
    """
    accept_type(module, TYPE_FIELD)
    config_class = module.TransformerConfig
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
    """All existing subclasses of `base`."""
    subclass: type
    for subclass in base.__subclasses__():
        yield subclass
        yield from derived(subclass)


def _with_options(original: Any) -> Any:
    """Wrap a constructor of configs so that it takes `ncclep`."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, ncclep: EpConfig | None = None, **kwargs: Any) -> None:
        # A copy of a config without its own options passes the process's options.
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


def resolve_options(config: Any) -> EpConfig:
    """Return a validated copy of the options that apply to `config`, or else the environment's.

    If the config's own are a mapping, they become an EpConfig.

    Raises:
        InputError: they are neither, or invalid.
    """
    if vars(config).get(NAME) is None:
        # Constructors generated by dataclasses set None, which would hide the class attribute.
        vars(config).pop(NAME, None)
    elif not isinstance(config.ncclep, EpConfig):
        config.ncclep = EpConfig.of(config.ncclep)
    return EpConfig.resolve() if config.ncclep is None else EpConfig.of(config.ncclep)
