"""This package and how it gets loaded; Megatron-Core and the places in it that are changed."""

from __future__ import annotations

import importlib
import importlib.util
import platform
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from megatron_ncclep import envs
from megatron_ncclep.config import VARIABLES, EpConfig, unknown_variables
from megatron_ncclep.doctor.report import Finding
from megatron_ncclep.errors import InputError, IntegrationError
from megatron_ncclep.logs import remarks_hidden
from megatron_ncclep.version import __version__

INSTALL_MEGATRON = "install it: pip install 'megatron-ncclep[train]'"


def package() -> Iterator[Finding]:
    """The versions of this package and of Python, and the environment's settings."""
    yield Finding("megatron_ncclep", f"{__version__} in {Path(envs.__file__).parents[1]}")
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield _environment()
    yield _autoload()


def _environment() -> Finding:
    """The environment variables of this package that are set."""
    given, problems = [], []
    for variable in VARIABLES.values():
        try:
            value = variable.get()
        except InputError as error:
            problems.append(str(error))
            continue
        if value != variable.default:
            given.append(f"{variable.name}={value}")
    if not problems:
        try:
            EpConfig.resolve()
        except InputError as error:
            problems.append(str(error))
    problems += unknown_variables().values()
    return Finding(
        "environment",
        ", ".join(given) or "all defaults (`ncclep env`)",
        "; ".join(problems) or None,
    )


def _autoload() -> Finding:
    """How the dispatcher is registered with Megatron."""
    found = [e.value for e in entry_points(group="torch.backends") if e.name == "megatron_ncclep"]
    if not found:
        value = "no entry point: call megatron_ncclep.install(), or use `ncclep run`"
    elif not envs.get("NCCLEP_AUTOLOAD"):
        value = "off (NCCLEP_AUTOLOAD=0): call megatron_ncclep.install(), or use `ncclep run`"
    else:
        value = "on: unmodified scripts can say --moe-token-dispatcher-type ncclep"
    return Finding("autoload", value)


def megatron_core() -> Iterator[Finding]:
    """Megatron-Core's version and the places in it that the integration changes."""
    from megatron_ncclep.integration import hooks
    from megatron_ncclep.integration.releases import MEGATRON

    if not has_megatron():
        yield Finding("Megatron-Core", "not installed", INSTALL_MEGATRON)
        return
    try:
        with remarks_hidden():
            core = importlib.import_module("megatron.core")
    except ImportError as error:
        yield Finding("Megatron-Core", "cannot be imported", f"{error}; {INSTALL_MEGATRON}")
        return
    version = core.__version__
    yield Finding(
        "Megatron-Core",
        f"{version} in {Path(str(core.__file__)).parents[1]}",
        None
        if MEGATRON.is_tested(version)
        else f"{MEGATRON.oldest} to {MEGATRON.newest} are tested: install one of these",
    )
    for name in hooks.PLACES:
        if name.startswith("megatron.training") and not importlib.util.find_spec(
            "megatron.training"
        ):
            yield Finding(name, "not in this wheel; scripts bring it from a Megatron-LM checkout")
            continue
        if name in hooks.NOT_EVERYWHERE and importlib.util.find_spec(name) is None:
            yield Finding(name, "not in this version, which needs no hook there")
            continue
        yield _hook_point(name)
    yield _experts()


def has_megatron() -> bool:
    """Whether Megatron-Core is installed; does not import it."""
    return bool(importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"))


def _experts() -> Finding:
    """The kernels that compute the experts of bf16 models by default."""
    import torch

    from megatron_ncclep.integration.experts import fused_swiglu, grouped_gemm

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        value = "Megatron's own: grouped ones are for GPUs"
    elif reason := grouped_gemm.unavailable_reason(device, torch.bfloat16):
        value = f"Megatron's own: {reason}"
    elif reason := fused_swiglu.unavailable_reason(device, torch.bfloat16):
        value = f"torch's grouped GEMMs, where they are faster than Megatron's: {reason}"
    else:
        value = f"grouped GEMMs of {fused_swiglu.PACKAGE} {fused_swiglu.VERSION}"
    return Finding("experts", value)


def _hook_point(name: str) -> Finding:
    from megatron_ncclep.integration import hooks

    try:
        with remarks_hidden():
            module = importlib.import_module(name)
        hooks.change_module(module)
        if hasattr(module, "MoELayer"):
            hooks.check_dispatcher_hooks(module)
    except IntegrationError as error:
        return Finding(name, "changed", str(error))
    except ImportError as error:
        return Finding(name, "cannot be imported", f"{error}; {INSTALL_MEGATRON}")
    return Finding(name, "as expected")
