"""EpConfig: every option of the dispatcher, its default and its limits."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
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
    return _is_between(1, MAX_COUNT, value) and isinstance(value, int)


def _is_rows(value: Any) -> bool:
    in_words = isinstance(value, str) and (value in (WORST, AUTO) or bool(thousandths(value)))
    return in_words or _is_count(value)


def _is_between(least: float, most: float, value: Any) -> bool:
    # A `yes` in a file is True, which counts as 1 elsewhere.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and least <= value <= most  # nan fails


def _switch(text: str) -> bool:
    try:
        return envs.switch(text)
    except ValueError as error:  # argparse would not show its text
        raise argparse.ArgumentTypeError(f"{text!r} is {error}") from None


@dataclass(frozen=True)
class _Kind:
    """What values an option has: how text is parsed, the check of a value, and the check's text."""

    parse: Callable[[str], Any]
    is_one: Callable[[Any], bool]
    must: str
    choices: tuple[Any, ...] | None = None


def _one_of(parse: Callable[[str], Any], *choices: Any) -> _Kind:
    kinds = {type(choice) for choice in choices}
    is_one = lambda value: type(value) in kinds and value in choices  # noqa: E731
    return _Kind(parse, is_one, f"one of {choices}", choices)


def _option(default: Any, kind: _Kind, help: str) -> Any:
    """A field of EpConfig; a default of None counts as left out."""
    return field(default=default, metadata={"kind": kind, "help": help})


_ENGINE = _Kind(
    str, lambda value: isinstance(value, str), "the name of an engine, or 'auto'", envs.ENGINES
)
_ROWS = _Kind(
    envs.rows, _is_rows,
    f"a whole number from 1 to {MAX_COUNT}, a factor of a balanced load such as '1.25x', "
    f"{WORST!r}, {AUTO!r}",
)  # fmt: skip
_GIB = _Kind(
    float, lambda value: _is_between(0, MAX_COUNT, value) and value != 0,
    f"a number of GiB, more than 0 and at most {MAX_COUNT}",
)  # fmt: skip
_COUNT = _Kind(int, _is_count, f"a whole number from 1 to {MAX_COUNT}")
_STEPS = _Kind(
    int, lambda value: value == 0 or _is_count(value),
    f"a whole number of steps from 0 (never) to {MAX_COUNT}",
)  # fmt: skip
_SECONDS = _Kind(
    float, partial(_is_between, MIN_TIMEOUT_S, MAX_TIMEOUT_S),
    f"a number of seconds from {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g}; every wait has a deadline",
)  # fmt: skip


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
        "auto", _ENGINE,
        "engine that moves the tokens; 'auto' chooses and logs the reason",
    )  # fmt: skip
    alignment: int | None = _option(
        None, _one_of(int, *ALIGNMENTS),
        "pad every expert's block of rows to a multiple of this: 1, 16, 32, 64, 128 or 256 "
        "(default: what the experts need, 1 for most)",
    )  # fmt: skip
    max_recv_rows: int | str | None = _option(
        None, _ROWS,
        "static mode: the dispatched tensor always has this many rows: a number, a factor of a "
        "balanced load such as 1.25x, 'worst', room for any routing, or 'auto', a factor that "
        "follows the load (with on_overflow 'rerun'); rows that do not fit are dropped and counted "
        "(default: exactly the rows that the routing needs)",
    )  # fmt: skip
    max_recv_gib: float | None = _option(
        None, _GIB,
        "with max_recv_rows 'auto': the most GiB that the dispatched tensor of a layer may take; "
        "steps that need more are run again (default: no limit)",
    )  # fmt: skip
    max_tokens_per_rank: int | None = _option(
        None, _COUNT,
        "static mode: the most tokens that a rank brings to a layer: factors, 'worst' and 'auto' "
        "then follow from it and not from the batch, so that ranks and micro-batches may have any "
        "number of tokens up to it (default: with those, all ranks the same number)",
    )  # fmt: skip
    on_overflow: str = _option(
        DROP, _one_of(str, DROP, RAISE, RERUN),
        "static mode: 'drop' warns about rows that did not fit; 'raise' raises an error on all "
        "ranks before the optimizer steps; 'rerun' runs the step again, with room for all rows and "
        "without CUDA graphs, so that nothing is dropped",
    )  # fmt: skip
    num_sms: int | None = _option(
        None, _COUNT,
        "SMs that the engine's kernels may use (default: the engine's own)",
    )  # fmt: skip
    network_chunks: int | None = _option(
        None, _COUNT,
        "with several nodes: the number of column chunks in which rows cross the network; one "
        "crosses while the previous one moves inside the node (default: by the batch's size)",
    )  # fmt: skip
    experts: str = _option(
        "auto", _one_of(str, *EXPERTS),
        "'grouped': Megatron's experts compute with one grouped GEMM per layer, which does not "
        "wait for the host and pads blocks to 16 rows; 'auto': 'grouped' where that was measured "
        "to be faster, and logs the reason; 'megatron': Megatron's own experts, unchanged",
    )  # fmt: skip
    timeout_s: float = _option(
        DEFAULT_TIMEOUT_S, _SECONDS,
        "seconds that a rank waits for the others before it raises an error; ranks may differ",
    )  # fmt: skip
    first_timeout_s: float | None = _option(
        None, _SECONDS,
        "the same in the first step, in which a rank may compile for minutes: until the first "
        "megatron_ncclep.check(), which precedes the optimizer's first step; at least timeout_s "
        f"(default: {FIRST_TIMEOUT_S:g}, or timeout_s where that is not "
        f"{DEFAULT_TIMEOUT_S:g})",
    )  # fmt: skip
    metrics_interval: int = _option(
        0, _STEPS,
        "steps between two reports to Megatron's TensorBoard and W&B and to the log of `ncclep "
        "train`: rows from rank to rank, how uneven the load is, and how long each rank waited for "
        "the others; 0: never",
    )  # fmt: skip
    inference_tokens: int | None = _option(
        None, _COUNT,
        "while text is generated: the most tokens on a rank for which a batch uses low-latency "
        "mode; larger ones go through the engine (default: what Megatron's CUDA graphs hold, at "
        "least 128)",
    )  # fmt: skip
    check_calls: bool = _option(
        False, _one_of(_switch, False, True),
        "true: the ranks' hosts agree in every call before it moves anything, so a wrong argument "
        "is an error in that call, not in a later one; slower, for debugging",
    )  # fmt: skip
    gradient_averaging: str = _option(
        MEAN, _one_of(str, MEAN, A2SGD),
        "'a2sgd': data-parallel ranks exchange two means for each bucket in place of its "
        "gradients, which changes the result of the training; 'mean': Megatron's own averaging",
    )  # fmt: skip
    resync_interval: int = _option(
        0, _STEPS,
        "with a2sgd: steps between two averages of the weights of the data-parallel ranks, which "
        "differ; 0: never",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value, kind, may_lack = getattr(self, f.name), f.metadata["kind"], f.default is None
            if not (kind.is_one(value) or (may_lack and value is None)):
                or_not = ", or left out" if may_lack else ""
                raise InputError(f"{f.name} {value!r}: must be {kind.must}{or_not}")
        if self.experts == "grouped" and self.alignment is None:
            self.alignment = GROUPED_ALIGNMENT
        rows, alignment = self.max_recv_rows, self.block_alignment
        overflow, averaging = self.on_overflow, self.gradient_averaging
        for is_wrong, message in (
            (
                self.experts == "grouped" and alignment == 1,
                f"alignment 1: grouped experts need blocks of a multiple of {GROUPED_ALIGNMENT} "
                "rows: leave it out, or ask for more",
            ),
            (
                rows == AUTO and overflow != RERUN,
                f"max_recv_rows {AUTO!r} with on_overflow {overflow!r}: the limit follows the "
                f"load, which sometimes exceeds it: set on_overflow to {RERUN!r}",
            ),
            (
                self.max_recv_gib is not None and rows != AUTO,
                f"max_recv_gib {self.max_recv_gib!r} with max_recv_rows {rows!r}: it limits "
                f"{AUTO!r} only; leave it out",
            ),
            (
                self.max_tokens_per_rank is not None and rows is None,
                f"max_tokens_per_rank {self.max_tokens_per_rank!r} without max_recv_rows: ranks "
                "may bring any number of tokens anyway; leave it out, or set max_recv_rows",
            ),
            (
                isinstance(rows, int) and rows % alignment,
                f"max_recv_rows {rows}: must be a multiple of the alignment {alignment}, so that "
                "the last block ends inside the tensor",
            ),
            (
                self.resync_interval and averaging == MEAN,
                f"resync_interval {self.resync_interval} without gradient_averaging {A2SGD!r}: "
                "the ranks' weights are equal anyway; leave it out",
            ),
            (
                overflow != DROP and rows is None,
                f"on_overflow {overflow!r} without max_recv_rows: nothing can overflow, since "
                "every tensor has the rows that the routing needs; leave it out, or set "
                "max_recv_rows",
            ),
            (
                overflow == RERUN and averaging == A2SGD,
                f"on_overflow {RERUN!r} with gradient_averaging {A2SGD!r}: it counts the steps "
                "that have begun, and one that is run again would count twice; choose one of them",
            ),
            (
                self.first_deadline_s < self.timeout_s,
                f"first_timeout_s {self.first_timeout_s!r}: must be at least timeout_s, "
                f"{self.timeout_s:g}: the first step takes longer than others; leave it out, or "
                "lower timeout_s",
            ),
        ):
            if is_wrong:
                raise InputError(message)

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
        from_env = {name: VARIABLES[f"NCCLEP_{name.upper()}"].get() for name in known}
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


def _variable(option: dataclasses.Field[Any]) -> envs.EnvVar:
    flag, kind = OPTION_FLAG + option.name.replace("_", "-"), option.metadata["kind"]
    parse = envs.switch if kind.parse is _switch else kind.parse
    name = f"NCCLEP_{option.name.upper()}"
    return envs.EnvVar(name, parse, None, f"default of {flag}", kind.choices)


# All that are read: of options, whose values in code or on the command line win, and others.
VARIABLES = envs.VARIABLES | {
    variable.name: variable for variable in map(_variable, dataclasses.fields(EpConfig))
}


def unknown_variables() -> dict[str, str]:
    """Variables of the environment that look like ours but that nothing reads; see envs.py."""
    return envs.unknown(VARIABLES)


def add_option_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one `--ncclep-*` argument for each option; arguments left out parse as None."""
    group = parser.add_argument_group(title="ncclep token dispatcher")
    for f in dataclasses.fields(EpConfig):
        group.add_argument(
            OPTION_FLAG + f.name.replace("_", "-"),
            type=f.metadata["kind"].parse,
            choices=f.metadata["kind"].choices,
            metavar=_metavar(f),
            default=None,
            help=f"{f.metadata['help']} (environment: NCCLEP_{f.name.upper()}; "
            f"default: {f.default})",
        )


def _metavar(option: dataclasses.Field[Any]) -> str:
    """The text that `--help` shows for the value: its choices as users type them, or a word."""
    if choices := option.metadata["kind"].choices:
        return "{" + ",".join(str(choice).lower() for choice in choices) + "}"
    return option.name.rpartition("_")[2].upper()


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that the command line named, without the prefix."""
    return {
        name.removeprefix(OPTION_PREFIX): value
        for name, value in vars(args).items()
        if name.startswith(OPTION_PREFIX) and value is not None
    }
