"""The limits of the options: an error in words, wherever the value comes from."""

from __future__ import annotations

import argparse
import dataclasses
import math
from datetime import timedelta
from typing import Any

import pytest

from megatron_ncclep.config import (
    MAX_COUNT,
    MAX_TIMEOUT_S,
    MIN_TIMEOUT_S,
    EpConfig,
    add_option_arguments,
    given_options,
)
from megatron_ncclep.errors import InputError

SECONDS = r"must be a number of seconds from 0\.001"
ROWS = r"must be .* a factor of a balanced load such as '1\.25x', 'worst'"
# Values, and what is said of each, with its name; most of them can be in the environment.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    # timeout_s=inf once meant no deadline, and ended in an OverflowError of the first wait.
    "timeout_s": ((math.inf, -math.inf, math.nan, 0, -1.0, 9e-4, 1.1e9), SECONDS),
    "first_timeout_s": ((math.inf, math.nan, 0, 9e-4, 1.1e9), SECONDS),
    "max_recv_rows": (
        ("best", "Worst", "1.25", "x", "0x", "0.000x", "-1x", "1.2345x", "1e3x", "infx", "1 x"),
        ROWS,
    ),
}
COUNTS = ("inference_tokens", "max_recv_rows", "num_sms")


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values, words = REFUSED[name]
    for value in values:
        with pytest.raises(InputError, match=f"{name} .*: {words}"):
            EpConfig(**{name: value})
        monkeypatch.setenv(f"NCCLEP_{name.upper()}", str(value))
        with pytest.raises(InputError, match=f"{name} .*: {words}"):
            EpConfig.resolve()


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    """They cross the wire as integers: a float was an error of `struct`, on one rank alone."""
    for value in (0, -1, MAX_COUNT + 1, 24.0, "24"):
        with pytest.raises(InputError, match=f"{name} .*: must be .*from 1 to 2147483647"):
            EpConfig(**{name: value})
    assert getattr(EpConfig(**{name: MAX_COUNT}), name) == MAX_COUNT


@pytest.mark.parametrize("name", ["timeout_s", "max_tokens_per_rank", "metrics_interval", *COUNTS])
def test_a_switch_is_no_number(name: str) -> None:
    """`ncclep_max_recv_rows: yes` in a file of options meant one row."""
    with pytest.raises(InputError, match=f"{name} True: must be a (whole )?number"):
        EpConfig(**{name: True})


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({}, 600.0),
        ({"timeout_s": 5}, 5),
        ({"timeout_s": 90.0}, 90.0),
        ({"timeout_s": 1e4}, 1e4),
        ({"timeout_s": 5, "first_timeout_s": 7.5}, 7.5),
        ({"first_timeout_s": 60}, 60),
    ],
)
def test_the_deadline_of_the_first_step(given: dict[str, float], first: float) -> None:
    """One that is asked for holds from the first call on, unless another is asked for too."""
    assert EpConfig(**given).first_deadline_s == first


def test_a_first_step_is_not_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCLEP_FIRST_TIMEOUT_S", "59.5")
    with pytest.raises(InputError, match=r"first_timeout_s 59\.5: must be at least timeout_s, 60:"):
        EpConfig.resolve()
    assert EpConfig.resolve(timeout_s=5).first_deadline_s == 59.5


def test_ranks_compare_all_options_but_deadlines() -> None:
    names = {f.name for f in dataclasses.fields(EpConfig)}
    assert set(EpConfig().common()) == names - {"timeout_s", "first_timeout_s"}


@pytest.mark.parametrize("value", [MIN_TIMEOUT_S, 1, 60.0, MAX_TIMEOUT_S])
def test_deadlines_that_every_clock_takes(value: float) -> None:
    timeout_s = EpConfig(timeout_s=value).timeout_s
    # torch's backends: milliseconds, where zero would mean no deadline.
    assert timedelta(seconds=timeout_s) >= timedelta(milliseconds=1)
    # From 1970, or the start of the node, in nanoseconds; plan's host waits twice as long.
    assert (2 * timeout_s + 100 * 365 * 86400) * 1e9 < 2**63


@pytest.mark.parametrize("value", ["worst", "1x", "1.25x", "0.001x", "999999.999x"])
def test_rows_in_words(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From code, the environment and a command line: the same config, and copies of it."""
    config = EpConfig(max_recv_rows=value, alignment=16, on_overflow="raise")
    assert dataclasses.replace(config, alignment=1).max_recv_rows == value
    assert EpConfig(**dataclasses.asdict(config)) == config
    parser = argparse.ArgumentParser()
    add_option_arguments(parser)
    flags = ["--ncclep-max-recv-rows", value, "--ncclep-alignment", "16"]
    parsed = parser.parse_args([*flags, "--ncclep-on-overflow", "raise"])
    assert EpConfig.resolve(**given_options(parsed)) == config
    monkeypatch.setenv("NCCLEP_MAX_RECV_ROWS", value)
    monkeypatch.setenv("NCCLEP_ON_OVERFLOW", "raise")
    assert EpConfig.resolve(alignment=16) == config
    monkeypatch.setenv("NCCLEP_MAX_RECV_ROWS", "64")
    assert EpConfig.resolve().max_recv_rows == 64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timeout_s": "60"}, "timeout_s '60': must be a number of seconds"),
        ({"alignment": 2}, r"alignment 2: must be one of \(1, 16, 32, 64, 128, 256\), or left"),
        ({"alignment": 16.0}, r"alignment 16\.0: must be one of"),
        ({"alignment": "16"}, "alignment '16': must be one of"),
        ({"max_recv_rows": 8, "on_overflow": "stop"},
         r"on_overflow 'stop': must be one of \('drop', "),
        ({"on_overflow": "raise"}, "on_overflow 'raise' without max_recv_rows: not"),
        ({"on_overflow": "rerun"}, "on_overflow 'rerun' without max_recv_rows: not"),
        ({"max_recv_rows": 8, "on_overflow": "rerun", "gradient_averaging": "a2sgd"},
         "on_overflow 'rerun' with gradient_averaging 'a2sgd': it"),
        ({"max_recv_rows": "auto", "on_overflow": "raise"},
         "max_recv_rows 'auto' with on_overflow 'raise': the limit"),
        ({"max_recv_rows": "2x", "max_recv_gib": 1},
         "max_recv_gib 1 with max_recv_rows '2x': it limits 'auto'"),
        ({"max_recv_rows": "auto", "on_overflow": "rerun", "max_recv_gib": math.nan},
         "max_recv_gib nan: must be a number of GiB, more than 0"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        EpConfig(**options)
