"""The files under configs/: found by kind and name, read and checked.

A run takes one file of each of the first three kinds, which `ncclep render` composes:

    model       sizes and training: Megatron-LM arguments
    dispatcher  which token dispatcher moves the tokens: Megatron-LM arguments
    cluster     how processes are started: see megatron_ncclep/cli/render.py
    benchmark   what `ncclep bench` measures: see megatron_ncclep/benchmark/shapes.py

A model or dispatcher file is a flat mapping of Megatron-LM argument names without the leading
dashes: `num-layers: 4`, a boolean for a flag, a list for an argument that takes several values.
With `base: NAME` it holds only its differences from that shipped file.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from megatron_ncclep.errors import InputError

KINDS = ("model", "dispatcher", "cluster")  # of a run
BENCHMARK = "benchmark"
FLAT_KINDS = ("model", "dispatcher")
BASE = "base"
# Names that a shell takes as they are: they become words of a command.
ARGUMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# The types that a field may have, by its annotation.
TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "dict[str, Any]": (dict,),
    "None": (type(None),),
}  # fmt: skip


def folder() -> Path:
    """The folder that holds `model/`, `dispatcher/`, `cluster/` and `benchmark/`.

    An installed package has it as `megatron_ncclep/configs`.  In a checkout, including an editable
    installation, that folder does not exist, and `configs/` is next to the package.  The installed
    place comes first, because a `configs` next to an installed package, in site-packages, would
    belong to another package.
    """
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def names(kind: str) -> list[str]:
    """The names of the shipped files of `kind`, one of `KINDS` or `BENCHMARK`, sorted."""
    return sorted(path.stem for path in (folder() / kind).glob("*.yaml"))


def path_of(kind: str, name_or_path: str) -> Path:
    """The file that `name_or_path` means: a path that ends in .yaml, or else a shipped name.

    Raises:
        InputError: there is no such file; the message lists the names that exist.
    """
    shipped = names(kind)
    is_path = name_or_path.endswith(".yaml")
    path = Path(name_or_path) if is_path else folder() / kind / f"{name_or_path}.yaml"
    # os.path reports a path as missing where pathlib raises an OSError, such as a name that is too
    # long.
    if is_path and not os.path.isfile(path):
        raise InputError(f"{kind} configuration {name_or_path!r}: there is no such file")
    if not is_path and name_or_path not in shipped:
        raise InputError(
            f"no {kind} configuration {name_or_path!r}: give a path that ends in .yaml, or one of "
            f"the names {', '.join(shipped)}"
        )
    return path


def load(kind: str, name_or_path: str) -> dict[str, object]:
    """Read one configuration file.

    Args:
        kind: model, dispatcher, cluster or benchmark.
        name_or_path: a bare NAME means configs/KIND/NAME.yaml; a text that ends in .yaml is a path.

    Returns:
        the mapping, in the file's order.  For a model or dispatcher every value is a bool, int,
        float, str, or a list of int, float or str.

    Raises:
        InputError: no such file, not YAML, not a mapping, or a key or value of the wrong form.
    """
    path = path_of(kind, name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    content = parse_yaml(str(path), text)
    if not isinstance(content, dict):
        raise InputError(f"{path}: must be a mapping of names to values, is {content!r:.60}")
    if kind not in FLAT_KINDS:
        return content
    base = content.pop(BASE, None)
    check_arguments(str(path), content)
    if base is None:
        return content
    if base == path.stem or base not in names(kind):
        raise InputError(
            f"{path}: {BASE}: {base!r} must be another of the names {', '.join(names(kind))}"
        )
    return load(kind, base) | content


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a mapping has each key once: the first value would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """As in SafeLoader.  Raises ConstructorError, which names the key and its line."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(where: str, text: str) -> Any:
    """Read one YAML document.

    Raises:
        InputError: it is not YAML, or has a key twice.
    """
    try:
        return yaml.load(text, _UniqueKeys)  # a SafeLoader
    except Exception as error:
        # Not only YAMLError: PyYAML does not wrap the errors of its conversions, such as a KeyError
        # for `!!bool x`, a ValueError for 2001-99-99, a RecursionError for a thousand brackets.
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{where}: not valid YAML: {reason}") from error


def check_arguments(where: str, mapping: dict[str, object], variables: bool = False) -> None:
    """Refuse names and values that are ambiguous as words of a command.

    Args:
        where: the mapping's name in errors.
        mapping: argument names without their dashes, and their values.
        variables: they are environment variables, not arguments.

    Raises:
        InputError: the first name or value of the wrong form.
    """
    for name, value in mapping.items():
        pattern = VARIABLE if variables else ARGUMENT
        if not isinstance(name, str) or not pattern.fullmatch(name):
            what = "a variable's name" if variables else "an argument's name without its dashes"
            raise InputError(f"{where}: {name!r}: write {what}, which matches {pattern.pattern}")
        items = value if isinstance(value, list) else [value]
        if isinstance(value, list) and (not value or any(isinstance(v, bool) for v in value)):
            raise InputError(
                f"{where}: {name}: {value!r} must hold numbers or texts; leave out an empty list, "
                "and write a flag as true or false"
            )
        for item in items:
            if not isinstance(item, (bool, int, float, str)):
                raise InputError(
                    f"{where}: {name}: {item!r} must be a number, a text, a boolean or a list of "
                    "numbers or texts"
                )
            if isinstance(item, str) and is_number(item):
                raise InputError(
                    f"{where}: {name}: YAML reads {item!r} as text; write the number without "
                    "quotes and with a point, such as 1.0e-4"
                )


def is_number(text: str) -> bool:
    """Whether Python reads `text` as a number; YAML 1.1 reads 1e-4 as a string."""
    try:
        float(text)
    except ValueError:
        return False
    return True


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
