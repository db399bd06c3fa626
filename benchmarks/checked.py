"""Dataclasses that check their fields: what a file of benchmarks/configs/ holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from megatron_ncclep.errors import InputError

# The types that a field may have, by its annotation.
TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "dict[str, Any]": (dict,),
    "None": (type(None),),
}  # fmt: skip


class Checked:
    """A dataclass that checks its fields: types, and metadata `least` and `choices`.

    Raises:
        InputError: names the field and its value.
    """

    def __post_init__(self) -> None:
        for known in dataclasses.fields(self):  # type: ignore[arg-type]
            value, must = getattr(self, known.name), known.metadata
            kinds = str(known.type).split(" | ")
            if not set(kinds) <= set(TYPES):
                continue
            where = f"{known.name} {value!r}"
            allowed = tuple(kind for name in kinds for kind in TYPES[name])
            if not isinstance(value, allowed) or isinstance(value, bool):
                raise InputError(f"{where}: must be {known.type}")
            # Not `<`, which a NaN would pass.
            if value is not None and "least" in must and not value >= must["least"]:
                raise InputError(f"{where}: must be >= {must['least']}")
            if value not in must.get("choices", (value,)):
                raise InputError(f"{where}: one of {', '.join(map(str, must['choices']))}")


def at_least(least: float, **default: Any) -> Any:
    """A numeric field of a `Checked` with a lower bound."""
    return dataclasses.field(metadata={"least": least}, **default)


def one_of(choices: Iterable[Any], default: Any) -> Any:
    """A field of a `Checked` with one of these values."""
    return dataclasses.field(metadata={"choices": tuple(choices)}, default=default)
