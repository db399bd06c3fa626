"""Everything that can be measured, by name.

    ENGINE                 an engine of this package through the engine interface
    nccl_ep_library        NVIDIA's libnccl_ep called directly, without this package's checks: the
                           one that the engine nccl_ep takes
    nccl_ep_library:PACKAGE    the one that a package brought; +pull_push and +fixed_order switch
                           modes of transformer-engine's on, which are off otherwise
    alltoall, allgather,   Megatron-Core's own dispatchers through their six hooks
    flex_deepep, ...
    ncclep:ENGINE          this package's dispatcher through the same hooks
    layer:DISPATCHER...    a whole MoELayer (router, dispatcher, experts) with any of those through
                           hooks, such as layer:alltoall and layer:ncclep:native
    train:DISPATCHER...    whole training steps of a model

The last two take variants of experts and graphs: variants.py.

`@N` after an engine or a libnccl_ep lets its kernels have N SMs.  Layers and training steps are
measured only when they are asked for: they take as much memory and time as in training.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_ncclep.benchmark.dispatchers import dispatcher_choice, dispatcher_names
from megatron_ncclep.benchmark.engine_subject import EngineSubject
from megatron_ncclep.benchmark.layer_names import GRAMMAR as LAYER_GRAMMAR
from megatron_ncclep.benchmark.layer_names import is_layer, parse_layer
from megatron_ncclep.benchmark.layer_subject import LayerSubject
from megatron_ncclep.benchmark.library_subject import LibrarySubject
from megatron_ncclep.benchmark.megatron_subject import MegatronSubject
from megatron_ncclep.benchmark.subjects import Subject
from megatron_ncclep.benchmark.train_names import GRAMMAR as TRAIN_GRAMMAR
from megatron_ncclep.benchmark.train_names import is_train, parse_train
from megatron_ncclep.engines import ENGINES
from megatron_ncclep.errors import InputError

LIBRARY = "nccl_ep_library"
# The yardstick's variants -> the package that brings the library, and modes of it.  A process has
# one NCCL, and with it at most one of the packages' libraries can run.
LIBRARIES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    LIBRARY: (None, ()),
    f"{LIBRARY}:nccl-extensions": ("nccl-extensions", ()),
    **{
        "+".join([f"{LIBRARY}:transformer-engine", *modes]): ("transformer-engine", modes)
        for modes in ((), ("pull_push",), ("fixed_order",), ("pull_push", "fixed_order"))
    },
}


def default_names() -> list[str]:
    """The names of what is measured unless something is asked for, in the order of the table."""
    return [*ENGINES, LIBRARY, *dispatcher_names()]


def known_names() -> list[str]:
    """The names of all subjects but layers and those that train."""
    return [*ENGINES, *LIBRARIES, *dispatcher_names()]


def make_subject(name: str, max_recv_rows: Any = None) -> Subject:
    """Make the subject that `name` means, which does not train.

    Args:
        max_recv_rows: option of a layer with a fixed number of received rows.

    Raises:
        InputError: unknown, or a number of SMs for something that has no such option.
    """
    if is_layer(name):
        return LayerSubject(parse_layer(name), max_recv_rows)
    base, num_sms = split_name(name)
    if base in ENGINES:
        return EngineSubject(name, base, num_sms)
    if base in LIBRARIES:
        return LibrarySubject(name, num_sms, *LIBRARIES[base])
    return MegatronSubject(name, dispatcher_choice(base))


def split_name(name: str) -> tuple[str, int | None]:
    """Split `BASE@N` into BASE and N, without making anything.

    Raises:
        InputError: unknown, or a number of SMs for something that has no such option.
    """
    if is_train(name):
        parse_train(name)
        return name, None
    base, at, sms = name.partition("@")
    if is_layer(base):
        parse_layer(base)
    elif base not in known_names():
        raise InputError(
            f"unknown subject {name!r}: there are {', '.join(known_names())}, "
            f"{LAYER_GRAMMAR.form}, and {TRAIN_GRAMMAR.form}"
        )
    if not at:
        return base, None
    if not re.fullmatch("[1-9][0-9]*", sms):
        raise InputError(f"subject {name!r}: write a number of SMs after the @, such as {base}@24")
    takes_sms = base in LIBRARIES or (base in ENGINES and "num_sms" in ENGINES[base].caps.options)
    if not takes_sms:
        raise InputError(f"subject {name!r}: {base} would ignore a number of SMs: leave @{sms} out")
    return base, int(sms)
