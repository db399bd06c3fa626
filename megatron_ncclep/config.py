"""EpConfig: every option of the dispatcher, its default and its limits."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from megatron_ncclep import envs
from megatron_ncclep.errors import InputError

ALIGNMENTS = (1, 16, 32, 64, 128, 256)
EXPERTS = ("megatron", "grouped", "auto")
# Alignment of expert blocks for grouped experts; torch's kernels need multiples of 8 rows in bf16.
GROUPED_ALIGNMENT = 16
# Limit of options that are counts; row numbers are int32.
MAX_COUNT = 2**31 - 1
# Deadlines are compared in nanoseconds, in 64 bits; torch's backends take milliseconds, and 0 ms
# means no deadline.
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 1e-3, 1e9
# Defaults of timeout_s, and of first_timeout_s where timeout_s has its default.
DEFAULT_TIMEOUT_S, FIRST_TIMEOUT_S = 60.0, 600.0
# Options in which ranks may differ: how long a rank waits changes no message and no size.
OWN_OPTIONS = ("timeout_s", "first_timeout_s")
OPTION_PREFIX, OPTION_FLAG = "ncclep_", "--ncclep-"
# Values of max_recv_rows other than a number of rows: room for any routing, or for the load of the
# last steps,
WORST, AUTO = "worst", "auto"
# which begins with this many thousandths of a balanced load,
AUTO_START = 1250
# or for a multiple of a balanced load, with at most three decimals.
_FACTOR = re.compile(r"([0-9]{1,6})(?:\.([0-9]{1,3}))?x", re.ASCII)
DROP, RAISE, RERUN = "drop", "raise", "rerun"
MEAN, A2SGD = "mean", "a2sgd"


def thousandths(max_recv_rows: str) -> int | None:
    """A factor in thousandths, 1250 for "1.25x"; the first one of "auto"; None for other texts."""
    if max_recv_rows == AUTO:
        return AUTO_START
    found = _FACTOR.fullmatch(max_recv_rows)
    return None if found is None else 1000 * int(found[1]) + int((found[2] or "0").ljust(3, "0"))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 1 <= value <= MAX_COUNT


def _is_rows_in_words(value: Any) -> bool:
    return isinstance(value, str) and (value in (WORST, AUTO) or bool(thousandths(value)))


def _switch(text: str) -> bool:
    try:
        return envs.switch(text)
    except ValueError as error:  # argparse would not show its text
        raise argparse.ArgumentTypeError(f"{text!r} is {error}") from None


def _option(default: Any, parse: Any, help: str, choices: tuple[Any, ...] | None = None) -> Any:
    metadata = {"parse": parse, "help": help, "choices": choices}
    return field(default=default, metadata=metadata)


@dataclass
class EpConfig:
    """Options of one dispatcher, checked when made.

    A layer takes a copy, checked again, when it is built: as with all of Megatron's configuration,
    later changes have no effect.  Frameworks set single options, because their command lines and
    files override existing configurations.

    An alignment that is left out becomes what the experts need: 16 for grouped experts, the
    recipe's for FP8 (integration/checks/fp8.py), otherwise 1.  An explicit one is kept or refused.

    Raises:
        InputError: a value is outside its limits.
    """

    engine: str = _option(
        "auto",
        str,
        "engine that moves the tokens; 'auto' chooses and logs the reason",
        envs.ENGINES,
    )
    alignment: int | None = _option(
        None,
        int,
        "pad every expert's block of rows to a multiple of this: 1, 16, 32, 64, 128 or 256 "
        "(default: what the experts need, 1 for most)",
        ALIGNMENTS,
    )
    max_recv_rows: int | str | None = _option(
        None,
        envs.rows,
        "static mode: the dispatched tensor always has this many rows: a number, a factor of a "
        "balanced load such as 1.25x, 'worst', room for any routing, or 'auto', a factor that "
        "follows the load (with on_overflow 'rerun'); rows that do not fit are dropped and counted "
        "(default: exactly the rows that the routing needs)",
    )
    max_recv_gib: float | None = _option(
        None,
        float,
        "with max_recv_rows 'auto': the most GiB that the dispatched tensor of a layer may take; "
        "steps that need more are run again (default: no limit)",
    )
    on_overflow: str = _option(
        DROP,
        str,
        "static mode: 'drop' warns about rows that did not fit; 'raise' raises an error on all "
        "ranks before the optimizer steps; 'rerun' runs the step again, with room for all rows and "
        "without CUDA graphs, so that nothing is dropped",
        (DROP, RAISE, RERUN),
    )
    num_sms: int | None = _option(
        None, int, "SMs that the engine's kernels may use (default: the engine's own)"
    )
    network_chunks: int | None = _option(
        None,
        int,
        "with several nodes: the number of column chunks in which rows cross the network; one "
        "crosses while the previous one moves inside the node (default: by the batch's size)",
    )
    experts: str = _option(
        "auto",
        str,
        "'grouped': Megatron's experts compute with one grouped GEMM per layer, which does not "
        "wait for the host and pads blocks to 16 rows; 'auto': 'grouped' where that was measured "
        "to be faster, and logs the reason; 'megatron': Megatron's own experts, unchanged",
        EXPERTS,
    )
    timeout_s: float = _option(
        DEFAULT_TIMEOUT_S,
        float,
        "seconds that a rank waits for the others before it raises an error; ranks may differ",
    )
    first_timeout_s: float | None = _option(
        None,
        float,
        "the same in the first step, in which a rank may compile for minutes: until the first "
        "megatron_ncclep.check(), which precedes the optimizer's first step; at least timeout_s "
        f"(default: {FIRST_TIMEOUT_S:g}, or timeout_s where that is not "
        f"{DEFAULT_TIMEOUT_S:g})",
    )
    metrics_interval: int = _option(
        0,
        int,
        "steps between two reports to Megatron's TensorBoard and W&B and to the log of `ncclep "
        "train`: rows from rank to rank, how uneven the load is, and how long each rank waited for "
        "the others; 0: never",
    )
    inference_tokens: int | None = _option(
        None,
        int,
        "while text is generated: the most tokens on a rank for which a batch uses low-latency "
        "mode; larger ones go through the engine (default: what Megatron's CUDA graphs hold, at "
        "least 128)",
    )
    check_calls: bool = _option(
        False,
        _switch,
        "true: the ranks' hosts agree in every call before it moves anything, so a wrong argument "
        "is an error in that call, not in a later one; slower, for debugging",
        (False, True),
    )

    gradient_averaging: str = _option(
        MEAN,
        str,
        "'a2sgd': data-parallel ranks exchange two means for each bucket in place of its "
        "gradients, which changes the result of the training; 'mean': Megatron's own averaging",
        (MEAN, A2SGD),
    )
    resync_interval: int = _option(
        0,
        int,
        "with a2sgd: steps between two averages of the weights of the data-parallel ranks, which "
        "differ; 0: never",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.engine, str):
            raise InputError(f"engine {self.engine!r}: must be the name of an engine, or 'auto'")
        is_alignment = isinstance(self.alignment, int) and self.alignment in ALIGNMENTS
        if not (self.alignment is None or is_alignment):
            raise InputError(
                f"alignment {self.alignment!r}: must be one of {ALIGNMENTS}, or left out"
            )
        if self.experts not in EXPERTS:
            raise InputError(f"experts {self.experts!r}: must be one of {EXPERTS}")
        if self.experts == "grouped" and self.alignment is None:
            self.alignment = GROUPED_ALIGNMENT
        if self.experts == "grouped" and self.alignment == 1:
            raise InputError(
                f"alignment 1: grouped experts need blocks of a multiple of {GROUPED_ALIGNMENT} "
                "rows: leave it out, or ask for more"
            )
        rows = self.max_recv_rows
        if not (rows is None or _is_count(rows) or _is_rows_in_words(rows)):
            raise InputError(
                f"max_recv_rows {rows!r}: must be a whole number from 1 to {MAX_COUNT}, a factor "
                f"of a balanced load such as '1.25x', {WORST!r}, {AUTO!r}, or left out"
            )
        if rows == AUTO and self.on_overflow != RERUN:
            raise InputError(
                f"max_recv_rows {AUTO!r} with on_overflow {self.on_overflow!r}: the limit follows "
                f"the load, which sometimes exceeds it: set on_overflow to {RERUN!r}"
            )
        gib = self.max_recv_gib
        if gib is not None and not (isinstance(gib, int | float) and 0 < gib <= MAX_COUNT):
            raise InputError(
                f"max_recv_gib {gib!r}: must be a number of GiB, more than 0 and at most "
                f"{MAX_COUNT}, or left out"
            )
        if gib is not None and rows != AUTO:
            raise InputError(
                f"max_recv_gib {gib!r} with max_recv_rows {rows!r}: it limits {AUTO!r} only; leave "
                "it out"
            )
        for name in ("num_sms", "network_chunks", "inference_tokens"):
            if not ((count := getattr(self, name)) is None or _is_count(count)):
                raise InputError(
                    f"{name} {count!r}: must be a whole number from 1 to {MAX_COUNT}, or left out"
                )
        for name in ("metrics_interval", "resync_interval"):
            if not ((steps := getattr(self, name)) == 0 or _is_count(steps)):
                raise InputError(
                    f"{name} {steps!r}: must be a whole number of steps from 0 (never) to "
                    f"{MAX_COUNT}"
                )
        if isinstance(rows, int) and rows % self.block_alignment:
            raise InputError(
                f"max_recv_rows {rows}: must be a multiple of the alignment "
                f"{self.block_alignment}, so that the last block ends inside the tensor"
            )
        if not isinstance(self.check_calls, bool):
            raise InputError(f"check_calls {self.check_calls!r}: must be True or False")
        if self.gradient_averaging not in (MEAN, A2SGD):
            raise InputError(
                f"gradient_averaging {self.gradient_averaging!r}: must be {MEAN!r} or {A2SGD!r}"
            )
        if self.resync_interval and self.gradient_averaging == MEAN:
            raise InputError(
                f"resync_interval {self.resync_interval} without gradient_averaging {A2SGD!r}: "
                "the ranks' weights are equal anyway; leave it out"
            )
        if self.on_overflow not in (DROP, RAISE, RERUN):
            raise InputError(
                f"on_overflow {self.on_overflow!r}: must be {DROP!r}, {RAISE!r} or {RERUN!r}"
            )
        if self.on_overflow != DROP and self.max_recv_rows is None:
            raise InputError(
                f"on_overflow {self.on_overflow!r} without max_recv_rows: nothing can overflow, "
                "since every tensor has the rows that the routing needs; leave it out, or set "
                "max_recv_rows"
            )
        if self.on_overflow == RERUN and self.gradient_averaging == A2SGD:
            raise InputError(
                f"on_overflow {RERUN!r} with gradient_averaging {A2SGD!r}: it counts the steps "
                "that have begun, and one that is run again would count twice; choose one of them"
            )
        for name, seconds in (
            ("timeout_s", self.timeout_s),
            ("first_timeout_s", self.first_deadline_s),
        ):
            is_number = isinstance(seconds, int | float)
            if not (is_number and MIN_TIMEOUT_S <= seconds <= MAX_TIMEOUT_S):  # nan fails
                raise InputError(
                    f"{name} {seconds!r}: must be a number of seconds from {MIN_TIMEOUT_S:g} to "
                    f"{MAX_TIMEOUT_S:g}; every wait has a deadline"
                )
        if self.first_deadline_s < self.timeout_s:
            raise InputError(
                f"first_timeout_s {self.first_timeout_s!r}: must be at least timeout_s, "
                f"{self.timeout_s:g}: the first step takes longer than others; leave it out, or "
                "lower timeout_s"
            )

    @property
    def first_deadline_s(self) -> float:
        """Seconds that a rank waits for the others in the first step."""
        if self.first_timeout_s is not None:
            return self.first_timeout_s
        # A single deadline that the user sets holds from the first call on.
        return FIRST_TIMEOUT_S if self.timeout_s == DEFAULT_TIMEOUT_S else self.timeout_s

    @property
    def block_alignment(self) -> int:
        """The multiple to which an expert's block of rows is padded; 1 by default."""
        return 1 if self.alignment is None else self.alignment

    @classmethod
    def resolve(cls, **given: Any) -> EpConfig:
        """Build a config from `given`, then the environment, then the defaults.

        An entry of `given` that is None counts as not given.

        Raises:
            InputError: an unknown option or a value outside its limits.
        """
        known = cls._known(given)
        from_env = {name: envs.get(f"NCCLEP_{name.upper()}") for name in known}
        merged = {**from_env, **{k: v for k, v in given.items() if v is not None}}
        try:
            return cls(**{name: value for name, value in merged.items() if value is not None})
        except InputError as error:
            variables = [f"NCCLEP_{name.upper()}" for name, v in from_env.items() if v is not None]
            if not variables:
                raise
            raise InputError(f"{error} (set in the environment: {', '.join(variables)})") from None

    @classmethod
    def of(cls, given: Any, where: str = "config.ncclep") -> EpConfig:
        """Build a checked copy of a config, or a config from a framework's representation of one.

        Args:
            given: an EpConfig, a mapping of options, or an object that has them as attributes, as
                `dataclasses.asdict`, YAML files and OmegaConf make from an EpConfig.
            where: what errors call it.

        Raises:
            InputError: it is something else, has an unknown option or a value outside its limits.
        """
        if isinstance(given, EpConfig):
            return dataclasses.replace(given)
        if isinstance(given, Mapping):
            options = dict(given)
        elif type(given) in (argparse.Namespace, SimpleNamespace):
            options = vars(given)
        else:
            raise InputError(
                f"{where} is {given!r}: give it a megatron_ncclep.EpConfig(...), or a "
                "mapping of its options"
            )
        # The name of the class: a key of files from which objects are made.
        options = {name: value for name, value in options.items() if name != "_target_"}
        cls._known(options)
        return cls(**options)

    @classmethod
    def _known(cls, given: Mapping[str, Any]) -> list[str]:
        known = sorted(f.name for f in dataclasses.fields(cls))
        if unknown := sorted(str(name) for name in given if name not in known):
            raise InputError(f"unknown option {unknown[0]!r}: the options are {known}")
        return known

    def to_cfg_dict(self) -> dict[str, Any]:
        """The options, for Megatron's configuration files (`ConfigContainer.to_yaml`).

        Without the name of a class: the files restore only classes on a list of Megatron's.
        """
        return dataclasses.asdict(self)

    def common(self) -> dict[str, int | str | None]:
        """The options that must be the same on all ranks, with their effective values, by name."""
        options = dataclasses.asdict(self) | {"alignment": self.block_alignment}
        return {name: value for name, value in options.items() if name not in OWN_OPTIONS}

    def non_default(self) -> dict[str, Any]:
        """The options whose value is not the default, by name."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }


def add_option_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one `--ncclep-*` argument for each option; arguments left out parse as None."""
    group = parser.add_argument_group(title="ncclep token dispatcher")
    for f in dataclasses.fields(EpConfig):
        group.add_argument(
            OPTION_FLAG + f.name.replace("_", "-"),
            type=f.metadata["parse"],
            choices=f.metadata["choices"],
            metavar=_metavar(f),
            default=None,
            help=f"{f.metadata['help']} (environment: NCCLEP_{f.name.upper()}; "
            f"default: {f.default})",
        )


def _metavar(option: dataclasses.Field[Any]) -> str:
    """The text that `--help` shows for the value: its choices as users type them, or a word."""
    if choices := option.metadata["choices"]:
        return "{" + ",".join(str(choice).lower() for choice in choices) + "}"
    return option.name.rpartition("_")[2].upper()


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that the command line named, without the prefix."""
    return {
        name.removeprefix(OPTION_PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(OPTION_PREFIX) and value is not None
    }
