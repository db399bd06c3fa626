"""Our options on the command line of Megatron-LM's scripts, and in YAML files that replace it.

`HOOKS` in hooks.py lists which module each function changes.
"""

from __future__ import annotations

import functools
import re
import sys
from contextlib import nullcontext
from typing import Any

import megatron_ncclep
from megatron_ncclep.config import EpConfig, add_option_arguments, given_options
from megatron_ncclep.errors import UnsupportedError
from megatron_ncclep.integration.inference.support import FIELD as INFERENCE_FIELD
from megatron_ncclep.integration.inference.support import ignored_option, offer_inference_type
from megatron_ncclep.integration.options.field import NAME, options_hidden
from megatron_ncclep.integration.patching import mark_patched, unpatched

TYPE_FIELD = "moe_token_dispatcher_type"


def change_add_arguments(module: Any) -> None:
    """Offer our options on Megatron's command line."""
    original = unpatched(module, module, "add_megatron_arguments", ["parser"])
    if original is None:
        return

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        # Newer versions turn the config's fields into arguments themselves.
        with options_hidden(_config_class()):
            parser = original(parser)
        add_option_arguments(parser)
        offer_inference_type(parser)
        _escape_percent_signs(parser)
        return parser

    module.add_megatron_arguments = mark_patched(add_megatron_arguments)


def _escape_percent_signs(parser: Any) -> None:
    """Fix `--help`, which fails in 0.18 and 0.19.

    They have a help text with a bare "10%)", which argparse takes for a format specifier.
    """
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%([%(]?)", lambda m: m[0] if m[1] else "%%", action.help)


def change_parse_args(module: Any) -> None:
    """Make the options of the command line the defaults of the process's configs."""
    original = unpatched(module, module, "parse_args", [])
    if original is None:
        return

    @functools.wraps(original)
    def parse_args(*args: Any, **kwargs: Any) -> Any:
        parsed = original(*args, **kwargs)
        options, kind = given_options(parsed), getattr(parsed, TYPE_FIELD, None)
        inference_kind = getattr(parsed, INFERENCE_FIELD, None)
        ignored = ignored_option(options, kind == NAME, inference_kind == NAME)
        if ignored == "inference_tokens":
            raise UnsupportedError(
                "--ncclep-inference-tokens was given, but the inference dispatcher is "
                f"{inference_kind!r}, which would ignore it: leave it out, or add "
                f"--{INFERENCE_FIELD.replace('_', '-')} {NAME}"
            )
        if ignored is not None:
            raise UnsupportedError(
                f"--ncclep-{ignored.replace('_', '-')} was given, but the dispatcher "
                f"is {kind!r}, which would ignore it: leave it out, or add "
                f"--moe-token-dispatcher-type {NAME}"
            )
        if options:
            megatron_ncclep.install(**options)
        elif kind == NAME:
            EpConfig.resolve()  # a mistake in the environment, before anything is built
        return parsed

    module.parse_args = mark_patched(parse_args)


def change_core_config_from_args(module: Any) -> None:
    """Let YAML files (`--yaml-cfg`) omit the field: Megatron requires every field in every file."""
    original = unpatched(module, module, "core_config_from_args", ["args", "dataclass"])
    if original is None:
        return

    @functools.wraps(original)
    def core_config_from_args(args: Any, dataclass: Any = None) -> Any:
        dataclass = dataclass or _config_class()
        with nullcontext() if hasattr(args, NAME) else options_hidden(dataclass):
            return original(args, dataclass)

    module.core_config_from_args = mark_patched(core_config_from_args)


def _config_class() -> Any:
    return sys.modules["megatron.core.transformer.transformer_config"].TransformerConfig
