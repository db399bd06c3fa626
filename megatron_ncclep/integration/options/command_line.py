"""Our options on the command line of Megatron-LM's scripts, and in YAML files that replace it.

`HOOKS` in hooks.py lists which module each function changes.
"""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from typing import Any

import megatron_ncclep
from megatron_ncclep.config import EpConfig, add_option_arguments, given_options
from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.inference.session import OPTIONS as INFERENCE_OPTIONS
from megatron_ncclep.integration.inference.support import FIELD as INFERENCE_FIELD
from megatron_ncclep.integration.inference.support import offer_inference_type
from megatron_ncclep.integration.options.field import NAME, TYPE_FIELD, is_ours, options_hidden
from megatron_ncclep.integration.patching import replaces


@replaces("add_megatron_arguments", ["parser"])
def change_add_arguments(original: Any) -> Any:
    """Offer our options on Megatron's command line."""

    def add_megatron_arguments(parser: Any) -> Any:
        # Newer versions turn the config's fields into arguments themselves.
        with options_hidden(_config_class()):
            parser = original(parser)
        add_option_arguments(parser)
        offer_inference_type(parser)
        _escape_percent_signs(parser)
        return parser

    return add_megatron_arguments


def _escape_percent_signs(parser: Any) -> None:
    """Fix `--help`, which fails in 0.18 and 0.19.

    They have a help text with a bare "10%)", which argparse takes for a format specifier.
    """
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%([%(]?)", lambda m: m[0] if m[1] else "%%", action.help)


@replaces("parse_args", [])
def change_parse_args(original: Any) -> Any:
    """Make the options of the command line the defaults of the process's configs."""

    def parse_args(*args: Any, **kwargs: Any) -> Any:
        parsed = original(*args, **kwargs)
        options, kind = given_options(parsed), getattr(parsed, TYPE_FIELD, None)
        inference_kind = getattr(parsed, INFERENCE_FIELD, None)
        trains, generates = is_ours(kind), inference_kind == NAME
        for name in options:
            whose, given, field, is_used = "", kind, TYPE_FIELD, trains
            if name == "inference_tokens":
                whose, given, field, is_used = "inference ", inference_kind, INFERENCE_FIELD, False
            if not is_used and not (generates and name in INFERENCE_OPTIONS):
                raise UnsupportedError(
                    f"--ncclep-{name.replace('_', '-')} was given, but the {whose}dispatcher is "
                    f"{given!r}, which would ignore it: leave it out, or add "
                    f"--{field.replace('_', '-')} {NAME}"
                )
        if trains:
            EpConfig.resolve()  # a mistake in the environment, before anything is built
        if options or trains or generates:
            megatron_ncclep.install(**options)
        if options:
            # Where ranks are other processes than this one, as Ray's are, they have only these
            # arguments, of which Megatron makes the config.
            parsed.ncclep = EpConfig.resolve(**options).non_default()
        return parsed

    return parse_args


@replaces("core_config_from_args", ["args", "dataclass"])
def change_core_config_from_args(original: Any) -> Any:
    """Let YAML files (`--yaml-cfg`) omit the field: Megatron requires every field in every file."""

    def core_config_from_args(args: Any, dataclass: Any = None) -> Any:
        dataclass = dataclass or _config_class()
        with nullcontext() if hasattr(args, NAME) else options_hidden(dataclass):
            return original(args, dataclass)

    return core_config_from_args


def _config_class() -> Any:
    return sys.modules["megatron.core.transformer.transformer_config"].TransformerConfig
